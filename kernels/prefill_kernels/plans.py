"""Plans: what a method hands to a kernel, and the counts a kernel hands back.

A *tile* is one block of query rows, a *block* one block of keys; both hold ``block_size`` tokens and are numbered by
absolute position, so that a chunk of a longer prompt is planned exactly as the whole prompt would be. A *cell* is
one causally valid (query, key) pair, the unit of every budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_offset, check_table


def causal_cells(q_offset: int, q_len: int) -> int:
    """Number of (query, key) pairs with key <= query for queries ``q_offset .. q_offset + q_len - 1``."""
    return q_len * q_offset + q_len * (q_len + 1) // 2


def causal_blocks(q_offset: int, q_len: int, block_size: int) -> int:
    """Number of (tile, block) pairs with block <= tile for the tiles of the queries, edge blocks counted whole."""
    first = q_offset // block_size
    tiles = math.ceil(q_len / block_size)
    return tiles * first + tiles * (tiles + 1) // 2


@dataclass(frozen=True)
class DensePlan:
    """Attend to every causal key. ``reason`` says why: ``"method"`` (dense on purpose) or ``"fallback"``."""

    reason: str = "method"


@dataclass(frozen=True)
class BlockPlan:
    """Key blocks to visit for each tile, in visiting order (equation 14).

    Attributes:
        order: int32 [B, Hq, NQ, K], absolute key-block ids, the first ``count`` entries valid, then -1.
        count: int32 [B, Hq, NQ], number of blocks to visit.
        block_size: tokens in a tile and in a key block.
        q_offset: absolute position of the first query; a multiple of ``block_size``.
        q_len: number of queries.
        kv_len: number of keys, ``q_offset + q_len``.
        prompt_len: N of the skip threshold, the unpadded length of the whole prompt.
        skip_scale: the skip scale (capital delta); <= 0 turns in-kernel skipping off.
    """

    order: Tensor
    count: Tensor
    block_size: int
    q_offset: int
    q_len: int
    kv_len: int
    prompt_len: int
    skip_scale: float = -1.0

    @property
    def first_tile(self) -> int:
        """Absolute number of the first tile."""
        return self.q_offset // self.block_size

    @property
    def skip_ratio(self) -> float:
        """delta/N as asked for; the kernel uses at most 1. Zero when skipping is off."""
        return self.skip_scale / self.prompt_len if self.skip_scale > 0 else 0.0

    @property
    def log_threshold(self) -> float | None:
        """ln(min(delta/N, 1)), natural log, or None when skipping is off."""
        return math.log(min(self.skip_ratio, 1.0)) if self.skip_scale > 0 else None

    def tile_rows(self) -> Tensor:
        """Number of real query rows in each tile, int64 [NQ]."""
        starts = torch.arange(self.order.shape[2], device=self.order.device) * self.block_size
        return (self.q_len - starts).clamp(max=self.block_size)

    def block_cells(self) -> Tensor:
        """Causally valid cells of each planned (tile, block), int64 [B, Hq, NQ, K]; 0 for padding."""
        rows = self.tile_rows()[:, None]
        tile = (self.first_tile + torch.arange(self.order.shape[2], device=self.order.device))[:, None]
        full, diagonal = rows * self.block_size, rows * (rows + 1) // 2
        cells = torch.where(self.order == tile, diagonal, full)
        return torch.where((self.order >= 0) & (self.order <= tile), cells, 0)

    def check_geometry(self) -> None:
        """Raise ValueError unless lengths, offset, block and skip scale belong together. Reads no tensor."""
        check_offset(self.q_offset, self.block_size)
        if self.kv_len != self.q_offset + self.q_len:
            raise ValueError(f"kv_len={self.kv_len}: must be q_offset + q_len = {self.q_offset + self.q_len}")
        if not self.kv_len <= self.prompt_len:
            raise ValueError(f"prompt_len={self.prompt_len}: must be at least kv_len={self.kv_len}")
        if math.isnan(self.skip_scale):
            raise ValueError(f"skip_scale={self.skip_scale}: must be a number; 0 or less turns skipping off")

    def check_lists(self, device: torch.device) -> None:
        """Raise ValueError unless the lists are int32 on ``device``, one for each tile. What they hold is not read."""
        tiles = math.ceil(self.q_len / self.block_size)
        if self.order.ndim != 4 or self.order.shape[:3] != self.count.shape or self.order.shape[2] != tiles:
            raise ValueError(f"order {tuple(self.order.shape)}, count {tuple(self.count.shape)}: want {tiles} tiles")
        for name, lists in (("order", self.order), ("count", self.count)):
            check_table(name, lists, tuple(lists.shape), torch.int32, device)

    def check(self) -> None:
        """Raise ValueError unless ids are causal, unique, front-packed and the geometry is consistent.

        Reads the plan back to the host: for tests and for checking a new method, not for the fast path.
        """
        self.check_geometry()
        self.check_lists(self.order.device)
        tiles = self.order.shape[2]
        slot = torch.arange(self.order.shape[3], device=self.order.device)
        used = slot < self.count[..., None]
        tile = self.first_tile + torch.arange(tiles, device=self.order.device)[:, None]
        if bool((used != (self.order >= 0)).any()):
            raise ValueError("order: the first count entries must be block ids and the rest -1")
        if bool((used & (self.order > tile)).any()):
            raise ValueError("order: a block lies beyond its tile (not causal)")
        ranked = torch.where(used, self.order, -1 - slot.to(self.order.dtype)).sort(-1).values
        if bool((ranked[..., 1:] == ranked[..., :-1]).any()):
            raise ValueError("order: a block is listed twice for one tile")


@dataclass(frozen=True)
class TileStats:
    """What a kernel really did, per tile, on the device it ran on; int64, or int32 from the GPU backends.

    Attributes:
        visited_cells: [B, Hq, NQ], cells of blocks whose QK product was computed.
        computed_cells: [B, Hq, NQ], cells of blocks whose V side was computed too.
        visited_blocks: [B, Hq, NQ], the same as whole blocks.
        computed_blocks: [B, Hq, NQ].
        computed: bool [B, Hq, NQ, K] aligned with ``plan.order``, False where skipped or padded; the reference
            backend fills it, others may leave it None.
        backend: what executed the call, also where ``auto`` fell back.
        masked_cells: [B, Hq, NQ], causal cells whose QK and V products were computed and then masked out, so that they
            are in none of the counts above; None where the kernel masks nothing but the future.
    """

    visited_cells: Tensor
    computed_cells: Tensor
    visited_blocks: Tensor
    computed_blocks: Tensor
    computed: Tensor | None = None
    backend: str = "torch"
    masked_cells: Tensor | None = None
