"""Kernel-Aware Proxy in plain Triton: one pass over the sampled logits, no N/s x N/s matrix in memory.

Softmax, max-pool over a block and max-norm of a row collapse to ``exp(block_max - row_max)`` (the denominator
cancels in equation 10), so the product loop keeps block maxima alone. They stay in float32, where "equals the row
maximum" (equation 12) is exact. A row that sees NaN gives NaN scores and no flag, as its softmax would. A program
keeps the maxima of its rows in a scratch row that it uses again for its next tile, small enough to stay in L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backends import multiprocessors, product_problem
from .paged import PagedKV

LOG2_E = 1.4426950408889634


@triton.jit
def sample_kernel(
    k, table, samples, kv_len, count, kv_heads, table_stride, kv_page, kv_slot, kv_head,
    D: tl.constexpr, PAGE: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Collect every STRIDE-th key of a head in a row of ``samples`` [B, Hkv, count, D]; zeros beyond the sequence."""
    b, kv = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, D)
    token = n * STRIDE
    exists = token < kv_len
    page = tl.load(table + b.to(tl.int64) * table_stride + token // PAGE, mask=exists, other=0).to(tl.int64)
    rows = page * kv_page + (token % PAGE) * kv_slot + kv * kv_head
    keys = tl.load(k + rows[:, None] + dim[None, :], mask=exists[:, None], other=0.0)
    target = samples + tl.program_id(1).to(tl.int64) * count * D
    tl.store(target + n[:, None] * D + dim[None, :], keys, mask=(n < count)[:, None])


@triton.jit
def nan_max(a, b):
    """Maximum that keeps NaN, so that a broken key shows in the scores; one instruction as the plain one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _block_maxima(
    query, keys, j, position,
    D: tl.constexpr, STRIDE: tl.constexpr, BN: tl.constexpr, PER: tl.constexpr, M: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Largest logit of each row in each of BN // PER key blocks."""
    n = j * BN + tl.arange(0, BN)
    k = tl.load(keys + n[:, None] * D + tl.arange(0, D)[None, :])
    s = tl.dot(query, tl.trans(k), input_precision="ieee")
    if MASK:
        s = tl.where((n * STRIDE)[None, :] <= position[:, None], s, float("-inf"))
    return tl.reduce(tl.reshape(s, (M, BN // PER, PER)), 2, nan_max)


@triton.jit
def kap_kernel(
    q, samples, scratch, score, hrm,
    scale, q_len, count, first_tile, tiles, blocks, kv_heads, items, tile_groups,
    q_batch, q_head, q_row,
    GROUP: tl.constexpr, HEADS: tl.constexpr, TILES: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Scores and flags of TILES tiles of HEADS query heads of one KV head at a time; ``hrm`` is int8.

    Rows are ordered tile, head, sample. Items are ordered longest tiles first.
    """
    PER: tl.constexpr = BLOCK // STRIDE  # samples of a block
    M: tl.constexpr = TILES * HEADS * PER
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS  # programs that share the query heads of a KV head
    row = tl.arange(0, M)
    dim = tl.arange(0, D)
    scratch += tl.program_id(0).to(tl.int64) * M * blocks
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        side = item % (items // tile_groups)
        first = (tile_groups - 1 - item // (items // tile_groups)) * TILES
        b = side // (kv_heads * PARTS)
        kv = side // PARTS % kv_heads
        g = side % PARTS * HEADS + row // PER % HEADS
        h = kv * GROUP + g
        t = first + row // (HEADS * PER)
        local = t * BLOCK + row % PER * STRIDE
        used = (g < GROUP) & (t < tiles) & (local < q_len)
        position = first_tile * BLOCK + local
        places = q + b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head + local.to(tl.int64) * q_row
        query = tl.load(places[:, None] + dim[None, :], mask=used[:, None], other=0.0)
        keys = samples + (b * kv_heads + kv).to(tl.int64) * count * D

        # Keys before the first tile need no mask.
        last = tl.minimum(first_tile + first + TILES, blocks)
        whole = (first_tile + first) * PER // BN
        steps = tl.cdiv(last * PER, BN)
        top = tl.full([M], float("-inf"), tl.float32)
        for j in tl.range(0, whole, num_stages=STAGES):
            best = _block_maxima(query, keys, j, position, D, STRIDE, BN, PER, M, False) * scale
            top = nan_max(top, tl.reduce(best, 1, nan_max))
            n = j * (BN // PER) + tl.arange(0, BN // PER)
            tl.store(scratch + row[:, None] * blocks + n[None, :], best)
        for j in range(whole, steps):
            best = _block_maxima(query, keys, j, position, D, STRIDE, BN, PER, M, True) * scale
            top = nan_max(top, tl.reduce(best, 1, nan_max))
            n = j * (BN // PER) + tl.arange(0, BN // PER)
            tl.store(scratch + row[:, None] * blocks + n[None, :], best, mask=(n < blocks)[None, :])
        tl.debug_barrier()

        pair = tl.arange(0, TILES * HEADS)
        pair_head = side % PARTS * HEADS + pair % HEADS
        pair_tile = first + pair // HEADS
        stored = (pair_head < GROUP) & (pair_tile < tiles)
        target = ((b * kv_heads + kv) * GROUP + pair_head).to(tl.int64) * tiles + pair_tile
        for c in tl.range(0, last, CHUNK, num_stages=SCAN):
            n = c + tl.arange(0, CHUNK)
            causal = (n[None, :] <= (first_tile + t)[:, None]) & used[:, None]
            best = tl.load(scratch + row[:, None] * blocks + n[None, :], mask=causal, other=float("-inf"))
            share = tl.where(causal, tl.exp2((best - top[:, None]) * 1.4426950408889634), 0.0)
            flag = (causal & (best == top[:, None])).to(tl.int32)
            share = tl.sum(tl.reshape(share, (TILES * HEADS, PER, CHUNK)), 1)
            flag = tl.max(tl.reshape(flag, (TILES * HEADS, PER, CHUNK)), 1)
            here = stored[:, None] & (n < blocks)[None, :]
            tl.store(score + target[:, None] * blocks + n[None, :], share, mask=here)
            tl.store(hrm + target[:, None] * blocks + n[None, :], flag.to(tl.int8), mask=here)
        for c in range(tl.cdiv(last, CHUNK) * CHUNK, blocks, CHUNK):
            n = c + tl.arange(0, CHUNK)
            here = stored[:, None] & (n < blocks)[None, :]
            zero = tl.zeros([TILES * HEADS, CHUNK], tl.float32)
            tl.store(score + target[:, None] * blocks + n[None, :], zero, mask=here)
            tl.store(hrm + target[:, None] * blocks + n[None, :], zero.to(tl.int8), mask=here)
        tl.debug_barrier()


def refusal(q: Tensor, kv: PagedKV, stride: int, block_size: int) -> str | None:
    """Why this kernel cannot run the call, or None."""
    if block_size % stride:
        return f"stride={stride}, block_size={block_size}: the stride must divide the block"
    return product_problem(q, kv.k_pages, block_size=block_size)


def kap_triton(
    q: Tensor,
    kv: PagedKV,
    stride: int,
    scale: float,
    block_size: int,
    q_offset: int,
    *,
    rows_wanted: int = 128,
    waves: int = 1,
    chunk: int = 64,
    stages: int = 3,
    scan: int = 2,
    wide: int = 128,
) -> tuple[Tensor, Tensor]:
    """Scores (float32) and flags (bool), both [B, Hq, NQ, NK], for calls that :func:`refusal` accepts."""
    batch, heads, q_len, dim = q.shape
    tiles, blocks = -(-q_len // block_size), -(-kv.kv_len // block_size)
    group, per = heads // kv.num_kv_heads, block_size // stride
    q = q if q.stride(3) == 1 else q.contiguous()
    score = torch.empty(batch, heads, tiles, blocks, dtype=torch.float32, device=q.device)
    hrm = torch.empty(batch, heads, tiles, blocks, dtype=torch.bool, device=q.device)

    # As many rows as fill a product of 128; at least the 16 that a product needs.
    together = max(1, min(triton.next_power_of_2(group), rows_wanted // per))
    tile_count = max(1, min(triton.next_power_of_2(tiles), rows_wanted // (per * together)))
    while tile_count * together * per < 16:
        tile_count *= 2
    rows = tile_count * together * per
    keys = max(per, wide if block_size == 128 else 16)
    tile_groups = -(-tiles // tile_count)
    items = tile_groups * batch * kv.num_kv_heads * -(-group // together)
    programs = min(items, waves * multiprocessors(q.device))
    scratch = torch.empty(programs, rows, blocks, dtype=torch.float32, device=q.device)
    count = -(-blocks * per // keys) * keys
    samples = torch.empty(batch, kv.num_kv_heads, count, dim, dtype=q.dtype, device=q.device)
    sample_kernel[(-(-count // 64), batch * kv.num_kv_heads)](
        kv.k_pages,
        kv.page_table,
        samples,
        kv.kv_len,
        count,
        kv.num_kv_heads,
        kv.page_table.stride(0),
        *kv.k_pages.stride()[:3],
        D=dim,
        PAGE=kv.page_size,
        STRIDE=stride,
        ROWS=64,
        num_warps=4,
    )
    kap_kernel[(programs,)](
        q,
        samples,
        scratch,
        score,
        hrm.view(torch.int8),
        scale,
        q_len,
        count,
        q_offset // block_size,
        tiles,
        blocks,
        kv.num_kv_heads,
        items,
        tile_groups,
        *q.stride()[:3],
        GROUP=group,
        HEADS=together,
        TILES=tile_count,
        D=dim,
        BLOCK=block_size,
        STRIDE=stride,
        BN=keys,
        CHUNK=chunk if block_size == 128 else 8,
        STAGES=stages,
        SCAN=scan,
        num_warps=num_warps(rows),
    )
    return score, hrm


def num_warps(rows: int) -> int:
    """Fixed launch table by rows of the product."""
    return 8 if rows >= 128 else 4
