"""Small pieces that the selections in torch operations share: head groups, means of blocks, prefixes and ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

HEAD_TOKENS = 4 * 131072
"""Query heads x tokens that a selection in torch operations holds at once: below 1 GiB of float32 at d = 128."""


def head_groups(q_heads: int, kv_heads: int, tokens: int) -> Iterator[tuple[slice, slice]]:
    """Query heads and the KV heads that they share, as many at a time as :data:`HEAD_TOKENS` allows.

    A short prompt goes through in one group, so that launches do not outweigh the work; a long one in whole KV heads,
    or in parts of one where even its query heads are too many.
    """
    group = q_heads // kv_heads
    fit = max(1, HEAD_TOKENS // tokens)
    if fit >= group:
        for begin in range(0, kv_heads, fit // group):
            end = min(kv_heads, begin + fit // group)
            yield slice(begin * group, end * group), slice(begin, end)
        return
    for kv_head in range(kv_heads):
        for begin in range(kv_head * group, (kv_head + 1) * group, fit):
            yield slice(begin, min((kv_head + 1) * group, begin + fit)), slice(kv_head, kv_head + 1)


def by_kv_head(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Fold KV heads into the batch: q [B, H * G, L, d], k [B, H, L, d] -> [B * H, G, L, d] and [B * H, 1, L, d]."""
    return q.unflatten(1, (k.shape[1], -1)).flatten(0, 1), k.flatten(0, 1)[:, None]


def block_means(x: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """Mean of each block of rows, of the rows that exist: [B, H, L, d] -> [B, H, ceil(L / block_size), d].

    Args:
        x: rows; may be a view of pages.
        block_size: rows of a block; the last block may be shorter.
        dtype: of the sums and of the result.
    """
    whole = x.shape[2] // block_size * block_size
    means = x[:, :, :whole].unflatten(2, (-1, block_size)).mean(3, dtype=dtype) if whole else None
    if whole == x.shape[2]:
        assert means is not None
        return means
    rest = x[:, :, whole:].mean(2, keepdim=True, dtype=dtype)
    return rest if means is None else torch.cat([means, rest], 2)


def shortest_prefix(mass: Tensor, share: float) -> Tensor:
    """Length of the shortest prefix along the last axis that holds ``share`` of its sum; at least 1; int64."""
    cumulative = mass.cumsum(-1, dtype=torch.float64)
    return ((cumulative < share * cumulative[..., -1:]).sum(-1) + 1).clamp(max=mass.shape[-1])


def top_ranked(score: Tensor, count: Tensor) -> Tensor:
    """Which entries of the last axis are among the ``count`` largest, ties by lowest index.

    Args:
        score: [..., N].
        count: int64 [...], one a row.

    Returns:
        bool [..., N].
    """
    order = score.argsort(dim=-1, descending=True, stable=True)
    rank = torch.arange(score.shape[-1], device=score.device)
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, order, rank < count[..., None])
