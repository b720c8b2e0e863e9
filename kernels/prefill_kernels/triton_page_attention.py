"""Union attention in plain Triton: any CUDA device, any ratio of heads, and the CPU interpreter (not for E4M3).

One program a group of eight queries and a KV head; a tile row is (slot, head of the KV head's queries). Q, causal
position and output are addressed by the original query index. A page is walked in steps of at most 128 tokens, always
in ascending order, and a step in which a row sees nothing leaves that row as it was, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backends import half_problem, interpreting
from .fp8 import Fp8KV
from .paged import PagedKV
from .pages import GROUP, PagePlan
from .triton_osk import LOG2_E
from .unions import Unions

STEP = 128
"""Most tokens of a step."""


@triton.jit
def _quantized_rows(query):
    """Rows as E4M3 and their scales, amax / 448; a row without any number gets 1."""
    query = query.to(tl.float32)
    row_scale = tl.max(tl.abs(query), 1) / 448.0
    row_scale = tl.where(row_scale == 0.0, 1.0, row_scale)
    return (query / row_scale[:, None]).to(tl.float8e4nv), row_scale


@triton.jit
def _step_tiles(
    k, v, table, first, kv_len, k_page, k_slot, k_base, v_page, v_slot, v_dim, v_base,
    D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Keys [BN, D] and values ([BN, D], or transposed [D, BN] in E4M3) of the tokens from ``first`` on.

    ``table`` is the request's row of the page table; tokens that do not exist are 0, whatever their slots hold.
    """
    token = first + tl.arange(0, BN)
    dim = tl.arange(0, D)
    exists = token < kv_len
    if PAGE % BN == 0:  # the step lies in one physical page, and its first token exists
        page = tl.load(table + first // PAGE).to(tl.int64)
        slot = first % PAGE + tl.arange(0, BN)
        key_rows = page * k_page + slot * k_slot + k_base
        value_rows = page * v_page + slot * v_slot + v_base
    else:
        page = tl.load(table + token // PAGE, mask=exists, other=0).to(tl.int64)
        key_rows = page * k_page + (token % PAGE) * k_slot + k_base
        value_rows = page * v_page + (token % PAGE) * v_slot + v_base
    keys = tl.load(k + key_rows[:, None] + dim[None, :], mask=exists[:, None], other=0.0)
    if FP8:
        values = tl.load(v + value_rows[None, :] + dim[:, None] * v_dim, mask=exists[None, :], other=0.0)
    else:
        values = tl.load(v + value_rows[:, None] + dim[None, :], mask=exists[:, None], other=0.0)
    return keys, values


@triton.jit
def _weights(s, m):
    """Online softmax in log2 units: new maximum, weights, and what the old sums decay by.

    A row whose maximum does not change decays by exactly 1: the difference is taken before anything is rounded.
    """
    new = tl.maximum(m, tl.max(s, 1))
    shift = tl.where(new == float("-inf"), 0.0, new)
    return new, tl.exp2(s - shift[:, None]), tl.exp2(m - shift)


@triton.jit
def _mixed(p, values, acc, FP8: tl.constexpr):
    """P V added to ``acc``; E4M3 probabilities are scaled to the format's range first."""
    if FP8:
        return tl.dot((p * 448.0).to(tl.float8e4nv), tl.trans(values), acc)
    else:
        return tl.dot(p.to(values.dtype), values, acc, input_precision="ieee")


@triton.jit
def page_attention_kernel(
    q, k, v, k_scale, v_scale, table, positions, kv_lens, requests, ids, pages, members, counts, out,
    scale, q_head, q_row, k_page, k_slot, k_head, v_page, v_slot, v_dim, v_head, out_head, out_row,
    table_stride, ids_head, width, groups,
    GROUP: tl.constexpr, RATIO: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, BN: tl.constexpr, FP8: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One group of one KV head. SIZE is the logical and PAGE the physical page; ``scale`` includes log2(e)."""
    STEPS: tl.constexpr = SIZE // BN
    group = groups - 1 - tl.program_id(0)  # later queries see more
    head = tl.program_id(1)
    item = head.to(tl.int64) * groups + group
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, D)
    slot = row // RATIO
    query_head = head * RATIO + row % RATIO
    query_id = tl.load(ids + head.to(tl.int64) * ids_head + group * GROUP + slot, mask=slot < GROUP, other=-1)
    real = query_id >= 0
    request = tl.load(requests + group)
    kv_len = tl.load(kv_lens + request)
    position = tl.load(positions + query_id, mask=real, other=0)
    seen = tl.minimum(position + 1, kv_len)
    edge = tl.min(tl.where(real, seen, kv_len), 0)  # every row sees the tokens before it

    query_rows = query_id.to(tl.int64)
    places = q + query_head.to(tl.int64) * q_head + query_rows * q_row
    query = tl.load(places[:, None] + dim[None, :], mask=real[:, None], other=0.0)
    factor = tl.full([ROWS], 1.0, tl.float32) * scale
    if FP8:
        query, row_scale = _quantized_rows(query)
        factor = row_scale * (tl.load(k_scale + head) * scale)
    table += request.to(tl.int64) * table_stride
    k_base = head.to(tl.int64) * k_head
    v_base = head.to(tl.int64) * v_head

    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    count = tl.load(counts + item)
    for i in tl.range(0, count * STEPS, num_stages=STAGES):
        first = tl.load(pages + item * width + i // STEPS) * SIZE + i % STEPS * BN
        member = tl.load(members + item * width + i // STEPS)
        # A page's last steps may lie beyond the request.
        inside = tl.minimum(first, tl.maximum(kv_len - 1, 0) // BN * BN)
        keys, values = _step_tiles(
            k, v, table, inside, kv_len, k_page, k_slot, k_base, v_page, v_slot, v_dim, v_base, D, PAGE, BN, FP8
        )
        if FP8:
            s = tl.dot(query, tl.trans(keys))
        else:
            s = tl.dot(query, tl.trans(keys), input_precision="ieee")
        s = tl.where((((member >> slot) & 1) != 0)[:, None], s * factor[:, None], float("-inf"))
        if first + BN > edge:
            token = first + tl.arange(0, BN)
            s = tl.where(token[None, :] < seen[:, None], s, float("-inf"))
        m, p, decay = _weights(s, m)
        total = total * decay + tl.sum(p, 1)
        acc = _mixed(p, values, acc * decay[:, None], FP8)
    # An empty support leaves a zero denominator: its output is zero, not 0/0.
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if FP8:
        acc = acc * (tl.load(v_scale + head) / 448.0)
    places = out + query_head.to(tl.int64) * out_head + query_rows * out_row
    tl.store(places[:, None] + dim[None, :], acc.to(out.dtype.element_ty), mask=real[:, None])


def problem(q: Tensor, kv: PagedKV | Fp8KV, plan: PagePlan) -> str | None:
    """Why these kernels cannot run the call, or None."""
    ratio, dim, size = q.shape[1] // kv.num_kv_heads, q.shape[3], plan.page_size
    dtypes = (q.dtype,) if isinstance(kv, Fp8KV) else (q.dtype, kv.k_pages.dtype, kv.v_pages.dtype)
    if reason := half_problem(q.device, *dtypes):
        return reason
    if ratio > 16:
        return f"{ratio} query heads a KV head: at most 16"
    if dim not in (16, 32, 64, 128):
        return f"head_dim={dim}: must be 16, 32, 64 or 128"
    if size < 16 or size & (size - 1) or size > 1024:
        return f"page_size={size}: must be a power of two from 16 to 1024"
    if isinstance(kv, PagedKV):
        if kv.k_pages.stride(3) != 1 or kv.v_pages.stride(3) != 1:
            return "key and value pages must have contiguous rows"
        return None
    if interpreting():
        return "Triton's interpreter cannot multiply E4M3"
    if torch.cuda.get_device_capability(q.device) < (8, 9):
        return "E4M3 products need compute capability 8.9"
    if size < 32 or dim < 32:
        return f"page_size={size}, head_dim={dim}: E4M3 products need at least 32 of both"
    if kv.k_pages.stride(3) != 1 or kv.vt_pages.stride(3) != 1:
        return "key pages must have contiguous rows, transposed value pages contiguous tokens"
    return None


def launch_options(ratio: int, dim: int, page_size: int, fp8: bool) -> dict[str, int]:
    """Fixed launch table, by nothing that an unrelated query could change."""
    rows = max(16, triton.next_power_of_2(GROUP * ratio))
    step = min(page_size, STEP)
    if rows == 128:
        return {"ROWS": rows, "BN": step, "STAGES": 3 if fp8 or dim < 128 else 2, "num_warps": 8}
    return {"ROWS": rows, "BN": min(step, 64 if dim == 128 and not fp8 else STEP), "STAGES": 3, "num_warps": 4}


def cache_arguments(kv: PagedKV | Fp8KV) -> tuple[Any, ...]:
    """Pools, scales and strides (page, slot and head of K; page, slot, dimension and head of V) of a cache."""
    if isinstance(kv, Fp8KV):
        page, head, dim, slot = kv.vt_pages.stride()
        pools = (kv.k_pages, kv.vt_pages, kv.k_scale, kv.v_scale)
        return (*pools, *kv.k_pages.stride()[:3], page, slot, dim, head)
    page, slot, head, dim = kv.v_pages.stride()
    # The scales are not read.
    pools = (kv.k_pages, kv.v_pages, kv.k_pages, kv.v_pages)
    return (*pools, *kv.k_pages.stride()[:3], page, slot, dim, head)


def union_attention(q: Tensor, kv: PagedKV | Fp8KV, plan: PagePlan, unions: Unions, scale: float, out: Tensor) -> None:
    """:func:`prefill_kernels.union_attention` in plain Triton, for calls that :func:`problem` accepts."""
    ratio, dim, fp8 = q.shape[1] // kv.num_kv_heads, q.shape[3], isinstance(kv, Fp8KV)
    k, v, k_scale, v_scale, *strides = cache_arguments(kv)
    page_attention_kernel[(plan.groups, kv.num_kv_heads)](
        q,
        k,
        v,
        k_scale,
        v_scale,
        kv.page_table,
        plan.positions,
        plan.kv_lens,
        unions.requests,
        unions.ids,
        unions.pages,
        unions.members,
        unions.count,
        out,
        scale * LOG2_E,
        q.stride(1),
        q.stride(2),
        *strides,
        out.stride(1),
        out.stride(2),
        kv.page_table.stride(0),
        unions.ids.stride(0),
        unions.pages.shape[2],
        plan.groups,
        GROUP=GROUP,
        RATIO=ratio,
        D=dim,
        PAGE=kv.page_size,
        SIZE=plan.page_size,
        FP8=fp8,
        **launch_options(ratio, dim, plan.page_size, fp8),
    )
