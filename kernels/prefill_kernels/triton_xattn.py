"""XAttention's antidiagonal scores in plain Triton: no matrix over groups in memory.

A program keeps the log-sum-exp of each (query group, key block) in a scratch row that it uses again for its next tile,
small enough to stay in L2, and divides by the row's total at the end. The product is a GEMM over the phases of a group,
queries read in reverse order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backends import multiprocessors, product_problem
from .paged import PagedKV
from .triton_kap import sample_kernel

LOG2_E = 1.4426950408889634


@triton.jit
def _block_sums(
    places, exists, keys, j, group_row, scale,
    D: tl.constexpr, STRIDE: tl.constexpr, BN: tl.constexpr, PER: tl.constexpr, M: tl.constexpr,
    q_row, STAGES: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of exponentials of each row in each of BN // PER key blocks, base 2."""
    n = j * BN + tl.arange(0, BN)
    dim = tl.arange(0, D)
    s = tl.zeros([M, BN], tl.float32)
    for phase in tl.range(0, STRIDE, num_stages=STAGES):
        mirrored = STRIDE - 1 - phase
        query = tl.load(places + mirrored * q_row, mask=(mirrored < exists)[:, None], other=0.0)
        k = tl.load(keys + (n * STRIDE + phase)[:, None] * D + dim[None, :])
        s = tl.dot(query, tl.trans(k), s, input_precision="ieee")
    s = s * scale
    if MASK:
        s = tl.where(n[None, :] <= group_row[:, None], s, float("-inf"))
    s = tl.reshape(s, (M, BN // PER, PER))
    best = tl.max(s, 2)
    shift = tl.where(best == float("-inf"), 0.0, best)
    return best, tl.sum(tl.exp2(s - shift[:, :, None]), 2)


@triton.jit
def _absorb(best, share, top, total):
    """Running row maximum and sum after the blocks of one step. Block 0 comes first and is never masked."""
    new = tl.maximum(top, tl.max(best, 1))
    return new, total * tl.exp2(top - new) + tl.sum(share * tl.exp2(best - new[:, None]), 1)


@triton.jit
def xattn_kernel(
    q, keys, scratch, score,
    scale, q_len, count, first_tile, tiles, blocks, kv_heads, items, tile_groups,
    q_batch, q_head, q_row,
    GROUP: tl.constexpr, HEADS: tl.constexpr, TILES: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Masses of TILES tiles of HEADS query heads of one KV head at a time; ``scale`` includes log2(e) / STRIDE.

    Rows are ordered tile, head, query group. Items are ordered longest tiles first.
    """
    PER: tl.constexpr = BLOCK // STRIDE  # groups of a block
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
        exists = tl.where(used, q_len - local, 0)  # tokens of the group, or more
        group_row = first_tile * PER + local // STRIDE
        starts = q + b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head + local.to(tl.int64) * q_row
        places = starts[:, None] + dim[None, :]
        head_keys = keys + (b * kv_heads + kv).to(tl.int64) * count * D

        # Groups before the first tile need no mask.
        last = tl.minimum(first_tile + first + TILES, blocks)
        whole = (first_tile + first) * PER // BN
        steps = tl.cdiv(last * PER, BN)
        top = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        for j in range(0, whole):
            best, share = _block_sums(
                places, exists, head_keys, j, group_row, scale, D, STRIDE, BN, PER, M, q_row, STAGES, False
            )
            top, total = _absorb(best, share, top, total)
            n = j * (BN // PER) + tl.arange(0, BN // PER)
            tl.store(scratch + row[:, None] * blocks + n[None, :], best + tl.log2(tl.maximum(share, 1.0)))
        for j in range(whole, steps):
            best, share = _block_sums(
                places, exists, head_keys, j, group_row, scale, D, STRIDE, BN, PER, M, q_row, STAGES, True
            )
            top, total = _absorb(best, share, top, total)
            n = j * (BN // PER) + tl.arange(0, BN // PER)
            tl.store(
                scratch + row[:, None] * blocks + n[None, :],
                best + tl.log2(tl.maximum(share, 1.0)),
                mask=(n < blocks)[None, :],
            )
        tl.debug_barrier()

        normalizer = top + tl.log2(total)
        pair = tl.arange(0, TILES * HEADS)
        pair_head = side % PARTS * HEADS + pair % HEADS
        pair_tile = first + pair // HEADS
        stored = (pair_head < GROUP) & (pair_tile < tiles)
        target = ((b * kv_heads + kv) * GROUP + pair_head).to(tl.int64) * tiles + pair_tile
        for c in range(0, blocks, CHUNK):
            n = c + tl.arange(0, CHUNK)
            causal = (n[None, :] <= (first_tile + t)[:, None]) & (n < last)[None, :] & used[:, None]
            kept = tl.load(scratch + row[:, None] * blocks + n[None, :], mask=causal, other=float("-inf"))
            mass = tl.where(causal, tl.exp2(kept - normalizer[:, None]), 0.0)
            mass = tl.sum(tl.reshape(mass, (TILES * HEADS, PER, CHUNK)), 1)
            here = stored[:, None] & (n < blocks)[None, :]
            tl.store(score + target[:, None] * blocks + n[None, :], mass, mask=here)
        tl.debug_barrier()


def refusal(q: Tensor, kv: PagedKV, block_size: int) -> str | None:
    """Why this kernel cannot run the call, or None."""
    return product_problem(q, kv.k_pages, block_size=block_size)


def xattn_triton(
    q: Tensor,
    kv: PagedKV,
    stride: int,
    scale: float,
    block_size: int,
    q_offset: int,
    *,
    rows_wanted: int = 128,
    chunk: int = 64,
    stages: int = 3,
) -> Tensor:
    """Masses (float32 [B, Hq, NQ, NK]) for calls that :func:`refusal` accepts."""
    batch, heads, q_len, dim = q.shape
    tiles, blocks = -(-q_len // block_size), -(-kv.kv_len // block_size)
    group, per = heads // kv.num_kv_heads, block_size // stride
    q = q if q.stride(3) == 1 else q.contiguous()
    score = torch.empty(batch, heads, tiles, blocks, dtype=torch.float32, device=q.device)

    # As many rows as fill a product of 128; at least the 16 that a product needs.
    together = max(1, min(triton.next_power_of_2(group), rows_wanted // per))
    tile_count = max(1, min(triton.next_power_of_2(tiles), rows_wanted // (per * together)))
    while tile_count * together * per < 16:
        tile_count *= 2
    rows = tile_count * together * per
    wide = 128 if block_size >= 64 else max(per, 16)
    tile_groups = -(-tiles // tile_count)
    items = tile_groups * batch * kv.num_kv_heads * -(-group // together)
    programs = min(items, multiprocessors(q.device))
    scratch = torch.empty(programs, rows, blocks, dtype=torch.float32, device=q.device)
    # Keys in token order, zeros up to a whole step: a group is then one contiguous run.
    count = -(-blocks * per // wide) * wide * stride
    keys = torch.empty(batch, kv.num_kv_heads, count, dim, dtype=q.dtype, device=q.device)
    sample_kernel[(-(-count // 64), batch * kv.num_kv_heads)](
        kv.k_pages,
        kv.page_table,
        keys,
        kv.kv_len,
        count,
        kv.num_kv_heads,
        kv.page_table.stride(0),
        *kv.k_pages.stride()[:3],
        D=dim,
        PAGE=kv.page_size,
        STRIDE=1,
        ROWS=64,
        num_warps=4,
    )
    xattn_kernel[(programs,)](
        q,
        keys,
        scratch,
        score,
        scale / stride * LOG2_E,
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
        BN=wide,
        CHUNK=chunk if block_size >= 64 else 8,
        STAGES=stages,
        num_warps=num_warps(rows),
    )
    return score


def num_warps(rows: int) -> int:
    """Fixed launch table by rows of the product."""
    return 8 if rows >= 128 else 4
