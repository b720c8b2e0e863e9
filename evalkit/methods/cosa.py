"""CoSA: Kernel-Aware Proxy, Stage-1 selection, visiting order and in-kernel skip (Algorithm A)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from prefill_kernels import BlockPlan, KapScores, PagedKV, kap_scores, sampled_pairs, select_blocks
from prefill_kernels.select import ORDERS
from torch import Tensor

from ..errors import InputError, near_matches
from .base import Method, PlanContext

RULES = ("top_p", "budget")
SHARES = ("query_head", "kv_head")


@dataclass(frozen=True)
class Select:
    """Stage-1 selection.

    Attributes:
        rule: ``top_p`` keeps the shortest prefix of the order that holds ``p`` of the score mass; ``budget`` keeps
            the share ``budget`` of each tile's causal blocks.
        p: Top-p threshold; 1 keeps every block.
        budget: share of blocks, for ``rule: budget``.
    """

    rule: str = "top_p"
    p: float = 0.95
    budget: float | None = None


@dataclass(frozen=True)
class CoSA(Method):
    """Proxy-kernel co-designed sparse prefill.

    Attributes:
        block_size: b, logical key block and query tile (the tile that votes on a skip); the paper's is 128.
        stride: s, tokens between the rows the proxy samples.
        select: Stage-1 selection.
        order: visiting order of the kept blocks; ``ascending`` and ``descending`` are "without remap".
        skip_scale: capital delta of the in-kernel skip; <= 0 turns it off.
        share: ``query_head`` selects per query head, ``kv_head`` once for the query heads of a KV head (scores
            summed, HRM flags joined).
        force_sink_diagonal: always keep the first and the diagonal block.
    """

    name: ClassVar[str] = "cosa"
    chunkable: ClassVar[bool] = True

    stride: int = 8
    select: Select = field(default_factory=Select)
    order: str = "hrm_first"
    skip_scale: float = -1.0
    share: str = "query_head"
    force_sink_diagonal: bool = False

    def validate(self) -> None:
        """Check every field."""
        if self.block_size not in (64, 128):
            raise InputError("method.block_size", self.block_size, "64 or 128 tokens")
        if not 1 <= self.stride <= self.block_size:
            raise InputError("method.stride", self.stride, f"1 to block_size={self.block_size} (usual: 4, 8, 16)")
        for name, value, known in (
            ("method.select.rule", self.select.rule, RULES),
            ("method.order", self.order, ORDERS),
            ("method.share", self.share, SHARES),
        ):
            if value not in known:
                raise InputError(name, value, near_matches(value, known))
        if not (math.isfinite(self.select.p) and 0 < self.select.p <= 1):
            raise InputError("method.select.p", self.select.p, "above 0, at most 1 (1 keeps every block)")
        if self.select.rule == "budget":
            if self.select.budget is None or not 0 < self.select.budget <= 1:
                raise InputError("method.select.budget", self.select.budget, "above 0, at most 1, for rule=budget")
        elif self.select.budget is not None:
            raise InputError("method.select.budget", self.select.budget, "null unless method.select.rule=budget")
        if not math.isfinite(self.skip_scale):
            raise InputError("method.skip_scale", self.skip_scale, "a finite number; 0 or less turns skipping off")

    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> BlockPlan:
        """Algorithm A, lines 1-5."""
        scores = kap_scores(
            q,
            kv,
            stride=self.stride,
            scale=context.scale,
            block_size=self.block_size,
            q_offset=context.q_offset,
            backend=context.backend,
        )
        if self.share == "kv_head":
            scores = share_over_kv_heads(scores, kv.num_kv_heads)
        by_budget = self.select.rule == "budget"
        return select_blocks(
            scores,
            block_size=self.block_size,
            q_offset=context.q_offset,
            q_len=q.shape[2],
            prompt_len=context.prompt_len,
            p=None if by_budget else self.select.p,
            budget=self.select.budget if by_budget else None,
            order=self.order,
            skip_scale=self.skip_scale,
            force_sink_diagonal=self.force_sink_diagonal,
            backend=context.backend,
        )

    def estimator_cells(self, q_offset: int, q_len: int) -> int:
        """Causal pairs of sampled rows: about 1/s^2 of the causal cells."""
        return sampled_pairs(q_offset, q_len, self.stride, self.block_size)

    def warnings(self, prompt_len: int) -> list[str]:
        """Report a threshold that is clamped, or so high that it says little about the method."""
        ratio = self.skip_scale / prompt_len
        if ratio > 1:
            return [f"delta/N = {ratio:.2f} clamped to 1 (skip_scale={self.skip_scale:g}, N={prompt_len})"]
        if ratio > 0.5:
            return [f"delta/N = {ratio:.2f} above 0.5 (skip_scale={self.skip_scale:g}, N={prompt_len})"]
        return []


def share_over_kv_heads(scores: KapScores, kv_heads: int) -> KapScores:
    """Give the query heads of a KV head one common score (their sum) and flag (any of theirs)."""
    grouped = scores.score.unflatten(1, (kv_heads, -1))
    flags = scores.hrm.unflatten(1, (kv_heads, -1))
    return KapScores(
        grouped.sum(2, keepdim=True).expand_as(grouped).flatten(1, 2),
        flags.any(2, keepdim=True).expand_as(flags).flatten(1, 2),
    )
