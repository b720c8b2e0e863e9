"""The proxy against the literal float64 loops."""

from __future__ import annotations

import literal
import pytest
import torch
from prefill_kernels import PagedKV, kap_scores, sampled_pairs, sampled_positions

CASES = [  # length, query heads, kv heads, stride, block
    (1, 2, 1, 8, 16),
    (15, 3, 1, 4, 16),
    (16, 4, 4, 16, 16),
    (17, 4, 2, 8, 16),
    (70, 8, 2, 4, 16),
    (100, 3, 1, 12, 16),  # stride that does not divide the block: a short last block may hold no multiple of it
    (97, 2, 2, 5, 32),
]


def make(length: int, q_heads: int, kv_heads: int, dim: int = 8, dtype: torch.dtype = torch.float64, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(1, q_heads, length, dim, generator=g, dtype=torch.float64) * 2
    k = torch.randn(1, kv_heads, length, dim, generator=g, dtype=torch.float64)
    return q.to(dtype), k.to(dtype)


@pytest.mark.parametrize("length,q_heads,kv_heads,stride,block", CASES)
def test_matches_the_literal_loops(length, q_heads, kv_heads, stride, block):
    q, k = make(length, q_heads, kv_heads, seed=length)
    kv = PagedKV.from_dense(k, k, 16, generator=torch.Generator().manual_seed(3))
    got = kap_scores(q, kv, stride=stride, scale=0.35, block_size=block)
    score, flag, _ = literal.kap(q[0], k[0], stride, block, 0.35)
    torch.testing.assert_close(got.score[0], score, rtol=1e-10, atol=1e-12)
    assert torch.equal(got.hrm[0], flag)


@pytest.mark.parametrize("length,q_heads,kv_heads,stride,block", CASES)
def test_float32_agrees_but_for_near_ties(length, q_heads, kv_heads, stride, block):
    q, k = make(length, q_heads, kv_heads, dtype=torch.float32, seed=length + 1)
    got = kap_scores(q, PagedKV.from_dense(k, k, 32), stride=stride, scale=0.35, block_size=block)
    score, flag, margin = literal.kap(q[0], k[0], stride, block, 0.35)
    assert got.score.dtype == torch.float32
    torch.testing.assert_close(got.score[0].double(), score, rtol=1e-4, atol=1e-5)
    assert not ((got.hrm[0] != flag) & (margin > 1e-4)).any()


@pytest.mark.parametrize("offset", [16, 48, 64])
@pytest.mark.parametrize("stride", [4, 16])
def test_a_chunk_is_the_slice_of_the_whole(offset, stride):
    q, k = make(100, 4, 2)
    whole = kap_scores(q, PagedKV.from_dense(k, k, 16), stride=stride, scale=0.3, block_size=16)
    for stop in (100, offset + 16):
        kv = PagedKV.from_dense(k[:, :, :stop], k[:, :, :stop], 16)
        part = kap_scores(q[:, :, offset:stop], kv, stride=stride, scale=0.3, block_size=16, q_offset=offset)
        tiles = slice(offset // 16, -(-stop // 16))
        expected = whole.score[:, :, tiles, : part.score.shape[-1]]
        torch.testing.assert_close(part.score, expected)
        assert torch.equal(part.hrm, whole.hrm[:, :, tiles, : part.hrm.shape[-1]])


def test_row_chunking_inside_the_reference_changes_nothing(monkeypatch):
    from prefill_kernels import kap

    q, k = make(200, 2, 1)
    kv = PagedKV.from_dense(k, k, 16)
    whole = kap_scores(q, kv, stride=4, scale=0.3, block_size=16)
    monkeypatch.setattr(kap, "_MAX_LOGITS", 1)
    pieces = kap_scores(q, kv, stride=4, scale=0.3, block_size=16)
    torch.testing.assert_close(whole.score, pieces.score)
    assert torch.equal(whole.hrm, pieces.hrm)


def test_every_block_holds_a_sample_and_token_zero_is_one():
    for block in (16, 128):
        for stride in (1, 3, 4, 7, 8, 16):
            for length in (1, 2, block - 1, block, block + 1, 3 * block + 5):
                positions = sampled_positions(0, length, stride, block)
                assert positions[0] == 0
                blocks = set((positions // block).tolist())
                assert blocks == set(range(-(-length // block)))
                assert positions.tolist() == sorted(set(positions.tolist()))
                assert all(p % stride == 0 or p == length - 1 for p in positions.tolist())


def test_sampled_pairs_counts_what_the_proxy_multiplies():
    for length, stride in ((1, 8), (130, 8), (517, 16), (100, 24)):
        positions = sampled_positions(0, length, stride, 32).tolist()
        assert sampled_pairs(0, length, stride, 32) == sum(c <= r for r in positions for c in positions)
    whole = sampled_pairs(0, 640, 8, 128)
    assert whole == sampled_pairs(0, 256, 8, 128) + sampled_pairs(256, 384, 8, 128)


def test_flag_survives_probabilities_that_merge():
    """Two blocks whose probabilities round to the same float32 still have one row maximum."""
    q = torch.zeros(1, 1, 32, 2)
    k = torch.zeros(1, 1, 32, 2)
    q[..., 0] = 1.0
    k[0, 0, 0, 0], k[0, 0, 16, 0] = 1.0, 1.0 - 2**-24
    got = kap_scores(q, PagedKV.from_dense(k, k, 16), stride=16, scale=1.0, block_size=16)
    assert got.hrm[0, 0, 1].tolist() == [True, False]


def test_ties_flag_both_blocks():
    q = torch.ones(1, 1, 32, 2)
    k = torch.ones(1, 1, 32, 2)
    got = kap_scores(q, PagedKV.from_dense(k, k, 16), stride=4, scale=1.0, block_size=16)
    assert got.hrm[0, 0, 1].tolist() == [True, True]


def test_bad_geometry_is_refused():
    q, k = make(40, 2, 1)
    kv = PagedKV.from_dense(k, k, 16)
    with pytest.raises(ValueError, match="stride=32"):
        kap_scores(q, kv, stride=32, scale=1.0, block_size=16)
    with pytest.raises(ValueError, match="q_offset=8"):
        kap_scores(q[:, :, 8:], kv, stride=4, scale=1.0, block_size=16, q_offset=8)
    with pytest.raises(ValueError, match="kv_len=40"):
        kap_scores(q[:, :, :20], kv, stride=4, scale=1.0, block_size=16)
    with pytest.raises(ValueError, match="backend='cuda'"):
        kap_scores(q, kv, stride=4, scale=1.0, block_size=16, backend="cuda")
