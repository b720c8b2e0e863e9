"""SpargeAttn's selection against literal loops, and on inputs whose blocks are known."""

from __future__ import annotations

import math

import literal_proxies
import pytest
import torch
from kernel_cases import paged, tensors
from prefill_kernels import sparge_select
from prefill_kernels.sparge import self_similarity

B, D, SCALE = 16, 16, 0.25
CASES = [  # length, query heads, KV heads, tau, theta, page size
    (1, 2, 1, 0.5, 0.3, 16),
    (15, 1, 1, 0.5, 0.3, 16),
    (33, 3, 1, 0.7, 0.25, 16),
    (100, 4, 4, 0.6, 0.3, 32),
    (117, 6, 2, 0.8, 0.2, 16),
    (96, 5, 1, 0.9, 0.4, 64),
]


def sets(mask: torch.Tensor) -> list[list[set[int]]]:
    return [[set(row.nonzero().flatten().tolist()) for row in head] for head in mask[0]]


def mixed(length: int, q_heads: int, kv_heads: int, seed: int):
    """Rows around a direction of their block, more or less closely from block to block."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = tensors(length, q_heads, kv_heads, D, block=B, seed=seed, uneven=False)
    blocks = -(-length // B)
    for x in (q, k):
        centre = torch.randn(1, x.shape[1], blocks, D, generator=g)
        spread = torch.rand(1, x.shape[1], blocks, 1, generator=g) * 6
        each = torch.arange(length) // B
        x.mul_(spread[:, :, each]).add_(2 * centre[:, :, each])
    return q, k, v


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("length,q_heads,kv_heads,tau,theta,page_size", CASES)
def test_equals_the_literal_loops(length, q_heads, kv_heads, tau, theta, page_size, sink):
    q, k, v = mixed(length, q_heads, kv_heads, seed=length)
    settings = {"tau": tau, "theta": theta, "block_size": B, "scale": SCALE, "sink": sink}
    want = literal_proxies.sparge(q[0], k[0], **settings)
    assert sets(sparge_select(q.double(), paged(k.double(), v.double(), page_size), **settings)) == want
    assert sets(sparge_select(q, paged(k, v, page_size), **settings)) == want


def test_the_cases_hold_blocks_of_both_kinds_and_dropped_ones():
    q, k, v = mixed(117, 6, 2, seed=117)
    kept = sparge_select(q, paged(k, v, 16), tau=0.8, theta=0.2, block_size=B, scale=SCALE)
    full = torch.ones(8, 8).tril().bool().expand_as(kept)
    whole_rows = (kept == full).all(-1)[..., 2:]
    assert whole_rows.any() and not whole_rows.all()
    assert kept.sum() < 0.9 * full.sum()


@pytest.mark.parametrize("heads", [2, 3, 5])
def test_heads_a_few_at_a_time_equal_all_at_once(monkeypatch, heads):
    q, k, v = mixed(117, 6, 2, seed=117)
    settings = {"tau": 0.8, "theta": 0.2, "block_size": B, "scale": SCALE}
    whole = sparge_select(q, paged(k, v, 16), **settings)
    monkeypatch.setattr("prefill_kernels.pooling.HEAD_TOKENS", heads * 117)
    assert torch.equal(sparge_select(q, paged(k, v, 16), **settings), whole)


@pytest.mark.parametrize("length", [1, 16, 40])
def test_self_similarity_is_the_mean_cosine_of_all_pairs(length):
    x = torch.randn(1, 1, length, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x[..., 3 % length, :] = 0
    want = [literal_proxies.cosine(x[0, 0, i : i + B]) for i in range(0, length, B)]
    assert self_similarity(x, B, torch.float64)[0, 0].tolist() == pytest.approx(want)


# ----------------------------------------------------------- known answers: blocks of equal rows, one direction a block
BLOCKS, LENGTH = 8, 128


def blockwise(attended: dict[int, dict[int, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tile i gives block j the logit ``attended[i][j]``; other blocks get 0."""
    k = torch.eye(16)[torch.arange(LENGTH) // B][None, None].clone()
    q = torch.zeros(1, 1, LENGTH, 16)
    q[..., 15] = 1e-3  # no key lies here: rows of one tile stay alike where no block is attended
    for tile, logits in attended.items():
        for block, value in logits.items():
            q[0, 0, tile * B : (tile + 1) * B, block] = value
    return q, k


def run(q, k, tau=0.9, theta=0.5, sink=False):
    return sets(sparge_select(q, paged(k, k, 16), tau=tau, theta=theta, scale=1.0, block_size=B, sink=sink))[0]


def test_alike_blocks_are_kept_by_their_means():
    attended = {i: {max(0, i - 2): 20.0} for i in range(BLOCKS)}
    assert run(*blockwise(attended)) == [{max(0, i - 2)} for i in range(BLOCKS)]
    assert run(*blockwise(attended), sink=True) == [{0, max(0, i - 2)} for i in range(BLOCKS)]


def test_a_block_of_unlike_keys_is_always_kept():
    q, k = blockwise({i: {max(0, i - 2): 20.0} for i in range(BLOCKS)})
    k[0, 0, 3 * B : 4 * B] = torch.randn(B, 16, generator=torch.Generator().manual_seed(1))
    kept = run(q, k)
    assert all(3 in kept[i] for i in range(3, BLOCKS))
    assert kept[7] == {3, 5} and kept[4] == {3, 2}


def test_a_tile_of_unlike_queries_keeps_everything():
    q, k = blockwise({i: {max(0, i - 2): 20.0} for i in range(BLOCKS)})
    q[0, 0, 6 * B : 7 * B] = torch.randn(B, 16, generator=torch.Generator().manual_seed(1))
    kept = run(q, k)
    assert kept[6] == set(range(7)) and kept[7] == {5}


def test_the_prefix_does_not_exceed_tau_but_holds_a_block():
    shares = {1: 0.5, 3: 0.3, 5: 0.2}
    q, k = blockwise({7: {j: math.log(p) + 40 for j, p in shares.items()}})
    assert [run(q, k, tau=tau)[7] for tau in (0.4, 0.6, 0.79, 0.81, 0.99)] == [{1}, {1}, {1}, {1, 3}, {1, 3}]
    assert run(q, k, tau=1.0)[7] == set(range(8))


def test_keys_are_centred_before_their_similarity_and_not_for_their_scores():
    """A direction common to all keys hides that a block's keys are unlike; it adds the same to every score."""
    q, k = blockwise({i: {max(0, i - 2): 20.0} for i in range(BLOCKS)})
    k[0, 0, 3 * B : 4 * B] = torch.randn(B, 16, generator=torch.Generator().manual_seed(1))
    shifted = k + 100 * torch.ones(16)
    assert run(q.double(), shifted.double()) == run(q, k)


def test_nothing_to_judge_keeps_everything():
    q, k, v = tensors(100, 2, 1, D, block=B, uneven=False)
    kept = sparge_select(q, paged(k, v, 16), tau=0.5, theta=0.9, block_size=B, scale=SCALE)
    assert torch.equal(kept[0, 0], torch.ones(7, 7).tril().bool())


def test_a_bad_call_is_refused():
    q, k, v = tensors(32, 1, 1, D, block=B)
    with pytest.raises(ValueError, match="kv_len=32"):
        sparge_select(q[:, :, :16], paged(k, v, 16), tau=0.5, theta=0.5, block_size=B, scale=1.0)
