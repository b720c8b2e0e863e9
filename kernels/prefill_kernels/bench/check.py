"""Before something is timed, a few tiles of its output are computed again in float32 and compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..execute import HeadwisePlan, SparsePlan
from ..kap import KapScores, kap_scores
from ..osk import block_attention
from ..page_attention import page_attention
from ..paged import PagedKV
from ..pages import PagePlan
from ..plans import BlockPlan, TileStats
from ..select import select_blocks
from ..vertical_slash import VerticalSlashPlan, executed_blocks, members, slash_index
from .config import BLOCK, WrongResult
from .inputs import Inputs

TOLERANCE = 1e-2
"""Relative L2 error of a tile; bfloat16 weights give about 3e-3, another set of blocks far more."""
FP8_TOLERANCE = 0.1
"""The same where keys and values are quantised: what quantising loses is in it."""
TIES = 2
"""Blocks by which a tile may differ where votes tie to within rounding."""


def tiles_to_check(tiles: int) -> list[int]:
    """First, middle and last tile."""
    return sorted({0, tiles // 2, tiles - 1})


def check_attention(what: str, one: Inputs, plan: SparsePlan, out: Tensor, stats: TileStats | None = None) -> float:
    """Compare an output with what the plan means, computed again in float32.

    Args:
        what: named in the error.
        one: the inputs.
        plan: lists of blocks, geometry and skip scale; or columns and diagonals; or one of each for different heads.
        out: [1, Hq, L, d].
        stats: counts of the call; a tile whose computed blocks differ by a tie of votes is left out.

    Returns:
        Largest relative L2 error of a checked tile and head.

    Raises:
        WrongResult: beyond :data:`TOLERANCE`, or other blocks computed than the reference computes.
    """
    worst, ties, checked = 0.0, 0, 0
    size = block_size(plan)
    tolerance = FP8_TOLERANCE if isinstance(plan, PagePlan) and plan.kv_dtype == "fp8" else TOLERANCE
    for tile, heads, q, kv in _parts(one, size, _heads(plan, one.q.shape[1])):
        if isinstance(plan, PagePlan):
            sources = [head * one.k.shape[1] // one.q.shape[1] for head in heads]
            expected, counts = _pages(plan, tile, sources, q, kv, one.scale)
        else:
            expected, counts = _reference(plan, tile, heads, q, kv, one.scale)
        rows = slice(tile * size, tile * size + q.shape[2])
        got = out[:, heads, rows].float()
        error = _length(got - expected) / _length(expected).clamp(min=1e-20)
        same = torch.ones_like(error, dtype=torch.bool)
        if stats is not None:
            visited, visited_cells, computed, computed_cells = (
                (getattr(stats, name)[:, heads, tile : tile + 1].long() - getattr(counts, name)).abs().amax(dim=(0, 2))
                for name in ("visited_blocks", "visited_cells", "computed_blocks", "computed_cells")
            )
            same = computed == 0
            if bool((visited + visited_cells).any()) or int(computed.max()) > TIES or bool(computed_cells[same].any()):
                raise WrongResult(f"{what}: tile {tile} computes other blocks than the reference")
        ties += int((~same).sum())
        checked += same.numel()
        # Written so that NaN is wrong.
        if not bool((error[same] <= tolerance).all()):
            raise WrongResult(f"{what}: tile {tile} is {float(error[same].max()):.2g} away from float32 (relative L2)")
        worst = max(worst, float(error[same].max()) if bool(same.any()) else 0.0)
    if 2 * ties > checked:
        raise WrongResult(f"{what}: {ties} of {checked} checked tiles compute other blocks than the reference")
    return worst


def check_dense(what: str, one: Inputs, out: Tensor) -> float:
    """Compare a dense kernel's output with the reference; returns and raises as :func:`check_attention`."""
    return check_attention(what, one, every_block(one), out)


def block_size(plan: SparsePlan) -> int:
    """Rows of the plan's tiles, tokens."""
    return plan.parts[0].block_size if isinstance(plan, HeadwisePlan) else plan.block_size


def _heads(plan: SparsePlan, heads: int) -> list[int]:
    """First and last head, and the first one that each part of a plan for different heads plans."""
    found = {0, heads - 1}
    for part in plan.parts if isinstance(plan, HeadwisePlan) else ():
        if isinstance(part, BlockPlan):
            planned = part.count.amax(-1) > 0
        else:
            planned = (part.columns >= 0).any(-1) | (part.slashes >= 0).any(-1)
        found |= set(planned[0].nonzero().flatten()[:1].tolist())
    return sorted(found)


def _pages(
    plan: PagePlan, tile: int, sources: list[int], q: Tensor, kv: PagedKV, scale: float
) -> tuple[Tensor, TileStats]:
    """One tile under the pages of each head's KV head, in the queries' own order and the cache's own precision."""
    rows = slice(tile * plan.block_size, tile * plan.block_size + q.shape[2])
    part = PagePlan.for_prompt(
        plan.pages[:, rows, sources].contiguous(), plan.page_size, tile * plan.block_size, q.shape[2]
    )
    return page_attention(q, kv, part, scale=scale, backend="torch")


def _reference(
    plan: BlockPlan | VerticalSlashPlan | HeadwisePlan,
    tile: int,
    heads: list[int],
    q: Tensor,
    kv: PagedKV,
    scale: float,
) -> tuple[Tensor, TileStats]:
    """One tile of some heads as the plan means it: output [1, len(heads), rows, d] and counts of that tile."""
    if isinstance(plan, BlockPlan):
        lists = plan.order[:, heads, tile : tile + 1], plan.count[:, heads, tile : tile + 1]
        size = plan.block_size
        part = BlockPlan(*lists, size, tile * size, q.shape[2], kv.kv_len, plan.prompt_len, plan.skip_scale)
        return block_attention(q, kv, part, scale=scale, backend="torch")
    if isinstance(plan, VerticalSlashPlan):
        return _lines(plan, tile, heads, q, kv, scale)
    outputs, counts = zip(*(_reference(part, tile, heads, q, kv, scale) for part in plan.parts), strict=True)

    def added(name: str) -> Tensor:
        return torch.stack([getattr(item, name).long() for item in counts]).sum(0)

    return sum(outputs[1:], outputs[0]), TileStats(
        visited_cells=added("visited_cells"),
        computed_cells=added("computed_cells"),
        visited_blocks=added("visited_blocks"),
        computed_blocks=added("computed_blocks"),
    )


def _lines(
    plan: VerticalSlashPlan, tile: int, heads: list[int], q: Tensor, kv: PagedKV, scale: float
) -> tuple[Tensor, TileStats]:
    """Columns and diagonals of one tile as a mask over its keys."""
    size, stop = plan.block_size, kv.kv_len
    mine = replace(plan, columns=plan.columns[:, heads], slashes=plan.slashes[:, heads])
    key = torch.arange(stop, device=q.device)
    distance = torch.arange(tile * size, stop, device=q.device)[:, None] - key
    mask = members(mine.columns, plan.length)[:, None, :stop]
    mask = mask | members(mine.slashes, plan.length)[:, distance.clamp(min=0)]
    if plan.whole_windows:
        mask |= slash_index(mine).covered[:, None, (tile + 1) * size - 1 - key]
    mask &= distance >= 0
    k, v = kv.gather()
    weights = (q[0] @ k[0].mT * scale).masked_fill_(~mask, float("-inf")).softmax(-1)
    # A row without any key is 0 / 0 in the softmax, and zero by the plan.
    weights = torch.where(mask.any(-1, keepdim=True), weights, 0)
    cells = mask.sum((1, 2))[None, :, None]
    blocks = executed_blocks(mine)[:, :, tile : tile + 1]
    return (weights @ v[0])[None], TileStats(cells, cells, blocks, blocks)


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
    for tile, heads, q, kv in _parts(one, BLOCK, _heads(plan, one.q.shape[1])):
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


def _parts(one: Inputs, size: int, heads: list[int]) -> Iterator[tuple[int, list[int], Tensor, PagedKV]]:
    """Tiles to check as prompts of their own, for some heads: tile, heads, Q and KV in float32."""
    sources = [head * one.k.shape[1] // one.q.shape[1] for head in heads]
    for tile in tiles_to_check(-(-one.tokens // size)):
        stop = min((tile + 1) * size, one.tokens)
        q = one.q[:, heads, tile * size : stop].float()
        k, v = (x[:, sources, :stop].float() for x in (one.k, one.v))
        kv = PagedKV.from_dense(k, v, BLOCK, spare=0)
        yield tile, heads, q, replace(kv, in_order=True)
