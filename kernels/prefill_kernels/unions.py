"""Page unions of execution groups and who selected which page (PageWeaver, union preparation)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .backends import choose_backend, triton_refusal
from .checks import check_table
from .device_tables import device_table, stream_of
from .pages import GROUP, PagePlan, group_requests, page_support

BINS = 64
"""Of a :class:`GroupQueue`."""


@dataclass(frozen=True)
class GroupQueue:
    """The order in which programs take the groups of a call: those of many pages first, so that no long one ends late.

    Groups are sorted by |U_G| as far as :data:`BINS` bins tell them apart, in no fixed order within a bin. Which
    program takes which group, and when, changes no output.

    Attributes:
        sizes: int32 [BINS + 1], groups in each bin, and last the groups that programs have taken: 0 between calls.
        lines: int32 [BINS, Hkv * G], the groups of a bin as ``head * G + group``; one row where one bin is in use.
        made_on: the CUDA stream it was made on, and whether in a graph: those calls do not overlap.
    """

    sizes: Tensor
    lines: Tensor
    made_on: tuple[int, bool] | None

    @classmethod
    def empty(cls, items: int, device: torch.device) -> GroupQueue:
        """A queue to be filled with ``items`` groups."""
        lines = torch.empty(BINS, items, dtype=torch.int32, device=device)
        stream = stream_of(device)
        return cls(_cleared(device, stream), lines, stream)

    @classmethod
    def in_turn(cls, items: int, device: torch.device) -> GroupQueue:
        """One bin of groups whose unions nobody counted: late ones, which select the most, first."""
        stream = stream_of(device)
        sizes = _cleared(device, stream)
        sizes[:1].fill_(items)  # an assignment would copy from the host, which no graph may
        return cls(sizes, _late_first(device, items), stream)

    @staticmethod
    def bin_shift(width: int) -> int:
        """Groups of n pages, at most ``width``, are in bin ``max(0, BINS - 1 - (n >> bin_shift))``."""
        return max(0, (width - 1).bit_length() - (BINS - 1).bit_length())

    def open(self) -> Tensor:
        """``sizes`` for a call on the current stream; a copy in which none is taken where calls may overlap its own."""
        if stream_of(self.sizes.device) == self.made_on:
            return self.sizes
        return torch.cat([self.sizes[:BINS], self.sizes.new_zeros(1)])


_CLEARED: dict[tuple[torch.device, int], list[Tensor]] = {}
_AT_ONCE = 64


def _cleared(device: torch.device, stream: tuple[int, bool] | None) -> Tensor:
    """Zeros for ``sizes``. One launch clears those of many calls on a stream; in a graph, each replay its own."""
    if stream is None or stream[1]:
        return torch.zeros(BINS + 1, dtype=torch.int32, device=device)
    kept = _CLEARED.setdefault((device, stream[0]), [])
    try:
        return kept.pop()
    except IndexError:  # rows apart by a multiple of 16 bytes, or Triton compiles a kernel for each alignment
        with torch.inference_mode(False):  # for later calls in any mode
            rows = torch.zeros(_AT_ONCE, 2 * BINS, dtype=torch.int32, device=device)[:, : BINS + 1].unbind()
        kept.extend(rows[1:])
        return rows[0]


@device_table(kept=64)
def _late_first(items: int) -> Tensor:
    return torch.arange(items - 1, -1, -1, dtype=torch.int32)[None]


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
        queue: in which order to take the groups, where the preparation sorted them.
    """

    ids: Tensor
    pages: Tensor
    members: Tensor
    count: Tensor
    requests: Tensor
    queue: GroupQueue | None = None

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
        if self.queue is not None:
            bins = 1 if self.queue.lines.shape[:1] == (1,) else BINS
            for name, shape in {"sizes": (BINS + 1,), "lines": (bins, heads * groups)}.items():
                found = getattr(self.queue, name)
                check_table(
                    f"{name} of the unions' queue", found, shape, torch.int32, plan.pages.device, contiguous=True
                )


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
        requests=group_requests(ids.device, plan.cu_seqlens),
    )
