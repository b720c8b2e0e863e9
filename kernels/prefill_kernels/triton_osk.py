"""Ordered-Skipping Kernel in plain Triton: any CUDA device, and the CPU interpreter; and its logical-skip counterpart.

K and V are read through pointers, token by token through the page table, so every page size and block size works.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backends import product_problem
from .capabilities import provides
from .checks import check_operands, check_table
from .paged import PagedKV
from .plans import BlockPlan, TileStats

LOG2_E = 1.4426950408889634


@triton.jit
def _nan_max(a, b):
    """Maximum that keeps NaN, so that a broken key shows in the output instead of being skipped."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _rows_of_block(
    table, block, head_offset, kv_len, stride_page, stride_slot, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """Element offsets of the tokens of one block of one head, and which tokens exist."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    exists = token < kv_len
    page = tl.load(table + token // PAGE, mask=exists, other=0).to(tl.int64)
    return page * stride_page + (token % PAGE) * stride_slot + head_offset, exists


@triton.jit
def _logits(q, k, block, tile, row, BLOCK: tl.constexpr):
    """Unscaled logits; only the diagonal block of a tile holds keys after a query."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if block >= tile:
        key = block * BLOCK + tl.arange(0, BLOCK)
        s = tl.where(key[None, :] <= (tile * BLOCK + row)[:, None], s, float("-inf"))
    return s


@triton.jit
def _accumulate(s, v, m, new, total, acc, scale):
    """Algorithm A, lines 17-20; maxima are of unscaled logits, ``scale`` includes log2(e)."""
    shift = tl.where(new == float("-inf"), 0.0, new * scale)
    p = tl.exp2(s * scale - shift[:, None])
    decay = tl.exp2(m * scale - shift)
    total = total * decay + tl.sum(p, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return total, acc


@triton.jit
def _finish(out, acc, total, row, dim, real, stride_row):
    # An empty list leaves a zero denominator: its output is zero, not 0/0.
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    places = out + row.to(tl.int64)[:, None] * stride_row + dim[None, :]
    tl.store(places, acc.to(out.dtype.element_ty), mask=(row < real)[:, None])


@triton.jit
def _store_stats(stats, stride, visited, computed, visited_diagonal, computed_diagonal, real, BLOCK: tl.constexpr):
    below = real * BLOCK
    on = real * (real + 1) // 2
    tl.store(stats, (visited - visited_diagonal) * below + visited_diagonal * on)
    tl.store(stats + stride, (computed - computed_diagonal) * below + computed_diagonal * on)
    tl.store(stats + 2 * stride, visited)
    tl.store(stats + 3 * stride, computed)


@triton.jit
def osk_kernel(
    q, k, v, table, order, counts, out, stats,
    scale, threshold, q_len, kv_len, first_tile, tiles, width, heads, table_stride, stats_stride,
    q_batch, q_head, q_row, kv_page, kv_slot, kv_head, out_batch, out_head, out_row,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SKIP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program a tile; ``heads`` counts query heads, ``order`` is [B, heads, tiles, width]."""
    t = tiles - 1 - tl.program_id(0)  # longest first
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    item = tl.program_id(1) * tiles + t
    tile = first_tile + t
    real = tl.minimum(q_len - t * BLOCK, BLOCK)
    row = tl.arange(0, BLOCK)
    dim = tl.arange(0, D)
    q_base = q + b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head + (t * BLOCK).to(tl.int64) * q_row
    query = tl.load(q_base + row[:, None] * q_row + dim[None, :], mask=(row < real)[:, None], other=0.0)
    table += b.to(tl.int64) * table_stride
    order += item.to(tl.int64) * width
    head_offset = h // GROUP * kv_head

    m = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, D], tl.float32)
    count = tl.load(counts + item)
    computed = 0
    visited_diagonal = 0
    computed_diagonal = 0
    for i in tl.range(0, count, num_stages=STAGES):
        block = tl.load(order + i)
        rows, exists = _rows_of_block(table, block, head_offset, kv_len, kv_page, kv_slot, PAGE, BLOCK)
        keys = tl.load(k + rows[:, None] + dim[None, :], mask=exists[:, None], other=0.0)
        values = tl.load(v + rows[:, None] + dim[None, :], mask=exists[:, None], other=0.0)
        s = _logits(query, keys, block, tile, row, BLOCK)
        local = tl.reduce(s, 1, _nan_max)
        new = _nan_max(m, local)
        on_diagonal = (block == tile).to(tl.int32)
        visited_diagonal += on_diagonal
        if SKIP:
            # Rows beyond the sequence and rows that see no key abstain. "Not below" keeps NaN in.
            gap = tl.where((row < real) & (local != float("-inf")), local - new, float("-inf"))
            skipped = (tl.reduce(gap, 0, _nan_max) < threshold) & (i > 0)
            if not skipped:
                total, acc = _accumulate(s, values, m, new, total, acc, scale)
                m = new
                computed += 1
                computed_diagonal += on_diagonal
        else:
            total, acc = _accumulate(s, values, m, new, total, acc, scale)
            m = new
    if not SKIP:
        computed = count
        computed_diagonal = visited_diagonal
    out_base = out + b.to(tl.int64) * out_batch + h.to(tl.int64) * out_head + (t * BLOCK).to(tl.int64) * out_row
    _finish(out_base, acc, total, row, dim, real, out_row)
    _store_stats(stats + item, stats_stride, count, computed, visited_diagonal, computed_diagonal, real, BLOCK)


@triton.jit
def logical_kernel(
    q, k, v, table, mask, out,
    scale, q_len, kv_len, first_tile, tiles, blocks, heads, table_stride,
    q_batch, q_head, q_row, kv_page, kv_slot, kv_head, out_batch, out_head, out_row,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk every causal block and test ``mask`` (int8 [B, heads, tiles, blocks]): skipping without jumping."""
    t = tiles - 1 - tl.program_id(0)
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    tile = first_tile + t
    real = tl.minimum(q_len - t * BLOCK, BLOCK)
    row = tl.arange(0, BLOCK)
    dim = tl.arange(0, D)
    q_base = q + b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head + (t * BLOCK).to(tl.int64) * q_row
    query = tl.load(q_base + row[:, None] * q_row + dim[None, :], mask=(row < real)[:, None], other=0.0)
    table += b.to(tl.int64) * table_stride
    mask += (tl.program_id(1) * tiles + t).to(tl.int64) * blocks
    head_offset = h // GROUP * kv_head

    m = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, D], tl.float32)
    for block in tl.range(0, tile + 1, num_stages=STAGES):
        if tl.load(mask + block) != 0:
            rows, exists = _rows_of_block(table, block, head_offset, kv_len, kv_page, kv_slot, PAGE, BLOCK)
            keys = tl.load(k + rows[:, None] + dim[None, :], mask=exists[:, None], other=0.0)
            values = tl.load(v + rows[:, None] + dim[None, :], mask=exists[:, None], other=0.0)
            s = _logits(query, keys, block, tile, row, BLOCK)
            new = _nan_max(m, tl.reduce(s, 1, _nan_max))
            total, acc = _accumulate(s, values, m, new, total, acc, scale)
            m = new
    out_base = out + b.to(tl.int64) * out_batch + h.to(tl.int64) * out_head + (t * BLOCK).to(tl.int64) * out_row
    _finish(out_base, acc, total, row, dim, real, out_row)


def refusal(q: Tensor, kv: PagedKV, plan: BlockPlan) -> str | None:
    """Why these kernels cannot run the call, or None."""
    return product_problem(q, kv.k_pages, kv.v_pages, block_size=plan.block_size)


def launch_options(dim: int, block_size: int) -> dict[str, int]:
    """Fixed launch table: warps and software-pipelining stages."""
    if block_size == 128:
        return {"num_warps": 8, "STAGES": 2 if dim == 128 else 3}
    return {"num_warps": 4, "STAGES": 2}


def osk_triton(q: Tensor, kv: PagedKV, plan: BlockPlan, scale: float) -> tuple[Tensor, TileStats]:
    """:func:`prefill_kernels.block_attention` in plain Triton, for calls that :func:`refusal` accepts."""
    batch, heads, q_len, dim = q.shape
    tiles, width = plan.order.shape[2:]
    q = q if q.stride(3) == 1 else q.contiguous()
    out = torch.empty(batch, q_len, heads, dim, dtype=q.dtype, device=q.device).transpose(1, 2)
    stats = torch.empty(4, batch, heads, tiles, dtype=torch.int32, device=q.device)
    threshold = plan.log_threshold
    osk_kernel[(tiles, batch * heads)](
        q,
        kv.k_pages,
        kv.v_pages,
        kv.page_table,
        plan.order.contiguous(),
        plan.count.contiguous(),
        out,
        stats,
        scale * LOG2_E,
        # Maxima are compared unscaled.
        threshold / scale if threshold is not None else 0.0,
        q_len,
        plan.kv_len,
        plan.first_tile,
        tiles,
        width,
        heads,
        kv.page_table.stride(0),
        stats.stride(0),
        *q.stride()[:3],
        *kv.k_pages.stride()[:3],
        *out.stride()[:3],
        GROUP=heads // kv.num_kv_heads,
        D=dim,
        PAGE=kv.page_size,
        BLOCK=plan.block_size,
        SKIP=threshold is not None,
        **launch_options(dim, plan.block_size),
    )
    return out, TileStats(*stats)


@provides(logical_skip=True)
def logical_skip_attention(q: Tensor, kv: PagedKV, mask: Tensor, plan: BlockPlan, *, scale: float) -> Tensor:
    """Attention over the blocks of a mask by walking every causal block, as mask-testing kernels do.

    Gives what :func:`prefill_kernels.block_attention` gives for the same set of blocks without in-kernel skipping; it
    is here to measure what jumping from listed block to listed block is worth.

    Args:
        q: [B, Hq, Lq, d].
        kv: keys and values of positions ``0 .. plan.kv_len - 1``.
        mask: bool [B, Hq, NQ, NK], as :func:`block_mask` makes it.
        plan: geometry only; its lists and skip scale are not read.
        scale: softmax scaling.

    Raises:
        ValueError: shapes or geometry that do not belong together, ``scale`` not above 0, or a call that the kernel
            cannot run.
    """
    plan.check_geometry()
    check_operands(q, kv, scale=scale, q_offset=plan.q_offset, block_size=plan.block_size)
    shape = (*q.shape[:2], -(-plan.q_len // plan.block_size), -(-plan.kv_len // plan.block_size))
    check_table("mask", mask, shape, torch.bool, q.device)
    reason = refusal(q, kv, plan)
    if reason is not None:
        raise ValueError(reason)
    batch, heads, q_len, dim = q.shape
    tiles, blocks = mask.shape[2:]
    q = q if q.stride(3) == 1 else q.contiguous()
    out = torch.empty(batch, q_len, heads, dim, dtype=q.dtype, device=q.device).transpose(1, 2)
    logical_kernel[(tiles, batch * heads)](
        q,
        kv.k_pages,
        kv.v_pages,
        kv.page_table,
        mask.contiguous().view(torch.int8),
        out,
        scale * LOG2_E,
        q_len,
        plan.kv_len,
        plan.first_tile,
        tiles,
        blocks,
        heads,
        kv.page_table.stride(0),
        *q.stride()[:3],
        *kv.k_pages.stride()[:3],
        *out.stride()[:3],
        GROUP=heads // kv.num_kv_heads,
        D=dim,
        PAGE=kv.page_size,
        BLOCK=plan.block_size,
        **launch_options(dim, plan.block_size),
    )
    return out


def block_mask(plan: BlockPlan) -> Tensor:
    """The set of blocks of a plan as bool [B, Hq, NQ, NK]."""
    blocks = -(-plan.kv_len // plan.block_size)
    mask = torch.zeros(*plan.count.shape, blocks + 1, dtype=torch.bool, device=plan.order.device)
    mask.scatter_(-1, torch.where(plan.order >= 0, plan.order, blocks).long(), True)
    return mask[..., :blocks].contiguous()
