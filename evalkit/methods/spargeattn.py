"""SpargeAttn: compressed blocks judged by their self-similarity, and an in-kernel skip (Zhang et al. 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from prefill_kernels import BlockPlan, Capabilities, PagedKV, causal_blocks, plan_from_mask, sparge_select
from torch import Tensor

from ..errors import InputError
from .base import Knob, Method, PlanContext


@dataclass(frozen=True)
class SpargeAttn(Method):
    """Two filters: blocks by the attention of block means, then value products by the exact logits (Algorithm 1).

    Attributes:
        block_size: tile and key block, tokens; the authors' kernel has tiles of 128 and key blocks of 64.
        tau: share of the compressed attention that is kept; 1 keeps every block.
        theta: self-similarity below which a block is always computed; 0 trusts every mean, as the authors' function
            with a fixed share of blocks does; their function with tau has 0.6.
        sink: always keep the first block; the authors' functions do not unless asked (``attention_sink``).
        pv_threshold: minus lambda, in nats: a block is skipped where each of its row maxima lies further than this
            below the running maximum; null turns skipping off.
    """

    name: ClassVar[str] = "spargeattn"
    chunkable: ClassVar[bool] = False
    knob: ClassVar[Knob | None] = Knob("tau", 0.05, 0.9999, scale="tail")

    tau: float = 0.98
    theta: float = 0.0
    sink: bool = False
    pv_threshold: float | None = 50.0

    def validate(self) -> None:
        """Check every field."""
        if self.block_size not in (64, 128):
            raise InputError("method.block_size", self.block_size, "64 or 128 tokens")
        if not (math.isfinite(self.tau) and 0 < self.tau <= 1):
            raise InputError("method.tau", self.tau, "above 0, at most 1 (1 keeps every block)")
        if not 0 <= self.theta <= 1:
            raise InputError("method.theta", self.theta, "0 to 1, a mean cosine similarity")
        if self.pv_threshold is not None and not 0 <= self.pv_threshold < 700:
            raise InputError("method.pv_threshold", self.pv_threshold, "0 to 700 nats, or null for no skipping")
        super().validate()

    @property
    def skip_ratio(self) -> float:
        """e^lambda, which the kernel compares with; 0 skips nothing."""
        return 0.0 if self.pv_threshold is None else math.exp(-self.pv_threshold)

    @property
    def features(self) -> Capabilities:
        """Lists of kept blocks, and the skip where it is on."""
        return Capabilities(physical_skip=True, in_kernel_skip=self.pv_threshold is not None)

    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> BlockPlan:
        """Algorithm 1, lines 4 to 8; visited in ascending order."""
        mask = sparge_select(
            q,
            kv,
            tau=self.tau,
            theta=self.theta,
            scale=context.scale,
            block_size=self.block_size,
            sink=self.sink,
        )
        return plan_from_mask(
            mask,
            block_size=self.block_size,
            q_offset=0,
            q_len=q.shape[2],
            prompt_len=context.prompt_len,
            # The plan's threshold is a share of the prompt length; this one does not depend on it.
            skip_scale=self.skip_ratio * context.prompt_len,
            backend=context.backend,
        )

    def estimator_cells(self, q_offset: int, q_len: int) -> int:
        """One product a causal pair of blocks."""
        return causal_blocks(q_offset, q_len, self.block_size)
