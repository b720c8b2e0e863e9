"""Page-level selections: which KV pages each query attends to, for several requests packed along N."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from .checks import check_table
from .device_tables import device_table

GROUP = 8
"""g, queries of an execution group."""
CAPACITY = 512
"""Logical pages that the grouping bitmaps hold: sixteen words of 32 bits."""
REGROUP_WINDOWS = (0, 64, 128)
"""W, queries that one search looks at; 0 keeps the original order."""
KV_DTYPES = ("model", "fp8")
STATS_TILE = 128
"""Queries of a tile of the counts."""


@dataclass(frozen=True)
class PagePlan:
    """Selected pages of each query; a page is ``page_size`` consecutive tokens of one request, a *logical* page.

    The queries of R requests (their current prefill chunks) follow each other along N. Query i of request r attends to
    the tokens t with floor(t / P) in S_i, t < L_r and t <= c_i (equations 1-2).

    Attributes:
        pages: int32 [1, N, Hkv, K], selected logical pages, shared by the query heads of the KV head. Any id < 0 or
            >= ceil(L_r / P) is invalid; order is free and duplicates are allowed.
        page_size: P, tokens of a logical page.
        positions: int32 [N], contiguous, causal position c_i of each query inside its request.
        kv_lens: int32 [R], contiguous, keys L of each request.
        cu_seqlens: R + 1 offsets of the requests along N, on the host, so that no launch waits for the device; a tuple,
            by which tables are kept.
        max_kv_len: the largest L, on the host.
        regroup: W, queries of a search window; 0 keeps the original order.
        capacity: pages that the bitmaps of the search hold, a multiple of 32; a request of more keeps its original
            order, whatever others of the call do.
        kv_dtype: ``model`` (keys and values as cached) or ``fp8`` (E4M3, one scale a KV head).
    """

    pages: Tensor
    page_size: int
    positions: Tensor
    kv_lens: Tensor
    cu_seqlens: tuple[int, ...]
    max_kv_len: int
    regroup: int = 0
    capacity: int = CAPACITY
    kv_dtype: str = "model"

    @classmethod
    def for_prompt(cls, pages: Tensor, page_size: int, q_offset: int, q_len: int, **knobs: Any) -> PagePlan:
        """The plan of one request whose queries lie at ``q_offset .. q_offset + q_len - 1``, the last of its keys.

        Args:
            pages: int32 [1, q_len, Hkv, K].
            page_size: P.
            q_offset: position of the first query.
            q_len: number of queries.
            knobs: ``regroup``, ``capacity`` and ``kv_dtype``.
        """
        length, device = q_offset + q_len, pages.device
        positions = torch.arange(q_offset, length, dtype=torch.int32, device=device)
        kv_lens = torch.full((1,), length, dtype=torch.int32, device=device)
        return cls(pages, page_size, positions, kv_lens, (0, q_len), length, **knobs)

    @property
    def length(self) -> int:
        """N, queries of all requests."""
        return self.cu_seqlens[-1]

    @property
    def requests(self) -> int:
        """R."""
        return len(self.cu_seqlens) - 1

    @property
    def groups(self) -> int:
        """Execution groups of one KV head; the last one of a request may be short."""
        return sum(math.ceil((b - a) / GROUP) for a, b in zip(self.cu_seqlens, self.cu_seqlens[1:], strict=False))

    @property
    def num_kv_heads(self) -> int:
        """Hkv."""
        return self.pages.shape[2]

    @property
    def width(self) -> int:
        """K, page ids a query."""
        return self.pages.shape[3]

    @property
    def num_pages(self) -> int:
        """Logical pages of the longest request."""
        return math.ceil(self.max_kv_len / self.page_size)

    @property
    def block_size(self) -> int:
        """Queries of a tile of the counts."""
        return STATS_TILE

    def check(self) -> None:
        """Raise ValueError naming the field that is wrong. Reads the plan back to the host: not for the fast path."""
        self.check_shapes()
        if int(self.kv_lens.min()) < 0 or int(self.kv_lens.max()) != self.max_kv_len:
            raise ValueError(f"max_kv_len={self.max_kv_len}: must be the largest of kv_lens {self.kv_lens.tolist()}")
        if self.length and int(self.positions.min()) < 0:
            raise ValueError("positions: must not be negative")

    def check_shapes(self) -> None:
        """Raise ValueError naming the field whose type, shape, dtype, device or value is wrong, from the host alone."""
        for name in ("page_size", "max_kv_len", "regroup", "capacity"):
            if not isinstance(value := getattr(self, name), Integral):
                raise ValueError(f"{name}={value!r}: must be an integer")
        if self.pages.dim() != 4 or self.pages.shape[0] != 1 or self.pages.shape[3] < 1:
            raise ValueError(f"pages {tuple(self.pages.shape)}: must be [1, N, Hkv, K] with K at least 1")
        if self.pages.dtype != torch.int32:
            raise ValueError(f"pages: must be int32, not {self.pages.dtype}")
        offsets = self.cu_seqlens
        if not isinstance(offsets, tuple) or not all(isinstance(x, Integral) for x in offsets):
            raise ValueError(f"cu_seqlens={offsets!r}: must be a tuple of integers")
        if len(offsets) < 2 or offsets[0] or any(a > b for a, b in zip(offsets, offsets[1:], strict=False)):
            raise ValueError(f"cu_seqlens={offsets}: must begin with 0 and ascend")
        if self.length != self.pages.shape[1]:
            raise ValueError(f"cu_seqlens={offsets}: must end with N = {self.pages.shape[1]}")
        for name, count in (("positions", self.length), ("kv_lens", self.requests)):
            check_table(name, getattr(self, name), (count,), torch.int32, self.pages.device, contiguous=True)
        if self.page_size < 1:
            raise ValueError(f"page_size={self.page_size}: must be above 0")
        if self.regroup not in REGROUP_WINDOWS:
            raise ValueError(f"regroup={self.regroup}: must be one of {REGROUP_WINDOWS}")
        if self.capacity < 32 or self.capacity % 32:
            raise ValueError(f"capacity={self.capacity}: must be a multiple of 32")
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype={self.kv_dtype!r}: must be one of {KV_DTYPES}")


def visible_tokens(plan: PagePlan) -> Tensor:
    """Tokens 0 .. n - 1 that causality and length let each query see, int32 [N]."""
    lengths = plan.kv_lens[query_requests(plan.pages.device, plan.cu_seqlens).long()]
    return torch.minimum(plan.positions + 1, lengths).clamp(min=0)


def canonical_rows(plan: PagePlan) -> Tensor:
    """S_i as ascending rows without repetition, int32 [N, Hkv, K], ``2**31 - 1`` after the last.

    Invalid ids and pages wholly beyond c_i are out.
    """
    none = torch.iinfo(torch.int32).max
    pages = plan.pages[0]
    pages_seen = -(-visible_tokens(plan) // plan.page_size)[:, None, None]
    pages = torch.where((pages >= 0) & (pages < pages_seen), pages, none).sort(-1).values
    repeated = torch.nn.functional.pad(pages[..., 1:] == pages[..., :-1], (1, 0))
    return pages.masked_fill(repeated, none).sort(-1).values


def page_support(plan: PagePlan) -> Tensor:
    """S_i as flags over the pages of the longest request, bool [N, Hkv, M].

    Valid ids alone, each once; pages wholly beyond min(c_i, L - 1) are out.
    """
    rows, count = canonical_rows(plan), plan.num_pages
    flags = torch.zeros(*rows.shape[:2], count + 1, dtype=torch.bool, device=rows.device)
    return flags.scatter_(-1, rows.clamp(max=count).long(), True)[..., :count]


@device_table(kept=64)
def query_requests(cu_seqlens: tuple[int, ...]) -> Tensor:
    """Request of each query, int32 [N]."""
    lengths = torch.tensor(cu_seqlens).diff()
    return torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)


@device_table(kept=64)
def group_requests(cu_seqlens: tuple[int, ...]) -> Tensor:
    """Request of each execution group, int32 [G]; groups never cross a request."""
    groups = -(-torch.tensor(cu_seqlens).diff() // GROUP)
    return torch.arange(len(groups), dtype=torch.int32).repeat_interleave(groups)


@device_table(kept=64)
def identity_ids(cu_seqlens: tuple[int, ...], heads: int) -> Tensor:
    """Execution slots in the original order, int32 [heads, G * 8]; -1 in the slots after a request's last query."""
    parts = []
    for begin, end in zip(cu_seqlens, cu_seqlens[1:], strict=False):
        parts.append(torch.nn.functional.pad(torch.arange(begin, end), (0, -(end - begin) % GROUP), value=-1))
    return torch.cat(parts).int().expand(heads, -1)


@device_table(kept=64)
def windows(cu_seqlens: tuple[int, ...], size: int) -> Tensor:
    """Search windows from the first query of each request, int32 [windows, 4].

    Each row holds the window's first query, its queries, its first execution slot and its request.
    """
    rows, slot = [], 0
    for request, (begin, end) in enumerate(zip(cu_seqlens, cu_seqlens[1:], strict=False)):
        for first in range(begin, end, size):
            rows.append((first, min(size, end - first), slot + first - begin, request))
        slot += math.ceil((end - begin) / GROUP) * GROUP
    return torch.tensor(rows, dtype=torch.int32).view(-1, 4)
