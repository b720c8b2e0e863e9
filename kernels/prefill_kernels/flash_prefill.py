"""FlashPrefill's block scores and its max-based threshold (Fan et al. 2026)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .backends import choose_backend, triton_refusal
from .checks import check_operands
from .masks import causal_mask
from .paged import PagedKV
from .pooling import block_means

_MAX_LOGITS = 1 << 25
"""Most logits held at once by the reference backend (128 MiB of float32)."""


def flash_pairs(q_offset: int, q_len: int, block_size: int) -> int:
    """QK products of the scores, per query head: each query meets the mean keys of the blocks it sees whole."""
    # Query r sees (r + 1) // block_size whole blocks.
    return _whole_blocks(q_offset + q_len, block_size) - _whole_blocks(q_offset, block_size)


def _whole_blocks(queries: int, size: int) -> int:
    """Sum of (r + 1) // size for r = 0 .. queries - 1."""
    full, rest = divmod(queries + 1, size)
    return size * (full * (full - 1) // 2) + full * rest


def flash_scores(
    q: Tensor, kv: PagedKV, *, scale: float, block_size: int = 128, q_offset: int = 0, backend: str = "auto"
) -> Tensor:
    """Logarithm of the mass that a tile's queries give to the mean key of each block, per query head.

    ``score[i, j] = ln sum_r exp(q_r . mean(K_j) * scale)`` over the queries r of tile i that see block j whole; on the
    diagonal that is the tile's last query alone. Means are kept in the dtype of the keys.

    Args:
        q: [B, Hq, Lq, d] queries at absolute positions ``q_offset ...``, after RoPE and QK-norm.
        kv: keys of positions ``0 .. q_offset + Lq - 1``; never repeated to the query heads.
        scale: the model's own softmax scaling.
        block_size: tokens of a tile and of a key block.
        q_offset: a multiple of ``block_size``.
        backend: see :func:`prefill_kernels.resolve_backend`.

    Returns:
        float32 [B, Hq, NQ, NK] (float64 for float64 queries); -inf where no query sees the block whole.

    Raises:
        ValueError: unaligned offset, keys that do not match the queries, or a scale that is not above 0.
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    check_operands(q, kv, scale=scale, q_offset=q_offset, block_size=block_size)
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys = kv.gather()[0]
    means = block_means(keys, block_size, compute).to(keys.dtype)
    refusals = {"triton": triton_refusal("triton_flash_prefill", q, kv, block_size)}
    if choose_backend("proxy", backend, q.device, refusals) == "triton":
        from .triton_flash_prefill import scores_triton

        return scores_triton(q, means, scale, block_size, q_offset)
    return _scores_torch(q, means.to(compute), scale, block_size, q_offset)


def _scores_torch(q: Tensor, means: Tensor, scale: float, block_size: int, q_offset: int) -> Tensor:
    batch, q_heads, q_len, _ = q.shape
    kv_heads, blocks = means.shape[1:3]
    tiles = math.ceil(q_len / block_size)
    score = torch.empty(batch, q_heads, tiles, blocks, dtype=means.dtype, device=q.device)
    last_token = (torch.arange(blocks, device=q.device) + 1) * block_size - 1
    step = max(1, _MAX_LOGITS // (batch * q_heads * block_size * blocks))
    for begin in range(0, tiles, step):
        rows = q[:, :, begin * block_size : (begin + step) * block_size].to(means.dtype)
        position = q_offset + begin * block_size + torch.arange(rows.shape[2], device=q.device)
        logits = (rows.unflatten(1, (kv_heads, -1)) @ means[:, :, None].mT).flatten(1, 2) * scale
        logits.masked_fill_(last_token > position[:, None], float("-inf"))
        for tile, part in enumerate(logits.split(block_size, 2), begin):
            score[:, :, tile] = part.logsumexp(2)
    return score


def flash_select(
    score: Tensor, *, alpha: float, sink: int, window: int, last_full: int, first_tile: int, prompt_tiles: int
) -> Tensor:
    """Blocks whose mass is at least alpha of the tile's largest, and those that are kept anyway.

    Args:
        score: [B, Hq, NQ, NK] of :func:`flash_scores`.
        alpha: share of the largest mass; 0 keeps every causal block.
        sink: first blocks that are always kept.
        window: last blocks, the diagonal included, that are always kept; at least 1.
        last_full: last tiles of the prompt that keep every block.
        first_tile: absolute number of the first tile.
        prompt_tiles: tiles of the whole prompt.

    Returns:
        bool [B, Hq, NQ, NK], causal.
    """
    tiles, blocks = score.shape[-2:]
    log_alpha = math.log(alpha) if alpha > 0 else float("-inf")
    tile = first_tile + torch.arange(tiles, device=score.device)[:, None]
    block = torch.arange(blocks, device=score.device)
    always = (block < sink) | (block > tile - window) | (tile >= prompt_tiles - last_full)
    kept = (score >= score.amax(-1, keepdim=True) + log_alpha) | always
    return kept & causal_mask(tiles, blocks, first_tile, score.device)
