"""What a page-level attention call was asked for and what its execution groups walk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .backends import choose_backend, triton_refusal
from .pages import GROUP, STATS_TILE, PagePlan, canonical_rows, visible_tokens
from .plans import TileStats
from .regroup import beyond_capacity
from .unions import Unions

HALF = GROUP // 2


@dataclass(frozen=True, kw_only=True)
class PageStats(TileStats):
    """Counts of one call, on its device; see :class:`TileStats` for the rest.

    Tiles are of 128 queries along N. Visited and computed cells are alike: the (query, key) pairs of the supports,
    which regrouping cannot change. Blocks of a tile are ceil(sum of |S_i| * P / (queries * 128)).

    Attributes:
        member_pages: int64 [Hkv], sum of |S_i|.
        union_pages: int64 [Hkv], sum of |U_G|, pages loaded.
        half_pages: int64 [Hkv], sum of |U_G0| + |U_G1|, G0 and G1 being the first and the last four slots.
        imbalance: int64 [Hkv], sum of ||U_G0| - |U_G1||.
        groups: execution groups of one KV head.
        regrouped: whether orders were searched for; False where it was not asked for or the one request is too long.
        beyond_capacity: requests that were to be regrouped and kept their order, having more pages than the capacity;
            a scalar on the device where only the device can tell (:func:`prefill_kernels.regroup.beyond_capacity`).
    """

    member_pages: Tensor
    union_pages: Tensor
    half_pages: Tensor
    imbalance: Tensor
    groups: int
    regrouped: bool
    beyond_capacity: int | Tensor


def page_stats(plan: PagePlan, unions: Unions, q_heads: int, *, regrouped: bool, backend: str = "auto") -> PageStats:
    """Count on the device, without waiting for it.

    Args:
        plan: selections.
        unions: of the plan.
        q_heads: query heads, a multiple of Hkv.
        regrouped: as :func:`prefill_kernels.regroups` says.
        backend: see :func:`prefill_kernels.resolve_backend`.

    Raises:
        ValueError: the unions are not of such a plan.
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    unions.check_shapes(plan)
    if (
        choose_backend("count", backend, plan.pages.device, {"triton": triton_refusal("triton_unions", plan)})
        == "triton"
    ):
        from .triton_unions import stats_triton

        totals, cells, pages = stats_triton(plan, unions)
    else:
        totals, (cells, pages) = _totals(unions), _tile_counts(plan)
    tiles = cells.shape[1]
    rows = (plan.length - torch.arange(tiles, device=cells.device) * STATS_TILE).clamp(1, STATS_TILE)
    blocks = -(-pages * plan.page_size // (rows * STATS_TILE))
    ratio = q_heads // plan.num_kv_heads
    cells, blocks = (x[:, None].expand(-1, ratio, -1).reshape(1, q_heads, tiles) for x in (cells, blocks))
    member, union, half, imbalance = totals
    return PageStats(
        visited_cells=cells,
        computed_cells=cells,
        visited_blocks=blocks,
        computed_blocks=blocks,
        member_pages=member,
        union_pages=union,
        half_pages=half,
        imbalance=imbalance,
        groups=plan.groups,
        regrouped=regrouped,
        beyond_capacity=beyond_capacity(plan),
    )


def _totals(unions: Unions) -> Tensor:
    """Members, union, half and imbalance, int64 [4, Hkv]."""
    slot = torch.arange(GROUP, device=unions.members.device)
    sizes = ((unions.members[..., None] >> slot) & 1).sum((1, 2, 3))
    low, high = ((unions.members & mask != 0).sum(-1) for mask in ((1 << HALF) - 1, ((1 << HALF) - 1) << HALF))
    return torch.stack([sizes, unions.count.sum(-1), (low + high).sum(-1), (low - high).abs().sum(-1)])


def _tile_counts(plan: PagePlan) -> tuple[Tensor, Tensor]:
    """Support cells and support pages of each tile, int64 [Hkv, tiles] both."""
    rows, seen = canonical_rows(plan).long(), visible_tokens(plan).long()[:, None]
    held = rows < torch.iinfo(torch.int32).max
    cells = (seen[..., None] - rows * plan.page_size).clamp(max=plan.page_size).masked_fill(~held, 0).sum(-1)

    def by_tile(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x.mT, (0, -len(x) % STATS_TILE)).unflatten(1, (-1, STATS_TILE)).sum(-1)

    return by_tile(cells), by_tile(held.sum(-1))
