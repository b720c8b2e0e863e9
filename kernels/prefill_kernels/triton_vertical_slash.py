"""Vertical-slash attention in plain Triton: any CUDA device, and the CPU interpreter.

Four kernels. Two write each head's windows and its diagonals as bits. One lists, for each tile, the columns that lie in
none of its windows, and counts what the tile attends to. The last multiplies: windows of consecutive keys under a mask
of bits, then gathered columns. K and V are read through pointers, token by token through the page table, so windows may
begin anywhere and every page size works.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backends import product_problem
from .paged import PagedKV
from .plans import TileStats
from .triton_osk import LOG2_E, _accumulate, _finish
from .vertical_slash import STEP, VerticalSlashPlan, members, slash_ranges

_MAX_GATHERED = 1 << 27
"""Most entries of the tiles' column lists held at once (512 MiB of int32)."""


@triton.jit
def _near(below, offsets, distance, valid, length, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Last listed offset at or before a distance: its number (-1: none), itself, and whether a range holds it."""
    number = tl.load(below + tl.minimum(distance + 1, length), mask=valid, other=0) - 1
    has = number >= 0
    last = tl.load(offsets + number, mask=has, other=0)
    following = tl.load(offsets + number + 1, mask=has, other=0)
    return number, last, has & ((distance - last < BLOCK) | (following - last < BLOCK + STEP))


@triton.jit
def windows_kernel(
    below, offsets, starts, befores, windows, window_count, covered,
    length, reach, tiles, below_stride, ranges_stride, windows_stride, covered_stride,
    BLOCK: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """:func:`prefill_kernels.vertical_slash.slash_index`, one program for CHUNK distances of one line."""
    line = tl.program_id(1).to(tl.int64)
    below += line * below_stride
    offsets += line * ranges_stride
    place = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    valid = place < reach
    number, last, inside = _near(below, offsets, place, valid, length, BLOCK, STEP)
    has = number >= 0
    start = tl.load(starts + line * ranges_stride + number, mask=has, other=0)
    before = tl.load(befores + line * ranges_stride + number, mask=has, other=0)
    step = tl.where(has, place - start, 0) // STEP
    beginning = tl.where(has, start + step * STEP, 0)
    held_number, held_last, held = _near(below, offsets, beginning, valid & has, length, BLOCK, STEP)
    tl.store(covered + line * covered_stride + place, held.to(tl.int8), mask=valid)

    high = tl.load(below + tl.minimum(place + STEP, length), mask=valid, other=0)
    low = tl.load(below + tl.minimum(tl.maximum(place - BLOCK + 1, 0), length), mask=valid, other=0)
    packed = 2 * place + (high - low == BLOCK + STEP - 1).to(tl.int32)
    tl.store(windows + line * windows_stride + before + step, packed, mask=inside & (beginning == place))

    tile = place // BLOCK
    last_step = (last + BLOCK - 1 - start) // STEP
    reached = tl.where(has, before + 1 + tl.where(held, step, last_step), 0)
    tl.store(window_count + line * tiles + tile, reached, mask=((place + 1) % BLOCK == 0) & (tile < tiles))


@triton.jit
def bits_kernel(member, words, length, origin, count, member_stride, words_stride, CHUNK: tl.constexpr):
    """Offsets as bits, the largest first, so that the keys of a row ascend with the bits: s at ``origin`` - s."""
    line = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    bit = tl.arange(0, 64)
    offset = origin - (word[:, None] * 64 + bit[None, :])
    listed = tl.load(member + line * member_stride + offset, mask=(offset >= 0) & (offset < length), other=0)
    # Each bit is set once, so that the sum is their union.
    packed = tl.sum(listed.to(tl.int64) << bit[None, :].to(tl.int64), 1)
    tl.store(words + line * words_stride + word, packed, mask=word < count)


@triton.jit
def gather_kernel(
    columns, covered, below, windows, window_count, gathered, gathered_count, stats,
    length, tiles, first_line, width, columns_stride, covered_stride, below_stride, windows_stride, stats_stride,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """List the columns of one tile that no window covers; count its cells, its executed blocks and its masked cells.

    A row i of the tile attends to ``below[i + 1]`` diagonals and to its columns; a column met by a diagonal in
    ``below[i - j + 1] - below[i - j]`` is one cell, not two. Executed are its keys in windows, and the columns that lie
    in none; with WHOLE it attends to them all.
    """
    t = tl.program_id(0)
    line = first_line + tl.program_id(1)
    item = line.to(tl.int64) * tiles + t
    start = t * BLOCK
    end = tl.minimum(start + BLOCK, length)
    columns += line.to(tl.int64) * columns_stride
    covered += line.to(tl.int64) * covered_stride
    below += line.to(tl.int64) * below_stride
    gathered += (tl.program_id(1).to(tl.int64) * tiles + t) * width

    count = tl.load(window_count + item)
    row = tl.arange(0, BLOCK)
    # Every row sees the windows but for the distances that lie after it.
    last = tl.load(windows + line.to(tl.int64) * windows_stride + tl.maximum(count - 1, 0)) >> 1
    beyond = tl.maximum(last + STEP - start - BLOCK, 0)
    hidden = tl.load(covered + row).to(tl.int32) * tl.minimum(end - start, BLOCK - 1 - row)
    executed = tl.where(count > 0, (count * STEP - beyond) * (end - start), 0) - tl.sum(hidden, 0)
    cells = tl.sum(tl.load(below + start + row + 1, mask=start + row < end, other=0), 0)
    total = 0
    for i in range(0, width, CHUNK):
        slot = i + tl.arange(0, CHUNK)
        key = tl.load(columns + slot, mask=slot < width, other=-1)
        causal = (key >= 0) & (key < end)
        apart = causal & (tl.load(covered + (start + BLOCK - 1 - key), mask=causal, other=1) == 0)
        rank = total + tl.cumsum(apart.to(tl.int32), 0) - 1
        tl.store(gathered + rank, key, mask=apart)
        total += tl.sum(apart.to(tl.int32), 0)
        first = tl.maximum(start - key, 0)
        executed += tl.sum(tl.where(apart, end - key - first, 0), 0)
        if not WHOLE:
            met = tl.load(below + (end - key), mask=causal, other=0) - tl.load(below + first, mask=causal, other=0)
            cells += tl.sum(tl.where(causal, end - key - first - met, 0), 0)
    tl.store(gathered_count + item, total)
    steps = count + (total + STEP - 1) // STEP
    blocks = (steps * STEP + BLOCK - 1) // BLOCK
    if WHOLE:
        cells = executed
    tl.store(stats + item, cells)
    tl.store(stats + stats_stride + item, blocks)
    tl.store(stats + 2 * stats_stride + item, executed - cells)


@triton.jit
def _bits_from(words, place):
    """64 bits of a bit array, from each of the given places on."""
    low = tl.load(words + (place >> 6)).to(tl.uint64, bitcast=True)
    high = tl.load(words + (place >> 6) + 1).to(tl.uint64, bitcast=True)
    shift = (place & 63).to(tl.uint64)
    # Two shifts: one by 64 has no defined result.
    return (low >> shift) | ((high << 1) << (63 - shift))


@triton.jit
def _token_rows(table, key, exists, head_offset, stride_page, stride_slot, PAGE: tl.constexpr):
    """Element offsets of tokens of one head."""
    page = tl.load(table + key // PAGE, mask=exists, other=0).to(tl.int64)
    return page * stride_page + (key % PAGE) * stride_slot + head_offset


@triton.jit
def vertical_slash_kernel(
    q, k, v, table, words, windows, window_count, column_member, gathered, gathered_count, out,
    scale, length, tiles, heads, first_line, origin, table_stride, words_stride, windows_stride, member_stride, width,
    q_batch, q_head, q_row, kv_page, kv_slot, kv_head, out_batch, out_head, out_row,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One program a tile. ``words`` holds the listed offsets s as bits at place ``origin`` - s of each line."""
    t = tiles - 1 - tl.program_id(0)  # longest first
    line = first_line + tl.program_id(1)
    b, h = line // heads, line % heads
    item = line.to(tl.int64) * tiles + t
    start = t * BLOCK
    real = tl.minimum(length - start, BLOCK)
    row = tl.arange(0, BLOCK)
    dim = tl.arange(0, D)
    column = tl.arange(0, STEP)
    q_base = q + b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head + start.to(tl.int64) * q_row
    query = tl.load(q_base + row[:, None] * q_row + dim[None, :], mask=(row < real)[:, None], other=0.0)
    table += b.to(tl.int64) * table_stride
    words += line.to(tl.int64) * words_stride
    windows += line.to(tl.int64) * windows_stride
    column_member += line.to(tl.int64) * member_stride
    gathered += (tl.program_id(1).to(tl.int64) * tiles + t) * width
    head_offset = h // GROUP * kv_head

    m = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, D], tl.float32)
    for i in tl.range(0, tl.load(window_count + item), num_stages=STAGES):
        packed = tl.load(windows + i)
        first = start + BLOCK - STEP - (packed >> 1)
        key = first + column
        exists = (key >= 0) & (key < length)
        rows = _token_rows(table, key, exists, head_offset, kv_page, kv_slot, PAGE)
        keys = tl.load(k + rows[:, None] + dim[None, :], mask=exists[:, None], other=0.0)
        values = tl.load(v + rows[:, None] + dim[None, :], mask=exists[:, None], other=0.0)
        s = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if WHOLE:
            if (first < 0) | (first + STEP > start):
                s = tl.where(exists[None, :] & (key[None, :] <= (start + row)[:, None]), s, float("-inf"))
        elif ((packed & 1) == 0) | (first < 0):
            bits = _bits_from(words, origin - (start + row - first))
            hit = ((bits[:, None] >> column[None, :].to(tl.uint64)) & 1) != 0
            listed = tl.load(column_member + key, mask=exists, other=0) != 0
            hit = hit | (listed[None, :] & (key[None, :] <= (start + row)[:, None]))
            s = tl.where(hit & exists[None, :], s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        total, acc = _accumulate(s, values, m, new, total, acc, scale)
        m = new
    count = tl.load(gathered_count + item)
    for i in tl.range(0, count, STEP, num_stages=STAGES):
        exists = i + column < count
        key = tl.load(gathered + i + column, mask=exists, other=0)
        rows = _token_rows(table, key, exists, head_offset, kv_page, kv_slot, PAGE)
        keys = tl.load(k + rows[:, None] + dim[None, :], mask=exists[:, None], other=0.0)
        values = tl.load(v + rows[:, None] + dim[None, :], mask=exists[:, None], other=0.0)
        s = tl.dot(query, tl.trans(keys), input_precision="ieee")
        s = tl.where(exists[None, :] & (key[None, :] <= (start + row)[:, None]), s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        total, acc = _accumulate(s, values, m, new, total, acc, scale)
        m = new
    out_base = out + b.to(tl.int64) * out_batch + h.to(tl.int64) * out_head + start.to(tl.int64) * out_row
    _finish(out_base, acc, total, row, dim, real, out_row)


def refusal(q: Tensor, kv: PagedKV, plan: VerticalSlashPlan) -> str | None:
    """Why these kernels cannot run the call, or None."""
    if plan.block_size not in (64, 128):
        return f"block_size={plan.block_size}: must be 64 or 128"
    return product_problem(q, kv.k_pages, kv.v_pages)


def launch_options(dim: int, block_size: int) -> dict[str, int]:
    """Fixed launch table: warps and software-pipelining stages."""
    return {"num_warps": 8 if block_size == 128 else 4, "STAGES": 3}


@dataclass(frozen=True)
class Prepared:
    """A plan as the kernels read it; lines are [B * Hq].

    Attributes:
        below: int32 [lines, L + 1].
        windows, window_count, covered: as in :class:`prefill_kernels.vertical_slash.SlashIndex`.
        words: int64 [lines, words], listed offsets as bits; around them zeros, as far as a tile can ask.
        origin: place of offset 0 among the bits.
        columns: int32 [lines, at least 1], contiguous.
        column_member: int8 [lines, L].
    """

    below: Tensor
    windows: Tensor
    window_count: Tensor
    covered: Tensor
    words: Tensor
    origin: int
    columns: Tensor
    column_member: Tensor


def prepared(plan: VerticalSlashPlan) -> Prepared:
    """Windows and bits of a plan, made on its device without waiting for it."""
    ranges, size, length, tiles = slash_ranges(plan), plan.block_size, plan.length, plan.tiles
    device, lines, reach = ranges.below.device, ranges.below.shape[0], plan.length + plan.block_size
    windows = torch.empty(lines, reach // STEP + 1, dtype=torch.int32, device=device)
    window_count = torch.empty(lines, tiles, dtype=torch.int32, device=device)
    covered = torch.empty(lines, reach, dtype=torch.int8, device=device)
    starts, befores = ranges.start.contiguous(), ranges.before.contiguous()
    windows_kernel[(triton.cdiv(reach, 512), lines)](
        ranges.below,
        ranges.offsets,
        starts,
        befores,
        windows,
        window_count,
        covered,
        length,
        reach,
        tiles,
        ranges.below.stride(0),
        ranges.offsets.stride(0),
        windows.stride(0),
        covered.stride(0),
        BLOCK=size,
        STEP=STEP,
        CHUNK=512,
        num_warps=4,
    )
    origin = -(-(length + 2 * size + 2 * STEP) // 64) * 64
    count = origin // 64 + 2 + size // 64
    words = torch.empty(lines, count, dtype=torch.int64, device=device)
    member = ranges.member.view(torch.int8)
    bits_kernel[(triton.cdiv(count, 32), lines)](
        member,
        words,
        length,
        origin,
        count,
        member.stride(0),
        words.stride(0),
        CHUNK=32,
        num_warps=4,
    )
    columns = torch.nn.functional.pad(plan.columns.flatten(0, 1), (0, 0 if plan.columns.shape[-1] else 1), value=-1)
    column_member = members(plan.columns, length).view(torch.int8)
    return Prepared(ranges.below, windows, window_count, covered, words, origin, columns.contiguous(), column_member)


def vertical_slash_triton(q: Tensor, kv: PagedKV, plan: VerticalSlashPlan, scale: float) -> tuple[Tensor, TileStats]:
    """:func:`prefill_kernels.vertical_slash_attention` in plain Triton, for calls that :func:`refusal` accepts."""
    batch, heads, length, dim = q.shape
    tiles, lines, size = plan.tiles, batch * heads, plan.block_size
    q = q if q.stride(3) == 1 else q.contiguous()
    out = torch.empty(batch, length, heads, dim, dtype=q.dtype, device=q.device).transpose(1, 2)
    index = prepared(plan)
    width = index.columns.shape[1]
    stats = torch.empty(3, batch, heads, tiles, dtype=torch.int32, device=q.device)
    gathered_count = torch.empty(lines, tiles, dtype=torch.int32, device=q.device)
    # The lists of all tiles and heads can be large: some heads at a time.
    at_once = max(1, min(lines, _MAX_GATHERED // (tiles * width)))
    gathered = torch.empty(at_once, tiles, width, dtype=torch.int32, device=q.device)
    for first in range(0, lines, at_once):
        some = min(at_once, lines - first)
        gather_kernel[(tiles, some)](
            index.columns,
            index.covered,
            index.below,
            index.windows,
            index.window_count,
            gathered,
            gathered_count,
            stats,
            length,
            tiles,
            first,
            width,
            index.columns.stride(0),
            index.covered.stride(0),
            index.below.stride(0),
            index.windows.stride(0),
            stats.stride(0),
            BLOCK=size,
            CHUNK=min(1024, max(16, triton.next_power_of_2(width))),
            STEP=STEP,
            WHOLE=plan.whole_windows,
            num_warps=4,
        )
        vertical_slash_kernel[(tiles, some)](
            q,
            kv.k_pages,
            kv.v_pages,
            kv.page_table,
            index.words,
            index.windows,
            index.window_count,
            index.column_member,
            gathered,
            gathered_count,
            out,
            scale * LOG2_E,
            length,
            tiles,
            heads,
            first,
            index.origin,
            kv.page_table.stride(0),
            index.words.stride(0),
            index.windows.stride(0),
            index.column_member.stride(0),
            width,
            *q.stride()[:3],
            *kv.k_pages.stride()[:3],
            *out.stride()[:3],
            GROUP=heads // kv.num_kv_heads,
            D=dim,
            PAGE=kv.page_size,
            BLOCK=size,
            STEP=STEP,
            WHOLE=plan.whole_windows,
            **launch_options(dim, size),
        )
    cells, blocks, masked = stats
    return out, TileStats(cells, cells, blocks, blocks, backend="triton", masked_cells=masked)
