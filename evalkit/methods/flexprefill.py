"""FlexPrefill: query-aware and vertical-slash heads, told apart at run time (Lai et al. 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from prefill_kernels import BlockPlan, DensePlan, PagedKV, flex_select, plan_from_mask
from prefill_kernels.flex import flex_pairs
from torch import Tensor

from ..errors import InputError
from .base import Knob, Method, PlanContext


@dataclass(frozen=True)
class FlexPrefill(Method):
    """Blocks by the attention of the last queries (Algorithms 1 to 4).

    Attributes:
        block_size: tile, key block and number of representative queries, tokens; the paper's is 128.
        gamma: share of the attention that is kept; 1 keeps every block.
        tau: Jensen-Shannon distance, in nats, below which a head is query-aware; 0 makes every head vertical-slash.
        min_budget: least tokens of columns and of diagonals, rounded up to blocks; prompts that are no longer than it,
            or than two blocks, run densely.
    """

    name: ClassVar[str] = "flexprefill"
    chunkable: ClassVar[bool] = False
    knob: ClassVar[Knob | None] = Knob("gamma", 0.05, 0.9999, scale="tail")

    gamma: float = 0.95
    tau: float = 0.1
    min_budget: int = 1024

    def validate(self) -> None:
        """Check every field."""
        if self.block_size not in (64, 128):
            raise InputError("method.block_size", self.block_size, "64 or 128 tokens")
        if not (math.isfinite(self.gamma) and 0 < self.gamma <= 1):
            raise InputError("method.gamma", self.gamma, "above 0, at most 1 (1 keeps every block)")
        if not 0 <= self.tau <= 1:
            raise InputError("method.tau", self.tau, "0 (no head is query-aware) to 1 (every head is)")
        if self.min_budget < 1:
            raise InputError("method.min_budget", self.min_budget, "at least 1 token")
        super().validate()

    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> BlockPlan | DensePlan:
        """Dense for a short prompt, else the pattern of each head; visited in ascending order."""
        length = q.shape[2]
        if self._too_short(length):
            return DensePlan("fallback")
        chosen = flex_select(
            q,
            kv,
            gamma=self.gamma,
            tau=self.tau,
            min_budget=self.min_budget,
            scale=context.scale,
            block_size=self.block_size,
        )
        return plan_from_mask(
            chosen.mask,
            block_size=self.block_size,
            q_offset=0,
            q_len=length,
            prompt_len=context.prompt_len,
            backend=context.backend,
        )

    def estimator_cells(self, q_offset: int, q_len: int) -> int:
        """The last queries against every key, and the pooled products; nothing where the prompt falls back."""
        if self._too_short(q_len):
            return 0
        return flex_pairs(q_len, self.block_size, query_aware=self.tau > 0)

    def warnings(self, prompt_len: int) -> list[str]:
        """Report a prompt that is answered densely."""
        if self._too_short(prompt_len):
            return [f"flexprefill ran densely: {prompt_len} tokens are within its least budget of {self.min_budget}"]
        return []

    def _too_short(self, length: int) -> bool:
        least = math.ceil(self.min_budget / self.block_size) * self.block_size
        return length <= max(2 * self.block_size, least)
