"""Online grouping of queries by the pages they selected (PageWeaver, Algorithm 1 and equation 6)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .backends import choose_backend, triton_refusal
from .pages import GROUP, PagePlan, identity_ids, page_support
from .pages import windows as search_windows


def greedy_order(supports: Sequence[set[int]], group: int = GROUP) -> list[int]:
    """Algorithm 1 on one window, word for word: execution order of the queries 0 .. n - 1.

    The seed of a group is the lowest remaining id; each next member is the lexicographic minimum of (|S_j \\ U|, j),
    U being the union of the members so far (equation 6).

    Args:
        supports: S_j, the pages of each query.
        group: g, queries of a group.
    """
    remaining, order = list(range(len(supports))), []
    while remaining:
        members, union = [remaining.pop(0)], set[int]()
        union |= supports[members[0]]
        while len(members) < group and remaining:
            best = min(remaining, key=lambda j: (len(supports[j] - union), j))
            members.append(best)
            union |= supports[best]
            remaining.remove(best)
        order += members
    return order


def regroups(plan: PagePlan) -> bool:
    """Whether a call searches: a window is asked for, and the pages of a request may fit the bitmaps.

    The host knows the longest request alone. Of several, each is judged on the device: see :func:`beyond_capacity`.
    """
    return plan.regroup > 0 and (plan.requests > 1 or plan.num_pages <= plan.capacity)


def beyond_capacity(plan: PagePlan) -> int | Tensor:
    """Requests that were to be regrouped and have more pages than the capacity, so that they keep their order.

    A scalar on the device (int64) where the host cannot tell: several requests, of which the longest is too long.
    """
    if not plan.regroup or plan.num_pages <= plan.capacity:
        return 0
    return 1 if plan.requests == 1 else (~_fits(plan)).sum()


def _fits(plan: PagePlan) -> Tensor:
    """Whether the pages of each request fit the bitmaps, bool [R]."""
    return -(-plan.kv_lens // plan.page_size) <= plan.capacity


def regroup_queries(plan: PagePlan, *, backend: str = "auto") -> Tensor:
    """Query of each execution slot by Algorithm 1, searched anew for every call.

    Windows begin at the first query of each request's chunk and never leave it. Pages wholly beyond a query's causal
    position leave its support before costs are computed. Deterministic; a bijection within each request. A request of
    more pages than the capacity keeps its original order, whatever the others do.

    Args:
        plan: selections; ``regroup`` is the window and ``capacity`` the limit.
        backend: see :func:`prefill_kernels.resolve_backend`.

    Returns:
        int32 [Hkv, G * 8]: index along N of the query of each slot, -1 in the slots after a request's last query. The
        caller's own, to change at will.

    Raises:
        ValueError: the plan is broken.
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    order = execution_order(plan, backend=backend)
    return order if regroups(plan) and plan.length > 0 else order.clone()


def execution_order(plan: PagePlan, *, backend: str = "auto") -> Tensor:
    """:func:`regroup_queries` without a copy: an order that nothing searched is kept, and of all calls of the shape."""
    plan.check_shapes()
    device = plan.pages.device
    if not regroups(plan) or plan.length == 0:
        return identity_ids(device, plan.cu_seqlens, plan.num_kv_heads)

    if choose_backend("regroup", backend, device, {"triton": triton_refusal("triton_regroup", plan)}) == "triton":
        from .triton_regroup import regroup_triton

        return regroup_triton(plan)
    return _regroup_torch(plan)


def _regroup_torch(plan: PagePlan) -> Tensor:
    """All windows of all heads at once, one pick a step."""
    support, heads, size = page_support(plan), plan.num_kv_heads, plan.regroup
    table = search_windows(support.device, plan.cu_seqlens, size).long()
    first, count, slot = table[:, 0], table[:, 1], table[:, 2]
    place = torch.arange(size, device=support.device)
    exists = place < count[:, None]
    query = torch.where(exists, first[:, None] + place, 0)
    # Empty supports keep their order; no page of a request that fits lies beyond the capacity.
    searched = exists & _fits(plan)[table[:, 3], None]
    support = support[..., : plan.capacity]
    flags = support[query].permute(2, 0, 1, 3).float() * searched[..., None]  # [Hkv, windows, W, M]
    used = (~exists).expand(heads, -1, -1).clone()
    union = flags.new_zeros(*flags.shape[:2], flags.shape[3])
    sizes = flags.sum(-1)
    far = size * (flags.shape[3] + 1)
    ids = torch.full((heads, plan.groups * GROUP), -1, dtype=torch.int32, device=support.device)
    for step in range(size):
        if step % GROUP == 0:
            union.zero_()
            cost = torch.zeros_like(sizes)  # the seed is the lowest remaining id
        else:
            cost = sizes - (flags @ union[..., None])[..., 0]
        pick = torch.where(used, far, cost.long() * size + place).argmin(-1, keepdim=True)
        picked = torch.maximum(union, flags.gather(2, pick[..., None].expand(-1, -1, 1, flags.shape[3]))[:, :, 0])
        union = torch.where(used.gather(2, pick), union, picked)
        used.scatter_(2, pick, True)
        live = step < count
        ids[:, slot[live] + step] = (first + pick[..., 0])[:, live].int()
    return ids
