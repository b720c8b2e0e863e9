"""A training-free page selector for models that have none: page summaries scored by the queries of a KV head.

For query i and KV head h, with P tokens a page and the complete pages ``p < floor(i / P)`` before the query's own:

* ``z[g, p] = scale * q[g, i] . m[h, p]`` for each query head g of h, ``m`` the page's mean key (``mean``); or the
  largest logit that a key inside the page's bounding box could have (``minmax``, Quest's bound):
  ``scale * sum_c max(q_c * min_c, q_c * max_c)``,
* ``score[p] = mean over g of softmax_p(z[g])``.

The page of the query itself and page 0 (the sink) are always selected and are two of the K; the others have the largest
scores, of equal ones the lowest page. A query with no more than K causal pages selects them all, unscored.

A page whose logit is NaN or infinite for some query head of h (a broken key or query, or an overflow; under ``minmax``
any infinite key) has no score, and to leave it out would hide what broke: such pages go before all others, the lowest
first where there are more than K - 2, and the softmax is over the other pages.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .paged import PagedKV

SUMMARIES = ("mean", "minmax")
FORCED = 2
"""Pages of a query that are not chosen by score: the sink and its own."""
SCORE_CELLS = 1 << 24
"""Scores held at a time, over the query heads: 64 MiB in float32."""
_PAGE_BITS = 20


def page_summaries(kv: PagedKV, page_size: int, summary: str = "mean") -> Tensor:
    """What stands for the keys of each complete page.

    Args:
        kv: keys of one sequence; logical pages of ``page_size`` tokens, whatever the size of a physical page.
        page_size: P, tokens.
        summary: ``mean``, or ``minmax``: the largest and the smallest value of each channel.

    Returns:
        float32 [Hkv, floor(kv_len / P), d], for ``minmax`` [..., 2 d]: largest, then smallest.

    Raises:
        ValueError: an unknown summary.
    """
    if summary not in SUMMARIES:
        raise ValueError(f"summary={summary!r}: one of {', '.join(SUMMARIES)}")
    keys = kv.gather()[0][0]
    heads, _, dim = keys.shape
    complete = kv.kv_len // page_size
    pages = keys[:, : complete * page_size].reshape(heads, complete, page_size, dim)
    if summary == "mean":
        return pages.mean(2, dtype=torch.float32)
    return torch.cat([pages.amax(2), pages.amin(2)], -1).float()


def select_pages(
    q: Tensor, kv: PagedKV, *, page_size: int, top_k: int, scale: float, q_offset: int = 0, summary: str = "mean"
) -> Tensor:
    """Select the pages of each query, the same for the query heads of a KV head.

    Scores are float32 and held for a part of the queries at a time; nothing waits for the device.

    Args:
        q: [1, Hq, N, d] queries at absolute positions ``q_offset ...``; Hkv divides Hq.
        kv: keys of positions ``0 .. q_offset + N - 1`` of one sequence.
        page_size: P, tokens of a page.
        top_k: K, pages a query, sink and own page among them; at least 2.
        scale: softmax scaling.
        q_offset: absolute position of the first query.
        summary: see :func:`page_summaries`.

    Returns:
        int32 [1, N, Hkv, min(K, pages of the sequence)]: page ids, ascending, each once, -1 behind them; so too where
        queries or keys hold NaN.

    Raises:
        ValueError: ``top_k`` below 2, an unknown summary, or keys that are not those of the queries' positions.
    """
    length, stop = q.shape[2], q_offset + q.shape[2]
    if top_k < FORCED:
        raise ValueError(f"top_k={top_k}: at least {FORCED}, the sink and the query's own page")
    if kv.kv_len != stop:
        raise ValueError(f"kv_len={kv.kv_len}: must be q_offset + queries = {stop}")
    if summary not in SUMMARIES:
        raise ValueError(f"summary={summary!r}: one of {', '.join(SUMMARIES)}")
    heads = kv.num_kv_heads
    width = min(top_k, math.ceil(stop / page_size))
    own = torch.arange(q_offset, stop, device=q.device) // page_size
    # Every causal page, where there are no more than K.
    listed = torch.arange(width, device=q.device)
    pages = torch.where(listed <= own[:, None], listed, -1).int()[:, None].repeat(1, heads, 1)
    first = min(max(top_k * page_size - q_offset, 0), length)
    if first == length:
        return pages[None]
    if top_k == FORCED:
        pages[first:, :, 1] = own[first:, None].int()
        return pages[None]
    summaries = page_summaries(kv, page_size, summary)
    rows = max(1, SCORE_CELLS // (q.shape[1] * summaries.shape[1]))
    for begin in range(first, length, rows):
        end = min(begin + rows, length)
        before = summaries[:, : (q_offset + end - 1) // page_size]
        chosen = _chosen(q[0, :, begin:end], before, own[begin:end], top_k - FORCED, scale)
        pages[begin:end, :, 1:-1] = chosen.transpose(0, 1).sort(-1).values.int()
        pages[begin:end, :, -1] = own[begin:end, None].int()
    return pages[None]


def scored_products(q_offset: int, q_len: int, page_size: int, top_k: int, summary: str = "mean") -> int:
    """Products of a query and a page summary that :func:`select_pages` needs, for one query head.

    Each scored query (one with more than K causal pages) meets the summaries of the complete pages before its own.
    """
    if top_k == FORCED:
        return 0

    def below(position: int) -> int:  # sum of floor(i / P) over i < position
        whole, rest = divmod(position, page_size)
        return page_size * whole * (whole - 1) // 2 + whole * rest

    begin, end = max(q_offset, top_k * page_size), q_offset + q_len
    return max(0, below(end) - below(begin)) * (2 if summary == "minmax" else 1)


def _chosen(q: Tensor, summaries: Tensor, own: Tensor, count: int, scale: float) -> Tensor:
    """The ``count`` pages of largest score between the sink and the own page, int64 [Hkv, R, count].

    Args:
        q: [Hq, R, d] of neighbouring queries.
        summaries: of the complete pages before the last query's own.
        own: int64 [R], each query's own page, ascending and above ``count``.
        count: 1 or more.
        scale: softmax scaling.
    """
    heads, rows = summaries.shape[0], q.shape[1]
    pages = summaries.shape[1]
    group = q.shape[0] // heads
    q = q.float().reshape(heads, group * rows, -1)
    if summaries.shape[2] != q.shape[2]:
        q = torch.cat([q.clamp(min=0), q.clamp(max=0)], -1)
    page = torch.arange(pages, device=q.device)
    later = page >= own[:, None]
    logits = (q @ summaries.mT * scale).view(heads, group, rows, pages)
    # Within the softmax one NaN would take all scores along.
    broken = ~logits.isfinite().all(1)
    logits.masked_fill_((broken | later)[:, None], float("-inf"))
    score = logits.softmax(-1).mean(1).masked_fill_(broken, float("inf"))
    # Scores are not negative, so that their bits order as they do; behind them, the lowest page first.
    last = (1 << _PAGE_BITS) - 1
    key = (score.view(torch.int32).long() << _PAGE_BITS) | (last - page)
    key = key.masked_fill(later | (page == 0), -1)
    return last - (key.topk(count, sorted=False).values & last)
