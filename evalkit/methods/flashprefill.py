"""FlashPrefill: masses of mean keys and a threshold against the largest (Fan et al. 2026)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from prefill_kernels import BlockPlan, PagedKV, flash_scores, flash_select, plan_from_mask
from prefill_kernels.flash_prefill import flash_pairs
from torch import Tensor

from ..errors import InputError
from .base import Knob, Method, PlanContext


@dataclass(frozen=True)
class FlashPrefill(Method):
    """Blocks whose mass is not small beside the tile's largest, without a sort.

    Attributes:
        block_size: tile and key block, tokens; the authors' is 128.
        alpha: share of the largest mass that a block must have; 0 keeps every block.
        sink: first blocks that are always kept.
        window: last blocks, the diagonal included, that are always kept.
        last_full: last tiles of the prompt that attend to everything.
    """

    name: ClassVar[str] = "flashprefill"
    chunkable: ClassVar[bool] = True
    knob: ClassVar[Knob | None] = Knob("alpha", 1e-4, 1.0, rises=False, scale="log")

    alpha: float = 0.12
    sink: int = 2
    window: int = 4
    last_full: int = 2

    def validate(self) -> None:
        """Check every field."""
        if self.block_size not in (64, 128):
            raise InputError("method.block_size", self.block_size, "64 or 128 tokens")
        if not 0 <= self.alpha <= 1:
            raise InputError("method.alpha", self.alpha, "0 (keeps every block) to 1")
        if self.window < 1:
            raise InputError("method.window", self.window, "at least 1: the diagonal block is always kept")
        for name in ("sink", "last_full"):
            if getattr(self, name) < 0:
                raise InputError(f"method.{name}", getattr(self, name), "0 or more blocks")
        super().validate()

    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> BlockPlan:
        """Score every block, apply the threshold; visited in ascending order."""
        score = flash_scores(
            q,
            kv,
            scale=context.scale,
            block_size=self.block_size,
            q_offset=context.q_offset,
            backend=context.backend,
        )
        mask = flash_select(
            score,
            alpha=self.alpha,
            sink=self.sink,
            window=self.window,
            last_full=self.last_full,
            first_tile=context.q_offset // self.block_size,
            prompt_tiles=math.ceil(context.prompt_len / self.block_size),
        )
        return plan_from_mask(
            mask,
            block_size=self.block_size,
            q_offset=context.q_offset,
            q_len=q.shape[2],
            prompt_len=context.prompt_len,
            backend=context.backend,
        )

    def estimator_cells(self, q_offset: int, q_len: int) -> int:
        """Every query against the mean keys of the blocks before it: about 1/block_size of the causal cells."""
        return flash_pairs(q_offset, q_len, self.block_size)
