"""HRM-first order and Stage-1 selection in plain Triton: one program sorts one tile's blocks.

Group, float32 score and block id are packed into one int64 key, so that one sort of unique keys gives the order of
equation 13 with ties by lowest id, always the same. Scores are at least 0, where their bits order as they do; the
others are mapped so that no block is lost to the sign bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backends import half_problem
from .device_tables import device_table

MAX_BLOCKS = 8192
"""Blocks of the longest sequence: 1M tokens in blocks of 128. Ids take 13 bits of the key."""


@triton.jit
def select_kernel(
    score, hrm, limit, order, counts,
    first_tile, tiles, blocks, start, span, minimum, limits,
    N: tl.constexpr, RULE: tl.constexpr, FORCE: tl.constexpr, VISIT: tl.constexpr,
):  # fmt: skip
    """Order the tiles ``start .. start + span - 1`` of every head, whose causal blocks number at most N.

    RULE is 0 for all causal blocks, 1 for Top-p and 2 for a share of them; ``limit`` points at the float64 p or share:
    one for all heads (``limits`` = 1), or one for each.
    VISIT is 0 for HRM-first, 1 for ascending and 2 for descending ids. Padding is -1.
    """
    head, t = tl.program_id(0) // span, start + tl.program_id(0) % span
    line = head.to(tl.int64) * tiles + t
    tile = first_tile + t
    i = tl.arange(0, N)
    causal = i <= tile
    mass = tl.load(score + line * blocks + i, mask=causal, other=0.0)
    group = tl.load(hrm + line * blocks + i, mask=causal, other=0).to(tl.int64)
    if FORCE:
        group = tl.where((i == 0) | (i == tile), 2, group)
    # Floats as unsigned numbers of the same order: -0.0 is 0.0, and NaN of either sign comes first.
    broken = mass != mass
    bits = tl.where(mass == 0.0, 0.0, mass).to(tl.int32, bitcast=True)
    bits = tl.where(broken, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)).to(tl.int64) + 2147483648
    key = (group << 45) | (bits << 13) | (8191 - i).to(tl.int64)
    key = tl.sort(tl.where(causal, key, -1), descending=True)
    ranked = (8191 - (key & 8191)).to(tl.int32)
    valid = key >= 0
    count = tile + 1
    if RULE == 1:
        sorted_bits = (((key >> 13) & 0xFFFFFFFF) - 2147483648).to(tl.int32)
        sorted_bits = tl.where(sorted_bits < 0, sorted_bits ^ 0x7FFFFFFF, sorted_bits)
        sorted_mass = sorted_bits.to(tl.float32, bitcast=True).to(tl.float64)
        cumulative = tl.cumsum(tl.where(valid, sorted_mass, 0.0), 0)
        share = tl.load(limit + head % limits)
        short = valid & (cumulative < share * tl.max(cumulative, 0))
        reached = tl.minimum(tl.maximum(tl.sum(short.to(tl.int32), 0) + 1, minimum), count)
        whole = (share >= 1.0) | (tl.max((causal & broken).to(tl.int32), 0) > 0)
        count = tl.where(whole, count, reached)
    if RULE == 2:
        wanted = tl.floor(tl.load(limit) * count.to(tl.float64) + 0.5).to(tl.int32)
        count = tl.minimum(tl.maximum(wanted, minimum), count)
    kept = i < count
    if VISIT == 1:
        ranked = tl.sort(tl.where(kept, ranked, 8192))
    if VISIT == 2:
        ranked = tl.sort(tl.where(kept, ranked, -1), descending=True)
    tl.store(order + line * blocks + i, tl.where(kept, ranked, -1), mask=i < blocks)
    tl.store(counts + line, count)
    for c in range(N, blocks, N):
        n = c + i
        tl.store(order + line * blocks + n, tl.full([N], -1, tl.int32), mask=n < blocks)


def refusal(score: Tensor) -> str | None:
    """Why this kernel cannot run the call, or None."""
    blocks = score.shape[-1]
    if blocks > MAX_BLOCKS:
        return f"{blocks} key blocks: at most {MAX_BLOCKS} can be sorted"
    if score.dtype != torch.float32:
        return f"scores of {score.dtype}: must be float32"
    probe = torch.float16  # the scores' own dtype is fixed; only the machine is asked for
    return half_problem(score.device, probe)


def select_triton(
    score: Tensor,
    hrm: Tensor,
    *,
    first_tile: int,
    p: float | Tensor | None,
    budget: float | None,
    order: str,
    force_sink_diagonal: bool,
) -> tuple[Tensor, Tensor]:
    """Visiting order (int32 [B, Hq, NQ, NK], -1 padded) and counts (int32 [B, Hq, NQ]).

    Args:
        score, hrm: [B, Hq, NQ, NK].
        first_tile: absolute number of the first tile.
        p, budget: Top-p threshold (or one for each head, [Hq]) or share of the causal blocks; at ``p >= 1`` every
            causal block is kept.
        order: ``hrm_first``, ``ascending`` or ``descending``.
        force_sink_diagonal: put block 0 and the diagonal first.
    """
    batch, heads, tiles, blocks = score.shape
    device = score.device
    lists = torch.empty(batch, heads, tiles, blocks, dtype=torch.int32, device=device)
    counts = torch.empty(batch, heads, tiles, dtype=torch.int32, device=device)
    if isinstance(p, Tensor):
        rule, limit = 1, p.double().contiguous()
    else:
        rule = 2 if p is None else 1 if p < 1 else 0
        limit = _constant(device, p if p is not None else budget)
    start = 0
    while start < tiles:
        # Tiles of like length share a launch: a sort costs by the power of two above the causal blocks.
        size = max(16, triton.next_power_of_2(first_tile + start + 1), min(128, triton.next_power_of_2(blocks)))
        span = min(tiles, size - first_tile) - start
        select_kernel[(batch * heads * span,)](
            score.contiguous(),
            hrm.contiguous().view(torch.int8),
            limit,
            lists,
            counts,
            first_tile,
            tiles,
            blocks,
            start,
            span,
            2 if force_sink_diagonal else 1,
            limit.numel(),
            N=size,
            RULE=rule,
            FORCE=force_sink_diagonal,
            VISIT=("hrm_first", "ascending", "descending").index(order),
            num_warps=num_warps(size),
        )
        start += span
    return lists, counts


def num_warps(size: int) -> int:
    """Fixed launch table by the size of the sort."""
    return max(1, size // 512) if size <= 1024 else min(16, size // 256)


@device_table(kept=64)
def _constant(value: float | None) -> Tensor:
    """A float64 on the device: a kernel's own float arguments are float32."""
    return torch.full((1,), value or 0.0, dtype=torch.float64)
