"""The direct KV-page union in plain Triton: pages gather their queries, a second kernel joins the partial results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8 import Fp8KV
from .kv_union import Inverted
from .paged import PagedKV
from .pages import GROUP, PagePlan
from .triton_osk import LOG2_E
from .triton_page_attention import (
    STEP,
    _mixed,
    _quantized_rows,
    _step_tiles,
    _weights,
    cache_arguments,
    launch_options,
)
from .triton_page_attention import problem as attention_problem

CHUNK = 64
"""Queries that one load of a page serves at most."""


@triton.jit
def kv_union_kernel(
    q, k, v, k_scale, v_scale, table, positions, kv_lens, slots, starts, items, chunk_ends, partial, maxima, sums,
    scale, q_head, q_row, k_page, k_slot, k_head, v_page, v_slot, v_dim, v_head,
    table_stride, places, page_count, request_pages, width, bound,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, RATIO: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, SIZE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One page of one KV head and at most CHUNK of its queries; ``page_count`` counts those of all requests.

    ``items`` names the page of each program and ``chunk_ends`` the programs up to a page's last. Writes the maximum (in
    log2 units), the sum and the unnormalised output of each (query, page) slot.
    """
    item = tl.program_id(0)
    head = tl.program_id(1)
    number = tl.load(items + head.to(tl.int64) * bound + item)
    if number < page_count:
        chunk_ends += head.to(tl.int64) * page_count
        starts += head.to(tl.int64) * (page_count + 1)
        chunk = item - tl.load(chunk_ends + number - 1, mask=number > 0, other=0)
        begin = tl.load(starts + number) + chunk * CHUNK
        end = tl.minimum(tl.load(starts + number + 1), begin + CHUNK)
        request = number // request_pages
        first = number % request_pages * SIZE
        kv_len = tl.load(kv_lens + request)
        row = tl.arange(0, ROWS)
        dim = tl.arange(0, D)
        token = first + tl.arange(0, SIZE)
        query_head = row % RATIO
        table += request.to(tl.int64) * table_stride
        k_base = head.to(tl.int64) * k_head
        v_base = head.to(tl.int64) * v_head
        keys, values = _step_tiles(
            k, v, table, first, kv_len, k_page, k_slot, k_base, v_page, v_slot, v_dim, v_base, D, PAGE, SIZE, FP8
        )
        slots += head.to(tl.int64) * places
        q += (head * RATIO).to(tl.int64) * q_head
        out = (head.to(tl.int64) * places) * RATIO
        for tile in range(begin, end, GROUP):
            place = tile + row // RATIO
            real = (row < GROUP * RATIO) & (place < end)
            chosen = tl.load(slots + place, mask=real, other=0)
            query_id = chosen // width
            seen = tl.minimum(tl.load(positions + query_id, mask=real, other=0) + 1, kv_len)
            rows = query_id.to(tl.int64) * q_row + query_head * q_head
            query = tl.load(q + rows[:, None] + dim[None, :], mask=real[:, None], other=0.0)
            factor = tl.full([ROWS], 1.0, tl.float32) * scale
            if FP8:
                query, row_scale = _quantized_rows(query)
                factor = row_scale * (tl.load(k_scale + head) * scale)
                s = tl.dot(query, tl.trans(keys))
            else:
                s = tl.dot(query, tl.trans(keys), input_precision="ieee")
            s = tl.where(token[None, :] < seen[:, None], s * factor[:, None], float("-inf"))
            m, p, _ = _weights(s, tl.full([ROWS], float("-inf"), tl.float32))
            acc = _mixed(p, values, tl.zeros([ROWS, D], tl.float32), FP8)
            to = out + chosen.to(tl.int64) * RATIO + query_head
            tl.store(maxima + to, m, mask=real)
            tl.store(sums + to, tl.sum(p, 1), mask=real)
            tl.store(partial + to[:, None] * D + dim[None, :], acc.to(partial.dtype.element_ty), mask=real[:, None])


@triton.jit
def reduce_kernel(
    partial, maxima, sums, counts, v_scale, out, length, width, out_head, out_row,
    QUERIES: tl.constexpr, RATIO: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Join the slots of QUERIES queries of one KV head, pages ascending."""
    head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, D)
    query = tl.program_id(0) * QUERIES + row // RATIO
    real = (row < QUERIES * RATIO) & (query < length)
    count = tl.load(counts + head * length + query, mask=real, other=0)
    base = ((head * length + query).to(tl.int64) * width) * RATIO + row % RATIO
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for slot in range(0, tl.max(count, 0)):
        held = slot < count
        here = base + slot * RATIO
        local = tl.load(maxima + here, mask=held, other=float("-inf"))
        new = tl.maximum(m, local)
        shift = tl.where(new == float("-inf"), 0.0, new)
        decay = tl.exp2(m - shift)
        weight = tl.exp2(local - shift)
        total = total * decay + weight * tl.load(sums + here, mask=held, other=0.0)
        part = tl.load(partial + here[:, None] * D + dim[None, :], mask=held[:, None], other=0.0).to(tl.float32)
        acc = acc * decay[:, None] + weight[:, None] * part
        m = new
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if FP8:
        acc = acc * (tl.load(v_scale + head) / 448.0)
    places = out + (head * RATIO + row % RATIO).to(tl.int64) * out_head + query.to(tl.int64) * out_row
    tl.store(places[:, None] + dim[None, :], acc.to(out.dtype.element_ty), mask=real[:, None])


def problem(q: Tensor, kv: PagedKV | Fp8KV, plan: PagePlan) -> str | None:
    """Why these kernels cannot run the call, or None."""
    if plan.page_size > STEP:
        return f"page_size={plan.page_size}: at most {STEP}, so that a page stays on the chip"
    return attention_problem(q, kv, plan)


def chunked(starts: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """Cut the queries of each page into chunks.

    Args:
        starts: int32 [Hkv, pages + 1], as in :class:`Inverted`.
        places: (query, page) pairs of a head at most, on the host: it bounds the programs.

    Returns:
        int32 [Hkv, programs], page of each program, ``pages`` for those without work; int32 [Hkv, pages], programs up
        to each page's last.
    """
    ends = (-(-starts.diff(dim=-1) // CHUNK)).cumsum(-1, dtype=torch.int32)
    bound = places // CHUNK + ends.shape[1]
    program = torch.arange(bound, dtype=torch.int32, device=starts.device).expand(len(starts), -1).contiguous()
    return torch.searchsorted(ends, program, right=True, out_int32=True), ends


def kv_union_triton(
    q: Tensor, kv: PagedKV | Fp8KV, plan: PagePlan, inverted: Inverted, scale: float, partial_dtype: torch.dtype
) -> Tensor:
    """:func:`prefill_kernels.kv_union_attention` in plain Triton, for calls that :func:`problem` accepts."""
    heads, length, dim = q.shape[1:]
    kv_heads, width, fp8, device = kv.num_kv_heads, plan.width, isinstance(kv, Fp8KV), q.device
    ratio = heads // kv_heads
    q = q if q.stride(3) == 1 else q.contiguous()
    k, v, k_scale, v_scale, *strides = cache_arguments(kv)
    items, chunk_ends = chunked(inverted.starts, length * width)
    partial = torch.empty(kv_heads, length * width, ratio, dim, dtype=partial_dtype, device=device)
    maxima = torch.empty(kv_heads, length * width, ratio, dtype=torch.float32, device=device)
    sums = torch.empty_like(maxima)
    out = torch.empty(1, length, heads, dim, dtype=q.dtype, device=device).transpose(1, 2)
    options = launch_options(ratio, dim, plan.page_size, fp8)
    kv_union_kernel[(items.shape[1], kv_heads)](
        q,
        k,
        v,
        k_scale,
        v_scale,
        kv.page_table,
        plan.positions,
        plan.kv_lens,
        inverted.slots,
        inverted.starts,
        items,
        chunk_ends,
        partial,
        maxima,
        sums,
        scale * LOG2_E,
        q.stride(1),
        q.stride(2),
        *strides,
        kv.page_table.stride(0),
        length * width,
        chunk_ends.shape[1],
        plan.num_pages,
        width,
        items.shape[1],
        GROUP=GROUP,
        CHUNK=CHUNK,
        RATIO=ratio,
        ROWS=options["ROWS"],
        D=dim,
        PAGE=kv.page_size,
        SIZE=plan.page_size,
        FP8=fp8,
        num_warps=options["num_warps"],
    )
    queries = max(1, 32 // ratio)
    reduce_kernel[(triton.cdiv(length, queries), kv_heads)](
        partial,
        maxima,
        sums,
        inverted.counts,
        v_scale,
        out,
        length,
        width,
        out.stride(1),
        out.stride(2),
        QUERIES=queries,
        RATIO=ratio,
        ROWS=triton.next_power_of_2(queries * ratio),
        D=dim,
        FP8=fp8,
        num_warps=4,
    )
    return out
