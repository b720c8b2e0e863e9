"""PageWeaver (Li et al. 2026): pages for each query, queries regrouped by the pages they share, attention over unions.

PageWeaver executes a selection and makes none. The selector here is training-free and stands in for that of a model
with trained page selection (see :mod:`prefill_kernels.page_select`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from prefill_kernels import Capabilities, PagedKV, PagePlan, PageStats, TileStats
from prefill_kernels.page_attention import PAGE_BACKENDS, page_backend_problem
from prefill_kernels.page_select import FORCED, SUMMARIES, scored_products, select_pages
from prefill_kernels.pages import CAPACITY, GROUP
from torch import Tensor

from ..errors import InputError, near_matches
from .base import Knob, Method, PlanContext

WINDOWS = {"off": 0, "64": 64, "128": 128}
"""Values of ``regroup`` and the queries of a window; 0 keeps the queries in their order."""
KV_DTYPES = ("model", "fp8")
UNIONS = ("auto", *PAGE_BACKENDS)


@dataclass(frozen=True)
class PageWeaver(Method):
    """Top-K pages a query and KV head, executed as unions over groups of eight queries.

    Attributes:
        block_size: tile of the budget, tokens; chunks end on it.
        top_k: K, pages of a query and KV head; page 0 and the query's own page are always two of them. As many as a
            prompt has keep everything.
        page_size: P, tokens of a page. The Hopper kernels need 128, and ``execution.page_size`` to be the same.
        summary: what stands for a page in the selector: its mean key, or ``minmax``, Quest's bound.
        regroup: window of the regrouping, ``64`` or ``128`` queries, or ``off``.
        capacity: pages that the regrouping can hold; longer prompts run in their own order, and it is recorded. Beyond
            2048 pages, or with more than 256 selected ones, the search runs in torch, which is recorded too.
        kv_dtype: ``model`` (keys and values as cached) or ``fp8`` (E4M3, one scale a KV head; queries and weights too).
        union: kernel of the attention over unions; ``auto`` is what ``execution.backend`` says. ``cluster`` (two thread
            blocks that share each page load) can be had only here.
    """

    name: ClassVar[str] = "pageweaver"
    chunkable: ClassVar[bool] = True
    #: Up to the pages of 16 tokens that a prompt has.
    knob: ClassVar[Knob | None] = Knob("top_k", 2.0, 1.0 / 16, high_per_token=True, integer=True, scale="log")

    top_k: int = 16
    page_size: int = 128
    summary: str = "mean"
    regroup: str = "128"
    capacity: int = CAPACITY
    kv_dtype: str = "model"
    union: str = "auto"

    def validate(self) -> None:
        """Check every field."""
        if self.block_size != 128:
            raise InputError("method.block_size", self.block_size, "128 tokens; the page is method.page_size")
        if self.top_k < FORCED:
            raise InputError(
                "method.top_k", self.top_k, f"{FORCED} or more pages: the sink and the query's own are always selected"
            )
        least = 32 if self.kv_dtype == "fp8" else 16
        if not least <= self.page_size <= 256 or self.page_size & (self.page_size - 1):
            under = " under method.kv_dtype=fp8" if self.kv_dtype == "fp8" else ""
            raise InputError("method.page_size", self.page_size, f"a power of two from {least} to 256 tokens{under}")
        choices = {"summary": SUMMARIES, "regroup": tuple(WINDOWS), "kv_dtype": KV_DTYPES, "union": UNIONS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise InputError(f"method.{name}", getattr(self, name), near_matches(str(getattr(self, name)), allowed))
        if not 0 < self.capacity <= 32768 or self.capacity % 32:
            raise InputError("method.capacity", self.capacity, "a multiple of 32 pages, at most 32768")
        if self.union in ("hopper", "cluster") and self.page_size != 128:
            raise InputError("method.page_size", self.page_size, f"128 under method.union={self.union}")
        if self.union == "cluster" and self.kv_dtype != "fp8":
            raise InputError("method.kv_dtype", self.kv_dtype, "fp8 under method.union=cluster")
        super().validate()

    def inert(self) -> dict[str, str]:
        """The capacity of a regrouping that does not take place."""
        return {} if WINDOWS[self.regroup] else {"capacity": "regroup"}

    def check_device(self, device: torch.device, dtype: torch.dtype, backend: str, page_size: int) -> None:
        """Refuse a named kernel that cannot run; what depends on the model's heads shows at its first call."""
        name = self.kernel_backend(backend)
        if name == "auto":
            return
        reason = page_backend_problem(
            name, device, dtype, page_size=self.page_size, physical=page_size, fp8=self.kv_dtype == "fp8"
        )
        if reason:
            field = "execution.backend" if self.union == "auto" else "method.union"
            raise InputError(field, name, f"auto or torch here: {reason}")

    def select(self, q: Tensor, kv: PagedKV, context: PlanContext) -> Tensor:
        """Pages of each query and KV head, int32 [1, N, Hkv, K], -1 where a query has fewer."""
        return select_pages(
            q,
            kv,
            page_size=self.page_size,
            top_k=self.top_k,
            scale=context.scale,
            q_offset=context.q_offset,
            summary=self.summary,
        )

    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> PagePlan:
        """The selected pages, with how they are to be executed."""
        return PagePlan.for_prompt(
            self.select(q, kv, context),
            self.page_size,
            context.q_offset,
            q.shape[2],
            regroup=WINDOWS[self.regroup],
            capacity=self.capacity,
            kv_dtype=self.kv_dtype,
        )

    def kernel_backend(self, backend: str) -> str:
        """``union`` where it names one."""
        return backend if self.union == "auto" else self.union

    @property
    def chunk_problem(self) -> str | None:
        """FP8 takes the scale of a KV head from all that is cached: a chunk would be scaled by what came so far."""
        return None if self.kv_dtype == "model" else "scales a KV head by its whole prompt under method.kv_dtype=fp8"

    @property
    def features(self) -> Capabilities:
        """Unselected pages are never touched."""
        return Capabilities(physical_skip=True)

    def estimator_cells(self, q_offset: int, q_len: int) -> int:
        """One product a complete page before the query's own, two for ``minmax``: about 1/(2P) of dense work."""
        return scored_products(q_offset, q_len, self.page_size, self.top_k, self.summary)

    def work(self, stats: TileStats) -> dict[str, int | Tensor]:
        """Pages that were asked for and pages that groups went through, in page visits of one query or group."""
        assert isinstance(stats, PageStats)
        return {
            "member_pages": stats.member_pages.sum(),
            "union_pages": stats.union_pages.sum(),
            "half_pages": stats.half_pages.sum(),
            "imbalance_pages": stats.imbalance.sum(),
            "groups": stats.groups * stats.member_pages.numel(),
            "calls": 1,
            "calls_beyond_capacity": int(WINDOWS[self.regroup] > 0 and not stats.regrouped),
        }

    def work_ratios(self, total: Mapping[str, int]) -> dict[str, float]:
        """Mean |U_G|, |U_G0| + |U_G1| and | |U_G0| - |U_G1| | of a group, useful share, and calls beyond the capacity.

        Executed is every slot of a group on each page of its union, useful what its queries selected:
        ``sum |S_i| / (8 sum |U_G|)``.
        """
        groups, unions = max(total["groups"], 1), max(total["union_pages"], 1)
        return {
            "mean_union": total["union_pages"] / groups,
            "mean_halves": total["half_pages"] / groups,
            "mean_imbalance": total["imbalance_pages"] / groups,
            "useful_share": total["member_pages"] / (GROUP * unions),
            "identity_share": total["calls_beyond_capacity"] / max(total["calls"], 1),
        }

    def warnings(self, prompt_len: int) -> list[str]:
        """Report a prompt beyond the capacity, and one that every query sees whole."""
        pages = -(-prompt_len // self.page_size)
        found = []
        if WINDOWS[self.regroup] and pages > self.capacity:
            found.append(f"{pages} pages of N={prompt_len} are more than capacity={self.capacity}: not regrouped")
        if self.top_k >= pages:
            found.append(f"top_k={self.top_k} covers the {pages} pages of N={prompt_len}: dense")
        return found
