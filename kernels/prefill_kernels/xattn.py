"""XAttention's antidiagonal scores of key blocks (Xu et al. 2025, Algorithm 1).

Queries and keys are cut into *groups* of ``stride`` neighbouring tokens. The score of a query group and a key group is
the sum of the logits on the antidiagonal of their ``stride x stride`` square, which every vertical and every slash line
through the square crosses; it is one product of the concatenated rows, the queries in reverse order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from .backends import choose_backend, triton_refusal
from .checks import check_operands
from .masks import causal_mask
from .paged import PagedKV

_MAX_LOGITS = 1 << 25
"""Most group logits held at once by the reference backend (128 MiB of float32)."""


def xattn_pairs(q_offset: int, q_len: int, stride: int) -> int:
    """QK products of the scores, per query head: ``stride`` for each causal pair of groups, about 1/stride of dense.

    Args:
        q_offset: absolute position of the first query; a multiple of ``stride``.
        q_len: number of queries.
        stride: S, tokens of a group.
    """
    first, last = q_offset // stride, math.ceil((q_offset + q_len) / stride)
    return stride * (last * (last + 1) - first * (first + 1)) // 2


def xattn_scores(
    q: Tensor,
    kv: PagedKV,
    *,
    stride: int,
    scale: float,
    block_size: int = 128,
    q_offset: int = 0,
    backend: str = "auto",
) -> Tensor:
    """Mass of every causal key block for every tile, per query head (Algorithm 1, lines 3-10).

    With A the softmax over the causal key groups of ``sum_i q[r S + S - 1 - i] . k[c S + i] * scale / S``, the mass of
    block j for tile i is the sum of A over their groups, so that a tile's masses add up to its number of groups.
    Causality is asked of whole groups: the group on the diagonal takes part entirely. Tokens beyond the end of the
    sequence are zero vectors; a group of none but such tokens does not exist.

    Args:
        q: [B, Hq, Lq, d] queries at absolute positions ``q_offset ...``, after RoPE and QK-norm.
        kv: keys of positions ``0 .. q_offset + Lq - 1``; never repeated to the query heads.
        stride: S, tokens of a group; divides ``block_size``.
        scale: the model's own softmax scaling (1/sqrt(d) in Algorithm 1).
        block_size: B, tokens of a tile and of a key block.
        q_offset: a multiple of ``block_size``.
        backend: see :func:`prefill_kernels.resolve_backend`.

    Returns:
        float32 [B, Hq, NQ, NK] (float64 for float64 queries), 0 beyond the diagonal.

    Raises:
        ValueError: a stride that does not divide the block, unaligned offset, keys that do not match the queries, or a
            scale that is not above 0.
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    if stride < 1 or block_size % stride:
        raise ValueError(f"stride={stride}: must divide block_size={block_size}")
    check_operands(q, kv, scale=scale, q_offset=q_offset, block_size=block_size)
    refusals = {"triton": triton_refusal("triton_xattn", q, kv, block_size)}
    if choose_backend("proxy", backend, q.device, refusals) == "triton":
        from .triton_xattn import xattn_triton

        return xattn_triton(q, kv, stride, scale, block_size, q_offset)
    return _xattn_torch(q, kv, stride, scale, block_size, q_offset)


def _xattn_torch(q: Tensor, kv: PagedKV, stride: int, scale: float, block_size: int, q_offset: int) -> Tensor:
    batch, q_heads, q_len, _ = q.shape
    kv_heads, per = kv.num_kv_heads, block_size // stride
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    tiles, blocks = math.ceil(q_len / block_size), math.ceil(kv.kv_len / block_size)
    first = q_offset // stride

    keys = _groups(kv.gather()[0].to(compute), stride)[:, :, None].mT
    score = torch.zeros(batch, q_heads, tiles, blocks, dtype=compute, device=q.device)
    step = max(1, _MAX_LOGITS // (batch * q_heads * per * keys.shape[-1]))
    for begin in range(0, tiles, step):
        rows = q[:, :, begin * block_size : (begin + step) * block_size].to(compute)
        queries = _groups(rows, stride, reverse=True).unflatten(1, (kv_heads, q_heads // kv_heads))
        row = first + begin * per + torch.arange(queries.shape[3], device=q.device)
        column = torch.arange(keys.shape[-1], device=q.device)
        logits = (queries @ keys).flatten(1, 2) * (scale / stride)
        mass = logits.masked_fill_(column > row[:, None], float("-inf")).softmax(-1)
        # Sum over the groups of each block, then over those of each tile; missing groups add nothing.
        end = min(tiles, begin + step)
        mass = pad(mass, (0, blocks * per - mass.shape[-1], 0, (end - begin) * per - mass.shape[-2]))
        score[:, :, begin:end] = mass.unflatten(-1, (blocks, per)).sum(-1).unflatten(2, (end - begin, per)).sum(3)
    # A row that sees NaN is NaN to its end: beyond the diagonal there is nothing all the same.
    return score.masked_fill_(~causal_mask(tiles, blocks, q_offset // block_size, q.device), 0.0)


def _groups(x: Tensor, stride: int, *, reverse: bool = False) -> Tensor:
    """Concatenated rows of each group, zeros for missing tokens: [B, H, L, d] -> [B, H, groups, stride * d]."""
    count = math.ceil(x.shape[2] / stride)
    rows = pad(x, (0, 0, 0, count * stride - x.shape[2])).unflatten(2, (count, stride))
    return (rows.flip(3) if reverse else rows).flatten(3)
