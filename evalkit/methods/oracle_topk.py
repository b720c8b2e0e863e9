"""The ceiling of block selection: the key blocks with the largest exact attention mass, at a fixed budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from prefill_kernels import BlockPlan, KapScores, PagedKV, block_mass, causal_cells, select_blocks
from torch import Tensor

from ..errors import InputError
from .base import Knob, Method, PlanContext


@dataclass(frozen=True)
class OracleTopK(Method):
    """For each tile and query head, the blocks that hold the most of the true softmax mass.

    Tile i (from 0) keeps ``K_i = max(1, floor(budget * (i + 1) + 0.5))`` of its i + 1 causal blocks.

    Attributes:
        block_size: tile and key block, tokens.
        budget: share of each tile's causal blocks.
    """

    name: ClassVar[str] = "oracle_topk"
    chunkable: ClassVar[bool] = True
    knob: ClassVar[Knob | None] = Knob("budget", 0.001, 1.0)

    budget: float = 0.25

    def validate(self) -> None:
        """Check every field."""
        if self.block_size not in (64, 128):
            raise InputError("method.block_size", self.block_size, "64 or 128 tokens")
        if not 0 < self.budget <= 1:
            raise InputError("method.budget", self.budget, "above 0, at most 1 (1 keeps every block)")
        super().validate()

    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> BlockPlan:
        """The K_i blocks of largest mass, ties by lowest id, visited in ascending order."""
        mass = block_mass(
            q,
            kv,
            scale=context.scale,
            block_size=self.block_size,
            q_offset=context.q_offset,
            backend=context.backend,
        )
        return select_blocks(
            KapScores(mass, torch.zeros_like(mass, dtype=torch.bool)),
            block_size=self.block_size,
            q_offset=context.q_offset,
            q_len=q.shape[2],
            prompt_len=context.prompt_len,
            budget=self.budget,
            order="ascending",
            backend=context.backend,
        )

    def estimator_cells(self, q_offset: int, q_len: int) -> int:
        """Every causal cell: the mass needs the whole QK product."""
        return causal_cells(q_offset, q_len)
