"""Exact block mass in plain Triton: two passes over the keys, no matrix of logits in memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backends import product_problem
from .paged import PagedKV

LOG2_E = 1.4426950408889634


@triton.jit
def _block_logits(
    query, k, table, block, tile, row, head_offset, kv_len, scale, kv_page, kv_slot,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Logits times log2(e) of one tile and one block; -inf for keys after their query."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    exists = token < kv_len
    page = tl.load(table + token // PAGE, mask=exists, other=0).to(tl.int64)
    rows = page * kv_page + (token % PAGE) * kv_slot + head_offset
    keys = tl.load(k + rows[:, None] + tl.arange(0, D)[None, :], mask=exists[:, None], other=0.0)
    s = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if block >= tile:
        s = tl.where(token[None, :] <= (tile * BLOCK + row)[:, None], s, float("-inf"))
    return s


@triton.jit
def mass_kernel(
    q, k, table, mass,
    scale, q_len, kv_len, first_tile, tiles, blocks, heads, table_stride,
    q_batch, q_head, q_row, kv_page, kv_slot, kv_head,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a tile of one query head: the rows' maxima and totals first, then the blocks' shares of them."""
    t = tiles - 1 - tl.program_id(0)  # longest first
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    tile = first_tile + t
    real = tl.minimum(q_len - t * BLOCK, BLOCK)
    row = tl.arange(0, BLOCK)
    q_base = q + b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head + (t * BLOCK).to(tl.int64) * q_row
    places = q_base + row[:, None] * q_row + tl.arange(0, D)[None, :]
    query = tl.load(places, mask=(row < real)[:, None], other=0.0)
    table += b.to(tl.int64) * table_stride
    head_offset = h // GROUP * kv_head
    mass += (tl.program_id(1) * tiles + t).to(tl.int64) * blocks

    # Block 0 comes first and every row sees its key 0: the maximum is finite from then on.
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.range(0, tile + 1, num_stages=STAGES):
        s = _block_logits(query, k, table, j, tile, row, head_offset, kv_len, scale, kv_page, kv_slot, D, PAGE, BLOCK)
        new = tl.maximum(m, tl.max(s, 1))
        total = total * tl.exp2(m - new) + tl.sum(tl.exp2(s - new[:, None]), 1)
        m = new
    share = tl.where(row < real, 1.0 / total, 0.0)
    for j in tl.range(0, tile + 1, num_stages=STAGES):
        s = _block_logits(query, k, table, j, tile, row, head_offset, kv_len, scale, kv_page, kv_slot, D, PAGE, BLOCK)
        weights = tl.sum(tl.exp2(s - m[:, None]), 1) * share
        tl.store(mass + j, tl.sum(weights, 0))
    for c in range(tile + 1, blocks, BLOCK):
        n = c + tl.arange(0, BLOCK)
        tl.store(mass + n, tl.zeros([BLOCK], tl.float32), mask=n < blocks)


def refusal(q: Tensor, kv: PagedKV, block_size: int) -> str | None:
    """Why this kernel cannot run the call, or None."""
    return product_problem(q, kv.k_pages, block_size=block_size)


def launch_options(block_size: int) -> dict[str, int]:
    """Fixed launch table: warps and software-pipelining stages."""
    return {"num_warps": 8 if block_size == 128 else 4, "STAGES": 2}


def mass_triton(q: Tensor, kv: PagedKV, scale: float, block_size: int, q_offset: int) -> Tensor:
    """:func:`prefill_kernels.block_mass` in plain Triton, for calls that :func:`refusal` accepts."""
    batch, heads, q_len, dim = q.shape
    tiles, blocks = -(-q_len // block_size), -(-kv.kv_len // block_size)
    q = q if q.stride(3) == 1 else q.contiguous()
    mass = torch.empty(batch, heads, tiles, blocks, dtype=torch.float32, device=q.device)
    mass_kernel[(tiles, batch * heads)](
        q,
        kv.k_pages,
        kv.page_table,
        mass,
        scale * LOG2_E,
        q_len,
        kv.kv_len,
        q_offset // block_size,
        tiles,
        blocks,
        heads,
        kv.page_table.stride(0),
        *q.stride()[:3],
        *kv.k_pages.stride()[:3],
        GROUP=heads // kv.num_kv_heads,
        D=dim,
        PAGE=kv.page_size,
        BLOCK=block_size,
        **launch_options(block_size),
    )
    return mass
