"""Benchmark vertical-slash attention on a CUDA device: ``python -m prefill_kernels.bench_vertical_slash``.

Same shape, inputs and units as :mod:`prefill_kernels.bench`. TF/s count executed cells, 4 * d for each, whole blocks,
over the time of the call less that of the index part. Rows: the plain Triton block kernel at two budgets as the
yardstick; the vertical-slash kernel on plans of known make (``all``: every diagonal; ``runs``: 64-wide runs of
diagonals and 1000 columns; ``single``: lone diagonals and 1000 columns); and MInference's default call, estimate,
selection and attention apart and together.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import kap_scores, select_blocks
from .bench import BLOCK, DIM, HEADS, LENGTHS, SCALE, STRIDE, Inputs, Rows, geometry, inputs
from .osk import block_attention
from .paged import PagedKV
from .plans import causal_blocks
from .timing import milliseconds
from .triton_vertical_slash import prepared
from .vertical_slash import VerticalSlashPlan, vertical_slash_attention
from .vertical_slash_select import FORCED_COLUMNS, FORCED_SLASHES, top_positions, vertical_slash_scores

COLUMNS, SLASHES = 1000, 6096


def padded(member: Tensor) -> Tensor:
    """Flags [1, H, L] as ascending lists, -1 padded."""
    length = member.shape[-1]
    width = int(member.sum(-1).max())
    place = torch.where(member, torch.arange(length, device=member.device), length).sort(-1).values[..., :width]
    return torch.where(place < length, place, -1).int()


def made_plan(kind: str, tokens: int, size: int, seed: int) -> VerticalSlashPlan:
    """A plan of known make, different for each head."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    draw = functools.partial(torch.rand, 1, HEADS, tokens, device="cuda", generator=g)
    columns = draw() < COLUMNS / tokens
    slashes = torch.zeros(1, HEADS, tokens, dtype=torch.bool, device="cuda")
    if kind == "all":
        slashes |= True
    elif kind == "runs":
        begins = draw() < min(0.2, 48 / tokens * (tokens / 32768) ** 0.5)
        for step in range(64):
            slashes[..., step:] |= begins[..., : tokens - step]
    else:
        slashes |= draw() < min(0.002, 96 / tokens)
    slashes[..., :FORCED_SLASHES] = True
    return VerticalSlashPlan(padded(columns), padded(slashes), size, tokens)


def chosen_plan(q: Tensor, kv: PagedKV, size: int) -> VerticalSlashPlan:
    """MInference's default selection."""
    column, diagonal = vertical_slash_scores(q, kv, range(HEADS), scale=SCALE)
    columns = top_positions(column, [COLUMNS] * HEADS, forced=FORCED_COLUMNS)
    slashes = top_positions(diagonal, [SLASHES] * HEADS, forced=FORCED_SLASHES)
    return VerticalSlashPlan(columns, slashes, size, q.shape[2])


def executed(blocks: int, size: int) -> float:
    """Floating-point operations of executed blocks."""
    return 4.0 * size * size * DIM * blocks


def yardstick(rows: Rows, sets: list[Inputs]) -> float:
    """Rate of the plain Triton block kernel, TF/s, the better of two budgets."""
    tokens, best = sets[0][0].shape[2], 0.0
    for budget in (0.25, 1.0):
        plans = [
            select_blocks(kap_scores(q, kv, stride=STRIDE, scale=SCALE), budget=budget, **geometry(tokens))
            for q, kv, *_ in sets
        ]

        def call(q: Tensor, kv: PagedKV, plan: Any) -> Any:
            return block_attention(q, kv, plan, scale=SCALE, backend="triton")

        blocks = int(call(*sets[0][:2], plans[0])[1].computed_blocks.sum())
        ms = milliseconds([functools.partial(call, q, kv, p) for (q, kv, *_), p in zip(sets, plans, strict=True)])
        rate = executed(blocks, BLOCK) / ms / 1e9
        rows.add("vertical_slash", "osk_triton", tokens, f"budget {budget:.0%}", ms=ms, tflops=rate)
        best = max(best, rate)
    return best


def kernel(rows: Rows, sets: list[Inputs], plans: list[VerticalSlashPlan], setting: str, base: float) -> None:
    """Time the index part and the attention of given plans."""
    tokens = plans[0].length

    def call(q: Tensor, kv: PagedKV, plan: VerticalSlashPlan) -> Any:
        return vertical_slash_attention(q, kv, plan, scale=SCALE, backend="triton")

    stats = call(*sets[0][:2], plans[0])[1]
    blocks, cells = int(stats.computed_blocks.sum(dtype=torch.int64)), int(stats.computed_cells.sum(dtype=torch.int64))
    ms = milliseconds([functools.partial(call, q, kv, p) for (q, kv, *_), p in zip(sets, plans, strict=True)])
    index = milliseconds([functools.partial(prepared, plan) for plan in plans])
    dense = HEADS * tokens * (tokens + 1) / 2
    size = plans[0].block_size
    rate = executed(blocks, size) / (ms - index) / 1e9
    rows.add("vertical_slash", "index", tokens, f"{setting}, M={size}", ms=index)
    rows.add(
        "vertical_slash", "vertical_slash", tokens, f"{setting}, M={size}", ms=ms, tflops=rate,
        share_of_osk_triton_rate=rate / base, B=cells / dense,
        B_block=blocks / (HEADS * causal_blocks(0, tokens, size)),
    )  # fmt: skip


def length(rows: Rows, tokens: int) -> None:
    """Everything at one length."""
    sets = [inputs(tokens, seed, 1.0) for seed in range(4 if tokens <= 8192 else 1)]
    base = yardstick(rows, sets)
    for size in (64, 128):
        for kind in ("all", "runs", "single"):
            kernel(rows, sets, [made_plan(kind, tokens, size, seed) for seed in range(len(sets))], kind, base)
        chosen = [chosen_plan(q, kv, size) for q, kv, *_ in sets]
        kernel(rows, sets, chosen, "MInference (1000, 6096)", base)
        kernel(rows, sets, [replace(p, whole_windows=True) for p in chosen], "the same, whole windows", base)
    score = functools.partial(vertical_slash_scores, heads=range(HEADS), scale=SCALE)
    masses = [score(q, kv) for q, kv, *_ in sets]
    scoring = milliseconds([functools.partial(score, q, kv) for q, kv, *_ in sets])

    def choose(column: Tensor, diagonal: Tensor) -> Any:
        return (
            top_positions(column, [COLUMNS] * HEADS, forced=FORCED_COLUMNS),
            top_positions(diagonal, [SLASHES] * HEADS, forced=FORCED_SLASHES),
        )

    choosing = milliseconds([functools.partial(choose, *mass) for mass in masses])

    def whole(q: Tensor, kv: PagedKV, size: int) -> Any:
        return vertical_slash_attention(q, kv, chosen_plan(q, kv, size), scale=SCALE)

    rows.add("vertical_slash", "scores", tokens, "MInference (1000, 6096)", ms=scoring)
    rows.add("vertical_slash", "select", tokens, "MInference (1000, 6096)", ms=choosing)
    for size in (64, 128):
        ms = milliseconds([functools.partial(whole, q, kv, size) for q, kv, *_ in sets])
        rows.add("vertical_slash", "call", tokens, f"MInference (1000, 6096), M={size}", ms=ms)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="benchmark vertical-slash attention on a CUDA device")
    parser.add_argument("--out", type=Path, default=Path("results/h200/benchmarks.csv"), help="CSV file to append to")
    parser.add_argument("--commit", default="unknown", help="commit of the measured code")
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS, help="prompt lengths, multiples of 128")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    rows = Rows(arguments.out, arguments.commit)
    for tokens in arguments.tokens:
        length(rows, tokens)


if __name__ == "__main__":
    main()
