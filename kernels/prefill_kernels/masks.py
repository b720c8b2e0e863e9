"""Block lists out of a block mask, for selections that say which blocks are kept and nothing of their order."""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import choose_backend, half_problem
from .checks import check_offset, check_table
from .plans import BlockPlan


def causal_mask(tiles: int, blocks: int, first_tile: int, device: torch.device) -> Tensor:
    """Which blocks lie at or before each tile: bool [tiles, blocks]."""
    tile = first_tile + torch.arange(tiles, device=device)[:, None]
    return torch.arange(blocks, device=device) <= tile


def plan_from_mask(
    mask: Tensor,
    *,
    block_size: int,
    q_offset: int,
    q_len: int,
    prompt_len: int,
    skip_scale: float = -1.0,
    backend: str = "auto",
) -> BlockPlan:
    """List the kept blocks of each tile in ascending order.

    Args:
        mask: bool [B, Hq, NQ, NK]; what it says beyond the diagonal is ignored.
        block_size, q_offset, q_len, prompt_len, skip_scale: geometry, see :class:`BlockPlan`.
        backend: see :func:`prefill_kernels.resolve_backend`.

    Raises:
        ValueError: a mask that is not of the geometry.
        BackendUnavailable: a backend asked for by name cannot run the call.
    """

    def triton_refusal() -> str | None:
        return half_problem(mask.device, torch.float16)  # no floats here: only the machine is asked

    check_offset(q_offset, block_size)
    tiles, blocks = -(-q_len // block_size), -(-(q_offset + q_len) // block_size)
    check_table("mask", mask, (*mask.shape[:2], tiles, blocks), torch.bool, mask.device)
    first_tile = q_offset // block_size
    if choose_backend("select", backend, mask.device, {"triton": triton_refusal}) == "triton":
        from .triton_masks import compact_triton

        order, count = compact_triton(mask, first_tile)
    else:
        kept = mask & causal_mask(tiles, blocks, first_tile, mask.device)
        block = torch.arange(blocks, device=mask.device, dtype=torch.int32)
        order = torch.where(kept, block, blocks).sort(-1).values
        order, count = order.masked_fill_(order == blocks, -1), kept.sum(-1, dtype=torch.int32)
    return BlockPlan(order, count, block_size, q_offset, q_len, q_offset + q_len, prompt_len, skip_scale)
