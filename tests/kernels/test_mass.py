"""Exact block mass: literal loops, structures with a known answer, chunks, bounded memory."""

from __future__ import annotations

import literal_floors
import pytest
import torch
from kernel_cases import paged, tensors
from prefill_kernels import PagedKV, block_mass
from prefill_kernels import mass as module

B, D, SCALE = 16, 16, 0.25
CASES = [  # length, query heads, KV heads, offset, page size
    (1, 2, 1, 0, 16),
    (15, 3, 1, 0, 16),
    (17, 4, 4, 0, 32),
    (70, 8, 2, 0, 16),
    (64, 3, 3, 32, 64),
    (100, 6, 2, 48, 16),
]


@pytest.mark.parametrize("length,q_heads,kv_heads,offset,page_size", CASES)
def test_equals_the_literal_loops(length, q_heads, kv_heads, offset, page_size):
    q, k, v = tensors(length, q_heads, kv_heads, D, block=B, offset=offset, seed=length)
    got = block_mass(q.double(), paged(k.double(), v.double(), page_size), scale=SCALE, block_size=B, q_offset=offset)
    want = literal_floors.mass(q[0], k[0], B, SCALE, offset)
    torch.testing.assert_close(got[0], want, rtol=1e-10, atol=1e-12)
    single = block_mass(q, paged(k, v, page_size), scale=SCALE, block_size=B, q_offset=offset)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single[0].double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limit", [1, 5000, 1 << 25])
def test_pieces_of_any_size_give_the_same_mass(monkeypatch, limit):
    q, k, v = tensors(200, 4, 2, D, block=B)
    want = block_mass(q, paged(k, v, 16), scale=SCALE, block_size=B)
    monkeypatch.setattr(module, "_MAX_LOGITS", limit)
    got = block_mass(q, paged(k, v, 16), scale=SCALE, block_size=B)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_a_chunk_has_the_rows_of_the_whole():
    q, k, v = tensors(200, 4, 2, D, block=B)
    whole = block_mass(q, paged(k, v, 16), scale=SCALE, block_size=B)
    for start, stop in ((0, 64), (64, 144), (144, 200)):
        kv = PagedKV.from_dense(k[:, :, :stop], v[:, :, :stop], 16)
        part = block_mass(q[:, :, start:stop], kv, scale=SCALE, block_size=B, q_offset=start)
        torch.testing.assert_close(part, whole[:, :, start // B : -(-stop // B), : part.shape[-1]])


def test_a_tiles_masses_add_up_to_its_rows_and_the_future_has_none():
    q, k, v = tensors(75, 4, 1, D, block=B)
    got = block_mass(q, paged(k, v, 16), scale=SCALE, block_size=B)
    torch.testing.assert_close(got.sum(-1), torch.tensor([16.0, 16, 16, 16, 11]).expand(1, 4, 5))
    assert not got.triu(1).any()


def test_planted_lines_hold_the_mass():
    length, heads = 160, 3
    q, k = torch.zeros(1, heads, length, D), torch.zeros(1, heads, length, D)
    # Head 0: every query looks at token 37. Head 1: at the token 50 before it. Head 2: at the sink.
    q[0, 0, :, 0] = q[0, 2, :, 0] = 40.0
    k[0, 0, 37, 0] = k[0, 2, 0, 0] = 4.0
    angle = torch.arange(length, dtype=torch.float64) * 0.7
    code = torch.stack([f(angle * (i + 1) ** 1.3) for i in range(D // 2) for f in (torch.cos, torch.sin)], -1)
    k[0, 1], q[0, 1, 50:] = code.float() * 6, code[:-50].float() * 6
    got = block_mass(q, PagedKV.from_dense(k, k, 16), scale=1.0, block_size=B)
    for tile in range(4, 10):
        assert got[0, 0, tile, 2] == pytest.approx(16, abs=1e-3)
        assert got[0, 2, tile, 0] == pytest.approx(16, abs=1e-3)
        first, last = (tile * B - 50) // B, (tile * B + 15 - 50) // B
        assert got[0, 1, tile, first : last + 1].sum() == pytest.approx(16, abs=1e-2)
        assert got[0, 1, tile, last + 1 :].sum() < 1e-2
    assert got[0, 1, 5, 1] == pytest.approx(2, abs=0.01), "tokens 30 and 31 lie in block 1, the rest in block 2"


@pytest.mark.parametrize(
    "change,message", [({"q_offset": 8}, "q_offset=8"), ({"q_offset": 16}, "kv_len=64"), ({"backend": "cuda"}, "cuda")]
)
def test_calls_that_do_not_fit_are_refused(change, message):
    q, k, v = tensors(64, 2, 1, D, block=B)
    with pytest.raises(ValueError, match=message):
        block_mass(q, paged(k, v, 16), **({"scale": SCALE, "block_size": B} | change))
