"""CoSA's Kernel-Aware Proxy: scores and HRM flags of key blocks (equations 8-12; Algorithm A, lines 2-4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .backends import choose_backend, triton_refusal
from .checks import check_operands
from .masks import causal_mask
from .paged import PagedKV

_MAX_LOGITS = 1 << 25
"""Most logits held at once by the reference backend (128 MiB of float32)."""


@dataclass(frozen=True)
class KapScores:
    """What the proxy says of each (tile, key block).

    Attributes:
        score: float32 [B, Hq, NQ, NK], equation 11; 0 beyond the diagonal. NaN in every causal block of a tile with a
            sampled row that sees NaN.
        hrm: bool [B, Hq, NQ, NK], equation 12: some sampled row of the tile has its row maximum in the block; a row
            that sees NaN has none.
    """

    score: Tensor
    hrm: Tensor


def sampled_positions(start: int, stop: int, stride: int, block_size: int) -> Tensor:
    """Absolute positions the proxy samples in ``[start, stop)``, int64 on the CPU.

    Positions are 0, s, 2s, ...: the same set for queries and keys, and the same in a chunk as in the whole prompt.
    A short last block that no such position hits gives its last row. ``start`` is a multiple of ``block_size``.
    """
    first = -(-start // stride) * stride
    positions = torch.arange(first, stop, stride)
    last_block = (stop - 1) // block_size * block_size
    if len(positions) == 0 or int(positions[-1]) < last_block:
        positions = torch.cat([positions, torch.tensor([stop - 1])])
    return positions


def sampled_pairs(q_offset: int, q_len: int, stride: int, block_size: int) -> int:
    """Number of causal (sampled query, sampled key) pairs: the proxy's QK products per query head."""
    queries = sampled_positions(q_offset, q_offset + q_len, stride, block_size)
    keys = sampled_positions(0, q_offset + q_len, stride, block_size)
    return int(torch.searchsorted(keys, queries, right=True).sum())


def kap_scores(
    q: Tensor,
    kv: PagedKV,
    *,
    stride: int,
    scale: float,
    block_size: int = 128,
    q_offset: int = 0,
    backend: str = "auto",
) -> KapScores:
    """Score every causal key block for every tile, per query head.

    Args:
        q: [B, Hq, Lq, d] queries at absolute positions ``q_offset ...``, after RoPE and QK-norm.
        kv: keys of positions ``0 .. q_offset + Lq - 1``.
        stride: s, tokens between sampled rows.
        scale: the model's own softmax scaling (1/sqrt(d) in equation 8).
        block_size: b.
        q_offset: a multiple of ``block_size``.
        backend: see :func:`prefill_kernels.resolve_backend`.

    Raises:
        ValueError: stride outside 1..block_size, unaligned offset, keys that do not match the queries, or a scale that
            is not above 0.
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    if not 1 <= stride <= block_size:
        raise ValueError(f"stride={stride}: 1 to block_size={block_size}")
    check_operands(q, kv, scale=scale, q_offset=q_offset, block_size=block_size)
    refusals = {"triton": triton_refusal("triton_kap", q, kv, stride, block_size)}
    if choose_backend("proxy", backend, q.device, refusals) == "triton":
        from .triton_kap import kap_triton

        return KapScores(*kap_triton(q, kv, stride, scale, block_size, q_offset))
    return _kap_torch(q, kv, stride, scale, block_size, q_offset)


def _kap_torch(q: Tensor, kv: PagedKV, stride: int, scale: float, block_size: int, q_offset: int) -> KapScores:
    batch, q_heads, q_len, dim = q.shape
    kv_heads, stop = kv.num_kv_heads, q_offset + q_len
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32

    q_pos = sampled_positions(q_offset, stop, stride, block_size).to(q.device)
    k_pos = sampled_positions(0, stop, stride, block_size).to(q.device)
    queries = q[:, :, q_pos - q_offset].to(compute).unflatten(1, (kv_heads, q_heads // kv_heads))
    keys = kv.key_rows(k_pos).to(compute)[:, :, None]

    first_tile = q_offset // block_size
    key_slots = _slots(k_pos // block_size, 0)
    query_slots = _slots(q_pos // block_size, first_tile)
    tiles, blocks = query_slots.shape[0], key_slots.shape[0]
    score = torch.zeros(batch, q_heads, tiles, blocks, dtype=compute, device=q.device)
    hrm = torch.zeros(batch, q_heads, tiles, blocks, dtype=torch.bool, device=q.device)

    step = max(1, _MAX_LOGITS // (batch * q_heads * query_slots.shape[1] * len(k_pos)))
    for begin in range(0, tiles, step):
        slots = query_slots[begin : begin + step]
        rows = slots[slots >= 0]
        # Equation 8 with Algorithm A's causal mask; rows of several tiles at a time.
        logits = (queries[:, :, :, rows] @ keys.mT).flatten(1, 2) * scale
        logits.masked_fill_(k_pos > q_pos[rows][:, None], float("-inf"))
        probabilities = logits.softmax(-1)
        # Equations 9 and 10.
        pooled = _block_max(probabilities, key_slots, 0.0)
        normed = pooled / pooled.amax(-1, keepdim=True)
        # Equation 12's "= 1" is asked of the logits: the softmax is monotone, and float32 logits do not merge there.
        block_max = _block_max(logits, key_slots, float("-inf"))
        is_max = block_max == logits.amax(-1, keepdim=True)
        # Equations 11 and 12, over the sampled rows of each tile.
        local = torch.where(slots >= 0, slots - rows[0], -1)
        score[:, :, begin : begin + step] = _gather(normed, local, 0.0).sum(-2)
        hrm[:, :, begin : begin + step] = _gather(is_max, local, False).any(-2)
    # A row that sees NaN is NaN to its end: beyond the diagonal there is nothing all the same.
    causal = causal_mask(tiles, blocks, first_tile, q.device)
    return KapScores(score.masked_fill_(~causal, 0.0), hrm)


def _slots(block_of: Tensor, first_block: int) -> Tensor:
    """Indices of the samples of each block, padded with -1, from the ascending block number of each sample."""
    counts = torch.bincount(block_of - first_block)
    starts = counts.cumsum(0) - counts
    offsets = torch.arange(int(counts.max()), device=block_of.device)
    return torch.where(offsets < counts[:, None], starts[:, None] + offsets, -1)


def _block_max(rows: Tensor, slots: Tensor, padding: float) -> Tensor:
    """Maximum over the samples of each key block: [..., C] -> [..., NK]."""
    return rows[..., slots.clamp(min=0)].masked_fill_(slots < 0, padding).amax(-1)


def _gather(rows: Tensor, slots: Tensor, padding: float | bool) -> Tensor:
    """Rows of each tile: [B, H, R, NK] -> [B, H, tiles, samples, NK]."""
    return rows[:, :, slots.clamp(min=0)].masked_fill_((slots < 0)[..., None], padding)
