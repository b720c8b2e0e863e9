"""Page unions of execution groups and who selected which page (PageWeaver, union preparation)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .backends import choose_backend, triton_refusal
from .checks import check_table
from .pages import GROUP, PagePlan, group_requests, page_support


@dataclass(frozen=True)
class Unions:
    """What an execution group walks. Pages are logical, of the group's request.

    All are contiguous.

    Attributes:
        ids: int32 [Hkv, G * 8], original query index (along N) of each execution slot, -1 in tail slots; an order that
            nothing searched is shared by all calls of a shape, not to be written to.
        pages: int32 [Hkv, G, 8 * K], pages of the group, each once, ascending, -1 after ``count``.
        members: int32 [Hkv, G, 8 * K], bit r set: the query of slot r selected the page, and sees some token of it;
            0 after ``count``.
        count: int32 [Hkv, G], |U_G|.
        requests: int32 [G], request of each group; shared likewise.
    """

    ids: Tensor
    pages: Tensor
    members: Tensor
    count: Tensor
    requests: Tensor

    def check_shapes(self, plan: PagePlan) -> None:
        """Raise ValueError unless shapes, dtypes and devices are those of a plan. What they hold is not read."""
        heads, groups, width = plan.num_kv_heads, plan.groups, GROUP * plan.width
        shapes = {
            "ids": (heads, groups * GROUP),
            "pages": (heads, groups, width),
            "members": (heads, groups, width),
            "count": (heads, groups),
            "requests": (groups,),
        }
        for name, shape in shapes.items():
            found, where = getattr(self, name), plan.pages.device
            check_table(f"{name} of the unions", found, shape, torch.int32, where, contiguous=True)


def prepare_unions(plan: PagePlan, ids: Tensor, *, backend: str = "auto") -> Unions:
    """Gather the selections of each group through its ids, once each, with membership bits by execution slot.

    Args:
        plan: selections.
        ids: int32 [Hkv, G * 8], as :func:`prefill_kernels.regroup_queries` gives them.
        backend: see :func:`prefill_kernels.resolve_backend`; ``cuda`` is the kernel of
            :func:`prefill_kernels.search_unions` without its search, and ``auto`` wherever it can run.

    Raises:
        ValueError: the plan is broken, or ``ids`` has another shape or dtype or lies elsewhere.
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    plan.check_shapes()
    check_table("ids", ids, (plan.num_kv_heads, plan.groups * GROUP), torch.int32, plan.pages.device)
    ids = ids.contiguous()

    def cuda_refusal() -> str | None:
        from .cuda_page_search import refusal

        return refusal(plan)

    refusals = {"cuda": cuda_refusal, "triton": triton_refusal("triton_unions", plan)}
    chosen = choose_backend("union", backend, plan.pages.device, refusals)
    if chosen == "cuda":
        from .cuda_page_search import search_cuda

        return search_cuda(plan, ids)
    if chosen == "triton":
        from .triton_unions import unions_triton

        return unions_triton(plan, ids)
    return _unions_torch(plan, ids)


def _unions_torch(plan: PagePlan, ids: Tensor) -> Unions:
    """Flags of every page for every slot, packed and front-aligned."""
    support, heads, width, count = page_support(plan), plan.num_kv_heads, GROUP * plan.width, plan.num_pages
    head = torch.arange(heads, device=ids.device)[:, None]
    flags = support[ids.clamp(min=0).long(), head] & (ids >= 0)[..., None]
    slot = torch.arange(GROUP, dtype=torch.int32, device=ids.device)[:, None]
    masks = (flags.unflatten(1, (-1, GROUP)).int() << slot).sum(2, dtype=torch.int32)  # [Hkv, G, M]
    number = torch.arange(count, dtype=torch.int32, device=ids.device)
    ranked = torch.where(masks > 0, number, count).sort(-1).values[..., :width]
    padded = torch.nn.functional.pad(masks, (0, 1))
    members = padded.gather(-1, ranked.long())
    pages = torch.where(ranked < count, ranked, -1)
    short = width - pages.shape[-1]
    return Unions(
        ids=ids,
        pages=torch.nn.functional.pad(pages, (0, short), value=-1),
        members=torch.nn.functional.pad(members, (0, short)),
        count=(masks > 0).sum(-1, dtype=torch.int32),
        requests=group_requests(plan.cu_seqlens, ids.device),
    )
