"""Before something is timed, a few tiles of its output are computed again in float32 and compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..kap import KapScores, kap_scores
from ..osk import block_attention
from ..paged import PagedKV
from ..plans import BlockPlan, TileStats
from ..select import select_blocks
from .config import BLOCK, WrongResult
from .inputs import Inputs

TOLERANCE = 1e-2
"""Relative L2 error of a tile; bfloat16 weights give about 3e-3, another set of blocks far more."""
TIES = 2
"""Blocks by which a tile may differ where votes tie to within rounding."""


def tiles_to_check(tiles: int) -> list[int]:
    """First, middle and last tile."""
    return sorted({0, tiles // 2, tiles - 1})


def check_attention(what: str, one: Inputs, plan: BlockPlan, out: Tensor, stats: TileStats | None = None) -> float:
    """Compare an output with the reference on the plan's lists.

    Args:
        what: named in the error.
        one: the inputs.
        plan: lists, geometry and skip scale.
        out: [1, Hq, L, d].
        stats: counts of the call; a tile whose computed blocks differ by a tie of votes is left out.

    Returns:
        Largest relative L2 error of a checked tile and head.

    Raises:
        WrongResult: beyond :data:`TOLERANCE`, or other blocks computed than the reference computes.
    """
    worst, ties, checked = 0.0, 0, 0
    for tile, heads, q, kv in _parts(one):
        lists = plan.order[:, heads, tile : tile + 1], plan.count[:, heads, tile : tile + 1]
        part = BlockPlan(*lists, BLOCK, tile * BLOCK, q.shape[2], kv.kv_len, plan.prompt_len, plan.skip_scale)
        expected, counts = block_attention(q, kv, part, scale=one.scale, backend="torch")
        rows = slice(tile * BLOCK, tile * BLOCK + q.shape[2])
        got = out[:, heads, rows].float()
        error = _length(got - expected) / _length(expected).clamp(min=1e-20)
        same = torch.ones_like(error, dtype=torch.bool)
        if stats is not None:
            visited = stats.visited_blocks[:, heads, tile : tile + 1]
            computed = stats.computed_blocks[:, heads, tile : tile + 1].long()
            apart = (computed - counts.computed_blocks).abs().amax(dim=(0, 2))
            if int((visited.long() - counts.visited_blocks).abs().max()) or int(apart.max()) > TIES:
                raise WrongResult(f"{what}: tile {tile} computes other blocks than the reference")
            same = apart == 0
        ties += int((~same).sum())
        checked += same.numel()
        # Written so that NaN is wrong.
        if not bool((error[same] <= TOLERANCE).all()):
            raise WrongResult(f"{what}: tile {tile} is {float(error[same].max()):.2g} away from float32 (relative L2)")
        worst = max(worst, float(error[same].max()) if bool(same.any()) else 0.0)
    if 2 * ties > checked:
        raise WrongResult(f"{what}: {ties} of {checked} checked tiles compute other blocks than the reference")
    return worst


def check_dense(what: str, one: Inputs, out: Tensor) -> float:
    """Compare a dense kernel's output with the reference; returns and raises as :func:`check_attention`."""
    return check_attention(what, one, every_block(one), out)


def every_block(one: Inputs, skip_scale: float = -1.0) -> BlockPlan:
    """All causal blocks of each tile, in ascending order."""
    tiles = one.kv.page_table.shape[1]
    heads, device = one.q.shape[1], one.q.device
    count = torch.arange(1, tiles + 1, device=device, dtype=torch.int32).expand(1, heads, -1).contiguous()
    block = torch.arange(tiles, device=device, dtype=torch.int32)
    order = torch.where(block < count[..., None], block, -1).int()
    return BlockPlan(order, count, BLOCK, 0, one.tokens, one.tokens, one.tokens, skip_scale)


def check_selection(
    what: str, one: Inputs, scores: KapScores, plan: BlockPlan, stride: int, rule: dict[str, float]
) -> None:
    """Compare scores with the reference's, and the plan with what the reference selects by the same scores.

    Args:
        what: named in the error.
        one, scores, plan, stride: the call.
        rule: ``p`` or ``budget``.

    Raises:
        WrongResult: scores away by more than :data:`TOLERANCE`, more than 1 % other flags, or another list.
    """
    for tile, heads, q, kv in _parts(one):
        offset = tile * BLOCK
        reference = kap_scores(q, kv, stride=stride, scale=one.scale, q_offset=offset, backend="torch")
        score, hrm = (x[:, heads, tile : tile + 1, : tile + 1] for x in (scores.score, scores.hrm))
        error = float((score - reference.score).norm() / reference.score.norm())
        flips = int((hrm != reference.hrm).sum())
        if not error <= TOLERANCE or flips > max(1, 0.01 * hrm.numel()):
            raise WrongResult(f"{what}: proxy of tile {tile}: scores {error:.2g} away, {flips} other flags")
        expected = select_blocks(
            KapScores(score.contiguous(), hrm.contiguous()), block_size=BLOCK, q_offset=offset, q_len=q.shape[2],
            prompt_len=plan.prompt_len, backend="torch", **rule,  # type: ignore[arg-type]
        )  # fmt: skip
        order, count = plan.order[:, heads, tile : tile + 1], plan.count[:, heads, tile : tile + 1]
        if not torch.equal(count, expected.count) or not torch.equal(order[..., : tile + 1], expected.order):
            raise WrongResult(f"{what}: tile {tile} lists other blocks than the reference selects by the same scores")


def _length(x: Tensor) -> Tensor:
    """L2 norm for each head of [1, H, rows, d]."""
    return x.square().sum((0, 2, 3)).sqrt()


def _parts(one: Inputs) -> Iterator[tuple[int, list[int], Tensor, PagedKV]]:
    """Tiles to check as prompts of their own, for the first and the last head: tile, heads, Q and KV in float32."""
    heads = sorted({0, one.q.shape[1] - 1})
    sources = [head * one.k.shape[1] // one.q.shape[1] for head in heads]
    for tile in tiles_to_check(one.kv.page_table.shape[1]):
        stop = min((tile + 1) * BLOCK, one.tokens)
        q = one.q[:, heads, tile * BLOCK : stop].float()
        k, v = (x[:, sources, :stop].float() for x in (one.k, one.v))
        kv = PagedKV.from_dense(k, v, BLOCK, spare=0)
        yield tile, heads, q, replace(kv, in_order=True)
