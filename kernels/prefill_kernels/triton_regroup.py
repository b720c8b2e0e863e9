"""Algorithm 1 in plain Triton: one program searches one window of one KV head, a thread holds one query, or four.

A query's pages are bits of 32-bit words; every thread keeps its own words in registers and, for each pick, the cost
|S_j \\ U| is the population of its words without the union's. U itself is never held: a pick removes the picked
query's pages from everybody's copy. The picked query's words come back through memory (the first level of cache), so
that a pick costs one reduction over the threads and no exchange of bitmaps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backends import half_problem, interpreting
from .pages import GROUP, PagePlan
from .pages import windows as search_windows

try:
    from triton.language.extra.cuda import libdevice
except ImportError:  # a Triton built for other devices alone
    libdevice = None

WARPS = {64: 2, 128: 1}
"""Warps of a program by its window, as measured on an H200; entries may be changed to measure others."""
MAX_WORDS = 64
"""Words of a bitmap that stay in registers: 2048 pages."""


@triton.jit
def _population(x, HARDWARE: tl.constexpr):
    """Bits that are set in int32 words."""
    if HARDWARE:
        return libdevice.popc(x)
    else:  # Triton's interpreter has no population count
        u = x.to(tl.uint32, bitcast=True)
        u = u - ((u >> 1) & 0x55555555)
        u = (u & 0x33333333) + ((u >> 2) & 0x33333333)
        u = (u + (u >> 4)) & 0x0F0F0F0F
        return ((u * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _size(words, WORDS: tl.constexpr, HARDWARE: tl.constexpr):
    """Bits that are set in all words of each query.

    Population counts leave a Hopper SM at a quarter of the rate of logic, so three words are first added to two
    (a sum and a carry of twice the weight) wherever they come in threes.
    """
    ones = words[0]
    total = tl.zeros_like(ones)
    for w in tl.static_range(1, WORDS - 1, 2):
        a = words[w]
        b = words[w + 1]
        total += _population((ones & a) | (ones & b) | (a & b), HARDWARE)
        ones = ones ^ a ^ b
    total = total * 2 + _population(ones, HARDWARE)
    if WORDS % 2 == 0:
        total += _population(words[WORDS - 1], HARDWARE)
    return total


@triton.jit
def regroup_kernel(
    pages, positions, kv_lens, windows, bitmaps, ids,
    pages_query, pages_head, ids_head, page_size, capacity,
    K: tl.constexpr, W: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Order one window of one head. ``windows`` holds first query, queries, first slot, request of each.

    A window of a request with more pages than ``capacity`` keeps its order, and is not searched.
    ``bitmaps`` is scratch, int64 [heads, windows, W, WORDS / 2].
    """
    window = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(windows + window * 4)
    count = tl.load(windows + window * 4 + 1)
    slot = tl.load(windows + window * 4 + 2)
    length = tl.load(kv_lens + tl.load(windows + window * 4 + 3))
    fits = (length + page_size - 1) // page_size <= capacity
    place = tl.arange(0, W)
    exists = place < count
    position = tl.load(positions + first + place, mask=exists, other=-1)
    # Tokens beyond the causal position and beyond the request leave their pages before costs are computed.
    seen = (tl.maximum(tl.minimum(position + 1, length), 0) + page_size - 1) // page_size

    row = pages + (first + place).to(tl.int64) * pages_query + head * pages_head
    words = ()
    for _ in tl.static_range(WORDS):
        words = words + (tl.zeros([W], tl.int32),)  # type: ignore[assignment]
    for k in tl.static_range(K):
        page = tl.load(row + k, mask=exists, other=-1)
        valid = (page >= 0) & (page < seen)
        bit = tl.where(valid, 1 << (page & 31), 0)
        word = page >> 5
        new = ()
        for w in tl.static_range(WORDS):
            new = new + (words[w] | tl.where(word == w, bit, 0),)  # type: ignore[assignment]
        words = new

    # Out to memory, and back so that it lies in the first level of cache from here on.
    bitmaps += (head * tl.num_programs(0) + window).to(tl.int64) * (W * WORDS // 2)
    for w in tl.static_range(WORDS // 2):
        both = (words[2 * w].to(tl.int64) & 0xFFFFFFFF) | (words[2 * w + 1].to(tl.int64) << 32)
        tl.store(bitmaps + place * (WORDS // 2) + w, both)
    tl.debug_barrier()
    words = ()
    for w in tl.static_range(WORDS // 2):
        both = tl.load(bitmaps + place * (WORDS // 2) + w)
        words = words + (both.to(tl.int32), (both >> 32).to(tl.int32))  # type: ignore[assignment]

    rank = tl.where(fits, -1, place)
    for start in range(0, tl.where(fits, count, 0), GROUP):
        left = words
        cost = tl.zeros([W], tl.int32)  # the seed is the lowest remaining id
        for member in range(start, tl.minimum(start + GROUP, count)):
            key = tl.where(exists & (rank < 0), (cost << 16) | place, 0x7FFFFFFF)
            pick = tl.min(key, 0) & 0xFFFF
            rank = tl.where(place == pick, member, rank)
            picked = bitmaps + pick * (WORDS // 2)
            rest = ()
            for w in tl.static_range(WORDS // 2):
                pair = tl.load(picked + w)
                rest = rest + (left[2 * w] & ~pair.to(tl.int32), left[2 * w + 1] & ~(pair >> 32).to(tl.int32))  # type: ignore[assignment]
            left = rest
            cost = _size(left, WORDS, HARDWARE)
    ids += head.to(tl.int64) * ids_head + slot
    tl.store(ids + rank, first + place, mask=exists)
    # The last group of a request may be short.
    tail = (count + GROUP - 1) // GROUP * GROUP
    tl.store(ids + place, tl.full([W], -1, tl.int32), mask=(place >= count) & (place < tail))


def refusal(plan: PagePlan) -> str | None:
    """Why this kernel cannot run the call, or None."""
    # Ids have one dtype; only the machine is asked for.
    if problem := half_problem(plan.pages.device, torch.float16):
        return problem
    if bits(plan) > MAX_WORDS * 32:
        return f"{bits(plan)} pages: bitmaps of more than {MAX_WORDS * 32} bits do not stay in registers"
    if plan.width > 256:
        return f"{plan.width} pages a query: at most 256"
    return None


def bits(plan: PagePlan) -> int:
    """Pages that the bitmaps of a call must hold; requests of more are not searched."""
    return min(plan.num_pages, plan.capacity)


def launch_options(window: int) -> dict[str, int]:
    """Fixed launch table."""
    return {"num_warps": WARPS[window]}


def words_for(pages: int) -> int:
    """32-bit words of a bitmap: a power of two that holds so many pages, at least two."""
    return max(2, triton.next_power_of_2(-(-pages // 32)))


def regroup_triton(plan: PagePlan) -> Tensor:
    """:func:`prefill_kernels.regroup_queries` where :func:`prefill_kernels.regroups` holds."""
    heads, size, device = plan.num_kv_heads, plan.regroup, plan.pages.device
    pages = plan.pages if plan.pages.stride(3) == 1 else plan.pages.contiguous()
    table = search_windows(device, plan.cu_seqlens, size)
    words = words_for(bits(plan))
    bitmaps = torch.empty(heads, len(table), size, words // 2, dtype=torch.int64, device=device)
    ids = torch.empty(heads, plan.groups * GROUP, dtype=torch.int32, device=device)
    regroup_kernel[(len(table), heads)](
        pages,
        plan.positions,
        plan.kv_lens,
        table,
        bitmaps,
        ids,
        pages.stride(1),
        pages.stride(2),
        ids.stride(0),
        plan.page_size,
        plan.capacity,
        K=plan.width,
        W=size,
        WORDS=words,
        GROUP=GROUP,
        HARDWARE=not interpreting(),
        **launch_options(size),
    )
    return ids
