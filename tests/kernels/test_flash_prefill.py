"""FlashPrefill's scores and threshold against literal loops and known answers; the Triton scores in the interpreter."""

from __future__ import annotations

import math

import literal_proxies
import pytest
import torch
from kernel_cases import paged, tensors
from prefill_kernels import BackendUnavailable, flash_scores, flash_select
from prefill_kernels.flash_prefill import flash_pairs

B, D, SCALE = 16, 16, 0.25
CASES = [  # length, query heads, KV heads, offset, page size
    (1, 2, 1, 0, 16),
    (15, 3, 1, 0, 16),
    (16, 1, 1, 0, 32),
    (17, 4, 4, 0, 16),
    (100, 4, 1, 48, 64),
    (131, 6, 2, 0, 16),
]
BACKENDS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter, without a GPU")),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length,q_heads,kv_heads,offset,page_size", CASES)
def test_scores_equal_the_literal_loops(length, q_heads, kv_heads, offset, page_size, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    q, k, v = tensors(length, q_heads, kv_heads, D, block=B, offset=offset, seed=length, uneven=length % 2 == 0)
    want = literal_proxies.flash_mass(q[0], k[0], B, SCALE, offset).log()
    settings = {"scale": SCALE, "block_size": B, "q_offset": offset, "backend": backend}
    got = flash_scores(q, paged(k, v, page_size), **settings)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got[0].double(), want, rtol=1e-4, atol=1e-4)
    if backend == "torch":
        exact = flash_scores(q.double(), paged(k.double(), v.double(), page_size), **settings)
        torch.testing.assert_close(exact[0], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_beyond_the_range_of_exp_keep_their_order(backend):
    q, k, v = tensors(96, 2, 1, D, block=B)
    kv = paged(30 * k, v, 16)
    got = flash_scores(30 * q, kv, scale=1.0, block_size=B, backend=backend)
    assert not got.isnan().any() and got[got.isfinite()].abs().max() > 1000
    torch.testing.assert_close(
        got, flash_scores(30 * q, kv, scale=1.0, block_size=B, backend="torch"), rtol=1e-4, atol=1e-2
    )


def test_tiles_in_steps_equal_tiles_at_once(monkeypatch):
    q, k, v = tensors(150, 2, 1, D, block=B)
    whole = flash_scores(q, paged(k, v, 16), scale=SCALE, block_size=B)
    monkeypatch.setattr("prefill_kernels.flash_prefill._MAX_LOGITS", 1000)
    assert torch.equal(flash_scores(q, paged(k, v, 16), scale=SCALE, block_size=B), whole)


def test_only_the_last_query_of_a_tile_judges_the_diagonal():
    q = torch.zeros(1, 1, 48, 16)
    k = torch.ones(1, 1, 48, 16)
    q[0, 0, 30] = q[0, 0, 47] = 1.0
    got = flash_scores(q, paged(k, k, 16), scale=1.0, block_size=B)[0, 0]
    assert got[1, 0].item() == pytest.approx(math.log(15 + math.exp(16)), rel=1e-4)
    assert got[1, 1].item() == 0.0 and got[2, 2].item() == pytest.approx(16, rel=1e-5)
    assert (
        flash_scores(q[:, :, :47], paged(k[:, :, :47], k[:, :, :47], 16), scale=1.0, block_size=B)[0, 0, 2, 2]
        == -math.inf
    )


# ------------------------------------------------------------------------------------------------------------ threshold
RULES = {"alpha": 0.3, "sink": 1, "window": 2, "last_full": 1}


@pytest.mark.parametrize(
    "change", [{}, {"alpha": 0.9}, {"alpha": 0.0}, {"sink": 3}, {"sink": 0}, {"window": 4}, {"last_full": 0}]
)
@pytest.mark.parametrize("first", [0, 4])
def test_the_kept_blocks_equal_the_literal_rule(change, first):
    tiles, rules = 7, {**RULES, **change}
    blocks = first + tiles
    mass = torch.rand(1, 2, tiles, blocks, generator=torch.Generator().manual_seed(5)).double()
    mass *= torch.ones(blocks, blocks).tril()[first:]
    got = flash_select(mass.log(), first_tile=first, prompt_tiles=blocks + 1, **rules)
    for h in range(2):
        for t in range(tiles):
            want = literal_proxies.flash_kept(mass[0, h, t], first + t, prompt_tiles=blocks + 1, **rules)
            assert set(got[0, h, t].nonzero().flatten().tolist()) == want


def test_planted_vertical_slash_and_block_are_kept_and_nothing_else():
    blocks = 12
    mass = torch.full((1, 1, blocks, blocks), 1e-3).tril()
    mass[0, 0, 3:, 3] = 1.0
    for i in range(5, blocks):
        mass[0, 0, i, i - 5] = 0.5
    mass[0, 0, 10, 7] = 0.4
    got = flash_select(mass.log(), alpha=0.2, sink=1, window=1, last_full=1, first_tile=0, prompt_tiles=blocks)
    for i in range(blocks - 1):
        want = {0, i} | ({3} if i >= 3 else set()) | ({i - 5} if i >= 5 else set()) | ({7} if i == 10 else set())
        # Before the vertical line starts all masses are equal, none is small beside the largest.
        assert set(got[0, 0, i].nonzero().flatten().tolist()) == (want if i >= 3 else set(range(i + 1)))
    assert got[0, 0, -1].all()


def test_alpha_of_zero_keeps_every_causal_block():
    score = torch.full((1, 1, 4, 4), -math.inf)
    score[..., 1] = 1e4
    got = flash_select(score, alpha=0.0, sink=0, window=1, last_full=0, first_tile=0, prompt_tiles=4)
    assert torch.equal(got[0, 0], torch.ones(4, 4).tril().bool())


@pytest.mark.parametrize("length", [1, 15, 16, 100])
def test_the_pairs_are_the_products_that_are_made(length):
    assert flash_pairs(0, length, B) == sum((r + 1) // B for r in range(length))
    assert flash_pairs(0, 64, B) + flash_pairs(64, length, B) == flash_pairs(0, 64 + length, B)


def test_bad_calls_are_refused():
    q, k, v = tensors(32, 1, 1, 24, block=B)
    with pytest.raises(ValueError, match="q_offset=8"):
        flash_scores(q, paged(k, v, 16), scale=1.0, block_size=B, q_offset=8)
    with pytest.raises(ValueError, match="kv_len=32"):
        flash_scores(q[:, :, :16], paged(k, v, 16), scale=1.0, block_size=B)
    with pytest.raises(BackendUnavailable, match="head_dim=24"):
        flash_scores(q, paged(k, v, 16), scale=1.0, block_size=B, backend="triton")
