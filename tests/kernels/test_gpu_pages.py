"""Regrouping, union preparation, counts and plain-Triton page attention on the device against the reference."""

from __future__ import annotations

from dataclasses import replace

import page_cases
import pytest
import torch
from prefill_kernels import (
    BackendUnavailable,
    PagedKV,
    attend_pages,
    cuda_page_search,
    executed,
    kv_union_attention,
    nvcc,
    page_attention,
    prepare_unions,
    quantize_kv,
    regroup_queries,
    regroups,
    search_unions,
    union_attention,
)
from prefill_kernels.page_search import cuda_problem
from prefill_kernels.page_stats import page_stats

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SETS = [  # requests as (queries, keys), page size, K, KV heads, capacity
    ([(8192, 65536)], 128, 16, 1, 512),  # the capacity, to the page
    ([(1000, 8192), (65, 500), (1, 1), (129, 129)], 128, 16, 2, 512),
    ([(515, 20000)], 64, 5, 2, 512),
    ([(300, 131072)], 128, 16, 1, 1024),
    ([(300, 262144)], 128, 16, 1, 2048),
    ([(300, 9000), (200, 4096), (65, 4097), (130, 500)], 16, 8, 2, 256),  # two of four beyond the capacity
    ([(7, 7), (64, 64)], 16, 1, 3, 512),
    ([(77, 4000)], 16, 64, 1, 512),
]
CASES = [  # requests, heads, dim, page size, physical page, K, dtype
    ([(1, 1)], (1, 1), 128, 128, 128, 1, torch.bfloat16),
    ([(700, 3000), (9, 9), (1, 500)], (16, 1), 128, 128, 128, 8, torch.bfloat16),
    ([(300, 5000)], (32, 2), 128, 64, 64, 16, torch.bfloat16),
    ([(333, 2000)], (12, 3), 128, 128, 64, 6, torch.bfloat16),
    ([(333, 2001)], (9, 3), 64, 64, 16, 6, torch.bfloat16),
    ([(200, 1500)], (8, 1), 64, 128, 256, 4, torch.bfloat16),
    ([(200, 9000)], (2, 2), 128, 256, 256, 4, torch.bfloat16),
    ([(100, 900)], (5, 1), 128, 16, 16, 8, torch.bfloat16),
    ([(100, 900)], (8, 2), 32, 32, 32, 8, torch.float16),
]


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-20))


def single(kv):
    return PagedKV(kv.k_pages.float(), kv.v_pages.float(), kv.page_table, kv.kv_len)


def case(requests, heads, dim, page_size, physical, width, dtype, seed=0, **knobs):
    return page_cases.make(
        requests, heads=heads, dim=dim, page_size=page_size, physical=physical, width=width, dtype=dtype, seed=seed,
        device="cuda", **{"local": True, **knobs},
    )  # fmt: skip


def bench_case(seed=0, **knobs):
    """The benchmark's shape: 8192 queries at the end of 64K keys."""
    return case([(8192, 65536)], (16, 1), 128, 128, 128, 16, torch.bfloat16, seed, regroup=64, **knobs)


@pytest.mark.parametrize("regroup", [0, 64, 128])
@pytest.mark.parametrize("requests,page_size,width,kv_heads,capacity", SETS)
def test_search_preparation_and_counts_equal_the_reference(requests, page_size, width, kv_heads, capacity, regroup):
    for seed in range(2):
        plan = page_cases.make(
            requests, heads=(kv_heads, kv_heads), page_size=page_size, width=width, seed=seed, local=seed == 1,
            device="cuda", regroup=regroup, capacity=capacity,
        ).plan  # fmt: skip
        ids = regroup_queries(plan, backend="triton")
        assert torch.equal(ids, regroup_queries(plan, backend="torch"))
        for line in ids.tolist():
            assert sorted(i for i in line if i >= 0) == list(range(plan.length))
        got, want = (prepare_unions(plan, ids, backend=b) for b in ("triton", "torch"))
        for name in ("pages", "members", "count", "requests"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        mine, reference = (
            page_stats(plan, want, 2 * kv_heads, regrouped=regroups(plan), backend=b) for b in ("triton", "torch")
        )
        for name in ("visited_cells", "visited_blocks", "member_pages", "union_pages", "half_pages", "imbalance"):
            assert torch.equal(getattr(mine, name), getattr(reference, name)), name


UNIONS = ("ids", "pages", "members", "count", "requests")
RAGGED = [(1, 40), (7, 700), (8, 8), (9, 90), (63, 5000), (64, 64), (65, 8192), (127, 200), (128, 4097), (129, 9000)]
SEARCHES = [  # requests as (queries, keys), page size, K, KV heads, capacity
    *SETS,
    ([*RAGGED, (70, 70000)], 128, 16, 1, 512),  # the last one beyond the capacity
    (RAGGED, 16, 1, 2, 512),
    (RAGGED, 16, 33, 2, 2048),
    ([(200, 65536)], 128, 32, 8, 512),
    ([(8192, 65536)], 128, 64, 1, 512),
    ([(129, 129), (200, 5000)], 1, 17, 3, 128),  # far beyond it: many stretches of pages
]


@pytest.fixture
def fused():
    """The kernel in CUDA C++ can run; on an sm_90 device with a compiler it must."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a device of compute capability 9.0")
    if problem := nvcc.problem(cuda_page_search.SOURCE):
        pytest.skip(problem)
    assert cuda_problem(bench_case().plan) is None


def layouts(plan):
    """The same pages in other memory: heads outermost, rows apart from one another, ids apart from one another."""
    pages = plan.pages
    yield pages
    yield pages.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    yield torch.nn.functional.pad(pages, (0, 3))[..., : plan.width]
    yield pages.repeat_interleave(2, -1)[..., ::2]


@pytest.mark.parametrize("regroup", [64, 128])
@pytest.mark.parametrize("requests,page_size,width,kv_heads,capacity", SEARCHES)
def test_one_kernel_for_search_and_unions_equals_the_reference(
    fused, requests, page_size, width, kv_heads, capacity, regroup
):
    for seed in range(2):
        plan = page_cases.make(
            requests, heads=(kv_heads, kv_heads), page_size=page_size, width=width, seed=seed, local=seed == 1,
            device="cuda", regroup=regroup, capacity=capacity,
        ).plan  # fmt: skip
        if not regroups(plan):
            continue
        want = search_unions(plan, backend="torch")
        for pages in layouts(plan):
            got = search_unions(replace(plan, pages=pages), backend="cuda")
            page_cases.check_queue(got)
            for name in UNIONS:
                assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("regroup", [0, 64, 128])
@pytest.mark.parametrize("requests,page_size,width,kv_heads,capacity", SEARCHES)
def test_the_kernel_prepares_unions_of_any_order(fused, requests, page_size, width, kv_heads, capacity, regroup):
    plan = page_cases.make(
        requests, heads=(kv_heads, kv_heads), page_size=page_size, width=width, seed=5, local=True, device="cuda",
        regroup=regroup, capacity=capacity,
    ).plan  # fmt: skip
    for ids in (regroup_queries(plan, backend="torch"), page_cases.any_order(plan, seed=regroup)):
        want = prepare_unions(plan, ids, backend="torch")
        for pages in layouts(plan):
            got = prepare_unions(replace(plan, pages=pages), ids, backend="cuda")
            page_cases.check_queue(got)
            for name in UNIONS:
                assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("regroup", [64, 128])
def test_one_kernel_where_every_query_selects_alike_or_nothing(fused, regroup):
    plan = page_cases.make([(200, 9000)], page_size=16, width=16, device="cuda", regroup=regroup, capacity=1024).plan
    for one in page_cases.degenerate(plan):
        got, want = (search_unions(one, backend=backend) for backend in ("cuda", "torch"))
        assert all(torch.equal(getattr(got, name), getattr(want, name)) for name in UNIONS)


@pytest.mark.parametrize("regroup", [64, 128])
def test_one_kernel_gives_the_same_bits_every_time_and_does_not_wait(fused, regroup):
    plan = replace(bench_case(seed=6).plan, regroup=regroup)
    want = search_unions(plan, backend="triton")
    assert all(torch.equal(getattr(want, n), getattr(search_unions(plan, backend="cuda"), n)) for n in UNIONS)
    torch.cuda.synchronize()
    for _ in range(70):
        torch.full_like(want.pages, 1 << 20)  # poison what the allocator hands out next
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = search_unions(plan, backend="cuda")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        page_cases.check_queue(again)
        assert all(torch.equal(getattr(want, n), getattr(again, n)) for n in UNIONS)


def test_one_kernel_can_be_captured_in_a_graph(fused):
    plan = bench_case(seed=7).plan
    want = search_unions(plan, backend="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = search_unions(plan, backend="cuda")
    for name in UNIONS[:-1]:
        getattr(got, name).fill_(-7)
    graph.replay()
    torch.cuda.synchronize()
    page_cases.check_queue(got)
    assert all(torch.equal(getattr(got, name), getattr(want, name)) for name in UNIONS)


@pytest.mark.parametrize("kv_dtype", ["model", "fp8"])
def test_the_complete_call_takes_one_kernel_and_changes_no_bit(fused, kv_dtype):
    one = case([(900, 5000), (77, 80)], (16, 1), 128, 128, 128, 16, torch.bfloat16, seed=3, regroup=64)
    kv = quantize_kv(one.kv, kv_lens=one.plan.kv_lens) if kv_dtype == "fp8" else one.kv
    plain, _ = page_attention(one.q, kv, one.planned(regroup=0).plan, scale=one.scale)
    with executed() as ran:
        grouped, stats = page_attention(one.q, kv, one.plan, scale=one.scale)
    assert ran.counts["regroup", "cuda"] == ran.counts["union", "cuda"] == 1 and stats.regrouped
    assert torch.equal(plain, grouped)


@pytest.mark.parametrize("regroup", [0, 128])
@pytest.mark.parametrize("requests,heads,dim,page_size,physical,width,dtype", CASES)
def test_equals_the_float32_oracle(requests, heads, dim, page_size, physical, width, dtype, regroup):
    one = case(requests, heads, dim, page_size, physical, width, dtype, seed=dim + width, regroup=regroup)
    want = attend_pages(one.q.float(), single(one.kv), one.plan, one.scale)
    out, stats = page_attention(one.q, one.kv, one.plan, scale=one.scale, backend="triton")
    assert stats.backend == "triton" and torch.isfinite(out).all()
    empty = want.abs().sum(-1) == 0
    assert not out[empty].any()
    assert relative(out, want) < (4e-3 if dtype == torch.bfloat16 else 6e-4)


@pytest.mark.parametrize("requests,heads,dim,page_size,physical,width,dtype", CASES)
def test_e4m3_error_is_of_the_products_alone(requests, heads, dim, page_size, physical, width, dtype):
    if page_size < 32:
        pytest.skip("E4M3 products need 32 tokens")
    one = case(requests, heads, dim, page_size, physical, width, dtype, seed=dim + width)
    kv = quantize_kv(one.kv, kv_lens=one.plan.kv_lens)
    want = attend_pages(one.q.float(), kv, one.plan, one.scale)
    out, stats = page_attention(one.q, kv, one.plan, scale=one.scale, backend="triton")
    assert stats.backend == "triton" and torch.isfinite(out).all()
    assert relative(out, want) < 5e-2
    twin, _ = page_attention(one.q, kv, one.plan, scale=one.scale, backend="torch")
    assert relative(out, twin) < 2e-2
    # The same through the plan's own switch, and not by way of the unquantised path.
    again, _ = page_attention(one.q, one.kv, one.planned(kv_dtype="fp8").plan, scale=one.scale, backend="triton")
    assert torch.equal(out, again)
    if int(stats.member_pages.sum()) > 8:
        plain, _ = page_attention(one.q, one.kv, one.plan, scale=one.scale, backend="triton")
        assert relative(out, plain) > 2e-3


@pytest.mark.parametrize("kv_dtype", ["model", "fp8"])
@pytest.mark.parametrize("heads,dim,page_size", [((16, 1), 128, 128), ((8, 2), 128, 64), ((3, 1), 64, 128)])
def test_regrouping_changes_no_bit(heads, dim, page_size, kv_dtype):
    one = case([(900, 5000), (77, 80)], heads, dim, page_size, page_size, 8, torch.bfloat16, seed=3)
    kv = quantize_kv(one.kv, kv_lens=one.plan.kv_lens) if kv_dtype == "fp8" else one.kv
    plain, before = page_attention(one.q, kv, one.plan, scale=one.scale, backend="triton")
    for regroup in (64, 128):
        grouped, after = page_attention(one.q, kv, one.planned(regroup=regroup).plan, scale=one.scale, backend="triton")
        assert int(after.union_pages.sum()) < int(before.union_pages.sum())
        assert torch.equal(plain, grouped)


@pytest.mark.parametrize("kv_dtype", ["model", "fp8"])
def test_a_request_alone_gives_the_same_bits(kv_dtype):
    requests = [(300, 2000), (41, 777), (128, 128)]
    one = case(requests, (16, 1), 128, 128, 128, 8, torch.bfloat16, seed=4, regroup=64)
    kv = quantize_kv(one.kv, kv_lens=one.plan.kv_lens) if kv_dtype == "fp8" else one.kv
    both, _ = page_attention(one.q, kv, one.plan, scale=one.scale, backend="triton")
    for r, (begin, end) in enumerate(zip(one.plan.cu_seqlens, one.plan.cu_seqlens[1:], strict=False)):
        plan = one.planned(
            pages=one.plan.pages[:, begin:end], positions=one.plan.positions[begin:end],
            kv_lens=one.plan.kv_lens[r : r + 1], cu_seqlens=(0, end - begin), max_kv_len=requests[r][1],
        ).plan  # fmt: skip
        table = kv.page_table[r : r + 1]
        if kv_dtype == "fp8":
            cache = type(kv)(kv.k_pages, kv.vt_pages, kv.k_scale, kv.v_scale, table, requests[r][1])
        else:
            cache = PagedKV(kv.k_pages, kv.v_pages, table, requests[r][1])
        alone, _ = page_attention(one.q[:, :, begin:end], cache, plan, scale=one.scale, backend="triton")
        assert torch.equal(alone, both[:, :, begin:end])


@pytest.mark.parametrize("kv_dtype", ["model", "fp8"])
def test_repeated_runs_are_bitwise_equal_at_the_size_of_the_benchmark(kv_dtype):
    one = bench_case(seed=5)
    kv = quantize_kv(one.kv) if kv_dtype == "fp8" else one.kv
    ids = regroup_queries(one.plan)
    unions = prepare_unions(one.plan, ids)
    first = union_attention(one.q, kv, one.plan, unions, scale=one.scale, backend="triton")
    want = attend_pages(one.q.float(), kv if kv_dtype == "fp8" else single(kv), one.plan, one.scale)
    assert relative(first, want) < (5e-2 if kv_dtype == "fp8" else 4e-3)
    for _ in range(20):
        torch.full_like(first, float("nan"))  # poison what the allocator hands out next
        torch.full_like(unions.pages, 1 << 20)
        assert torch.equal(ids, regroup_queries(one.plan))
        again = prepare_unions(one.plan, ids)
        assert all(torch.equal(getattr(unions, n), getattr(again, n)) for n in ("pages", "members", "count"))
        assert torch.equal(first, union_attention(one.q, kv, one.plan, again, scale=one.scale, backend="triton"))


@pytest.mark.parametrize("kv_dtype", ["model", "fp8"])
@pytest.mark.parametrize("partial_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("requests,heads,dim,page_size,physical,width,dtype", CASES)
def test_kv_union(requests, heads, dim, page_size, physical, width, dtype, partial_dtype, kv_dtype):
    if page_size > 128 or kv_dtype == "fp8" and page_size < 32:
        pytest.skip("outside the kernel")
    one = case(requests, heads, dim, page_size, physical, width, dtype, seed=dim)
    kv = quantize_kv(one.kv, kv_lens=one.plan.kv_lens) if kv_dtype == "fp8" else one.kv
    call = {"scale": one.scale, "backend": "triton", "partial_dtype": partial_dtype}
    out = kv_union_attention(one.q, kv, one.plan, **call)
    want = attend_pages(one.q.float(), kv if kv_dtype == "fp8" else single(kv), one.plan, one.scale)
    assert torch.isfinite(out).all() and relative(out, want) < (5e-2 if kv_dtype == "fp8" else 6e-3)
    for _ in range(5):
        torch.full((1 << 22,), float("nan"), device="cuda")
        assert torch.equal(out, kv_union_attention(one.q, kv, one.plan, **call))


@pytest.mark.parametrize("kv_dtype", ["model", "fp8"])
def test_nothing_waits_for_the_device(kv_dtype):
    one = case([(600, 3000), (50, 70)], (16, 1), 128, 128, 128, 8, torch.bfloat16, regroup=64, kv_dtype=kv_dtype)

    def call():
        out, stats = page_attention(one.q, one.kv, one.plan, scale=one.scale, backend="triton")
        return out, stats, kv_union_attention(one.q, one.kv, one.plan, scale=one.scale, backend="triton")

    call()  # compiles, and makes what is kept on the device
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_complete_call_can_be_captured_in_a_graph():
    one = case([(600, 3000)], (16, 1), 128, 128, 128, 8, torch.bfloat16, regroup=64, seed=2)

    def call():
        return page_attention(one.q, one.kv, one.plan, scale=one.scale, backend="triton", stats=False)[0]

    want = call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


TINY = [("triton", "model"), ("triton", "fp8"), ("kv union", "model"), ("kv union", "fp8"), ("hopper", "model"),
        ("hopper", "fp8"), ("cluster", "fp8")]  # fmt: skip


def attended(one, kv, backend):
    """The output of a backend, or of the direct union; skips where the device cannot run it."""
    try:
        if backend == "kv union":
            return kv_union_attention(one.q, kv, one.plan, scale=one.scale, backend="triton")
        return page_attention(one.q, kv, one.plan, scale=one.scale, backend=backend)[0]
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("backend,kv_dtype", TINY)
def test_tiny_rows(backend, kv_dtype):
    """Rows whose E4M3 scale is below 2^-126 or nearly 0: neither 1 / scale nor a factor of 0 may reach a product."""
    one = case([(64, 1024), (9, 300)], (16, 1), 128, 128, 128, 5, torch.bfloat16)
    one.q[..., ::5] = 0
    for first, size in ((1, 1e-36), (2, 1e-38), (3, 1e-40)):
        one.q[:, :, first::4] *= size
    assert one.q[:, :, 3::4].any(), "subnormal queries"
    kv = quantize_kv(one.kv, kv_lens=one.plan.kv_lens) if kv_dtype == "fp8" else one.kv
    want = attend_pages(one.q.float(), kv if kv_dtype == "fp8" else single(kv), one.plan, one.scale)
    out = attended(one, kv, backend)
    assert torch.isfinite(out).all()
    for first in range(4):
        rows = slice(first, None, 4)
        assert relative(out[:, :, rows], want[:, :, rows]) < (6e-2 if kv_dtype == "fp8" else 6e-3)


@pytest.mark.parametrize("backend", [backend for backend, kv_dtype in TINY if kv_dtype == "fp8"])
def test_tiny_rows_count_where_keys_are_huge(backend):
    """Scores of ordinary size from queries of 1e-36: a tiny row is quantised by its scale, not flushed to zero."""
    one = case([(64, 1024)], (16, 1), 128, 128, 128, 6, torch.bfloat16, seed=13)
    one.q.mul_(1e-36)
    one.kv.k_pages.mul_(1e36)
    kv = quantize_kv(one.kv)
    assert relative(attended(one, kv, backend), attend_pages(one.q.float(), kv, one.plan, one.scale)) < 6e-2
