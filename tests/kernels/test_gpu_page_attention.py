"""The Hopper kernels of union attention on the device: against the float32 oracle, the FP8 twin, and themselves."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from page_cases import Case, check_queue, make
from prefill_kernels import PagedKV
from prefill_kernels.fp8 import quantize_kv
from prefill_kernels.page_attention import attend_pages, union_attention
from prefill_kernels.page_search import cuda_problem, search_unions
from prefill_kernels.regroup import regroup_queries
from prefill_kernels.unions import BINS, GroupQueue, prepare_unions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PAGE = 128
CASES = [  # requests as (queries, keys), query heads, KV heads, head dim, width, dtype
    ([(8, 128)], 16, 1, 128, 1, torch.bfloat16),
    ([(1, 1)], 16, 1, 128, 3, torch.bfloat16),
    ([(5, 70)], 16, 1, 128, 4, torch.bfloat16),
    ([(300, 300)], 16, 1, 128, 4, torch.bfloat16),
    ([(130, 1500)], 16, 1, 128, 6, torch.float16),
    ([(200, 4096)], 16, 1, 128, 16, torch.bfloat16),
    ([(100, 1111)], 32, 2, 128, 7, torch.bfloat16),
    ([(33, 900), (1, 129), (64, 64), (17, 2048)], 16, 1, 128, 5, torch.bfloat16),
    ([(40, 700), (9, 256)], 16, 2, 128, 5, torch.bfloat16),
    ([(100, 1000)], 8, 2, 128, 5, torch.bfloat16),
    ([(60, 513)], 9, 3, 128, 5, torch.float16),
    ([(77, 700)], 9, 3, 64, 5, torch.bfloat16),
    ([(50, 640)], 2, 2, 64, 5, torch.float16),
]
VARIANTS = ["hopper", "hopper fp8", "cluster fp8"]
EXTRA = [  # further ways to run the same kernels
    ("hopper", {"predicate": True}),
    ("hopper fp8", {"predicate": True}),
    ("hopper fp8", {"stages": (4, 5)}),
    ("hopper", {"programs": 2}),
    ("hopper fp8", {"programs": 1}),
    ("cluster fp8", {"multicast": False}),
]


@pytest.fixture(params=VARIANTS)
def variant(request) -> str:
    return request.param


def cache(variant: str, case: Case):
    return quantize_kv(case.kv, kv_lens=case.plan.kv_lens) if variant.endswith("fp8") else case.kv


def attend(variant: str, case: Case, kv=None, **tuning) -> torch.Tensor:
    """One call into poisoned memory; skips where the kernel refuses it."""
    kv = cache(variant, case) if kv is None else kv
    module = importlib.import_module(f"prefill_kernels.{variant.split()[0]}_page_attention")
    if reason := module.problem(case.q, kv, case.plan):
        pytest.skip(reason)
    unions = prepare_unions(case.plan, regroup_queries(case.plan, backend="torch"), backend="torch")
    _, heads, length, dim = case.q.shape
    out = torch.full((1, length, heads, dim), float("nan"), dtype=case.q.dtype, device="cuda").transpose(1, 2)
    module.union_attention(case.q, kv, case.plan, unions, case.scale, out, **tuning)
    return out


def oracle(case: Case, kv) -> torch.Tensor:
    if isinstance(kv, PagedKV):
        kv = PagedKV(kv.k_pages.float(), kv.v_pages.float(), kv.page_table, kv.kv_len)
    return attend_pages(case.q.float(), kv, case.plan, case.scale)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-20))


def built(requests, q_heads, kv_heads, dim, width, dtype, **more) -> Case:
    return make(
        requests, heads=(q_heads, kv_heads), dim=dim, page_size=PAGE, width=width, dtype=dtype, device="cuda", **more
    )


def with_rows(case: Case, rows: torch.Tensor) -> Case:
    return case.planned(pages=rows.to("cuda", torch.int32))


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("requests,q_heads,kv_heads,dim,width,dtype", CASES)
def test_equals_the_oracle(variant, requests, q_heads, kv_heads, dim, width, dtype, local):
    for seed in range(2):
        case = built(requests, q_heads, kv_heads, dim, width, dtype, seed=seed, local=local)
        kv = cache(variant, case)
        got, want = attend(variant, case, kv), oracle(case, kv)
        assert torch.isfinite(got).all()
        assert (got[want.abs().amax(-1) == 0] == 0).all()
        if variant.endswith("fp8"):
            assert relative(got, want) < 6e-2
            twin = union_attention(
                case.q, kv, case.plan, prepare_unions(case.plan, regroup_queries(case.plan, backend="torch")),
                scale=case.scale, backend="torch",
            )  # fmt: skip
            assert relative(got, twin) < 2e-2
        else:
            assert relative(got, want) < (5e-3 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("variant,tuning", EXTRA)
def test_other_settings_compute_the_same(variant, tuning):
    case = built([(200, 3000), (30, 500)], 16, 1, 128, 9, torch.bfloat16, seed=4, local=True)
    kv = cache(variant, case)
    assert relative(attend(variant, case, kv, **tuning), attend(variant, case, kv)) < 1e-3


def test_regrouping_changes_no_bit(variant):
    for seed in range(2):
        case = built([(260, 4000), (70, 900)], 16, 1, 128, 12, torch.bfloat16, seed=seed, local=True)
        kv = cache(variant, case)
        original = attend(variant, case, kv)
        for window in (64, 128):
            other = case.planned(regroup=window)
            assert not torch.equal(regroup_queries(other.plan), regroup_queries(case.plan))
            assert torch.equal(attend(variant, other, kv), original)


def test_a_query_alone_equals_a_query_in_a_group(variant):
    case = built([(64, 2000)], 16, 1, 128, 8, torch.bfloat16, seed=5)
    kv = cache(variant, case)
    together = attend(variant, case, kv)
    for query in (0, 7, 13, 63):
        rows = torch.full_like(case.plan.pages, -1)
        rows[:, query] = case.plan.pages[:, query]
        alone = attend(variant, with_rows(case, rows), kv)
        assert torch.equal(alone[:, :, query], together[:, :, query])
        assert (alone[:, :, [i for i in range(64) if i != query]] == 0).all()


def test_repeated_runs_are_bitwise_equal(variant):
    case = built([(1024, 16384)], 16, 1, 128, 16, torch.bfloat16, seed=6, local=True)
    kv = cache(variant, case)
    first = attend(variant, case, kv)
    for _ in range(20):
        assert torch.equal(first, attend(variant, case, kv))


def test_halves_without_members(variant):
    case = built([(20, 12 * PAGE)], 16, 1, 128, 3, torch.bfloat16, seed=7, sprinkle=False)
    rows = torch.full((1, 20, 1, 3), -1)
    rows[0, :4, 0] = torch.tensor([0, 1, 2])
    rows[0, 4:8, 0] = torch.tensor([5, 6, 1 << 30])
    rows[0, 12:16, 0] = torch.tensor([7, 7, 7])
    rows[0, 19, 0] = torch.tensor([0, 11, 3])
    case = with_rows(case, rows)
    kv = cache(variant, case)
    got, want = attend(variant, case, kv), oracle(case, kv)
    assert relative(got, want) < (6e-2 if variant.endswith("fp8") else 5e-3)
    assert (got[:, :, 8:12] == 0).all() and (got[:, :, 16:19] == 0).all()


def test_long_runs_of_one_half(variant):
    """Pages of one half alone, for longer than the rings hold, then of the other, then in turn."""
    pages = 40
    case = built([(8, pages * PAGE)], 16, 1, 128, 20, torch.bfloat16, seed=8, sprinkle=False)
    for split in ("runs", "turns"):
        rows = torch.empty(1, 8, 1, 20)
        for query in range(8):
            low = query < 4
            if split == "runs":
                rows[0, query, 0] = torch.arange(20) + (0 if low else 20)
            else:
                rows[0, query, 0] = torch.arange(20) * 2 + (0 if low else 1)
        one = with_rows(case, rows)
        kv = cache(variant, one)
        assert relative(attend(variant, one, kv), oracle(one, kv)) < (6e-2 if variant.endswith("fp8") else 5e-3)


def test_nothing_selected_gives_zeros(variant):
    case = built([(100, 900)], 16, 1, 128, 4, torch.bfloat16)
    assert (attend(variant, with_rows(case, torch.full_like(case.plan.pages, -1))) == 0).all()


def test_sparse_is_not_dense(variant):
    case = built([(64, 2048)], 16, 1, 128, 4, torch.bfloat16, seed=9, sprinkle=False)
    kv = cache(variant, case)
    every = torch.arange(16).expand(1, 64, 1, 16)
    assert relative(attend(variant, case, kv), oracle(with_rows(case, every), kv)) > 0.3
    dense = with_rows(case, every)
    assert relative(attend(variant, dense, kv), oracle(dense, kv)) < (6e-2 if variant.endswith("fp8") else 5e-3)


def test_head_major_queries(variant):
    case = built([(70, 900)], 16, 1, 128, 4, torch.bfloat16, seed=10)
    kv = cache(variant, case)
    major = Case(case.q.contiguous(), case.k, case.v, case.kv, case.plan, case.scale)
    assert torch.equal(attend(variant, major, kv), attend(variant, case, kv))


def test_large_logits_and_zero_rows(variant):
    """Rows whose scores are far apart, a row of zeros, and a page of zeros."""
    case = built([(64, 1024)], 16, 1, 128, 6, torch.bfloat16, seed=11)
    case.q[:, :, ::3] *= 40
    case.q[:, 3] = 0
    case.kv.k_pages[int(case.kv.page_table[0, 2])] = 0
    kv = cache(variant, case)
    got = attend(variant, case, kv)
    assert torch.isfinite(got).all()
    if not variant.endswith("fp8"):  # E4M3 queries move such scores by whole units
        assert relative(got, oracle(case, kv)) < 6e-3


def test_the_public_call_takes_these_backends(variant):
    case = built([(130, 2000)], 16, 1, 128, 6, torch.bfloat16, seed=12)
    kv = cache(variant, case)
    direct = attend(variant, case, kv)
    unions = prepare_unions(case.plan, regroup_queries(case.plan))
    got = union_attention(case.q, kv, case.plan, unions, scale=case.scale, backend=variant.split()[0])
    assert torch.equal(got, direct)


@pytest.mark.parametrize("kv_dtype", ["model", "fp8"])
@pytest.mark.parametrize(
    "requests,q_heads,kv_heads,dim,width",
    [
        ([(9000, 40000)], 16, 1, 128, 16),  # many groups a program
        ([(1, 1), (700, 3000), (9, 9)], 32, 4, 64, 7),
        ([(8, 128)], 16, 1, 128, 1),  # one group
        ([(400, 40000)], 16, 1, 128, 40),  # bins of more than one count
    ],
)
def test_the_order_of_the_queue_changes_no_bit(requests, q_heads, kv_heads, dim, width, kv_dtype):
    """Unions with a sorted queue against those that are taken in turn, one queue for several calls."""
    case = built(requests, q_heads, kv_heads, dim, width, torch.bfloat16, seed=13, local=True, regroup=64)
    kv = cache("hopper fp8" if kv_dtype == "fp8" else "hopper", case)
    module = importlib.import_module("prefill_kernels.hopper_page_attention")
    if reason := module.problem(case.q, kv, case.plan) or cuda_problem(case.plan):
        pytest.skip(reason)
    plain, sorted_ones = (search_unions(case.plan, backend=backend) for backend in ("torch", "cuda"))
    assert plain.queue is None
    results = []
    for unions, ahead in ((plain, 4), (sorted_ones, 4), (sorted_ones, 1), (sorted_ones, 1 << 20)):
        _, heads, length, dim = case.q.shape
        out = torch.full((1, length, heads, dim), float("nan"), dtype=case.q.dtype, device="cuda").transpose(1, 2)
        module.union_attention(case.q, kv, case.plan, unions, case.scale, out, ahead=ahead)
        results.append(out)
    assert torch.isfinite(results[0]).all()
    assert all(torch.equal(out, results[0]) for out in results)
    check_queue(sorted_ones)


def test_calls_that_overlap_on_other_streams_share_no_count():
    """One queue, several streams at once: no call takes groups that another then misses.

    A call's last group is several times as long as the others, so that its program takes a ticket amid the next call.
    """
    case = built([(9000, 40000)], 16, 1, 128, 16, torch.bfloat16, seed=14, sprinkle=False)
    module = importlib.import_module("prefill_kernels.hopper_page_attention")
    if reason := module.problem(case.q, case.kv, case.plan):
        pytest.skip(reason)
    rows = torch.arange(16).expand(1, 9000, 1, 16).clone()
    rows[0, :8, 0, :8] = 16 + torch.arange(64).view(8, 8)
    rows[0, :8, 0, 8:] = -1
    case = with_rows(case, rows)
    unions = prepare_unions(case.plan, regroup_queries(case.plan, backend="torch"), backend="torch")
    unions = replace(unions, queue=GroupQueue.in_turn(case.plan.groups, case.q.device))
    assert unions.count[0, 0] == 64 and (unions.count[0, 1:] == 16).all()
    outs = [torch.full_like(case.q, float("nan")) for _ in range(7)]
    module.union_attention(case.q, case.kv, case.plan, unions, case.scale, outs[6])
    torch.cuda.synchronize()
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # until all calls are launched
    for turn in range(2):
        for place, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                module.union_attention(case.q, case.kv, case.plan, unions, case.scale, outs[2 * place + turn])
    torch.cuda.synchronize()
    assert torch.isfinite(outs[6]).all() and all(torch.equal(out, outs[6]) for out in outs)
    assert unions.queue.sizes.tolist() == [case.plan.groups] + [0] * BINS


@pytest.mark.parametrize("prepared,own_stream", [("cuda", False), ("cuda", True), ("torch", False)])
def test_a_call_in_a_graph_can_be_replayed(prepared, own_stream):
    """The queue is made outside, the call captured: each replay takes every group, also after many other shapes."""
    case = built([(9000, 40000)], 16, 1, 128, 16, torch.bfloat16, seed=15, local=True, regroup=64)
    module = importlib.import_module("prefill_kernels.hopper_page_attention")
    if reason := module.problem(case.q, case.kv, case.plan) or cuda_problem(case.plan):
        pytest.skip(reason)
    want, out, stream = torch.empty_like(case.q), torch.empty_like(case.q), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        unions = search_unions(case.plan, backend=prepared)
        module.union_attention(case.q, case.kv, case.plan, unions, case.scale, want)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream if own_stream else None):
        module.union_attention(case.q, case.kv, case.plan, unions, case.scale, out)
    if unions.queue is not None:
        unions.queue.sizes[BINS] = 5  # as amid an eager call: none of the graph's business
    for items in range(1, 80):
        GroupQueue.in_turn(items, case.q.device)
    torch.cuda.empty_cache()
    torch.full((1 << 22,), 1 << 30, dtype=torch.int32, device="cuda")  # into what those left free
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)
