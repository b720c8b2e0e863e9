"""FlashPrefill's block scores in plain Triton: one pass over the mean keys, no logits in memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backends import product_problem
from .paged import PagedKV
from .triton_kap import nan_max

LOG2_E = 1.4426950408889634


@triton.jit
def mean_key_kernel(
    q, means, score,
    scale, q_len, first_tile, tiles, blocks, heads, kv_heads, q_batch, q_head, q_row,
    D: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of one tile's rows for every block; ``scale`` includes log2(e). Longest tiles first."""
    t = tiles - 1 - tl.program_id(0) // heads
    h, b = tl.program_id(0) % heads, tl.program_id(1)
    tile = first_tile + t
    row = tl.arange(0, BLOCK)
    dim = tl.arange(0, D)
    local = t * BLOCK + row
    places = q + b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head + local.to(tl.int64) * q_row
    query = tl.load(places[:, None] + dim[None, :], mask=(local < q_len)[:, None], other=0.0)
    keys = means + (b * kv_heads + h // (heads // kv_heads)).to(tl.int64) * blocks * D
    target = score + ((b * heads + h).to(tl.int64) * tiles + t) * blocks
    for c in range(0, tile + 1, BN):
        n = c + tl.arange(0, BN)
        k = tl.load(keys + n[:, None] * D + dim[None, :], mask=(n < blocks)[:, None], other=0.0)
        s = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        whole = (n[None, :] < tile) | ((n[None, :] == tile) & (row[:, None] == BLOCK - 1))
        s = tl.where(whole & (local < q_len)[:, None], s, float("-inf"))
        top = tl.reduce(s, 0, nan_max)
        shift = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp2(s - shift[None, :]), 0)
        tl.store(target + n, (top + tl.log2(tl.maximum(total, 1.0))) * 0.6931471805599453, mask=n < blocks)
    for c in range(tl.cdiv(tile + 1, BN) * BN, blocks, BN):
        n = c + tl.arange(0, BN)
        tl.store(target + n, tl.full([BN], float("-inf"), tl.float32), mask=n < blocks)


def refusal(q: Tensor, kv: PagedKV, block_size: int) -> str | None:
    """Why this kernel cannot run the call, or None."""
    return product_problem(q, kv.k_pages, block_size=block_size)


def scores_triton(q: Tensor, means: Tensor, scale: float, block_size: int, q_offset: int) -> Tensor:
    """Scores (float32 [B, Hq, NQ, NK]) for calls that :func:`refusal` accepts; ``means`` [B, Hkv, NK, d]."""
    batch, heads, q_len, dim = q.shape
    tiles, blocks = -(-q_len // block_size), means.shape[2]
    q, means = q if q.stride(3) == 1 else q.contiguous(), means.contiguous()
    score = torch.empty(batch, heads, tiles, blocks, dtype=torch.float32, device=q.device)
    mean_key_kernel[(tiles * heads, batch)](
        q,
        means,
        score,
        scale * LOG2_E,
        q_len,
        q_offset // block_size,
        tiles,
        blocks,
        heads,
        means.shape[1],
        *q.stride()[:3],
        D=dim,
        BLOCK=block_size,
        BN=max(16, min(64, block_size)),
        num_warps=num_warps(block_size),
    )
    return score


def num_warps(rows: int) -> int:
    """Fixed launch table by rows of the product."""
    return 4 if rows >= 64 else 2
