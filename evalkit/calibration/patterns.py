"""Offline search for the sparse pattern of each head (MInference, Algorithm 1).

Every candidate is first brought to the same cost, the blocks that the kernel executes for an A-shape; then each head
takes the candidate whose output is nearest to its dense output on calibration text. The model runs densely; its
attention is intercepted one layer at a time, so that no layer's queries and keys outlive the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from prefill_kernels import DensePlan, PagedKV, VerticalSlashPlan, dense_attention, sparse_attention
from prefill_kernels.vertical_slash import executed_blocks
from prefill_kernels.vertical_slash_select import (
    FORCED_COLUMNS,
    FORCED_SLASHES,
    ranked_keys,
    top_positions,
    vertical_slash_scores,
)
from torch import Tensor

from ..methods.base import PlanContext
from ..methods.dense import Dense
from ..methods.head_patterns import HeadPattern
from ..methods.minference import LEAST_SLASHES, fitted, pattern_plan
from .pattern_settings import PatternSearchConfig


@dataclass(frozen=True)
class Candidate:
    """One pattern tried on all heads of a layer.

    Attributes:
        patterns: the pattern of each head, with the sizes that meet the target.
        error: squared distance of each head's output from its dense output, summed over tokens.
        blocks: executed blocks of each head.
    """

    patterns: tuple[HeadPattern, ...]
    error: tuple[float, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class LayerResult:
    """What was measured in one layer on one window.

    Attributes:
        target: executed blocks that were aimed at.
        norm: squared norm of each head's dense output.
        candidates: what was tried.
    """

    target: int
    norm: tuple[float, ...]
    candidates: tuple[Candidate, ...]

    def plain(self) -> dict[str, Any]:
        """Form for a JSON line."""
        return {
            "target": self.target,
            "norm": list(self.norm),
            "candidates": [
                {
                    "patterns": [[p.name, *p.sizes] for p in c.patterns],
                    "error": list(c.error),
                    "blocks": list(c.blocks),
                }
                for c in self.candidates
            ],
        }

    @classmethod
    def from_plain(cls, value: dict[str, Any]) -> LayerResult:
        """Read what :meth:`plain` wrote."""
        candidates = tuple(
            Candidate(
                tuple(HeadPattern(name, tuple(sizes)) for name, *sizes in item["patterns"]),
                tuple(item["error"]),
                tuple(item["blocks"]),
            )
            for item in value["candidates"]
        )
        return cls(value["target"], tuple(value["norm"]), candidates)


@dataclass(frozen=True)
class Probe(Dense):
    """A dense method that shows each layer's queries and keys to the search."""

    visit: Callable[[Tensor, PagedKV, PlanContext], None] = lambda q, kv, context: None

    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> DensePlan:
        """Attend to everything, after the visit."""
        self.visit(q, kv, context)
        return super().plan(q, kv, context)


def search_layer(
    q: Tensor, kv: PagedKV, config: PatternSearchConfig, *, scale: float, backend: str = "auto"
) -> LayerResult:
    """Try every candidate on one layer.

    Args:
        q: [1, Hq, L, d] queries after RoPE and QK-norm.
        kv: keys and values of the same positions.
        config: validated settings.
        scale: softmax scaling of the model.
        backend: kernel backend.
    """
    heads, length, size = q.shape[1], q.shape[2], config.block_size
    target = a_shape_blocks(config.initial, config.local, size, length)
    tries = [
        (fitted(HeadPattern("a_shape", (config.initial, config.local)), length, size),) * heads,
        *vertical_slash_candidates(q, kv, config, target, scale=scale, backend=backend),
        (HeadPattern("block_sparse", (blocks_for(target, length, size),)),) * heads,
    ]
    dense = dense_attention(q, *kv.gather(), scale=scale)
    candidates = []
    for patterns in tries:
        plan = pattern_plan(
            q,
            kv,
            patterns,
            block_size=size,
            scale=scale,
            last_q=config.last_q,
            whole_windows=config.execution == "block",
            backend=backend,
        )
        out, stats = sparse_attention(q, kv, plan, scale=scale, backend=backend)
        error = [float((out[0, h].double() - dense[0, h].double()).square().sum()) for h in range(heads)]
        candidates.append(Candidate(patterns, tuple(error), tuple(stats.computed_blocks[0].sum(-1).tolist())))
    norm = tuple(float(dense[0, h].double().square().sum()) for h in range(heads))
    return LayerResult(target, norm, tuple(candidates))


def a_shape_blocks(initial: int, local: int, block_size: int, length: int) -> int:
    """Blocks that the kernel executes for an A-shape head: the target of every candidate."""
    columns, slashes = (torch.arange(n, dtype=torch.int32)[None, None] for n in (initial, local))
    return int(executed_blocks(VerticalSlashPlan(columns, slashes, block_size, length)).sum())


def blocks_for(target: int, length: int, block_size: int) -> int:
    """The largest number of blocks a tile, at least 1, with which a block-sparse head stays within the target."""
    tiles = math.ceil(length / block_size)
    best = 1
    for k in range(1, tiles + 1):
        if k * (k + 1) // 2 + (tiles - k) * k > target:
            break
        best = k
    return best


def vertical_slash_candidates(
    q: Tensor, kv: PagedKV, config: PatternSearchConfig, target: int, *, scale: float, backend: str
) -> list[tuple[HeadPattern, ...]]:
    """For each number of columns, the most diagonals of each head that stay within the target.

    Lines 2-5 of Algorithm 1: sizes change by ``step`` until the cost in the kernel is the target's. The cost of a head
    depends on where its diagonals lie, so each head has its own number; the least number is kept where even that
    costs more.
    """
    heads, length = q.shape[1], q.shape[2]
    scores = vertical_slash_scores(q, kv, range(heads), scale=scale, last_q=config.last_q, backend=backend)
    # Every prefix of this ranking is what top_positions takes of that size.
    ranking = ranked_keys(scores[1], forced=FORCED_SLASHES).argsort(-1, descending=True).int()
    most = max(1, -(-length // config.step))
    least = max(1, -(-min(LEAST_SLASHES, length) // config.step))
    found = []
    for count in config.columns:
        columns = top_positions(scores[0], [count] * heads, forced=FORCED_COLUMNS)
        low = torch.full((heads,), least, device=q.device)
        high = torch.full((heads,), most, device=q.device)
        for _ in range(most.bit_length()):
            middle = (low + high + 1) // 2
            kept = torch.arange(length, device=q.device) < (middle * config.step)[:, None]
            slashes = torch.where(kept, ranking, length).sort(-1).values
            slashes = torch.where(slashes < length, slashes, -1).int()
            plan = VerticalSlashPlan(columns, slashes, config.block_size, length)
            fits = executed_blocks(plan)[0].sum(-1) <= target
            low, high = torch.where(fits, middle, low), torch.where(fits, high, torch.maximum(middle - 1, low))
        patterns = (HeadPattern("vertical_slash", (count, int(n) * config.step)) for n in low)
        found.append(tuple(fitted(pattern, length, config.block_size) for pattern in patterns))
    return found


def choose(results: list[list[LayerResult]], step: int) -> tuple[list[list[HeadPattern]], dict[str, Any]]:
    """The pattern of each head with the smallest error, and what the choice amounts to.

    Args:
        results: [windows][layers].
        step: sizes that differ between windows are averaged to multiples of it.

    Returns:
        Patterns [layers][heads], and facts: heads by pattern, mean relative error of the chosen and of each
        candidate, and mean executed blocks over the target.
    """
    table: list[list[HeadPattern]] = []
    errors: dict[str, list[float]] = {}
    chosen_errors, costs = [], []
    for layers in zip(*results, strict=True):
        row = []
        for head in range(len(layers[0].norm)):
            norm = sum(layer.norm[head] for layer in layers)
            tried = []
            for i, candidate in enumerate(layers[0].candidates):
                error = math.sqrt(sum(layer.candidates[i].error[head] for layer in layers) / norm) if norm else 0.0
                name = candidate.patterns[head].name
                label = f"{name}({candidate.patterns[head].sizes[0]}, ...)" if name == "vertical_slash" else name
                errors.setdefault(label, []).append(error)
                tried.append(error)
            best = min(range(len(tried)), key=tried.__getitem__)
            chosen_errors.append(tried[best])
            costs.append(sum(layer.candidates[best].blocks[head] / layer.target for layer in layers) / len(layers))
            row.append(_average([layer.candidates[best].patterns[head] for layer in layers], step))
        table.append(row)
    counts: dict[str, int] = {}
    for pattern in (pattern for row in table for pattern in row):
        counts[pattern.name] = counts.get(pattern.name, 0) + 1
    facts = {
        "heads": counts,
        "relative_error": {"chosen": _mean(chosen_errors), **{name: _mean(found) for name, found in errors.items()}},
        "executed_over_target": _mean(costs),
    }
    return table, facts


def _average(patterns: list[HeadPattern], step: int) -> HeadPattern:
    if len(set(patterns)) == 1:
        return patterns[0]
    columns, slashes = zip(*(pattern.sizes for pattern in patterns), strict=True)
    return HeadPattern(patterns[0].name, (columns[0], max(step, round(_mean(slashes) / step) * step)))


def _mean(values: Any) -> float:
    values = list(values)
    return float(f"{sum(values) / len(values):.6g}")
