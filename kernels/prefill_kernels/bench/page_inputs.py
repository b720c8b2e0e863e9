"""What page attention is measured on: captured or synthetic page ids, with synthetic Q, K and V."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..paged import PagedKV
from ..pages import GROUP, PagePlan
from ..regroup import regroup_queries
from .captures import CapturedLayer, captured_layers
from .config import BenchError
from .inputs import L2_BYTES


@dataclass(frozen=True)
class Selection:
    """Selected pages of one KV head.

    Attributes:
        name: ``<tokens>/<layer>`` of a capture, or what the synthetic ids are.
        pages: int32 [N, K] on the CPU; an id below 0 selects nothing.
        positions: int32 [N], ascending.
        kv_len: tokens of the context.
        page_size: P.
        source: where the ids come from, for the setting of rows.
    """

    name: str
    pages: Tensor
    positions: Tensor
    kv_len: int
    page_size: int
    source: str

    def last(self, queries: int | None) -> Selection:
        """Of the last queries alone: the chunk that was prefilled last."""
        if queries is None:
            return self
        return replace(self, pages=self.pages[-queries:], positions=self.positions[-queries:])

    def plan(self, device: torch.device, *, regroup: int = 0, kv_dtype: str = "model") -> PagePlan:
        """The plan of these queries, each page id for one KV head."""
        return PagePlan(
            pages=self.pages[None, :, None].to(device, torch.int32).contiguous(),
            page_size=self.page_size,
            positions=self.positions.to(device, torch.int32),
            kv_lens=torch.tensor([self.kv_len], dtype=torch.int32, device=device),
            cu_seqlens=(0, len(self.positions)),
            max_kv_len=self.kv_len,
            regroup=regroup,
            kv_dtype=kv_dtype,
        )


@dataclass(frozen=True)
class Overlap:
    """How much the pages of neighbouring queries overlap, in their own order.

    Attributes:
        support: mean pages of a query.
        union: mean pages of eight neighbouring queries together.
        distinct: pages that any query selects.
    """

    support: float
    union: float
    distinct: int

    @property
    def text(self) -> str:
        """In words."""
        return f"{self.support:.2f} pages a query, {self.union:.2f} for eight neighbours, {self.distinct} in all"


def overlap(pages: Tensor, positions: Tensor, page_size: int) -> Overlap:
    """Measure the overlap of page ids, mean over KV heads.

    Args:
        pages: [N, Hkv, K].
        positions: [N].
        page_size: P.
    """
    count = int(positions.max()) // page_size + 1
    own = (positions // page_size)[:, None, None]
    valid = (pages >= 0) & (pages <= own)
    support, unions, distinct = 0, 0, 0
    groups = math.ceil(len(pages) / GROUP)
    for head in range(pages.shape[1]):
        member = torch.zeros(groups * GROUP, count + 1, dtype=torch.bool)
        slots = torch.where(valid[:, head], pages[:, head], count).long()
        member[: len(pages)].scatter_(1, slots, True)
        member = member[:, :count]
        support += int(member.sum())
        unions += int(member.view(groups, GROUP, count).any(1).sum())
        distinct = max(distinct, int(member.any(0).sum()))
    heads = pages.shape[1]
    return Overlap(support / (len(pages) * heads), unions / (groups * heads), distinct)


def captured_pages(path: str | Path, kv_head: int | None = None, queries: int | None = None) -> list[Selection]:
    """Selections of each layer of a file of ``evalkit capture``; of one KV head, or of each as a layer of its own.

    Args:
        path: the file.
        kv_head: None = all.
        queries: the last ones alone; None = all.

    Raises:
        BenchError: no such file, contents that cannot be used, no such KV head, or nothing selected.
    """
    return [one for layer in captured_layers(path) for one in selections(layer, kv_head, queries)]


def selections(layer: CapturedLayer, kv_head: int | None = None, queries: int | None = None) -> list[Selection]:
    """Those of one layer, as :func:`captured_pages` does it.

    Raises:
        BenchError: no such KV head, or nothing selected.
    """
    heads = layer.pages.shape[1]
    if kv_head is not None and kv_head >= heads:
        raise BenchError("kv_head", kv_head, f"below {heads}, the KV heads of {layer.path}")
    found = []
    for head in range(heads) if kv_head is None else (kv_head,):
        layer.check_selects(head, queries)
        name = f"{layer.tokens}/{layer.layer}" if kv_head is not None else f"{layer.tokens}/{layer.layer}/{head}"
        ids = layer.pages[:, head].contiguous()
        one = Selection(name, ids, layer.positions, layer.tokens, layer.page_size, layer.model)
        found.append(one.last(queries))
    return found


def synthetic_pages(
    tokens: int, queries: int, *, page_size: int, top_k: int, shared: float, cluster: int, seed: int
) -> Selection:
    """Page ids whose overlap is set, of the last queries of a context.

    Sink and own page are always selected. Each other page of a query is, with probability ``shared``, of a pool of as
    many pages that its cluster has in common, else drawn from the whole context. Clusters are interleaved: query i
    belongs to cluster ``i mod cluster``, so that neighbours in their own order share little, and a window of at least
    eight times as many queries holds a whole group of each.

    Args:
        tokens: context length.
        queries: of the last chunk.
        page_size: P.
        top_k: K.
        shared: probability, 0 to 1.
        cluster: number of clusters.
        seed: of the draw.

    Raises:
        ValueError: a context of fewer pages than ``top_k``.
    """
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(tokens - queries, tokens, dtype=torch.int32)
    own = positions // page_size
    choices, free = int(own[0]) - 1, top_k - 2
    if choices < free:
        found = f"{choices} pages to choose from before the queries"
        raise ValueError(f"tokens={tokens}: {found}, top_k={top_k} needs {free}")
    # A stretch of neighbours as long as the window draws its clusters' pools anew.
    stretch = (torch.arange(queries) // (cluster * GROUP)) * cluster + torch.arange(queries) % cluster
    pools = torch.rand(int(stretch.max()) + 1, choices, generator=generator).argsort(1)[:, :free]
    drawn = torch.rand(queries, choices, generator=generator).argsort(1)[:, :free]
    take = torch.rand(queries, free, generator=generator) < shared
    inner = 1 + torch.where(take, pools[stretch], drawn)
    pages = torch.cat([torch.zeros(queries, 1, dtype=torch.long), inner, own[:, None].long()], 1)
    name = f"shared {shared:g}"
    return Selection(name, pages.int(), positions, tokens, page_size, f"synthetic ids, {cluster} clusters")


def searched_pages(selection: Selection, window: int) -> Selection:
    """The pages of a selection in the order of a search: one that regrouping costs, and cannot help.

    The search repeats itself on its own order. Its seed is the first query left, and so is the next member: it was the
    best of the same queries before, and ties go to the first. Unions in the given order are therefore those that a
    search in this window finds, or in a shorter one that divides it. Rows move within a window alone; the last page of
    each, a query's own, is that of the window's first query, so that no row's pages depend on where it moved.

    Args:
        selection: pages of :func:`synthetic_pages`, drawn from before its queries; its own page is the last.
        window: W.
    """
    pages = selection.pages.clone()
    pages[:, -1] = pages[torch.arange(len(pages)) // window * window, -1]
    alike = replace(selection, pages=pages, name=f"{selection.name} in the order of a search")
    plan = alike.plan(pages.device, regroup=window)
    # The order is wanted whatever bitmaps the measured call has.
    plan = replace(plan, capacity=max(plan.capacity, math.ceil(plan.num_pages / 32) * 32))
    ids = regroup_queries(plan, backend="torch")[0].long()
    return replace(alike, pages=pages[ids[ids >= 0]])


@dataclass(frozen=True)
class PageInputs:
    """Q, K and V of one call, KV in both precisions.

    Attributes:
        q: [1, Hq, N, d], a transposed [1, N, Hq, d].
        kv: keys and values of the context in shuffled pages.
        scale: softmax scaling.
    """

    q: Tensor
    kv: PagedKV
    scale: float


def page_inputs(
    selection: Selection, *, heads: int, kv_heads: int, dim: int, seed: int, device: torch.device, dtype: torch.dtype
) -> PageInputs:
    """Standard normal Q, K and V; physical pages of P tokens, shuffled, zero beyond the context."""
    g = torch.Generator(device=device).manual_seed(seed)
    size = selection.page_size
    count = math.ceil(selection.kv_len / size)
    q = torch.randn(1, len(selection.positions), heads, dim, device=device, dtype=dtype, generator=g).transpose(1, 2)
    places = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).to(device)

    def pool() -> Tensor:
        pages = torch.randn(count, size, kv_heads, dim, device=device, dtype=dtype, generator=g)
        pages[places[-1], selection.kv_len - (count - 1) * size :] = 0
        return pages

    return PageInputs(q, PagedKV(pool(), pool(), places.int()[None], selection.kv_len), dim**-0.5)


def rotation(one: PageInputs) -> int:
    """How many inputs of this size to take in turn, so that a call finds none of its own in L2 (on a CPU, one)."""
    if one.q.device.type != "cuda":
        return 1
    size = sum(x.numel() * x.element_size() for x in (one.q, one.kv.k_pages, one.kv.v_pages))
    return max(1, math.ceil(L2_BYTES / size))
