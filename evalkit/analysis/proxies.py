"""Block rankings of the proxies, so that all of them can be asked for the same number of blocks in every row.

A method's mask grows with its knob; a block's place in the ranking is where it enters. For kap, xattention,
flashprefill, spargeattn and random that is the order of their block scores. FlexPrefill and MInference choose columns
and diagonals: a block enters with the first of its columns or diagonals, at the gamma (FlexPrefill) or the ratio
(MInference) at which the method would choose that line. PageWeaver's selector chooses pages for each query: with pages
of a block's size, a tile ranks them by the mean of its queries' scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from prefill_kernels import (
    KapScores,
    PagedKV,
    flash_scores,
    kap_scores,
    order_blocks,
    random_scores,
    vertical_slash_scores,
    xattn_scores,
)
from prefill_kernels.flex import js_distance, line_masses
from prefill_kernels.masks import causal_mask
from prefill_kernels.page_select import page_summaries
from prefill_kernels.pooling import block_means, by_kv_head, head_groups
from prefill_kernels.vertical_slash_select import FORCED_COLUMNS, FORCED_SLASHES, ranked_keys
from torch import Tensor

from ..methods.base import PlanContext
from ..methods.flashprefill import FlashPrefill
from ..methods.flexprefill import FlexPrefill
from ..methods.minference import MInference

MAX_RANKED = 1 << 24
"""Most (tile, block) pairs that are sorted at once: 128 MiB for each int64 intermediate."""


@dataclass(frozen=True)
class Ranking:
    """What a proxy says of each (tile, key block); a larger score comes first, ties by lowest block.

    Attributes:
        score: [1, Hq, NQ, NK], any real numbers; what lies beyond the diagonal is ignored.
        first: bool, broadcastable to the scores: blocks that come before all others, such as CoSA's HRM blocks.
        forced: bool, broadcastable: blocks that the method always keeps; they come before even those.
    """

    score: Tensor
    first: Tensor | None = None
    forced: Tensor | None = None


@dataclass(frozen=True)
class Call:
    """One attention call as the proxies see it; the whole prompt in one call.

    Attributes:
        q: [1, Hq, L, d].
        kv: keys and values of the same positions.
        context: layer, scale, backend.
        block_size: of tiles and key blocks.
        stride: of kap and xattention.
    """

    q: Tensor
    kv: PagedKV
    context: PlanContext
    block_size: int
    stride: int

    @property
    def blocks(self) -> int:
        """Number of tiles, and of key blocks."""
        return math.ceil(self.q.shape[2] / self.block_size)


def rank(name: str, call: Call) -> Ranking:
    """The ranking of one of :data:`~evalkit.analysis.settings.PROXIES`."""
    return _PROXIES[name](call)


def places(score: Tensor, first: Tensor | None = None, forced: Tensor | None = None) -> Tensor:
    """Place of each causal block among its tile's, 0 the first; int32 [1, H, NQ, NK], NK beyond the diagonal.

    Args:
        score: [1, H, NQ, NK].
        first, forced: as in :class:`Ranking`, broadcastable.
    """
    blocks = score.shape[-1]
    group = torch.zeros_like(score, dtype=torch.bool) if first is None else first.expand_as(score)
    order = order_blocks(KapScores(score, group), backend="torch")
    if forced is not None:
        held = forced.expand_as(score).gather(-1, order.clamp(min=0)) & (order >= 0)
        # Stable: the forced blocks keep their order among themselves, and so do the others.
        order = order.gather(-1, (~held).to(torch.uint8).argsort(dim=-1, stable=True))
    found = torch.full((*order.shape[:-1], blocks + 1), blocks, dtype=torch.int32, device=order.device)
    place = torch.arange(blocks, dtype=torch.int32, device=order.device).expand_as(order)
    # What lies beyond the diagonal has no place; it is written behind the last column and cut off.
    found.scatter_(-1, torch.where(order >= 0, order, blocks), place)
    return found[..., :blocks]


def head_slices(heads: int, blocks: int, most: int = MAX_RANKED) -> Iterator[slice]:
    """Slices of heads of which no more than ``most`` (tile, block) pairs are held at once."""
    step = max(1, most // (blocks * blocks))
    for begin in range(0, heads, step):
        yield slice(begin, min(heads, begin + step))


def part(x: Tensor | None, heads: slice) -> Tensor | None:
    """The heads' part of a tensor that may be shared by all heads."""
    return x if x is None or x.ndim < 4 or x.shape[1] == 1 else x[:, heads]


# ------------------------------------------------------------------------------------------------------- proxies
def _sink_diagonal(call: Call) -> Tensor:
    block = torch.arange(call.blocks, device=call.q.device)
    return (block == 0) | (block == block[:, None])


def _kap(call: Call) -> Ranking:
    """HRM blocks first, each group by equation 11: CoSA's order; nothing is forced."""
    found = kap_scores(
        call.q, call.kv, stride=call.stride, scale=call.context.scale, block_size=call.block_size,
        backend=call.context.backend,
    )  # fmt: skip
    return Ranking(found.score, found.hrm)


def _xattention(call: Call) -> Ranking:
    mass = xattn_scores(
        call.q, call.kv, stride=call.stride, scale=call.context.scale, block_size=call.block_size,
        backend=call.context.backend,
    )  # fmt: skip
    return Ranking(mass, forced=_sink_diagonal(call))


def _flashprefill(call: Call) -> Ranking:
    score = flash_scores(
        call.q, call.kv, scale=call.context.scale, block_size=call.block_size, backend=call.context.backend
    )
    block = torch.arange(call.blocks, device=call.q.device)
    tile = block[:, None]
    return Ranking(score, forced=(block < FlashPrefill.sink) | (block > tile - FlashPrefill.window))


def _spargeattn(call: Call) -> Ranking:
    """Products of block means; every block is judged by its mean, as at the method's default theta of 0."""
    compute, keys = torch.float32, call.kv.gather()[0]
    score = torch.empty(1, call.q.shape[1], call.blocks, call.blocks, dtype=compute, device=call.q.device)
    for heads, kv_heads in head_groups(call.q.shape[1], call.kv.num_kv_heads, call.q.shape[2]):
        rows, k = by_kv_head(call.q[:, heads], keys[:, kv_heads])
        product = block_means(rows, call.block_size, compute) @ block_means(k, call.block_size, compute).mT
        score[:, heads] = product.view_as(score[:, heads])
    return Ranking(score)


def _pageweaver(call: Call) -> Ranking:
    """Page scores of :mod:`prefill_kernels.page_select` (mean keys), averaged over a tile's queries.

    A tile is a page here, so that its queries choose among the same complete pages: those before it.
    """
    size, heads = call.block_size, call.kv.num_kv_heads
    summaries = page_summaries(call.kv, size)
    grouped = call.q[0].unflatten(0, (heads, -1))
    score = torch.zeros(1, heads, call.blocks, call.blocks, dtype=torch.float32, device=call.q.device)
    for tile in range(1, call.blocks):
        rows = grouped[:, :, tile * size : (tile + 1) * size].float().flatten(1, 2)
        logits = rows @ summaries[:, :tile].mT * call.context.scale
        score[0, :, tile, :tile] = logits.softmax(-1).mean(1)
    return Ranking(score.repeat_interleave(grouped.shape[1], 1), forced=_sink_diagonal(call))


def _random(call: Call) -> Ranking:
    score = random_scores(
        call.q.shape[1], seed=0, layer=call.context.layer, block_size=call.block_size, q_offset=0,
        q_len=call.q.shape[2], device=call.q.device,
    )  # fmt: skip
    return Ranking(score, forced=_sink_diagonal(call))


def _minference(call: Call) -> Ranking:
    """A line enters at the ratio at which its kind's default size, times the ratio, reaches its rank (from 1)."""
    heads = range(call.q.shape[1])
    column, slash = vertical_slash_scores(
        call.q, call.kv, heads, scale=call.context.scale, last_q=MInference.last_q, backend=call.context.backend
    )
    first_column = (_rank(column, FORCED_COLUMNS) + 1) / MInference.vertical_size
    first_slash = (_rank(slash, FORCED_SLASHES) + 1) / MInference.slash_size
    size, blocks, length = call.block_size, call.blocks, call.q.shape[2]
    padded = torch.nn.functional.pad(first_column, (0, blocks * size - length), value=math.inf)
    of_block = padded.unflatten(-1, (blocks, size)).amin(-1)
    # A diagonal crosses the blocks of two block diagonals: those that hold a pair at its distance.
    padded = torch.nn.functional.pad(first_slash, (size - 1, blocks * size - length), value=math.inf)
    of_offset = -torch.nn.functional.max_pool1d(-padded, 2 * size - 1, size)
    return Ranking(-torch.minimum(of_block[:, :, None], of_offset[:, :, _offsets(call)]))


def _rank(score: Tensor, forced: int) -> Tensor:
    """Rank of each position, 0 the first; float32 of the shape of the scores."""
    order = ranked_keys(score, forced=forced).argsort(dim=-1, descending=True)
    place = torch.arange(score.shape[-1], dtype=torch.float32, device=score.device)
    return torch.empty_like(order, dtype=torch.float32).scatter_(-1, order, place.expand_as(order))


def _offsets(call: Call) -> Tensor:
    block = torch.arange(call.blocks, device=call.q.device)
    return (block[:, None] - block).clamp(min=0)


def _flexprefill(call: Call) -> Ranking:
    """Vertical-slash heads by the gamma at which a line enters, query-aware heads by pooled attention in each row."""
    compute, keys = torch.float32, call.kv.gather()[0]
    score = torch.empty(1, call.q.shape[1], call.blocks, call.blocks, dtype=compute, device=call.q.device)
    for heads, kv_heads in head_groups(call.q.shape[1], call.kv.num_kv_heads, call.q.shape[2]):
        rows, k = by_kv_head(call.q[:, heads], keys[:, kv_heads])
        score[:, heads] = _flex_group(rows, k, call).view_as(score[:, heads])
    return Ranking(score, forced=_sink_diagonal(call))


def _flex_group(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """Scores of the heads of some KV heads: q [B, G, L, d], k [B, 1, L, d] -> [B, G, NQ, NK]."""
    size, blocks, length = call.block_size, call.blocks, q.shape[2]
    last = q[:, :, -size:].float()
    logits = (last * call.context.scale) @ k.float().mT
    width = last.shape[2]
    future = torch.ones(width, width, dtype=torch.bool, device=q.device).triu(1)
    logits[..., -width:].masked_fill_(future, float("-inf"))
    columns, slashes = line_masses(logits.softmax(-1))
    k_means, q_means = block_means(k, size, torch.float32), block_means(q, size, torch.float32)
    pooled = ((last.mean(2, keepdim=True) @ k_means.mT) * call.context.scale).softmax(-1)[:, :, 0]

    def in_blocks(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, blocks * size - length)).unflatten(-1, (blocks, size)).sum(-1)

    def entry(mass: Tensor) -> Tensor:
        """Gamma above which each block line enters: line n (from 0) once n blocks of tokens are needed to reach it."""
        reached = mass.sort(-1, descending=True).values.cumsum(-1) / mass.sum(-1, keepdim=True)
        needed = torch.cat([torch.zeros_like(reached[..., :1]), reached[..., size - 2 :: size]], -1)[..., :blocks]
        order = in_blocks(mass).argsort(dim=-1, descending=True, stable=True)
        return torch.empty_like(needed).scatter_(-1, order, needed)

    lines = -torch.minimum(entry(columns)[:, :, None], entry(slashes)[:, :, _offsets(call)])
    mass = (q_means @ k_means.mT) * call.context.scale
    mass = mass.masked_fill(~causal_mask(blocks, blocks, 0, q.device), float("-inf")).softmax(-1)
    aware = js_distance(pooled, in_blocks(columns)) < FlexPrefill.tau
    return torch.where(aware[..., None, None], mass, lines)


_PROXIES: dict[str, Callable[[Call], Ranking]] = {
    "kap": _kap,
    "xattention": _xattention,
    "flexprefill": _flexprefill,
    "minference": _minference,
    "flashprefill": _flashprefill,
    "spargeattn": _spargeattn,
    "pageweaver": _pageweaver,
    "random": _random,
}
