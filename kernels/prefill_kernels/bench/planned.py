"""The whole call of any method: what plans, and the kernel for its plan; each apart, and as one call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..dense import dense_attention
from ..execute import SparsePlan, sparse_attention
from ..pages import PagePlan
from ..plans import DensePlan, TileStats, causal_blocks, causal_cells
from .check import block_size, check_attention, check_dense
from .config import BLOCK
from .inputs import Inputs
from .measure import Bench, budgets, dense_flops, host_ms, products

Plan = SparsePlan | DensePlan


@dataclass(frozen=True)
class Planner:
    """A method as it is measured.

    Attributes:
        variant: of the rows.
        setting: its knobs, for the rows.
        plan: plans one call.
        pairs: QK products that planning costs, per query head, by number of tokens.
    """

    variant: str
    setting: str
    plan: Callable[[Inputs], Plan]
    pairs: Callable[[int], int]


def planned_call(bench: Bench, planner: Planner, sets: list[Inputs], kind: str) -> None:
    """Check and time a method's plan, the attention on it, and both as one call.

    Metrics besides those of every kernel: ``plan_ms`` and ``attention_ms``, the stages apart; ``attention_tflops``, the
    executed rate of the latter; ``plan_memory``, what planning holds at its peak beyond its inputs (CUDA alone). The
    executed products of a call are those of the plan's kernel and those of planning.

    Args:
        bench: the bench, with dense kernels measured on inputs of this length.
        planner: the method.
        sets: inputs; times are means over them.
        kind: what rows call the inputs; begins the setting.

    Raises:
        WrongResult: an output is not what its plan means.
        ValueError: a plan is not sound.
    """
    first, setting = sets[0], f"{kind}, {planner.setting}"
    what = f"{planner.variant} at {first.tokens} tokens, {setting}"

    def whole(one: Inputs) -> tuple[Tensor, TileStats]:
        return attend(bench, one, planner.plan(one))

    planner.plan(first)  # compiles, and copies constants to the device
    plan, memory = peak_memory(functools.partial(planner.plan, first), bench.device)
    plans = [plan, *(planner.plan(one) for one in sets[1:])]
    size = BLOCK if isinstance(plan, DensePlan) else block_size(plan)
    out, counts = whole(first)
    if isinstance(plan, DensePlan):
        error = check_dense(what, first, out)
    else:
        plan.check()
        error = check_attention(what, first, plan, out, counts)
    del out
    stats = [counts, *(attend(bench, one, item)[1] for one, item in zip(sets[1:], plans[1:], strict=True))]
    attending = bench.mean_ms(
        functools.partial(attend, bench, one, item) for one, item in zip(sets, plans, strict=True)
    )
    work = dense_flops(first) if isinstance(plan, DensePlan) else products(sets, stats, size)
    realized = budgets(sets, stats, size)
    del plans, plan, stats, counts
    planning = bench.mean_ms(functools.partial(planner.plan, one) for one in sets)
    calls = [functools.partial(whole, one) for one in sets]
    ms = bench.mean_ms(calls)
    scoring = 2.0 * first.q.shape[3] * first.q.shape[1] * planner.pairs(first.tokens)
    measured = {
        "plan_ms": planning,
        "attention_ms": attending,
        "attention_tflops": work / attending / 1e9,
        "host_ms": host_ms(calls),
    }
    if memory is not None:
        measured["plan_memory"] = memory
    bench.rows.add(
        "attention", planner.variant, first.tokens, setting, ms=ms, **bench.rates(work + scoring, ms, first),
        **bench.speedups(ms), **realized, **measured, rel_err=error,
    )  # fmt: skip


def attend(bench: Bench, one: Inputs, plan: Plan) -> tuple[Tensor, TileStats]:
    """Attention as the plan says; an answer that is dense is counted as every cell."""
    if isinstance(plan, DensePlan):
        out = dense_attention(one.q, *one.kv.gather(), scale=one.scale)
        return out, every_cell(one.tokens, one.q.shape[1], one.q.device)
    return sparse_attention(one.q, one.kv, plan, scale=one.scale, backend=kernel_for(plan, bench.backend))


def kernel_for(plan: SparsePlan, backend: str) -> str:
    """The backend by name that runs a plan: the Hopper kernel has tiles of 128, for pages some head ratios alone."""
    if isinstance(plan, PagePlan) and backend == "hopper":
        return "auto"
    return "triton" if backend == "hopper" and block_size(plan) != BLOCK else backend


def every_cell(tokens: int, heads: int, device: torch.device) -> TileStats:
    """Counts of a dense call, all of a head's in one tile."""
    cells, blocks = (
        torch.full((1, heads, 1), count, device=device)
        for count in (causal_cells(0, tokens), causal_blocks(0, tokens, BLOCK))
    )
    return TileStats(cells, cells, blocks, blocks)


def peak_memory(call: Callable[[], Plan], device: torch.device) -> tuple[Plan, float | None]:
    """A call's result, and GiB that it held at its peak beyond what was allocated before; None on a CPU."""
    if device.type != "cuda":
        return call(), None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    plan = call()
    torch.cuda.synchronize(device)
    return plan, (torch.cuda.max_memory_allocated(device) - before) / 2**30
