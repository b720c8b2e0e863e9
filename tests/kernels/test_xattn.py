"""XAttention's scores: the reference against literal loops, and structures whose blocks are known."""

from __future__ import annotations

import literal_proxies
import pytest
import torch
from kernel_cases import paged, tensors
from prefill_kernels import xattn_scores
from prefill_kernels.xattn import xattn_pairs

B, D, SCALE = 16, 16, 0.25
CASES = [  # length, query heads, KV heads, stride, offset, page size
    (1, 2, 1, 8, 0, 16),
    (15, 3, 1, 4, 0, 16),
    (16, 1, 1, 16, 0, 16),
    (17, 4, 4, 16, 0, 32),
    (70, 4, 1, 4, 0, 16),
    (67, 3, 3, 8, 0, 64),
    (50, 3, 1, 1, 32, 16),
    (93, 8, 2, 8, 48, 16),
]


@pytest.mark.parametrize("length,q_heads,kv_heads,stride,offset,page_size", CASES)
def test_equals_the_literal_loops(length, q_heads, kv_heads, stride, offset, page_size):
    q, k, v = tensors(length, q_heads, kv_heads, D, block=B, offset=offset, seed=length, uneven=length % 2 == 0)
    want = literal_proxies.xattn(q[0], k[0], stride, B, SCALE, offset)
    settings = {"stride": stride, "scale": SCALE, "block_size": B, "q_offset": offset, "backend": "torch"}
    got = xattn_scores(q, paged(k, v, page_size), **settings)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got[0].double(), want, rtol=1e-4, atol=1e-6)
    exact = xattn_scores(q.double(), paged(k.double(), v.double(), page_size), **settings)
    torch.testing.assert_close(exact[0], want, rtol=1e-10, atol=1e-12)


def test_a_tile_shares_out_one_unit_a_group():
    q, k, v = tensors(75, 2, 1, D, block=B)
    got = xattn_scores(q, paged(k, v, 16), stride=4, scale=SCALE, block_size=B)
    assert got.sum(-1)[0, 0].tolist() == pytest.approx([4, 4, 4, 4, 3], abs=1e-4)
    assert not got[0].triu(1).any()


def test_tiles_in_steps_equal_tiles_at_once(monkeypatch):
    q, k, v = tensors(150, 2, 1, D, block=B)
    settings = {"stride": 4, "scale": SCALE, "block_size": B}
    whole = xattn_scores(q, paged(k, v, 16), **settings)
    monkeypatch.setattr("prefill_kernels.xattn._MAX_LOGITS", 1000)
    torch.testing.assert_close(xattn_scores(q, paged(k, v, 16), **settings), whole)


def line(length: int, cells: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and K [1, 1, L, L] with logit 100 at the given (query, key) cells and 0 elsewhere."""
    q = torch.zeros(1, 1, length, length)
    for row, column in cells:
        q[0, 0, row, column] = 100.0
    return q, torch.eye(length)[None, None]


@pytest.mark.parametrize("stride", [4, 8, 16])
@pytest.mark.parametrize("column", [0, 21, 37, 47])
def test_every_vertical_line_is_found(stride, column):
    length = 160
    q, k = line(length, [(row, column) for row in range(column, length)])
    got = xattn_scores(q, paged(k, k, 16), stride=stride, scale=1.0, block_size=B)[0, 0]
    for tile in range(column // B + 1, length // B):
        assert int(got[tile].argmax()) == column // B
        assert got[tile, column // B] > 0.9 * got[tile].sum() or stride == 16


def slash(distance: int, stride: int, length: int = 160) -> torch.Tensor:
    q, k = line(length, [(row, row - distance) for row in range(distance, length)])
    return xattn_scores(q, paged(k, k, 16), stride=stride, scale=1.0, block_size=B)[0, 0]


@pytest.mark.parametrize("stride", [4, 8, 16])
@pytest.mark.parametrize("distance", [33, 39, 47, 75])
def test_every_slash_line_of_odd_distance_is_found(stride, distance):
    got = slash(distance, stride)
    for tile in range(distance // B + 1, 160 // B):
        crossed = sorted({(row - distance) // B for row in range(tile * B, (tile + 1) * B)})
        assert int(got[tile].argmax()) in crossed
        outside = [j for j in range(tile + 1) if j not in crossed]
        assert got[tile, outside].max() < got[tile, crossed].max() / 4


@pytest.mark.parametrize("stride", [4, 8, 16])
def test_a_slash_line_of_even_distance_passes_between_the_sampled_cells(stride):
    """Row minus column is odd on every antidiagonal of an even square: a limit of the method, not of this code."""
    torch.testing.assert_close(slash(32, stride), slash(0, stride))


def test_the_antidiagonal_is_scored_and_the_diagonal_is_not():
    """Query 6 of 16..23 mirrors key 1 of 0..7: only their cell lies on the antidiagonal."""
    settings = {"stride": 8, "scale": 8 * 0.2, "block_size": 8}
    for cell, heavy in (((22, 1), True), ((22, 6), False), ((17, 1), False), ((17, 6), True)):
        q, k = line(24, [cell])
        got = xattn_scores(q, paged(k, k, 16), **settings)[0, 0]
        assert bool(got[2, 0] > 0.99) == heavy, cell
        assert got[1].tolist() == pytest.approx([0.5, 0.5, 0])


@pytest.mark.parametrize("length", [1, 16, 100])
@pytest.mark.parametrize("stride", [4, 8, 16])
def test_the_pairs_are_the_products_that_are_made(length, stride):
    groups = -(-length // stride)
    assert xattn_pairs(0, length, stride) == stride * sum(r + 1 for r in range(groups))
    assert xattn_pairs(0, 64, stride) + xattn_pairs(64, length, stride) == xattn_pairs(0, 64 + length, stride)


def test_the_scores_cost_one_in_the_stride_of_dense_products():
    for stride in (4, 8, 16):
        assert xattn_pairs(0, 1 << 17, stride) / (1 << 33) == pytest.approx(1 / stride, rel=1e-3)


@pytest.mark.parametrize(
    "change,message",
    [({"stride": 3}, "stride=3"), ({"stride": 0}, "stride=0"), ({"q_offset": 8}, "q_offset=8"), ({}, "kv_len=32")],
)
def test_bad_calls_are_refused(change, message):
    q, k, v = tensors(32, 1, 1, D, block=B)
    q = q[:, :, :24] if message == "kv_len=32" else q
    with pytest.raises(ValueError, match=message):
        xattn_scores(q, paged(k, v, 16), **{"stride": 4, "scale": SCALE, "block_size": B, **change})
