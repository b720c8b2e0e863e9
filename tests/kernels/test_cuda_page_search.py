"""The CUDA C++ kernel of search and unions, its source compiled for the CPU, against the reference."""

from __future__ import annotations

import contextlib

import cuda_emulator
import page_cases
import pytest
import torch
from prefill_kernels import cuda_page_search as kernel
from prefill_kernels import prepare_unions, regroup_queries, regroups, search_unions

pytestmark = pytest.mark.skipif(cuda_emulator.problem() is not None, reason=str(cuda_emulator.problem()))

FIELDS = ("ids", "pages", "members", "count", "requests")
CASES = [  # requests as (queries, keys), page size, pages a query, KV heads, capacity
    ([(1, 1)], 16, 1, 1, 512),
    ([(64, 64), (63, 500), (65, 65), (7, 7)], 16, 3, 2, 512),
    ([(128, 1000), (129, 129), (127, 3000)], 16, 16, 1, 512),
    ([(200, 8192)], 16, 17, 2, 512),  # the capacity, to the page
    ([(100, 8193)], 16, 16, 1, 512),  # one page beyond it
    ([(100, 2000), (70, 400)], 16, 33, 1, 64),  # one of two beyond it, several stretches of masks
    ([(90, 2048)], 1, 64, 1, 2048),
    ([(130, 40000)], 128, 64, 1, 512),
    ([(100, 33 * 16), (70, 20 * 16), (130, 32 * 16)], 16, 8, 2, 32),  # one page beyond it among others, and to the page
]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    library = cuda_emulator.build(kernel.SOURCE, "page_search_memory", tmp_path_factory.mktemp("emulated"))
    return kernel.declared(library)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, emulated):
    monkeypatch.setattr(kernel, "library", lambda: emulated)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: empty(*a, **kw).fill_(-777))  # nothing is left unwritten


def equal(got, want):
    page_cases.check_queue(got)
    return [name for name in FIELDS if not torch.equal(getattr(got, name), getattr(want, name))] == []


@pytest.mark.parametrize("regroup", [64, 128])
@pytest.mark.parametrize("requests,page_size,width,kv_heads,capacity", CASES)
def test_search_and_unions(requests, page_size, width, kv_heads, capacity, regroup):
    for seed in range(2):
        plan = page_cases.make(
            requests, heads=(kv_heads, kv_heads), page_size=page_size, width=width, seed=seed, local=seed == 1,
            sprinkle=seed == 1, regroup=regroup, capacity=capacity,
        ).plan  # fmt: skip
        if regroups(plan):
            assert equal(kernel.search_cuda(plan), search_unions(plan, backend="torch"))


@pytest.mark.parametrize("regroup", [0, 64, 128])
@pytest.mark.parametrize("requests,page_size,width,kv_heads,capacity", CASES)
def test_unions_of_an_order_that_is_there(requests, page_size, width, kv_heads, capacity, regroup):
    plan = page_cases.make(
        requests, heads=(kv_heads, kv_heads), page_size=page_size, width=width, seed=3, local=True, regroup=regroup,
        capacity=capacity,
    ).plan  # fmt: skip
    for ids in (regroup_queries(plan, backend="torch"), page_cases.any_order(plan, seed=regroup)):
        assert equal(kernel.search_cuda(plan, ids.contiguous()), prepare_unions(plan, ids, backend="torch"))


@pytest.mark.parametrize("regroup", [64, 128])
def test_equal_empty_and_repeated_selections(regroup):
    plan = page_cases.make([(137, 3000)], page_size=16, width=16, regroup=regroup).plan
    for one in page_cases.degenerate(plan):
        assert equal(kernel.search_cuda(one), search_unions(one, backend="torch"))
