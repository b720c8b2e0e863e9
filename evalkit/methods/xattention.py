"""XAttention: antidiagonal scores and a Top-p threshold with sink and diagonal (Xu et al. 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from prefill_kernels import BlockPlan, KapScores, PagedKV, select_blocks, xattn_pairs, xattn_scores
from torch import Tensor

from ..errors import InputError
from .base import Knob, Method, PlanContext
from .tables import HeadTable, load_table

STRIDES = (4, 8, 16)


@dataclass(frozen=True)
class XAttention(Method):
    """Blocks by the mass on their antidiagonals (Algorithm 1).

    Attributes:
        block_size: B, tile and key block, tokens; the paper's is 128.
        stride: S, tokens of a group.
        threshold: tau, share of a tile's mass that is kept; 1 keeps every block.
        threshold_table: file with one threshold for each layer and query head, in place of ``threshold``.
    """

    name: ClassVar[str] = "xattention"
    chunkable: ClassVar[bool] = True
    knob: ClassVar[Knob | None] = Knob("threshold", 0.05, 0.9999, scale="tail", table_field="threshold_table")
    file_fields: ClassVar[tuple[str, ...]] = (*Method.file_fields, "threshold_table")

    stride: int = 8
    threshold: float = 0.9
    threshold_table: str | None = None

    def validate(self) -> None:
        """Check every field; a table is read."""
        if self.block_size not in (64, 128):
            raise InputError("method.block_size", self.block_size, "64 or 128 tokens")
        if self.stride not in STRIDES:
            raise InputError("method.stride", self.stride, f"one of {', '.join(map(str, STRIDES))}")
        if not (math.isfinite(self.threshold) and 0 < self.threshold <= 1):
            raise InputError("method.threshold", self.threshold, "above 0, at most 1 (1 keeps every block)")
        super().validate()
        self._table()

    def check_model(self, layers: int, heads: int) -> None:
        """Refuse a table of another shape."""
        table = self._table()
        if table is not None:
            table.check_model("method.threshold_table", layers, heads)

    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> BlockPlan:
        """First and diagonal block, then blocks by descending mass until tau is reached; visited in ascending order."""
        mass = xattn_scores(
            q,
            kv,
            stride=self.stride,
            scale=context.scale,
            block_size=self.block_size,
            q_offset=context.q_offset,
            backend=context.backend,
        )
        table = self._table()
        return select_blocks(
            KapScores(mass, torch.zeros_like(mass, dtype=torch.bool)),
            block_size=self.block_size,
            q_offset=context.q_offset,
            q_len=q.shape[2],
            prompt_len=context.prompt_len,
            p=self.threshold if table is None else table.row(context.layer, q.device),
            order="ascending",
            force_sink_diagonal=True,
            backend=context.backend,
        )

    def estimator_cells(self, q_offset: int, q_len: int) -> int:
        """One product a cell of the antidiagonals: about 1/S of the causal cells."""
        return xattn_pairs(q_offset, q_len, self.stride)

    def _table(self) -> HeadTable | None:
        if self.threshold_table is None:
            return None
        return load_table(self.threshold_table, "method.threshold_table", above=0.0, at_most=1.0)
