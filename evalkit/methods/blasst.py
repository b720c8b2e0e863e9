"""BLASST: no proxy; every causal block is visited and skipped by its exact logits (Yuan et al. 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from prefill_kernels import BlockPlan, Capabilities, PagedKV, causal_plan
from prefill_kernels.patterns import FIXED_ORDERS
from torch import Tensor

from ..errors import InputError, near_matches
from .base import Knob, Method, PlanContext, skip_warnings


@dataclass(frozen=True)
class BLASST(Method):
    """In-kernel skip over all causal blocks.

    A block is skipped when ``m_loc - m < ln(a / N)`` for every row of the tile, ``m`` being the running maximum with
    the block in it. The full QK product is paid: B counts the blocks whose value side was computed, B_cost the products
    too.

    Attributes:
        block_size: tile that votes and key block, tokens.
        order: ``ascending`` from the sink, or ``descending`` from the diagonal.
        skip_scale: a, the threshold times the prompt length; <= 0 skips nothing.
    """

    name: ClassVar[str] = "blasst"
    chunkable: ClassVar[bool] = True
    knob: ClassVar[Knob | None] = Knob("skip_scale", 1e-3, 1.0, rises=False, scale="log", high_per_token=True)

    order: str = "ascending"
    skip_scale: float = 1000.0

    def validate(self) -> None:
        """Check every field."""
        if self.block_size not in (64, 128):
            raise InputError("method.block_size", self.block_size, "64 or 128 tokens")
        if self.order not in FIXED_ORDERS:
            raise InputError("method.order", self.order, near_matches(self.order, FIXED_ORDERS))
        if not math.isfinite(self.skip_scale):
            raise InputError("method.skip_scale", self.skip_scale, "a finite number; 0 or less turns skipping off")
        super().validate()

    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> BlockPlan:
        """All causal blocks, in the fixed order."""
        return causal_plan(
            q.shape[1],
            block_size=self.block_size,
            q_offset=context.q_offset,
            q_len=q.shape[2],
            prompt_len=context.prompt_len,
            order=self.order,
            skip_scale=self.skip_scale,
            device=q.device,
        )

    @property
    def features(self) -> Capabilities:
        """No block is left out before the kernel."""
        return Capabilities(in_kernel_skip=self.skip_scale > 0)

    def warnings(self, prompt_len: int) -> list[str]:
        """Report a threshold that is clamped, or so high that it says little about the method."""
        return skip_warnings(self.skip_scale, prompt_len)
