"""Union preparation and counts in plain Triton: one program a group.

A group's selections are sorted as (page, slot) keys, so that any page id works; runs of one page become one entry.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backends import half_problem
from .pages import GROUP, STATS_TILE, PagePlan, group_requests
from .unions import Unions

MAX_KEYS = 4096
"""Selections of a group that are sorted at once."""


@triton.jit
def _run_or(begins_a, bits_a, begins_b, bits_b):
    """Union of bits within runs."""
    return begins_a | begins_b, tl.where(begins_b != 0, bits_b, bits_a | bits_b)


@triton.jit
def unions_kernel(
    selected, positions, kv_lens, requests, ids, pages, members, counts,
    selected_query, selected_head, ids_head, page_size, groups,
    K: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Pages, members and count of one group of one head. WIDE is K's power of two above."""
    N: tl.constexpr = GROUP * WIDE
    group = tl.program_id(0)
    head = tl.program_id(1)
    item = head.to(tl.int64) * groups + group
    place = tl.arange(0, N)
    slot = place // WIDE
    k = place % WIDE
    query = tl.load(ids + head.to(tl.int64) * ids_head + group * GROUP + slot)
    real = query >= 0
    length = tl.load(kv_lens + tl.load(requests + group))
    position = tl.load(positions + query, mask=real, other=-1)
    # Tokens beyond the causal position and beyond the request leave their pages out.
    seen = (tl.maximum(tl.minimum(position + 1, length), 0) + page_size - 1) // page_size
    row = selected + query.to(tl.int64) * selected_query + head * selected_head
    page = tl.load(row + k, mask=real & (k < K), other=-1)
    valid = (page >= 0) & (page < seen)

    key = tl.sort(tl.where(valid, page * GROUP + slot, 0x7FFFFFFF))
    page = key // GROUP
    live = key != 0x7FFFFFFF
    before = tl.gather(page, tl.maximum(place - 1, 0), 0)
    after = tl.gather(page, tl.minimum(place + 1, N - 1), 0)
    begins = ((place == 0) | (before != page)).to(tl.int32)
    ends = live & ((place == N - 1) | (after != page))
    bits = tl.where(live, 1 << (key % GROUP), 0)
    _, union = tl.associative_scan((begins, bits), 0, _run_or)
    rank = tl.cumsum(begins, 0) - 1
    count = tl.sum(ends.to(tl.int32), 0)

    out = item * (GROUP * K)
    tl.store(pages + out + rank, page, mask=ends)
    tl.store(members + out + rank, union, mask=ends)
    rest = (place >= count) & (place < GROUP * K)
    tl.store(pages + out + place, tl.full([N], -1, tl.int32), mask=rest)
    tl.store(members + out + place, tl.zeros([N], tl.int32), mask=rest)
    tl.store(counts + item, count)


@triton.jit
def stats_kernel(
    pages, members, counts, ids, positions, kv_lens, requests, totals, cells, sizes,
    ids_head, page_size, groups, width, heads, tiles,
    WIDE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add one group of one head to the counts: integers, so that the order of the additions does not matter."""
    group = tl.program_id(0)
    head = tl.program_id(1)
    item = head.to(tl.int64) * groups + group
    slot = tl.arange(0, GROUP)
    query = tl.load(ids + head.to(tl.int64) * ids_head + group * GROUP + slot)
    real = query >= 0
    length = tl.load(kv_lens + tl.load(requests + group))
    position = tl.load(positions + query, mask=real, other=-1)
    seen = tl.maximum(tl.minimum(position + 1, length), 0)

    place = tl.arange(0, WIDE)
    held = place < width
    page = tl.load(pages + item * width + place, mask=held, other=-1)
    mask = tl.load(members + item * width + place, mask=held, other=0)
    low = tl.sum(((mask & 15) != 0).to(tl.int32), 0)
    high = tl.sum((mask > 15).to(tl.int32), 0)
    chosen = (mask[None, :] >> slot[:, None]) & 1
    size = tl.sum(chosen, 1)
    whole = chosen.to(tl.int64) * tl.minimum(seen[:, None] - page[None, :] * page_size, page_size)
    tile = head * tiles + query // TILE
    tl.atomic_add(sizes + tile, size.to(tl.int64), mask=real)
    tl.atomic_add(cells + tile, tl.sum(whole, 1), mask=real)
    tl.atomic_add(totals + head, tl.sum(size, 0).to(tl.int64))
    tl.atomic_add(totals + heads + head, tl.load(counts + item).to(tl.int64))
    tl.atomic_add(totals + 2 * heads + head, (low + high).to(tl.int64))
    tl.atomic_add(totals + 3 * heads + head, tl.abs(low - high).to(tl.int64))


def refusal(plan: PagePlan) -> str | None:
    """Why these kernels cannot run the call, or None."""
    # Ids have one dtype; only the machine is asked for.
    if problem := half_problem(plan.pages.device, torch.float16):
        return problem
    if GROUP * triton.next_power_of_2(plan.width) > MAX_KEYS:
        return f"{plan.width} pages a query: at most {MAX_KEYS // GROUP}"
    if plan.num_pages >= 2**31 // GROUP:
        return f"{plan.num_pages} pages: (page, slot) keys are 32-bit"
    return None


def launch_options(keys: int) -> dict[str, int]:
    """Fixed launch table by the size of the sort."""
    return {"num_warps": 1 if keys <= 256 else min(8, keys // 256)}


def unions_triton(plan: PagePlan, ids: Tensor) -> Unions:
    """:func:`prefill_kernels.prepare_unions` in plain Triton."""
    heads, groups, device = plan.num_kv_heads, plan.groups, plan.pages.device
    selected = plan.pages if plan.pages.stride(3) == 1 else plan.pages.contiguous()
    width = GROUP * plan.width
    pages = torch.empty(heads, groups, width, dtype=torch.int32, device=device)
    members = torch.empty_like(pages)
    count = torch.empty(heads, groups, dtype=torch.int32, device=device)
    requests = group_requests(device, plan.cu_seqlens)
    wide = triton.next_power_of_2(plan.width)
    if groups:
        unions_kernel[(groups, heads)](
            selected,
            plan.positions,
            plan.kv_lens,
            requests,
            ids,
            pages,
            members,
            count,
            selected.stride(1),
            selected.stride(2),
            ids.stride(0),
            plan.page_size,
            groups,
            K=plan.width,
            WIDE=wide,
            GROUP=GROUP,
            **launch_options(GROUP * wide),
        )
    return Unions(ids, pages, members, count, requests)


def stats_triton(plan: PagePlan, unions: Unions) -> tuple[Tensor, Tensor, Tensor]:
    """Totals int64 [4, Hkv] (members, union, halves, imbalance) and cells and pages int64 [Hkv, tiles]."""
    heads, groups, device = plan.num_kv_heads, plan.groups, plan.pages.device
    tiles = triton.cdiv(plan.length, STATS_TILE)
    counts = torch.zeros(heads * (4 + 2 * tiles), dtype=torch.int64, device=device)
    totals, cells, sizes = counts.split((4 * heads, heads * tiles, heads * tiles))
    width = unions.pages.shape[2]
    if groups:
        stats_kernel[(groups, heads)](
            unions.pages,
            unions.members,
            unions.count,
            unions.ids,
            plan.positions,
            plan.kv_lens,
            unions.requests,
            totals,
            cells,
            sizes,
            unions.ids.stride(0),
            plan.page_size,
            groups,
            width,
            heads,
            tiles,
            WIDE=triton.next_power_of_2(width),
            GROUP=GROUP,
            TILE=STATS_TILE,
            num_warps=4,
        )
    return totals.view(4, heads), cells.view(heads, tiles), sizes.view(heads, tiles)
