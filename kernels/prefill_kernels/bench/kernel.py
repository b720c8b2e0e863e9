"""The attention kernels alone: all blocks, what the vote costs, jumping against logical skipping, a skipped block."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..plans import BlockPlan
from .check import check_attention, every_block
from .config import BLOCK, KernelBench
from .inputs import Inputs, from_dense, synthetic, synthetic_sets
from .measure import Bench, block_kernel, dense, sparse_flops, with_scale

NONE_SKIPPED = 1e-30
"""A skip scale that turns the vote on and skips nothing."""


def run(settings: KernelBench, bench: Bench) -> None:
    """Measure every length.

    Raises:
        WrongResult: a kernel does not compute what it should.
    """
    matmul_ceiling(bench)
    for tokens in settings.lengths:
        _length(settings, bench, tokens)
    for tokens in settings.skip_lengths if "osk" in settings.variants else ():
        skipped_block(settings, bench, tokens)


def matmul_ceiling(bench: Bench, size: int = 8192) -> None:
    """What a large matrix product reaches: above any attention kernel. Left out on a CPU."""
    if bench.device.type != "cuda":
        return
    a, b = (torch.randn(size, size, device=bench.device, dtype=bench.dtype) for _ in range(2))
    ms = bench.mean_ms([lambda: a @ b])
    setting = f"{size} x {size} x {size}, {str(bench.dtype).removeprefix('torch.')}"
    bench.rows.add("ceiling", "matmul", size, setting, ms=ms, tflops=2.0 * size**3 / ms / 1e9)


def _length(settings: KernelBench, bench: Bench, tokens: int) -> None:
    sets = synthetic_sets(bench.shape, tokens, settings.seed, bench.device, bench.dtype)
    dense(bench, "kernel", settings.variants, sets)
    scores = [bench.scores(one, settings.stride) for one in sets]

    def lists(budget: float) -> list[BlockPlan]:
        return [bench.select(item, tokens, budget=budget) for item in scores]

    variants = settings.variants
    if "osk" in variants:
        every = lists(1.0)
        bare = block_kernel(bench, "kernel", "osk", "all blocks", sets, every)
        voting = with_scale(every, NONE_SKIPPED)
        setting = "all blocks, vote, none skipped"
        block_kernel(bench, "kernel", "osk", setting, sets, voting, more={"vote_cost": lambda ms: ms / bare - 1})
        del every, voting
    for budget in settings.budgets:
        plans, setting = lists(budget), f"budget {budget:.0%}"
        if "osk" in variants:
            block_kernel(bench, "kernel", "osk", setting, sets, plans)
        more: dict[str, Callable[[float], float]] = {}
        if "logical_triton" in variants:
            logical = _logical(bench, setting, sets, plans)
            more["gain_of_jumping"] = lambda ms, logical=logical: logical / ms  # type: ignore[misc]
        if "osk_triton" in variants:
            block_kernel(bench, "kernel", "osk_triton", setting, sets, plans, backend="triton", more=more)


def _logical(bench: Bench, setting: str, sets: list[Inputs], plans: list[BlockPlan]) -> float:
    """Walk every causal block and test a mask: the same blocks in the same language as ``osk_triton``."""
    from ..triton_osk import block_mask, logical_skip_attention

    masks = [block_mask(plan) for plan in plans]
    tokens, dim = sets[0].tokens, sets[0].q.shape[3]
    calls = [
        functools.partial(logical_skip_attention, one.q, one.kv, mask, plan, scale=one.scale)
        for one, mask, plan in zip(sets, masks, plans, strict=True)
    ]
    what = f"logical_triton at {tokens} tokens, {setting}"
    error = check_attention(what, sets[0], plans[0], calls[0]())
    ms = bench.mean_ms(calls)
    blocks = sum(int(plan.count.sum()) for plan in plans) // len(plans)
    rates = bench.rates(sparse_flops(blocks, blocks, dim), ms, sets[0])
    bench.rows.add("kernel", "logical_triton", tokens, setting, ms=ms, **rates, **bench.speedups(ms), rel_err=error)
    return ms


def skipped_block(settings: KernelBench, bench: Bench, tokens: int) -> None:
    """What a skipped block costs over a live one.

    All blocks in ascending order; the first outweighs the others so far that all others are skipped when the
    threshold allows it.
    """
    plain = synthetic(bench.shape, tokens, 7, device=bench.device, dtype=bench.dtype)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (plain.q, plain.k, plain.v))
    # The first block's logits lie 42 higher: beyond any skip threshold in use, and not beyond NONE_SKIPPED.
    q[..., 0] = 8.0
    k[..., 0] = 0
    k[:, :BLOCK, :, 0] = 42.0 / (8.0 * plain.scale)
    one = from_dense(q, k, v, plain.scale, 7)
    plan = [every_block(one)]
    dense(bench, "skip", settings.variants, [one])
    live = block_kernel(bench, "skip", "osk", "vote off", [one], plan)
    voting = block_kernel(bench, "skip", "osk", "none skipped", [one], with_scale(plan, NONE_SKIPPED))
    ratios: dict[str, Callable[[float], float]] = {
        "skipped_over_live": lambda ms: ms / live,
        "skipped_over_voting": lambda ms: ms / voting,
    }
    block_kernel(bench, "skip", "osk", "all but one skipped", [one], with_scale(plan, 0.5 * tokens), more=ratios)
