"""The paged layout and dense attention with an offset."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from prefill_kernels import PagedKV, causal_blocks, causal_cells, dense_attention


@pytest.mark.parametrize("length,page_size", [(1, 16), (16, 16), (61, 16), (61, 64)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_round_trip(length, page_size, shuffle):
    k, v = torch.randn(2, 3, length, 4), torch.randn(2, 3, length, 4)
    kv = PagedKV.from_dense(k, v, page_size, generator=torch.Generator().manual_seed(0) if shuffle else None)
    got_k, got_v = kv.gather()
    assert torch.equal(got_k, k) and torch.equal(got_v, v)
    positions = torch.randperm(length)[: max(1, length // 2)]
    assert torch.equal(kv.key_rows(positions), k[:, :, positions])
    if shuffle and length > page_size:
        assert kv.page_table.flatten().tolist() != sorted(kv.page_table.flatten().tolist())


def test_in_order_pages_are_not_copied():
    k = torch.randn(1, 2, 40, 4)
    made = PagedKV.from_dense(k, k, 16)
    kv = PagedKV(made.k_pages, made.v_pages, made.page_table, 40, in_order=True)
    view, _ = kv.gather()
    assert torch.equal(view, k)
    assert view.data_ptr() == kv.k_pages.data_ptr()


@pytest.mark.parametrize("offset,length", [(0, 33), (1, 33), (20, 33), (32, 33)])
def test_dense_attention_is_causal_from_the_lower_right(offset, length):
    q, k, v = torch.randn(1, 4, length, 8), torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 8)
    logits = q @ k.repeat_interleave(2, 1).mT * 0.3
    logits.masked_fill_(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
    expected = logits.softmax(-1) @ v.repeat_interleave(2, 1)
    got = dense_attention(q[:, :, offset:], k, v, scale=0.3, q_offset=offset)
    torch.testing.assert_close(got, expected[:, :, offset:], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="kv_len"):
        dense_attention(q[:, :, offset:], k, v, scale=0.3, q_offset=offset + 1)


def test_causal_counts_by_counting():
    for offset, length in ((0, 1), (0, 37), (32, 5), (48, 33)):
        rows = range(offset, offset + length)
        assert causal_cells(offset, length) == sum(r + 1 for r in rows)
        assert causal_blocks(offset, length, 16) == sum(t + 1 for t in {r // 16 for r in rows})


def test_a_page_outside_the_pool_is_named():
    k = torch.randn(1, 2, 40, 8)
    kv = PagedKV.from_dense(k, k, 16, generator=torch.Generator().manual_seed(0))
    kv.check()
    for entry in (-1, kv.k_pages.shape[0], 10**7):
        table = kv.page_table.clone()
        table[0, 1] = entry
        with pytest.raises(ValueError, match=f"page_table: entries .*{entry}.*the pool has pages 0 to"):
            dataclasses.replace(kv, page_table=table).check()
    with pytest.raises(ValueError, match="page_table: 2 pages for 40 tokens, want 3"):
        dataclasses.replace(kv, page_table=kv.page_table[:, :2]).check()
