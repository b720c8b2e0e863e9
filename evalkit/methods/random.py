"""A floor for block selection: the sink, the diagonal, and other causal blocks drawn at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from prefill_kernels import BlockPlan, KapScores, PagedKV, random_scores, select_blocks
from torch import Tensor

from ..errors import InputError
from .base import Knob, Method, PlanContext


@dataclass(frozen=True)
class Random(Method):
    """Blocks drawn without replacement for each layer, query head and tile; block 0 and the diagonal are always kept.

    Tile i (from 0) keeps ``K_i = max(2, floor(budget * (i + 1) + 0.5))`` of its i + 1 causal blocks, the two forced
    ones among them. The draw is a function of seed, layer, head, tile and block alone: the same on every device, in
    chunks, and for every sample of the same length.

    Attributes:
        block_size: tile and key block, tokens.
        budget: share of each tile's causal blocks.
        seed: of the draw.
    """

    name: ClassVar[str] = "random"
    chunkable: ClassVar[bool] = True
    knob: ClassVar[Knob | None] = Knob("budget", 0.001, 1.0)

    budget: float = 0.25
    seed: int = 0

    def validate(self) -> None:
        """Check every field."""
        if self.block_size not in (64, 128):
            raise InputError("method.block_size", self.block_size, "64 or 128 tokens")
        if not 0 < self.budget <= 1:
            raise InputError("method.budget", self.budget, "above 0, at most 1 (1 keeps every block)")
        if not 0 <= self.seed < 2**32:
            raise InputError("method.seed", self.seed, "an integer from 0 to 2^32 - 1")
        super().validate()

    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> BlockPlan:
        """Sink, diagonal and the best random scores, visited in ascending order."""
        score = random_scores(
            q.shape[1],
            seed=self.seed,
            layer=context.layer,
            block_size=self.block_size,
            q_offset=context.q_offset,
            q_len=q.shape[2],
            device=q.device,
        )
        return select_blocks(
            KapScores(score, torch.zeros_like(score, dtype=torch.bool)),
            block_size=self.block_size,
            q_offset=context.q_offset,
            q_len=q.shape[2],
            prompt_len=context.prompt_len,
            budget=self.budget,
            order="ascending",
            force_sink_diagonal=True,
            backend=context.backend,
        )
