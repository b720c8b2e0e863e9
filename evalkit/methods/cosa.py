"""CoSA: Kernel-Aware Proxy, Stage-1 selection, visiting order and in-kernel skip (Algorithm A); its ablation rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from prefill_kernels import BlockPlan, Capabilities, KapScores, PagedKV, kap_scores, sampled_pairs, select_blocks
from prefill_kernels.select import ORDERS
from prefill_kernels.xattn import xattn_pairs, xattn_scores
from torch import Tensor

from ..errors import InputError, near_matches
from .base import Knob, Method, PlanContext, skip_warnings
from .tables import HeadTable, load_table

PROXIES = ("kap", "xattention")
RULES = ("top_p", "budget")
SHARES = ("query_head", "kv_head")


@dataclass(frozen=True)
class Select:
    """Stage-1 selection.

    Attributes:
        rule: ``top_p`` keeps the shortest prefix of the order that holds ``p`` of the score mass; ``budget`` keeps
            the share ``budget`` of each tile's causal blocks.
        p: Top-p threshold; 1 keeps every block.
        p_table: YAML or JSON file with one p for each layer and query head, in place of ``p``.
        budget: share of blocks, for ``rule: budget``.
    """

    rule: str = "top_p"
    p: float = 0.95
    p_table: str | None = None
    budget: float | None = None


@dataclass(frozen=True)
class CoSA(Method):
    """Proxy-kernel co-designed sparse prefill.

    Attributes:
        block_size: b, logical key block and query tile (the tile that votes on a skip); the paper's is 128.
        proxy: ``kap`` is CoSA's; ``xattention`` puts XAttention's antidiagonal scores in its place, which know no HRM
            flags: the row "Base" of the ablation (Table 3), whose mask is binary and visited in a fixed order.
        stride: s, tokens between the rows the proxy samples; of ``xattention`` the side of its squares.
        select: Stage-1 selection.
        order: visiting order of the kept blocks; ``ascending`` and ``descending`` are "without remap".
        skip_scale: capital delta of the in-kernel skip; <= 0 turns it off.
        share: ``query_head`` selects per query head, ``kv_head`` once for the query heads of a KV head (scores
            summed, HRM flags joined).
        force_sink_diagonal: always keep the first and the diagonal block.
    """

    name: ClassVar[str] = "cosa"
    chunkable: ClassVar[bool] = True
    knob: ClassVar[Knob | None] = Knob("select.p", 0.05, 1.0 - 1e-5, scale="tail", table_field="select.p_table")
    file_fields: ClassVar[tuple[str, ...]] = (*Method.file_fields, "select.p_table")

    proxy: str = "kap"
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
            ("method.proxy", self.proxy, PROXIES),
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
        if self.select.p_table is not None and self.select.rule != "top_p":
            raise InputError("method.select.p_table", self.select.p_table, "null unless method.select.rule=top_p")
        if self.proxy == "xattention":
            if self.block_size % self.stride:
                raise InputError("method.stride", self.stride, f"a divisor of block_size={self.block_size}")
            if self.order == "hrm_first":
                raise InputError(
                    "method.order", self.order, "ascending or descending with proxy xattention (no HRM flags)"
                )
        if not math.isfinite(self.skip_scale):
            raise InputError("method.skip_scale", self.skip_scale, "a finite number; 0 or less turns skipping off")
        super().validate()

    def inert(self) -> dict[str, str]:
        """p, where a table or the fixed share decides."""
        return {"select.p": "select.budget"} if self.select.rule == "budget" else super().inert()

    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> BlockPlan:
        """Algorithm A, lines 1-5."""
        scores = self._scores(q, kv, context)
        if self.share == "kv_head":
            scores = share_over_kv_heads(scores, kv.num_kv_heads)
        by_budget = self.select.rule == "budget"
        return select_blocks(
            scores,
            block_size=self.block_size,
            q_offset=context.q_offset,
            q_len=q.shape[2],
            prompt_len=context.prompt_len,
            p=None if by_budget else self._threshold(context.layer, q.device),
            budget=self.select.budget if by_budget else None,
            order=self.order,
            skip_scale=self.skip_scale,
            force_sink_diagonal=self.force_sink_diagonal,
            backend=context.backend,
        )

    def _scores(self, q: Tensor, kv: PagedKV, context: PlanContext) -> KapScores:
        settings: dict[str, Any] = {
            "stride": self.stride,
            "scale": context.scale,
            "block_size": self.block_size,
            "q_offset": context.q_offset,
            "backend": context.backend,
        }
        if self.proxy == "kap":
            return kap_scores(q, kv, **settings)
        mass = xattn_scores(q, kv, **settings)
        return KapScores(mass, torch.zeros_like(mass, dtype=torch.bool))

    def _threshold(self, layer: int, device: torch.device) -> float | Tensor:
        table = self._table()
        return self.select.p if table is None else table.row(layer, device)

    def _table(self) -> HeadTable | None:
        path = self.select.p_table
        return None if path is None else load_table(path, "method.select.p_table", above=0.0, at_most=1.0)

    def check_model(self, layers: int, heads: int) -> None:
        """A p-table must be for the model's shape."""
        table = self._table()
        if table is not None:
            table.check_model("method.select.p_table", layers, heads)

    @property
    def features(self) -> Capabilities:
        """Mask skip always, the in-kernel skip where its scale is above 0, remapping where HRM blocks come first."""
        return Capabilities(
            physical_skip=True, in_kernel_skip=self.skip_scale > 0, page_remap=self.order == "hrm_first"
        )

    def estimator_cells(self, q_offset: int, q_len: int) -> int:
        """QK products of the proxy: about 1/s^2 of the causal cells for KAP, 1/s for XAttention's."""
        if self.proxy == "xattention":
            return xattn_pairs(q_offset, q_len, self.stride)
        return sampled_pairs(q_offset, q_len, self.stride, self.block_size)

    def warnings(self, prompt_len: int) -> list[str]:
        """Report a threshold that is clamped, or so high that it says little about the method."""
        return skip_warnings(self.skip_scale, prompt_len)


def share_over_kv_heads(scores: KapScores, kv_heads: int) -> KapScores:
    """Give the query heads of a KV head one common score (their sum) and flag (any of theirs)."""
    grouped = scores.score.unflatten(1, (kv_heads, -1))
    flags = scores.hrm.unflatten(1, (kv_heads, -1))
    return KapScores(
        grouped.sum(2, keepdim=True).expand_as(grouped).flatten(1, 2),
        flags.any(2, keepdim=True).expand_as(flags).flatten(1, 2),
    )
