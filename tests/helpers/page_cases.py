"""Selections, caches and queries for the page tests, shared by the interpreter and the GPU tests."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from prefill_kernels import PagedKV, PagePlan, Unions, regroup_queries
from prefill_kernels.unions import BINS, GroupQueue
from torch import Tensor

CASES: dict[str, dict[str, Any]] = {
    "ragged requests": {"requests": [(13, 50), (1, 1), (9, 100)], "heads": (4, 2), "physical": 16, "page_size": 32},
    "ratio 1": {"requests": [(17, 40)], "heads": (2, 2)},
    "ratio 3, a chunk": {"requests": [(21, 90)], "heads": (3, 1), "width": 3},
    "ratio 4": {"requests": [(9, 9)], "heads": (4, 1), "dim": 32},
    "ratio 8": {"requests": [(16, 70)], "heads": (8, 1), "physical": 64},
    "ratio 16": {"requests": [(11, 60)], "heads": (16, 1), "page_size": 32},
    "long pages": {"requests": [(9, 600)], "heads": (2, 1), "page_size": 256, "physical": 64, "width": 2},
    "longer physical pages": {"requests": [(9, 70), (8, 8)], "heads": (1, 1), "physical": 256},
    "K = 1": {"requests": [(20, 300)], "heads": (2, 1), "width": 1},
    "beyond the capacity": {"requests": [(9, 700)], "heads": (1, 1), "width": 4, "capacity": 32, "regroup": 64},
}


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter runs where there is no GPU")
    return str(request.param)


def double(kv: PagedKV) -> PagedKV:
    return PagedKV(kv.k_pages.double(), kv.v_pages.double(), kv.page_table, kv.kv_len)


@dataclass
class Case:
    """One call; ``k`` and ``v`` are the dense [R, Hkv, max L, d] of ``kv``."""

    q: Tensor
    k: Tensor
    v: Tensor
    kv: PagedKV
    plan: PagePlan
    scale: float

    def planned(self, **changes: Any) -> Case:
        return replace(self, plan=replace(self.plan, **changes))


def cache(k: Tensor, v: Tensor, page_size: int, lengths: list[int], seed: int = 9) -> PagedKV:
    """Shuffled physical pages; slots without a token hold NaN, table entries without a page point nowhere."""
    kv = PagedKV.from_dense(k, v, page_size, generator=torch.Generator().manual_seed(seed))
    table = torch.cat([kv.page_table, kv.page_table.new_full((len(lengths), 3), 1 << 20)], 1)
    for request, length in enumerate(lengths):
        for m in range(kv.page_table.shape[1]):
            held = max(0, min(page_size, length - m * page_size))
            for pool in (kv.k_pages, kv.v_pages):
                pool[int(kv.page_table[request, m]), held:] = float("nan")
            if held == 0:
                table[request, m] = 1 << 20
    return PagedKV(kv.k_pages, kv.v_pages, table, max(lengths))


def make(
    requests: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (2, 1),
    dim: int = 16,
    page_size: int = 16,
    physical: int | None = None,
    width: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    local: bool = False,
    sprinkle: bool = True,
    **knobs: Any,
) -> Case:
    """Requests are (queries, keys): the queries are the last ones of their request.

    Selections are random pages, with ``sprinkle`` also ids that are invalid, repeated, after the query, and rows with
    nothing. With ``local`` every third query of a stretch shares most of its pages.
    """
    g = torch.Generator().manual_seed(seed)
    q_heads, kv_heads = heads
    n, lengths = sum(a for a, _ in requests), [b for _, b in requests]
    longest = max(lengths)
    q = torch.randn(1, n, q_heads, dim, generator=g).transpose(1, 2)
    k, v = (torch.randn(len(requests), kv_heads, longest, dim, generator=g) for _ in range(2))
    q, k, v = (x.to(device, dtype) for x in (q * 2, k, v))
    positions = torch.cat([torch.arange(b - a, b) for a, b in requests]).int()
    total = max(1, -(-longest // page_size))
    pages = torch.randint(0, total, (1, n, kv_heads, width), generator=g, dtype=torch.int32)
    if local:
        hot = pages[:, torch.arange(n) // 48 * 48 + torch.arange(n) % 3 * (torch.arange(n) // 48 * 48 + 2 < n)]
        pages = torch.where(torch.rand(pages.shape, generator=g) < 0.8, hot, pages)
    last = (positions // page_size)[None, :, None, None].int()
    pages = torch.where(torch.rand(pages.shape, generator=g) < 0.7, torch.minimum(pages, last), pages)
    if sprinkle:
        u = torch.rand(pages.shape, generator=g)
        pages = torch.where(u < 0.08, -1 - pages, pages)
        pages = torch.where((u > 0.08) & (u < 0.12), 2**31 - 1 - pages, pages)
        pages = torch.where((u > 0.12) & (u < 0.16), total + pages % 3, pages)
        pages = torch.where((u > 0.2) & (u < 0.4), pages[..., :1], pages)
        pages = torch.where(torch.rand(pages.shape[:3], generator=g)[..., None] < 0.1, -1, pages)
    offsets = torch.tensor([0] + [a for a, _ in requests]).cumsum(0).tolist()
    plan = PagePlan(
        pages.to(device), page_size, positions.to(device), torch.tensor(lengths, dtype=torch.int32, device=device),
        tuple(offsets), longest, **knobs,
    )  # fmt: skip
    plan.check()
    kv = cache(k, v, physical or page_size, lengths, seed + 1)
    return Case(q, k, v, kv, plan, dim**-0.5)


def halves(page_size: int = 16, pages: int = 12) -> Case:
    """Eight queries of which the first four and the last four share no page, and a group with holes in one half."""
    one = make([(20, page_size * pages)], page_size=page_size, width=3, seed=3, sprinkle=False)
    rows = torch.full((1, 20, 1, 3), -1, dtype=torch.int32)
    rows[0, :4, 0] = torch.tensor([0, 1, 2], dtype=torch.int32)
    rows[0, 4:8, 0] = torch.tensor([5, 6, 1 << 30], dtype=torch.int32)
    rows[0, 12:16, 0] = torch.tensor([7, 7, 7], dtype=torch.int32)
    rows[0, 19, 0] = torch.tensor([0, 11, 3], dtype=torch.int32)
    return one.planned(pages=rows)


def any_order(plan, seed):
    """A random order of the queries within each request, as ids by execution slot."""
    ids, slot = regroup_queries(replace(plan, regroup=0), backend="torch"), 0
    draws = torch.Generator().manual_seed(seed)
    for begin, end in itertools.pairwise(plan.cu_seqlens):
        for head in range(plan.num_kv_heads):
            drawn = begin + torch.randperm(end - begin, generator=draws)
            ids[head, slot : slot + end - begin] = drawn.to(ids)
        slot += -(-(end - begin) // 8) * 8
    return ids


def degenerate(plan):
    """The plan with selections that are equal, empty, repeated, sorted or beyond all pages."""
    width = plan.width
    own = torch.arange(width, dtype=torch.int32, device=plan.pages.device)
    for pages in (
        plan.pages[:, :1].expand_as(plan.pages),
        torch.full_like(plan.pages, -1),
        own.expand_as(plan.pages),
        own.flip(0).expand_as(plan.pages) * 37 % width,
        torch.full_like(plan.pages, 3),
        torch.full_like(plan.pages, 2**31 - 1),
        plan.pages.sort(-1).values,
    ):
        yield replace(plan, pages=pages.contiguous())


def check_queue(unions: Unions) -> None:
    """Every group is in the queue once, in the bin of its count, and none is taken."""
    assert unions.queue is not None
    *sizes, taken = unions.queue.sizes.tolist()
    counts, shift = unions.count.flatten().tolist(), GroupQueue.bin_shift(unions.pages.shape[2])
    lines = []
    for place, size in enumerate(sizes):
        some = unions.queue.lines[place, :size].tolist()
        assert [max(0, BINS - 1 - (counts[line] >> shift)) for line in some] == [place] * size
        lines += some
    assert sorted(lines) == list(range(len(counts))) and taken == 0
