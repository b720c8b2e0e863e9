"""Block lists out of a block mask in plain Triton: a prefix sum a tile instead of a sort."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def compact_kernel(mask, order, counts, first_tile, tiles, blocks, N: tl.constexpr):
    """List the set entries of one row of ``mask`` (int8) up to the diagonal, ascending, then -1."""
    line = tl.program_id(0).to(tl.int64)
    tile = first_tile + tl.program_id(0) % tiles
    count = 0
    for c in range(0, blocks, N):
        block = c + tl.arange(0, N)
        kept = tl.load(mask + line * blocks + block, mask=(block < blocks) & (block <= tile), other=0).to(tl.int32)
        place = count + tl.cumsum(kept, 0) - kept
        tl.store(order + line * blocks + place, block, mask=kept > 0)
        count += tl.sum(kept, 0)
    tl.store(counts + line, count)
    for c in range(0, blocks, N):
        place = c + tl.arange(0, N)
        tl.store(order + line * blocks + place, tl.full([N], -1, tl.int32), mask=(place >= count) & (place < blocks))


def compact_triton(mask: Tensor, first_tile: int) -> tuple[Tensor, Tensor]:
    """Lists (int32 [B, Hq, NQ, NK], -1 padded) and counts (int32 [B, Hq, NQ]) of a bool mask [B, Hq, NQ, NK]."""
    batch, heads, tiles, blocks = mask.shape
    order = torch.empty(batch, heads, tiles, blocks, dtype=torch.int32, device=mask.device)
    count = torch.empty(batch, heads, tiles, dtype=torch.int32, device=mask.device)
    size = min(1024, max(16, triton.next_power_of_2(blocks)))
    bits = mask.contiguous().view(torch.int8)
    compact_kernel[(batch * heads * tiles,)](
        bits, order, count, first_tile, tiles, blocks, N=size, num_warps=num_warps(size)
    )
    return order, count


def num_warps(size: int) -> int:
    """Fixed launch table by the length of the prefix sum."""
    return max(1, size // 256)
