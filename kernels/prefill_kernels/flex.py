"""FlexPrefill's selection of key blocks (Lai et al. 2025, Algorithms 1 to 4).

The last ``block_size`` queries stand for all. A head whose block-pooled attention resembles their true one is
*query-aware*: its blocks come from the pooled attention of every tile. Any other is *vertical-slash*: the columns and
the diagonals that hold the share gamma of the last queries' attention are extended over the whole prompt, as block
columns and block diagonals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .backends import record_call
from .checks import check_operands
from .masks import causal_mask
from .paged import PagedKV
from .pooling import block_means, by_kv_head, head_groups, shortest_prefix, top_ranked


@dataclass(frozen=True)
class FlexSelection:
    """What FlexPrefill decides for one layer.

    Attributes:
        mask: bool [B, Hq, NQ, NK], the kept blocks, causal.
        query_aware: bool [B, Hq], pattern of each head; the others are vertical-slash.
        divergence: float32 [B, Hq], square root of the Jensen-Shannon divergence, in nats.
    """

    mask: Tensor
    query_aware: Tensor
    divergence: Tensor


def js_distance(p: Tensor, q: Tensor) -> Tensor:
    """Square root of the Jensen-Shannon divergence of two distributions along the last axis, natural logarithm.

    A zero probability adds nothing (0 log 0 = 0) instead of NaN, and rounding never makes the root's argument negative.
    """
    middle = (p + q) / 2

    def divergence(x: Tensor) -> Tensor:
        return torch.where(x > 0, x * (x / middle).log(), 0).sum(-1)

    return ((divergence(p) + divergence(q)) / 2).clamp(min=0).sqrt()


def line_masses(attention: Tensor) -> tuple[Tensor, Tensor]:
    """Mean attention on each column and on each diagonal (Algorithm 3, lines 2 and 3).

    Args:
        attention: [..., R, L], probabilities of the last R of L queries.

    Returns:
        Columns [..., L] by key position, and diagonals [..., L] by distance, query position minus key position.
    """
    rows, length = attention.shape[-2:]
    # Row i ends at position L - R + i: shifted by i, one diagonal is one column of the shifted rows.
    padded = pad(attention, (rows - 1, 0))
    strides = (*padded.stride()[:-2], padded.stride(-2) + 1, 1)
    shifted = padded.as_strided(attention.shape, strides)
    return attention.sum(-2) / rows, shifted.sum(-2).flip(-1) / rows


def flex_pairs(q_len: int, block_size: int, *, query_aware: bool) -> int:
    """QK products of the selection, per query head.

    The last queries meet every key, their mean every key block; where heads may be query-aware every tile's mean meets
    its causal blocks too, for all heads alike, so that nothing waits to know which heads are.
    """
    rows, blocks = min(block_size, q_len), math.ceil(q_len / block_size)
    last = rows * (q_len - rows) + rows * (rows + 1) // 2
    return last + blocks + (blocks * (blocks + 1) // 2 if query_aware else 0)


def flex_select(
    q: Tensor, kv: PagedKV, *, gamma: float, tau: float, min_budget: int, scale: float, block_size: int = 128
) -> FlexSelection:
    """Choose the pattern and the blocks of every head, in torch operations on whatever device the tensors lie on.

    A few heads go through at a time, so that memory stays bounded at 128K; nothing waits for the device.

    Args:
        q: [B, Hq, L, d] queries of the whole prompt, after RoPE and QK-norm.
        kv: keys of positions ``0 .. L - 1``; never repeated to the query heads.
        gamma: share of the attention that the lines or blocks must hold; at 1 and above every causal block is kept.
        tau: bound of the divergence below which a head is query-aware; 0 makes every head vertical-slash.
        min_budget: tokens, rounded up to blocks: the least number of block columns and of block diagonals.
        scale: the model's own softmax scaling.
        block_size: tokens of a tile, of a key block and of the representative queries.

    Raises:
        ValueError: fewer queries than a block, keys that do not match the queries, or a scale that is not above 0.
    """
    batch, q_heads, length, _ = q.shape
    check_operands(q, kv, scale=scale, block_size=block_size)
    record_call("proxy", "torch")
    if length < block_size:
        raise ValueError(f"q_len={length}: must be at least block_size={block_size}")
    keys = kv.gather()[0]
    blocks = math.ceil(length / block_size)
    minimum = min(blocks, max(1, math.ceil(min_budget / block_size)))
    mask = torch.empty(batch, q_heads, blocks, blocks, dtype=torch.bool, device=q.device)
    aware, distance = [], []
    for heads, kv_heads in head_groups(q_heads, kv.num_kv_heads, length):
        rows, columns = by_kv_head(q[:, heads], keys[:, kv_heads])
        chosen = _select_group(rows, columns, gamma, tau, minimum, scale, block_size)
        mask[:, heads] = chosen.mask.view_as(mask[:, heads])
        aware.append(chosen.query_aware.view(batch, -1))
        distance.append(chosen.divergence.view(batch, -1))
    return FlexSelection(mask, torch.cat(aware, 1), torch.cat(distance, 1))


def _select_group(
    q: Tensor, k: Tensor, gamma: float, tau: float, minimum: int, scale: float, block_size: int
) -> FlexSelection:
    """Heads of one KV head: q [B, G, L, d], k [B, 1, L, d]."""
    length, compute = q.shape[2], torch.float64 if q.dtype == torch.float64 else torch.float32
    blocks = math.ceil(length / block_size)
    causal = causal_mask(blocks, blocks, 0, q.device)
    rows = q[:, :, -block_size:].to(compute)
    attention = (rows * scale) @ k.to(compute).mT
    future = torch.ones(block_size, block_size, dtype=torch.bool, device=q.device).triu(1)
    attention[..., -block_size:].masked_fill_(future, float("-inf"))
    attention = attention.sub_(attention.amax(-1, keepdim=True)).exp_()
    attention /= attention.sum(-1, keepdim=True)
    vertical, slash = line_masses(attention)
    del attention

    def in_blocks(x: Tensor) -> Tensor:
        return pad(x, (0, blocks * block_size - length)).unflatten(-1, (blocks, block_size)).sum(-1)

    # Algorithm 2: pooled against true attention of the last queries.
    k_means = block_means(k, block_size, compute)
    pooled = ((rows.mean(2, keepdim=True) @ k_means.mT) * scale).softmax(-1)[:, :, 0]
    divergence = js_distance(pooled, in_blocks(vertical))
    query_aware = divergence < tau

    # Algorithm 3: tokens that hold gamma, rounded to blocks; the first column and the main diagonal besides.
    def lines(token_mass: Tensor) -> Tensor:
        tokens = shortest_prefix(token_mass.sort(-1, descending=True).values, gamma)
        count = (tokens // block_size + 1).clamp(min=minimum, max=blocks).masked_fill(query_aware, minimum)
        kept = top_ranked(in_blocks(token_mass), count)
        kept[..., 0] = True
        return kept

    tile = torch.arange(blocks, device=q.device)
    offset = (tile[:, None] - tile).clamp(min=0)
    mask = lines(vertical)[:, :, None] | lines(slash)[:, :, offset]
    if tau > 0:
        mask |= query_aware[..., None, None] & _pooled_top_p(q, k_means, gamma, scale, block_size, causal)
    if gamma >= 1:
        mask = torch.ones_like(mask)
    return FlexSelection(mask & causal, query_aware, divergence.float())


def _pooled_top_p(q: Tensor, k_means: Tensor, gamma: float, scale: float, block_size: int, causal: Tensor) -> Tensor:
    """Algorithm 4: the fewest blocks of all tiles together that hold the share gamma of the pooled attention."""
    logits = (block_means(q, block_size, k_means.dtype) @ k_means.mT) * scale
    # Every tile's attention sums to 1, so that normalising the whole by its sum changes no order.
    mass = logits.masked_fill(~causal, float("-inf")).softmax(-1).flatten(2)
    ranked, order = mass.sort(dim=-1, descending=True, stable=True)
    count = shortest_prefix(ranked, gamma)
    rank = torch.arange(mass.shape[-1], device=q.device)
    kept = torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, order, rank < count[..., None])
    return kept.unflatten(-1, causal.shape)
