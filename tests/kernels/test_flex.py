"""FlexPrefill's selection against literal loops, and on inputs whose pattern and blocks are known."""

from __future__ import annotations

import math

import literal_proxies
import pytest
import torch
from kernel_cases import paged, tensors
from prefill_kernels import flex_select
from prefill_kernels.flex import flex_pairs, js_distance, line_masses
from prefill_kernels.pooling import block_means, shortest_prefix

SCALE = 0.25
CASES = [  # length, query heads, KV heads, block, gamma, tau, min budget, page size
    (40, 2, 2, 16, 0.9, 0.0, 1, 16),
    (96, 3, 1, 16, 0.5, 0.1, 1, 32),
    (101, 4, 1, 16, 0.8, 0.3, 20, 16),
    (130, 3, 3, 32, 0.7, 0.2, 1, 64),
    (113, 6, 2, 16, 0.95, 0.25, 33, 16),
    (70, 5, 1, 16, 1.0, 0.3, 1, 16),
]


def sets(mask: torch.Tensor) -> list[list[set[int]]]:
    """Kept blocks of each head and tile of the only sequence."""
    return [[set(row.nonzero().flatten().tolist()) for row in head] for head in mask[0]]


def heads_of_both_kinds(length, q_heads, kv_heads, block, seed):
    """Even heads attend to whole blocks alike, which pooling sees; odd ones to single tokens, which it does not."""
    q, k, v = tensors(length, q_heads, kv_heads, 16, block=block, seed=seed, uneven=True)
    q[:, 1::2] = 2 * torch.randn(q[:, 1::2].shape, generator=torch.Generator().manual_seed(seed))
    return q, k, v


@pytest.mark.parametrize("length,q_heads,kv_heads,block,gamma,tau,min_budget,page_size", CASES)
def test_equals_the_literal_loops(length, q_heads, kv_heads, block, gamma, tau, min_budget, page_size):
    q, k, v = heads_of_both_kinds(length, q_heads, kv_heads, block, seed=length)
    settings = {"gamma": gamma, "tau": tau, "min_budget": min_budget, "block_size": block, "scale": SCALE}
    kept, aware, distance = literal_proxies.flex(q[0], k[0], **settings)
    for exact in (True, False):
        x, y, z = (t.double() if exact else t for t in (q, k, v))
        got = flex_select(x, paged(y, z, page_size), **settings)
        assert sets(got.mask) == kept
        assert got.query_aware[0].tolist() == aware
        assert got.divergence[0].tolist() == pytest.approx(distance, abs=1e-5)
    if tau == 0.25:
        assert len(set(aware)) == 2, "the case is meant to hold heads of both patterns"


@pytest.mark.parametrize("heads", [2, 3, 5])
def test_heads_a_few_at_a_time_equal_all_at_once(monkeypatch, heads):
    q, k, v = heads_of_both_kinds(101, 6, 2, 16, seed=3)
    settings = {"gamma": 0.8, "tau": 0.25, "min_budget": 1, "block_size": 16, "scale": SCALE}
    whole = flex_select(q, paged(k, v, 16), **settings)
    monkeypatch.setattr("prefill_kernels.pooling.HEAD_TOKENS", heads * 101)
    parts = flex_select(q, paged(k, v, 16), **settings)
    assert torch.equal(whole.mask, parts.mask) and torch.equal(whole.query_aware, parts.query_aware)


# ---------------------------------------------------------------------- known answers: K is the identity, Q the logits
B, LENGTH, TILES = 16, 160, 10


def planted(logits: torch.Tensor, **change):
    settings = {"gamma": 0.9, "tau": 0.0, "min_budget": 1, "block_size": B, "scale": 1.0, **change}
    k = torch.eye(LENGTH)[None, None]
    return flex_select(logits[None, None], paged(k, k, 16), **settings)


def test_a_vertical_line_keeps_its_column():
    logits = torch.zeros(LENGTH, LENGTH)
    logits[:, 32] = 100.0  # distances 112 to 127 of the last queries: block diagonal 7
    got = planted(logits)
    assert not got.query_aware.any()
    assert sets(got.mask)[0] == [
        {0, i} | ({2} if i >= 2 else set()) | ({i - 7} if i >= 7 else set()) for i in range(TILES)
    ]


def test_a_slash_line_keeps_its_block_diagonal():
    logits = torch.zeros(LENGTH, LENGTH)
    rows = torch.arange(48, LENGTH)
    logits[rows, rows - 48] = 100.0  # block diagonal 3; the last queries look at block 6
    assert sets(planted(logits).mask)[0] == [
        {0, i} | ({i - 3} if i >= 3 else set()) | ({6} if i >= 6 else set()) for i in range(TILES)
    ]


def test_gamma_and_the_least_budget_decide_how_many_lines_are_kept():
    logits = torch.full((LENGTH, LENGTH), -100.0)
    rows = torch.arange(LENGTH)
    for distance, share in ((32, 0.8), (80, 0.2)):
        far = rows[distance:]
        logits[far, far - distance] = math.log(share)
    # Tile 8 meets the lines in blocks 6 and 3; the last queries look at columns of blocks 7 and 4.
    assert sets(planted(logits, gamma=0.7).mask)[0][8] == {0, 8, 6, 7}
    # gamma asks for both lines: two tokens, which still round to one block diagonal; 24 columns round to two blocks.
    assert sets(planted(logits, gamma=0.9).mask)[0][8] == {0, 8, 6, 7, 4}
    assert sets(planted(logits, gamma=0.9, min_budget=17).mask)[0][8] == {0, 8, 6, 7, 4, 3}


def test_the_least_budget_counts_blocks_of_each_direction():
    logits = torch.zeros(LENGTH, LENGTH)
    logits[:, 32] = 100.0
    one, more = (sets(planted(logits, min_budget=x).mask)[0][9] for x in (16, 64))
    assert one == {0, 2, 9} and one < more and 4 <= len(more) <= 9


def blockwise(attended: dict[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and K of dimension 16, equal inside blocks: tile i looks at block ``attended[i]`` with logit 1000."""
    k = torch.eye(16)[torch.arange(LENGTH) // B][None, None]
    q = torch.zeros(1, 1, LENGTH, 16)
    for tile, block in attended.items():
        q[0, 0, tile * B : (tile + 1) * B, block] = 1000.0
    return q, k


def test_a_query_aware_head_keeps_the_blocks_of_each_tile():
    attended = {0: 0, 1: 1, 2: 1, 3: 2, 4: 1, 5: 3, 6: 6, 7: 4, 8: 2, 9: 5}
    q, k = blockwise(attended)
    got = flex_select(q, paged(k, k, 16), gamma=0.95, tau=0.1, min_budget=1, scale=1.0, block_size=B)
    # Both distributions are one and zeros: p log p of a zero must not become NaN and turn the head vertical-slash.
    assert got.divergence.item() == 0.0 and got.query_aware.item()
    # Column 0 and the main diagonal always; block column 5 and block diagonal 4 are the last queries' own lines.
    assert sets(got.mask)[0] == [
        {0, i, attended[i]} | ({5} if i >= 5 else set()) | ({i - 4} if i >= 4 else set()) for i in range(TILES)
    ]
    plain = flex_select(q, paged(k, k, 16), gamma=0.95, tau=0.0, min_budget=1, scale=1.0, block_size=B)
    assert not plain.query_aware.item() and 2 not in sets(plain.mask)[0][8]


def test_gamma_of_query_aware_heads_is_shared_by_all_tiles():
    """Eight tiles sure of one block hold 8 of 10; tile 7, nearly sure, brings them beyond 8.5; tile 8 is not needed."""
    attended = {0: 0, 1: 1, 2: 1, 3: 2, 4: 1, 5: 3, 6: 6, 7: 4, 8: 2, 9: 5}
    q, k = blockwise(attended)
    q[0, 0, 7 * B : 8 * B] *= 0.0045
    q[0, 0, 8 * B : 9 * B] *= 0.0015
    settings = {"tau": 0.5, "min_budget": 1, "scale": 1.0, "block_size": B}
    got = flex_select(q, paged(k, k, 16), gamma=0.85, **settings)
    tiles = sets(got.mask)[0]
    assert got.query_aware.item() and 4 in tiles[7] and 2 not in tiles[8]
    assert 2 in sets(flex_select(q, paged(k, k, 16), gamma=0.96, **settings).mask)[0][8]


@pytest.mark.parametrize("share,length", [(0.1, 1), (0.5, 1), (0.501, 2), (0.75, 2), (0.9, 3), (1.0, 3)])
def test_the_shortest_prefix_ends_where_the_share_is_reached(share, length):
    assert shortest_prefix(torch.tensor([[0.5, 0.25, 0.25, 0.0]]), share).tolist() == [length]
    assert shortest_prefix(torch.tensor([[1.0, 0.5, 0.5, 0.0]]), share).tolist() == [length]


def test_js_distance():
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.25, 0.5])
    assert js_distance(p, p) == 0 and js_distance(q, q) == 0
    assert js_distance(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).item() == pytest.approx(
        math.sqrt(math.log(2))
    )
    want = literal_proxies.js_distance(p.tolist(), q.tolist())
    assert js_distance(p, q).item() == pytest.approx(want) and js_distance(q, p).item() == pytest.approx(want)


def test_js_distance_of_nearly_equal_distributions_is_a_number():
    """Rounding makes some of these divergences negative."""
    g = torch.Generator().manual_seed(0)
    p = torch.rand(200, 64, generator=g).softmax(-1)
    assert js_distance(p, p * (1 + 1e-7 * torch.randn(200, 64, generator=g))).isfinite().all()


@pytest.mark.parametrize("rows,length", [(1, 1), (1, 7), (4, 4), (4, 9)])
def test_columns_and_diagonals(rows, length):
    attention = torch.rand(2, rows, length, generator=torch.Generator().manual_seed(1)).tril(length - rows)
    columns, diagonals = line_masses(attention)
    want = torch.zeros(2, 2, length)
    for i in range(rows):
        for c in range(length - rows + i + 1):
            want[0, :, c] += attention[:, i, c] / rows
            want[1, :, length - rows + i - c] += attention[:, i, c] / rows
    torch.testing.assert_close(columns, want[0])
    torch.testing.assert_close(diagonals, want[1])


@pytest.mark.parametrize("length", [5, 16, 32, 37])
def test_means_of_blocks_count_the_rows_that_exist(length):
    x = torch.rand(1, 2, length, 3)
    want = torch.stack([x[:, :, i : i + 16].mean(2) for i in range(0, length, 16)], 2)
    torch.testing.assert_close(block_means(x, 16, torch.float32), want)
    assert block_means(x.half(), 16, torch.float32).dtype == torch.float32


@pytest.mark.parametrize("length,block", [(16, 16), (100, 16), (640, 64)])
def test_the_pairs_are_the_products_that_are_made(length, block):
    blocks = -(-length // block)
    last = sum(r + 1 for r in range(length - block, length))
    assert flex_pairs(length, block, query_aware=False) == last + blocks
    assert flex_pairs(length, block, query_aware=True) == last + blocks + sum(i + 1 for i in range(blocks))


def test_bad_calls_are_refused():
    q, k, v = tensors(32, 1, 1, 16, block=16)
    settings = {"gamma": 0.9, "tau": 0.1, "min_budget": 1, "scale": 1.0}
    with pytest.raises(ValueError, match="kv_len=32"):
        flex_select(q[:, :, :16], paged(k, v, 16), block_size=16, **settings)
    with pytest.raises(ValueError, match="q_len=32: must be at least block_size=64"):
        flex_select(q, paged(k, v, 16), block_size=64, **settings)
