"""Order and Stage-1 selection of key blocks (equations 13 and 14; Algorithm A, line 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import choose_backend, triton_refusal
from .checks import check_offset, check_share, check_table
from .kap import KapScores
from .plans import BlockPlan

ORDERS = ("hrm_first", "ascending", "descending")


def order_blocks(
    scores: KapScores, *, first_tile: int = 0, force_sink_diagonal: bool = False, backend: str = "auto"
) -> Tensor:
    """Flag-grouped sort of the causal blocks of each tile (equation 13).

    HRM blocks come first, each group by descending score, ties by lowest block id; -0.0 ties with 0.0, NaN comes before
    every number. With ``force_sink_diagonal`` block 0 and the diagonal block form a group of their own before the
    others.

    Returns:
        int64 [B, Hq, NQ, NK] block ids; entries beyond the causal blocks are -1.

    Raises:
        ValueError: scores and flags of different shapes, or fewer blocks than the last tile sees.
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    _check(scores, first_tile)
    if _choose(backend, scores.score) == "triton":
        return _select_triton(scores, first_tile, 1.0, None, "hrm_first", force_sink_diagonal)[0].long()
    return _order_torch(scores, first_tile, force_sink_diagonal)


def _order_torch(scores: KapScores, first_tile: int, force_sink_diagonal: bool) -> Tensor:
    score, hrm = scores.score, scores.hrm
    tiles, blocks = score.shape[-2:]
    block = torch.arange(blocks, device=score.device)
    tile = first_tile + torch.arange(tiles, device=score.device)[:, None]
    causal = block <= tile
    group = torch.where(hrm, 1, 2)
    if force_sink_diagonal:
        group = torch.where((block == 0) | (block == tile), 0, group)
    group = torch.where(causal, group, 3)
    # Two stable sorts: the second keeps the score order, and block order among ties, inside each group.
    by_score = score.argsort(dim=-1, descending=True, stable=True)
    by_group = group.gather(-1, by_score).argsort(dim=-1, stable=True)
    order = by_score.gather(-1, by_group)
    return torch.where(block < causal.sum(-1)[:, None], order, -1)


def top_p_counts(score: Tensor, order: Tensor, p: float | Tensor, *, minimum: int = 1) -> Tensor:
    """Length of the shortest prefix of ``order`` whose mass reaches ``p`` of the causal total.

    Mass is the proxy score of equation 11, at least 0, summed in float64. At ``p >= 1`` every causal block is kept: a
    literal prefix would drop blocks whose mass underflowed to zero. A tile with NaN among its scores keeps every causal
    block too, so that a broken key shows in the output.

    Args:
        score: [B, Hq, NQ, NK].
        order: [B, Hq, NQ, NK] as :func:`order_blocks` returns it.
        p: the Top-p threshold, above 0; or one for each head, [Hq], whose values are not read back to be checked.
        minimum: least number of blocks, where there are as many.

    Returns:
        int64 [B, Hq, NQ].

    Raises:
        ValueError: ``p`` is not above 0, or not one for each head.
    """
    _check_p(p, score)
    causal = (order >= 0).sum(-1)
    if not isinstance(p, Tensor) and p >= 1:
        return causal
    share = p.double()[:, None, None] if isinstance(p, Tensor) else p
    mass = score.gather(-1, order.clamp(min=0)).double() * (order >= 0)
    cumulative = mass.cumsum(-1)
    # Written as "does not reach" so that NaN keeps every block.
    short = ~(cumulative >= share * cumulative[..., -1:]) & (order >= 0)
    counts = torch.minimum((short.sum(-1) + 1).clamp(min=minimum), causal)
    return torch.where(p[:, None] >= 1, causal, counts) if isinstance(p, Tensor) else counts


def budget_counts(order: Tensor, budget: float, *, first_tile: int = 0, minimum: int = 1) -> Tensor:
    """Fixed-budget rule: K_i = max(minimum, floor(budget * (i + 1) + 0.5)) for absolute tile i from 0.

    Returns:
        int64 [B, Hq, NQ].

    Raises:
        ValueError: ``budget`` is not above 0 and at most 1.
    """
    check_share("budget", budget, most=1.0)
    tile = first_tile + torch.arange(order.shape[-2], device=order.device, dtype=torch.float64)
    counts = torch.floor(budget * (tile + 1) + 0.5).long().clamp(min=minimum)
    return torch.minimum(counts, (order >= 0).sum(-1))


def select_blocks(
    scores: KapScores,
    *,
    block_size: int,
    q_offset: int,
    q_len: int,
    prompt_len: int,
    p: float | Tensor | None = None,
    budget: float | None = None,
    order: str = "hrm_first",
    skip_scale: float = -1.0,
    force_sink_diagonal: bool = False,
    backend: str = "auto",
) -> BlockPlan:
    """Keep a prefix of the HRM-first order and lay it out in the visiting order.

    The kept set is always the prefix of the HRM-first order; ``order`` says only how it is visited, so that
    ``ascending`` and ``descending`` are the ablation "without remap" of the same selection.

    Args:
        scores: [B, Hq, NQ, NK] proxy scores, at least 0, and flags.
        block_size, q_offset, q_len, prompt_len: geometry, see :class:`BlockPlan`.
        p: Top-p threshold, above 0, or one for each query head, float64 [Hq]; exactly one of ``p`` and ``budget`` is
            given. A tile with NaN among its scores keeps every block.
        budget: share of the causal blocks of each tile, above 0, at most 1.
        order: ``hrm_first``, ``ascending`` or ``descending``.
        skip_scale: carried into the plan.
        force_sink_diagonal: always keep block 0 and the diagonal block, visited first.
        backend: see :func:`prefill_kernels.resolve_backend`.

    Raises:
        ValueError: not exactly one rule, a rule out of range, an unknown order, or scores that are not of the geometry.
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    if (p is None) == (budget is None):
        raise ValueError(f"p={p}, budget={budget}: give exactly one")
    if order not in ORDERS:
        raise ValueError(f"order={order!r}: one of {', '.join(ORDERS)}")
    if p is not None:
        _check_p(p, scores.score)
    if budget is not None:
        check_share("budget", budget, most=1.0)
    check_offset(q_offset, block_size)
    first_tile = q_offset // block_size
    _check(scores, first_tile, (-(-q_len // block_size), -(-(q_offset + q_len) // block_size)))

    def plan(lists: Tensor, count: Tensor) -> BlockPlan:
        kv_len = q_offset + q_len
        found = BlockPlan(lists, count, block_size, q_offset, q_len, kv_len, prompt_len, skip_scale)
        found.check_geometry()
        return found

    if _choose(backend, scores.score) == "triton":
        return plan(*_select_triton(scores, first_tile, p, budget, order, force_sink_diagonal))
    ranked = _order_torch(scores, first_tile, force_sink_diagonal)
    minimum = 2 if force_sink_diagonal else 1
    if p is not None:
        count = top_p_counts(scores.score, ranked, p, minimum=minimum)
    else:
        assert budget is not None
        count = budget_counts(ranked, budget, first_tile=first_tile, minimum=minimum)
    blocks = ranked.shape[-1]
    kept = torch.arange(blocks, device=ranked.device) < count[..., None]
    if order == "ascending":
        visit = torch.where(kept, ranked, blocks).sort(-1).values
    elif order == "descending":
        visit = torch.where(kept, ranked, -1).sort(-1, descending=True).values
    else:
        visit = ranked
    return plan(torch.where(kept, visit, -1).int(), count.int())


def _choose(backend: str, score: Tensor) -> str:
    return choose_backend("select", backend, score.device, {"triton": triton_refusal("triton_select", score)})


def _check(scores: KapScores, first_tile: int, grid: tuple[int, int] | None = None) -> None:
    """Scores and flags of one shape that holds the causal blocks; of the tiles and blocks of ``grid`` where given."""
    score = scores.score
    if score.ndim != 4 or first_tile < 0 or score.shape[3] < first_tile + score.shape[2]:
        raise ValueError(
            f"scores {tuple(score.shape)}: must be [B, Hq, NQ, NK] with the blocks of every tile from {first_tile} on"
        )
    if grid is not None and score.shape[2:] != grid:
        raise ValueError(f"scores {tuple(score.shape)}: must be [B, Hq, NQ, NK] with (NQ, NK) = {grid}")
    check_table("flags", scores.hrm, tuple(score.shape), torch.bool, score.device)


def _check_p(p: float | Tensor, score: Tensor) -> None:
    """A number above 0, or one for each head, whose values are not read: that would wait for the device."""
    if not isinstance(p, Tensor):
        check_share("p", p)
    elif p.shape != score.shape[1:2] or p.device != score.device:
        heads = score.shape[1]
        raise ValueError(f"p {tuple(p.shape)} on {p.device}: must be [Hq] = ({heads},) on {score.device}")


def _select_triton(
    scores: KapScores,
    first_tile: int,
    p: float | Tensor | None,
    budget: float | None,
    order: str,
    force_sink_diagonal: bool,
) -> tuple[Tensor, Tensor]:
    from .triton_select import select_triton

    return select_triton(
        scores.score,
        scores.hrm,
        first_tile=first_tile,
        p=p,
        budget=budget,
        order=order,
        force_sink_diagonal=force_sink_diagonal,
    )
