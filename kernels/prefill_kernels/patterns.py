"""Block lists that follow from positions alone, and random scores: no query or key is looked at."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .plans import BlockPlan

FIXED_ORDERS = ("ascending", "descending")

_MASK = (1 << 63) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MAX_SCORES = 1 << 24
"""Most random scores drawn at once (128 MiB of int64 for each intermediate)."""


def causal_plan(
    heads: int,
    *,
    block_size: int,
    q_offset: int,
    q_len: int,
    prompt_len: int,
    order: str = "ascending",
    skip_scale: float = -1.0,
    device: torch.device | None = None,
) -> BlockPlan:
    """Every causal block of every tile, in ascending or descending order, the same for all heads.

    Args:
        heads: query heads; the lists are stored once and expanded.
        block_size, q_offset, q_len, prompt_len, skip_scale: see :class:`BlockPlan`.
        order: ``ascending`` from block 0, or ``descending`` from the diagonal.
        device: of the lists.

    Raises:
        ValueError: an unknown order.
    """
    if order not in FIXED_ORDERS:
        raise ValueError(f"order={order!r}: one of {', '.join(FIXED_ORDERS)}")
    tile, slot = _grid(block_size, q_offset, q_len, device)
    block = slot if order == "ascending" else tile - slot
    lists = torch.where(slot <= tile, block, -1)
    return _plan(lists, tile[:, 0] + 1, heads, block_size, q_offset, q_len, prompt_len, skip_scale)


def sink_window_plan(
    heads: int,
    *,
    sink_blocks: int,
    window_blocks: int,
    block_size: int,
    q_offset: int,
    q_len: int,
    prompt_len: int,
    device: torch.device | None = None,
) -> BlockPlan:
    """The first ``sink_blocks`` blocks and the last ``window_blocks`` up to the diagonal, ascending, all heads alike.

    Args:
        heads: query heads.
        sink_blocks: at least 0.
        window_blocks: at least 1; the diagonal block is one of them.
        block_size, q_offset, q_len, prompt_len: see :class:`BlockPlan`.
        device: of the lists.

    Raises:
        ValueError: a negative sink or an empty window.
    """
    if sink_blocks < 0 or window_blocks < 1:
        raise ValueError(f"sink_blocks={sink_blocks}, window_blocks={window_blocks}: at least 0 and 1")
    tile, slot = _grid(block_size, q_offset, q_len, device)
    count = (tile + 1).clamp(max=sink_blocks + window_blocks)
    slot = slot[:, : sink_blocks + window_blocks]
    window_start = (tile - window_blocks + 1).clamp(min=sink_blocks)
    block = torch.where(slot < sink_blocks, slot, window_start + slot - sink_blocks)
    lists = torch.where(slot < count, block, -1)
    return _plan(lists, count[:, 0], heads, block_size, q_offset, q_len, prompt_len, -1.0)


def random_scores(
    heads: int, *, seed: int, layer: int, block_size: int, q_offset: int, q_len: int, device: torch.device | None = None
) -> Tensor:
    """A score in (0, 1] for each (head, tile, causal block), a hash of seed, layer, head, tile and block.

    Computed in integers, so that it is the same on every device, and the same for a chunk as for the whole prompt.

    Returns:
        float32 [1, heads, NQ, NK], multiples of 2^-24; 0 beyond the diagonal.
    """
    tile, block = _grid(block_size, q_offset, q_len, device)
    place = _signed_multiply(tile * (1 << 24) + block + 1, _GOLDEN)
    score = torch.empty(1, heads, *place.shape, dtype=torch.float32, device=device)
    step = max(1, _MAX_SCORES // place.numel())
    for start in range(0, heads, step):
        keys = [_hash_int(seed, layer, head) for head in range(start, min(start + step, heads))]
        # Filled from Python numbers: a copy of a host tensor would make the host wait for the device.
        lane = torch.stack([place ^ key for key in keys])
        bits = _mixed(lane) & ((1 << 24) - 1)
        score[0, start : start + len(keys)] = torch.where(block <= tile, (bits + 1).float() * 2.0**-24, 0.0)
    return score


def _grid(block_size: int, q_offset: int, q_len: int, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """Absolute tile numbers int64 [NQ, 1] and the numbers 0 .. NK - 1 of blocks or list places, int64 [1, NK]."""
    if q_offset % block_size:
        raise ValueError(f"q_offset={q_offset}: must be a multiple of block_size={block_size}")
    first, tiles = q_offset // block_size, math.ceil(q_len / block_size)
    tile = first + torch.arange(tiles, device=device)
    return tile[:, None], torch.arange(first + tiles, device=device)[None]


def _plan(
    lists: Tensor,
    count: Tensor,
    heads: int,
    block_size: int,
    q_offset: int,
    q_len: int,
    prompt_len: int,
    skip_scale: float,
) -> BlockPlan:
    order = lists.int().expand(1, heads, *lists.shape)
    counts = count.int().expand(1, heads, *count.shape)
    return BlockPlan(order, counts, block_size, q_offset, q_len, q_offset + q_len, prompt_len, skip_scale)


def _signed(value: int) -> int:
    """The 64-bit pattern of ``value`` as a signed integer."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _signed_multiply(x: Tensor, factor: int) -> Tensor:
    return x * _signed(factor)  # int64 products wrap


def _mixed(x: Tensor) -> Tensor:
    """Finaliser of the SplitMix64 generator on int64 bit patterns."""
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1])):
        x = _signed_multiply(x ^ _shifted(x, shift), factor)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's keeps the sign."""
    return (x >> bits) & (_MASK >> (bits - 1))


def _hash_int(*parts: int) -> int:
    """A 64-bit pattern from small integers, signed."""
    state = 0
    for part in parts:
        state = (state + part + 1) * _GOLDEN & ((1 << 64) - 1)
        for shift, factor in ((30, _MIX[0]), (27, _MIX[1])):
            state = (state ^ (state >> shift)) * factor & ((1 << 64) - 1)
        state ^= state >> 31
    return _signed(state)
