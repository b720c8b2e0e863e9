"""Order and Stage-1 selection of key blocks (equations 13 and 14; Algorithm A, line 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import choose_backend, triton_problem
from .kap import KapScores
from .plans import BlockPlan

ORDERS = ("hrm_first", "ascending", "descending")


def order_blocks(
    scores: KapScores, *, first_tile: int = 0, force_sink_diagonal: bool = False, backend: str = "auto"
) -> Tensor:
    """Flag-grouped sort of the causal blocks of each tile (equation 13).

    HRM blocks come first, each group by descending score, ties by lowest block id. With ``force_sink_diagonal``
    block 0 and the diagonal block form a group of their own before the others.

    Returns:
        int64 [B, Hq, NQ, NK] block ids; entries beyond the causal blocks are -1.
    """
    score, hrm = scores.score, scores.hrm
    tiles, blocks = score.shape[-2:]
    if _choose(backend, score) == "triton":
        return _select_triton(scores, first_tile, 1.0, None, "hrm_first", force_sink_diagonal)[0].long()
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

    Mass is the proxy score of equation 11, summed in float64. At ``p >= 1`` every causal block is kept: a literal
    prefix would drop blocks whose mass underflowed to zero.

    Args:
        score: [B, Hq, NQ, NK].
        order: [B, Hq, NQ, NK] as :func:`order_blocks` returns it.
        p: the Top-p threshold, above 0; or one for each head, [Hq].
        minimum: least number of blocks, where there are as many.

    Returns:
        int64 [B, Hq, NQ].
    """
    causal = (order >= 0).sum(-1)
    if not isinstance(p, Tensor) and p >= 1:
        return causal
    share = p.double()[:, None, None] if isinstance(p, Tensor) else p
    mass = score.gather(-1, order.clamp(min=0)).double() * (order >= 0)
    cumulative = mass.cumsum(-1)
    short = (cumulative < share * cumulative[..., -1:]) & (order >= 0)
    counts = torch.minimum((short.sum(-1) + 1).clamp(min=minimum), causal)
    return torch.where(p[:, None] >= 1, causal, counts) if isinstance(p, Tensor) else counts


def budget_counts(order: Tensor, budget: float, *, first_tile: int = 0, minimum: int = 1) -> Tensor:
    """Fixed-budget rule: K_i = max(minimum, floor(budget * (i + 1) + 0.5)) for absolute tile i from 0.

    Returns:
        int64 [B, Hq, NQ].
    """
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
        scores: [B, Hq, NQ, NK] proxy scores and flags.
        block_size, q_offset, q_len, prompt_len: geometry, see :class:`BlockPlan`.
        p: Top-p threshold, or one for each query head, float64 [Hq]; exactly one of ``p`` and ``budget`` is given.
        budget: share of the causal blocks of each tile.
        order: ``hrm_first``, ``ascending`` or ``descending``.
        skip_scale: carried into the plan.
        force_sink_diagonal: always keep block 0 and the diagonal block, visited first.
        backend: see :func:`prefill_kernels.resolve_backend`.

    Raises:
        ValueError: not exactly one rule, or an unknown order.
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    if (p is None) == (budget is None):
        raise ValueError(f"p={p}, budget={budget}: give exactly one")
    if order not in ORDERS:
        raise ValueError(f"order={order!r}: one of {', '.join(ORDERS)}")
    first_tile = q_offset // block_size

    def plan(lists: Tensor, count: Tensor) -> BlockPlan:
        kv_len = q_offset + q_len
        return BlockPlan(lists, count, block_size, q_offset, q_len, kv_len, prompt_len, skip_scale)

    if _choose(backend, scores.score) == "triton":
        return plan(*_select_triton(scores, first_tile, p, budget, order, force_sink_diagonal))
    ranked = order_blocks(scores, first_tile=first_tile, force_sink_diagonal=force_sink_diagonal, backend="torch")
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
    def triton_refusal() -> str | None:
        if problem := triton_problem():
            return problem
        from . import triton_select

        return triton_select.refusal(score)

    return choose_backend(backend, score.device, {"triton": triton_refusal})


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
