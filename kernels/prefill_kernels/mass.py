"""Exact softmax mass of every key block: what the selections estimate, for the oracle and for measuring recall."""

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
"""Most logits held at once by the reference backend (128 MiB of float32)."""


def block_mass(
    q: Tensor,
    kv: PagedKV,
    *,
    scale: float,
    block_size: int = 128,
    q_offset: int = 0,
    backend: str = "auto",
) -> Tensor:
    """Sum of the causal softmax weights of each (tile, key block), per query head.

    With ``A[r, c] = softmax over c <= r of q_r . k_c * scale``, the mass of block j for tile i is the sum of A over the
    rows of the tile and the keys of the block, so that a tile's masses add up to its number of rows.

    Args:
        q: [B, Hq, Lq, d] queries at absolute positions ``q_offset ...``, after RoPE and QK-norm.
        kv: keys of positions ``0 .. q_offset + Lq - 1``; never repeated to the query heads.
        scale: the model's own softmax scaling.
        block_size: tokens of a tile and of a key block.
        q_offset: a multiple of ``block_size``.
        backend: see :func:`prefill_kernels.resolve_backend`.

    Returns:
        float32 [B, Hq, NQ, NK] (float64 for float64 queries), 0 beyond the diagonal.

    Raises:
        ValueError: unaligned offset, keys that do not match the queries, or a scale that is not above 0.
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    check_operands(q, kv, scale=scale, q_offset=q_offset, block_size=block_size)
    refusals = {"triton": triton_refusal("triton_mass", q, kv, block_size)}
    if choose_backend("proxy", backend, q.device, refusals) == "triton":
        from .triton_mass import mass_triton

        return mass_triton(q, kv, scale, block_size, q_offset)
    return _mass_torch(q, kv, scale, block_size, q_offset)


def _mass_torch(q: Tensor, kv: PagedKV, scale: float, block_size: int, q_offset: int) -> Tensor:
    """One KV head and a few tiles at a time, so that no more than ``_MAX_LOGITS`` logits exist."""
    batch, q_heads, q_len, _ = q.shape
    kv_heads, stop = kv.num_kv_heads, kv.kv_len
    group = q_heads // kv_heads
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    tiles, blocks = math.ceil(q_len / block_size), math.ceil(stop / block_size)
    keys = kv.gather()[0]
    mass = torch.zeros(batch, q_heads, tiles, blocks, dtype=compute, device=q.device)
    position = torch.arange(stop, device=q.device)
    step = max(1, _MAX_LOGITS // (batch * group * block_size * stop))
    for head in range(kv_heads):
        queries = q[:, head * group : (head + 1) * group]
        key = keys[:, head, None].to(compute)
        for begin in range(0, tiles, step):
            rows = queries[:, :, begin * block_size : (begin + step) * block_size].to(compute)
            row = q_offset + begin * block_size + torch.arange(rows.shape[2], device=q.device)
            seen = min(stop, q_offset + (begin + step) * block_size)  # keys beyond the last row add nothing
            logits = (rows @ key[:, :, :seen].mT) * scale
            logits.masked_fill_(position[:seen] > row[:, None], float("-inf"))
            mass[:, head * group : (head + 1) * group, begin : begin + step, : math.ceil(seen / block_size)] = (
                _block_sums(_block_sums(logits.softmax(-1), block_size).mT, block_size).mT
            )
    # A row that sees NaN is NaN to its end: beyond the diagonal there is nothing all the same.
    return mass.masked_fill_(~causal_mask(tiles, blocks, q_offset // block_size, q.device), 0.0)


def _block_sums(x: Tensor, size: int) -> Tensor:
    """Sums of each ``size`` neighbours of the last dimension, the last group filled with zeros."""
    groups = math.ceil(x.shape[-1] / size)
    return pad(x, (0, groups * size - x.shape[-1])).unflatten(-1, (groups, size)).sum(-1)
