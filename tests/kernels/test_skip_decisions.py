"""Which blocks the vote skips, exactly, against the literal loops: thresholds, scalings, visiting orders and ties."""

from __future__ import annotations

import math

import literal
import pytest
import torch
from kernel_cases import paged
from prefill_kernels import BlockPlan, block_attention

B, D, BLOCKS, OFFSET = 16, 16, 7, 80
LENGTH = BLOCKS * B - 5
ORDERS = [[[0, 1, 2, 3, 4, 5], [6, 2, 5, 0, 4, 1, 3]], [[5, 3, 0, 2, 1, 4], [1, 4, 2, 6, 3, 5, 0]]]
"""Visiting orders of two KV heads, of the tiles 5 and 6."""
BACKENDS = [
    "torch",
    pytest.param(
        "triton",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU"),
    ),
]


def graded(scale, seed):
    """Q of two tiles and K whose blocks lie 0 to 6 below the best in *scaled* logits, rows differing by about 0.3."""
    g = torch.Generator().manual_seed(seed)
    level = -torch.tensor([0.0, 0.6, 1.9, 3.2, 4.1, 5.0, 6.0])[torch.randperm(BLOCKS, generator=g)]
    q = 0.3 * torch.randn(1, 2, LENGTH - OFFSET, D, generator=g)
    k = 0.25 / scale * torch.randn(1, 2, LENGTH, D, generator=g)
    q[..., 0] = 1.0
    k[..., 0] = (level.repeat_interleave(B)[:LENGTH] + 0.05 * torch.randn(1, 2, LENGTH, generator=g)) / scale
    return q, k


def kept_blocks(q, k, scale, share, backend):
    """For each (head, tile), which of its list a backend computes: values of block j are unit vector j alone."""
    order = torch.full((1, 2, 2, BLOCKS), -1, dtype=torch.int32)
    for h, head in enumerate(ORDERS):
        for t, blocks in enumerate(head):
            order[0, h, t, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    count = (order >= 0).sum(-1, dtype=torch.int32)
    plan = BlockPlan(order, count, B, OFFSET, LENGTH - OFFSET, LENGTH, LENGTH, share * LENGTH)
    plan.check()
    v = torch.eye(BLOCKS, D).repeat_interleave(B, 0)[:LENGTH].expand(1, 2, -1, -1)
    out, stats = block_attention(q, paged(k, v, 16), plan, scale=scale, backend=backend)
    seen = torch.nn.functional.pad(out[0], (0, 0, 0, 2 * B - out.shape[2])).view(2, 2, B, D).amax(2) > 0
    kept = [[[bool(seen[h, t, j]) for j in blocks] for t, blocks in enumerate(head)] for h, head in enumerate(ORDERS)]
    assert stats.computed_blocks[0].tolist() == [[sum(tile) for tile in head] for head in kept]
    return kept


def margin(q, k, scale, threshold):
    """Smallest distance of any vote from the threshold, along the visiting orders."""
    found = math.inf
    for h, head in enumerate(ORDERS):
        for t, blocks in enumerate(head):
            rows = slice(t * B, min((t + 1) * B, LENGTH - OFFSET))
            position = OFFSET + torch.arange(LENGTH - OFFSET)[rows]
            running = torch.full((len(position),), -math.inf, dtype=torch.float64)
            for step, j in enumerate(blocks):
                token = torch.arange(j * B, min((j + 1) * B, LENGTH))
                s = q[0, h, rows].double() @ k[0, h, token].double().T * scale
                local = s.masked_fill(token > position[:, None], -math.inf).amax(-1)
                vote = float((local - torch.maximum(running, local)).amax())
                # A block that raises some row's maximum votes 0 exactly, in any arithmetic.
                if step and vote != 0.0:
                    found = min(found, abs(vote - threshold))
                if step == 0 or not vote < threshold:
                    running = torch.maximum(running, local)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("share", [0.01, 0.06, 0.25, 1.0])
@pytest.mark.parametrize("scale", [0.03, D**-0.5, 4.0])
def test_skipped_sets_equal_the_literal_loops(scale, share, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    q, k = graded(scale, seed=3)
    threshold = math.log(share)
    assert margin(q, k, scale, threshold) > 1e-4, "a vote too near the threshold: choose another seed"
    _, want = literal.osk(q[0], k[0], k[0], ORDERS, B, scale, threshold, OFFSET)
    assert kept_blocks(q, k, scale, share, backend) == want
    skipped = sum(not kept for head in want for tile in head for kept in tile)
    assert 0 < skipped < 20
    if share < 1:
        for wrong in (threshold * scale, threshold / scale):
            other = literal.osk(q[0], k[0], k[0], ORDERS, B, scale, wrong, OFFSET)[1]
            assert other != want, "a threshold on the wrong scale would not show"


@pytest.mark.parametrize("backend", BACKENDS)
def test_exact_ties_are_kept(backend):
    """Line 14 of Algorithm A skips strictly below ln(delta/N): at delta/N = 1 identical blocks vote 0, and all stay."""
    if backend == "triton":
        pytest.importorskip("triton")
    g = torch.Generator().manual_seed(0)
    k = torch.randint(-2, 3, (1, 2, B, D), generator=g).float().repeat(1, 1, BLOCKS, 1)[:, :, :LENGTH]
    q = torch.randint(-2, 3, (1, 2, LENGTH - OFFSET, D), generator=g).float()
    # The diagonal shows a row fewer keys: where the best key of every row is the first, it ties there too.
    k[:, :, ::B] = q[:, :, :1].sign() * 4
    q = q[:, :, :1].sign().expand_as(q).contiguous()
    kept = kept_blocks(q, k, 0.5, 1.0, backend)
    assert all(all(tile) for head in kept for tile in head)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_step_below_a_tie_is_skipped(backend):
    if backend == "triton":
        pytest.importorskip("triton")
    q, k = (torch.zeros(1, 2, n, D) for n in (LENGTH - OFFSET, LENGTH))
    q[..., 0], k[..., 0] = 1.0, 1.0
    k[:, :, 2 * B : 3 * B, 0] = 1.0 - 2.0**-20
    kept = kept_blocks(q, k, 0.5, 1.0, backend)
    for head, lists in zip(kept, ORDERS, strict=True):
        for tile, blocks in zip(head, lists, strict=True):
            assert [j for j, done in zip(blocks, tile, strict=True) if not done] == [2]
