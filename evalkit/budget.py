"""The budget of a prefill: one definition for all methods, counted in causally valid (query, key) cells.

Counts are kept per layer and query head in int64 on the device of the run and read back once a sample, so that
metering never waits for the GPU. For a sample, ratios are ratios of sums over layers and heads:

* ``B = computed / dense``,
* ``B_stage1 = visited / dense``,
* ``B_cost = (visited + computed + 2 masked + estimator) / (2 dense)``: the QK and V products that were computed, those
  that a mask then leaves out and the estimator's QK products included,
* ``B_block`` and ``B_stage1_block``, the same two in whole blocks, as papers print them.

What a method's kernel executes beyond those cells (:meth:`evalkit.methods.Method.work`) is added up beside them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from prefill_kernels import TileStats, causal_blocks, causal_cells
from torch import Tensor

COUNTS = ("dense", "visited", "computed", "dense_blocks", "visited_blocks", "computed_blocks")


@dataclass(frozen=True)
class SampleBudget:
    """The budget of one prompt's prefill.

    Attributes:
        counts: int64 [layers, heads, len(COUNTS)].
        estimator: QK cells of the selection, summed over layers and heads.
        masked: cells whose QK and V products the kernel computed and masked out, summed over layers and heads.
        fallback_calls, calls: attention calls that a sparse method answered densely, and all prefill calls.
        work: sums of the method's own counters; empty for most methods.
        work_ratios: what the method makes of them.
    """

    counts: np.ndarray
    estimator: int
    fallback_calls: int
    calls: int
    masked: int = 0
    work: dict[str, int] = field(default_factory=dict)
    work_ratios: dict[str, float] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Sums, ratios, extremes over layers and the share of fallback calls, for a sample's record.

        ``work`` is there where the method counts any.
        """
        total = dict(zip(COUNTS, (int(x) for x in self.counts.sum((0, 1))), strict=True))
        per_layer = self.counts[..., 2].sum(1) / self.counts[..., 0].sum(1)
        dense, blocks = total["dense"], total["dense_blocks"]
        return {
            **total,
            "estimator": self.estimator / (2 * dense),
            "masked": self.masked / dense,
            "B": total["computed"] / dense,
            "B_stage1": total["visited"] / dense,
            "B_cost": (total["visited"] + total["computed"] + 2 * self.masked + self.estimator) / (2 * dense),
            "B_block": total["computed_blocks"] / blocks,
            "B_stage1_block": total["visited_blocks"] / blocks,
            "layer_min": float(per_layer.min()),
            "layer_max": float(per_layer.max()),
            "fallback_share": self.fallback_calls / self.calls,
            **({"work": {"counts": self.work, "ratios": self.work_ratios}} if self.work else {}),
        }

    def frame(self) -> pd.DataFrame:
        """One row per layer and head."""
        layers, heads, _ = self.counts.shape
        columns = {name: self.counts[..., i].ravel() for i, name in enumerate(COUNTS)}
        grid = np.indices((layers, heads)).reshape(2, -1)
        return pd.DataFrame({"layer": grid[0].astype(np.int32), "head": grid[1].astype(np.int32), **columns})


class BudgetMeter:
    """Adds up what the attention calls of one prefill did.

    Args:
        layers: number of attention layers.
        heads: number of query heads.
        block_size: block of the method, for the block-rounded counts.
        work_ratios: what the sums of a method's own counters say (:meth:`evalkit.methods.Method.work_ratios`).
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        block_size: int,
        work_ratios: Callable[[Mapping[str, int]], Mapping[str, float]] = lambda total: {},
    ) -> None:
        self.layers, self.heads, self.block_size = layers, heads, block_size
        self._spent: list[list[Tensor]] = [[] for _ in range(layers)]
        self._dense = np.zeros((layers, 2), dtype=np.int64)
        self._estimator = 0
        self._masked: list[int | Tensor] = []
        self._fallback = 0
        self._calls = 0
        self._work: defaultdict[str, list[int | Tensor]] = defaultdict(list)
        self._work_ratios = work_ratios

    def add_sparse(
        self,
        layer: int,
        q_offset: int,
        q_len: int,
        stats: TileStats,
        estimator_cells: int,
        work: Mapping[str, int | Tensor] = {},  # noqa: B006 - only read
    ) -> None:
        """Count one call that a sparse kernel executed; ``estimator_cells`` is per head, ``work`` the method's own."""
        parts = (stats.visited_cells, stats.computed_cells, stats.visited_blocks, stats.computed_blocks)
        self._spent[layer].append(torch.stack([x.sum(dim=(0, 2), dtype=torch.int64) for x in parts], dim=-1))
        self._count(layer, q_offset, q_len)
        self._estimator += estimator_cells * self.heads
        if stats.masked_cells is not None:
            self._masked.append(stats.masked_cells.sum(dtype=torch.int64))
        for name, amount in work.items():
            self._work[name].append(amount)

    def add_dense(self, layer: int, q_offset: int, q_len: int, *, fallback: bool, estimator_cells: int = 0) -> None:
        """Count one call that ran densely."""
        cells, blocks = causal_cells(q_offset, q_len), causal_blocks(q_offset, q_len, self.block_size)
        self._spent[layer].append(torch.tensor([[cells, cells, blocks, blocks]]).expand(self.heads, 4))
        self._count(layer, q_offset, q_len)
        self._estimator += estimator_cells * self.heads
        self._fallback += fallback

    def _count(self, layer: int, q_offset: int, q_len: int) -> None:
        self._dense[layer] += causal_cells(q_offset, q_len), causal_blocks(q_offset, q_len, self.block_size)
        self._calls += 1

    def read(self) -> SampleBudget:
        """Bring the counts to the host; the one place that waits for the device."""
        spent = np.stack([torch.stack([x.cpu() for x in layer]).sum(0).numpy() for layer in self._spent])
        dense = np.broadcast_to(self._dense[:, None], (self.layers, self.heads, 2))
        counts = np.empty((self.layers, self.heads, len(COUNTS)), dtype=np.int64)
        counts[..., 0], counts[..., 3] = dense[..., 0], dense[..., 1]
        counts[..., 1], counts[..., 2] = spent[..., 0], spent[..., 1]
        counts[..., 4], counts[..., 5] = spent[..., 2], spent[..., 3]
        total = {name: _total(amounts) for name, amounts in self._work.items()}
        ratios = dict(self._work_ratios(total)) if total else {}
        masked = _total(self._masked)
        return SampleBudget(counts, self._estimator, self._fallback, self._calls, masked, total, ratios)


def _total(amounts: list[int | Tensor]) -> int:
    """Sum of whole numbers and of scalars on one device."""
    scalars = [amount for amount in amounts if isinstance(amount, Tensor)]
    known = sum(amount for amount in amounts if not isinstance(amount, Tensor))
    return known + (int(torch.stack(scalars).sum()) if scalars else 0)
