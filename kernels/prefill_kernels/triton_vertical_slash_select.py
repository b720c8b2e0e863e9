"""Column and diagonal sums of the last queries' attention in plain Triton, without a matrix of scores.

Three kernels: row maxima and sums by ranges of keys, their merger, and a second product that sums the normalised
weights down columns and along diagonals. Rows of a product are shifted against each other by a gather inside the
program, so that a diagonal becomes a column; no two programs write one place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backends import product_problem
from .paged import PagedKV
from .triton_osk import LOG2_E

SPLITS = 64
"""Ranges of keys whose maxima are found in parallel."""


@triton.jit
def _logits(query, k, table, key, position, length, head_offset, dim, kv_page, kv_slot, scale, PAGE: tl.constexpr):
    """Logits times log2(e) of all rows with some keys, -inf where a key is not causal or does not exist."""
    exists = (key >= 0) & (key < length)
    page = tl.load(table + key // PAGE, mask=exists, other=0).to(tl.int64)
    rows = page * kv_page + (key % PAGE) * kv_slot + head_offset
    keys = tl.load(k + rows[:, None] + dim[None, :], mask=exists[:, None], other=0.0)
    s = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    return tl.where(exists[None, :] & (key[None, :] <= position[:, None]), s, float("-inf"))


@triton.jit
def _queries(q, b, h, q_batch, q_head, q_row, position, row, used, dim):
    base = q + b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head
    places = base + position.to(tl.int64)[:, None] * q_row + dim[None, :]
    return tl.load(places, mask=(row < used)[:, None], other=0.0)


@triton.jit
def maxima_kernel(
    q, k, table, head_list, maxima, sums,
    scale, length, used, listed, span, table_stride,
    q_batch, q_head, q_row, kv_page, kv_slot, kv_head,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of exponentials of each row over ``span`` keys; outputs are [lines, splits, ROWS]."""
    split, item = tl.program_id(0), tl.program_id(1)
    b = item // listed
    h = tl.load(head_list + item % listed).to(tl.int32)
    row, dim = tl.arange(0, ROWS), tl.arange(0, D)
    position = length - used + row
    query = _queries(q, b, h, q_batch, q_head, q_row, position, row, used, dim)
    table += b.to(tl.int64) * table_stride
    head_offset = h // GROUP * kv_head
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for i in range(0, span, KEYS):
        key = split * span + i + tl.arange(0, KEYS)
        s = _logits(query, k, table, key, position, length, head_offset, dim, kv_page, kv_slot, scale, PAGE)
        new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(m - shift) + tl.sum(tl.exp2(s - shift[:, None]), 1)
        m = new
    place = (item * tl.num_programs(0) + split) * ROWS + row
    tl.store(maxima + place, m)
    tl.store(sums + place, total)


@triton.jit
def merge_kernel(maxima, sums, shifts, SPLITS: tl.constexpr, ROWS: tl.constexpr):
    """Logarithm (base 2) of each row's denominator, written to ``shifts`` [lines, ROWS]."""
    item = tl.program_id(0)
    split, row = tl.arange(0, SPLITS), tl.arange(0, ROWS)
    place = (item * SPLITS + split)[:, None] * ROWS + row[None, :]
    m = tl.load(maxima + place)
    best = tl.max(m, 0)
    total = tl.sum(tl.load(sums + place) * tl.exp2(m - best[None, :]), 0)
    tl.store(shifts + item * ROWS + row, best + tl.log2(total))


@triton.jit
def sums_kernel(
    q, k, table, head_list, shifts, column, diagonal,
    scale, length, used, listed, table_stride,
    q_batch, q_head, q_row, kv_page, kv_slot, kv_head,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums over the rows of ROWS columns, and along the ROWS diagonals that end on those columns in the last row.

    A row r of the last ``used`` meets a diagonal that the last row meets at key j at key j - (used - 1 - r).
    """
    item = tl.program_id(1)
    b = item // listed
    h = tl.load(head_list + item % listed).to(tl.int32)
    row, dim = tl.arange(0, ROWS), tl.arange(0, D)
    position = length - used + row
    query = _queries(q, b, h, q_batch, q_head, q_row, position, row, used, dim)
    table += b.to(tl.int64) * table_stride
    head_offset = h // GROUP * kv_head
    shift = tl.load(shifts + item * ROWS + row)
    first = tl.program_id(0) * ROWS
    key = first - ROWS + tl.arange(0, 2 * ROWS)
    s = _logits(query, k, table, key, position, length, head_offset, dim, kv_page, kv_slot, scale, PAGE)
    p = tl.where((row < used)[:, None], tl.exp2(s - shift[:, None]), 0.0)
    # Each output reads its own row of the product, moved left by how far the row lies above the last.
    back = tl.maximum(used - 1 - row, 0)
    lined_up = tl.gather(p, ROWS + row[None, :] - back[:, None], 1)
    straight = tl.gather(p, tl.broadcast_to(ROWS + row[None, :], [ROWS, ROWS]), 1)
    end = first + row
    line = item.to(tl.int64) * length
    tl.store(column + line + end, tl.sum(straight, 0), mask=end < length)
    tl.store(diagonal + line + (length - 1 - end), tl.sum(lined_up, 0), mask=end < length)


def refusal(q: Tensor, kv: PagedKV, last_q: int) -> str | None:
    """Why these kernels cannot run the call, or None."""
    if last_q > 128:
        return f"last_q={last_q}: at most 128"
    return product_problem(q, kv.k_pages)


def scores_triton(q: Tensor, kv: PagedKV, heads: Tensor, scale: float, last_q: int) -> tuple[Tensor, Tensor]:
    """:func:`prefill_kernels.vertical_slash_scores` in plain Triton, for calls that :func:`refusal` accepts.

    Args:
        q: [B, Hq, L, d].
        kv: keys.
        heads: int64 [H], query heads on the device.
        scale: softmax scaling.
        last_q: number of last queries.
    """
    batch, q_heads, length, dim = q.shape
    q = q if q.stride(3) == 1 else q.contiguous()
    used, listed = min(length, last_q), len(heads)
    rows = max(16, triton.next_power_of_2(used))
    lines, device = batch * listed, q.device
    keys = 64
    splits = min(SPLITS, triton.next_power_of_2(-(-length // (4 * keys))))
    span = -(-length // (splits * keys)) * keys
    maxima, sums = torch.empty(2, lines, splits, rows, dtype=torch.float32, device=device)
    shifts = torch.empty(lines, rows, dtype=torch.float32, device=device)
    column, diagonal = torch.empty(2, batch, listed, length, dtype=torch.float32, device=device)
    strides = (kv.page_table.stride(0), *q.stride()[:3], *kv.k_pages.stride()[:3])
    shape = {"GROUP": q_heads // kv.num_kv_heads, "D": dim, "PAGE": kv.page_size, "ROWS": rows}
    scale2 = scale * LOG2_E
    maxima_kernel[(splits, lines)](
        q, kv.k_pages, kv.page_table, heads, maxima, sums, scale2, length, used, listed, span, *strides,
        KEYS=keys, num_warps=4, **shape,
    )  # fmt: skip
    merge_kernel[(lines,)](maxima, sums, shifts, SPLITS=splits, ROWS=rows, num_warps=4)
    sums_kernel[(-(-length // rows), lines)](
        q, kv.k_pages, kv.page_table, heads, shifts, column, diagonal, scale2, length, used, listed, *strides,
        num_warps=4 if rows <= 64 else 8, **shape,
    )  # fmt: skip
    return column, diagonal
