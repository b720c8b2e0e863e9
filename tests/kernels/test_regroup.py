"""Algorithm 1: the reading notes' example, the literal loop, the reference and the Triton kernel."""

from __future__ import annotations

from dataclasses import replace

import literal_pages as literal
import page_cases
import pytest
import torch
from page_cases import backend  # noqa: F401 - a fixture
from prefill_kernels import BackendUnavailable, PagePlan, regroup_queries, regroups, search_unions
from prefill_kernels.regroup import beyond_capacity, greedy_order

EXAMPLE = [{1, 2}, {8, 9}, {2, 3}, {3, 4}, {8, 10}, {9, 10}]


def visits(order, supports, group):
    return sum(len(set().union(*(supports[j] for j in order[i : i + group]))) for i in range(0, len(order), group))


def literal_ids(plan):
    """Slots of every head by the literal loop, window after window; requests beyond the capacity in their order."""
    lines = []
    for h in range(plan.num_kv_heads):
        line = []
        for r, (begin, end) in enumerate(zip(plan.cu_seqlens, plan.cu_seqlens[1:], strict=False)):
            fits = -(-int(plan.kv_lens[r]) // plan.page_size) <= plan.capacity
            for first in range(begin, end, plan.regroup):
                some = range(first, min(first + plan.regroup, end))
                found = greedy_order([literal.support(plan, i, h) for i in some])
                line += [first + j for j in found] if fits else some
            line += [-1] * (-(end - begin) % 8)
        lines.append(line)
    return lines


def test_the_worked_example():
    assert greedy_order(EXAMPLE, 3) == [0, 2, 3, 1, 4, 5]
    assert visits(range(6), EXAMPLE, 3) == 10 and visits(greedy_order(EXAMPLE, 3), EXAMPLE, 3) == 7


def test_the_union_grows_with_every_pick():
    # 3 costs 2 beside the seed alone, and 1 once 2 has joined: comparing with the seed would take 1 before it.
    supports = [{1, 2}, {8, 9}, {2, 3}, {3, 4}]
    assert greedy_order(supports) == [0, 2, 3, 1]
    # Marginal pages, not overlap: a smaller support with one new page goes before a larger one with two.
    assert greedy_order([{1, 2, 3}, {1, 2, 3, 4, 5}, {9}]) == [0, 2, 1]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("window", [64, 128])
def test_equals_the_literal_loop(backend, window, seed):  # noqa: F811
    one = page_cases.make(
        [(window + 3, 400), (1, 1), (21, 30)], heads=(2, 2), page_size=4, width=3 + seed, seed=seed + window,
        local=seed == 1, regroup=window,
    )  # fmt: skip
    assert regroups(one.plan)
    ids = regroup_queries(one.plan, backend=backend)
    assert ids.dtype == torch.int32 and ids.tolist() == literal_ids(one.plan)


def test_tied_empty_and_equal_supports_keep_the_order(backend):  # noqa: F811
    for pages in (torch.full((1, 20, 1, 2), -1), torch.full((1, 20, 1, 2), 3), torch.arange(40).view(1, 20, 1, 2)):
        plan = PagePlan.for_prompt(pages.int(), 16, 1000, 20, regroup=64)
        ids = regroup_queries(plan, backend=backend)[0].tolist()
        assert ids == [*range(20), -1, -1, -1, -1]


def test_pages_after_the_query_cost_nothing(backend):  # noqa: F811
    # Query 1 lists page 5, which it cannot see: it costs query 0 nothing, and goes before query 2.
    pages = torch.tensor([[0, 0], [5, 0], [0, 0], [1, 0]], dtype=torch.int32).view(1, 4, 1, 2)
    plan = PagePlan(
        pages, 16, torch.tensor([10, 20, 40, 95], dtype=torch.int32), torch.tensor([96], dtype=torch.int32),
        (0, 4), 96, regroup=64,
    )  # fmt: skip
    assert regroup_queries(plan, backend=backend)[0, :4].tolist() == [0, 1, 2, 3]
    late = replace(plan, positions=torch.tensor([95, 95, 95, 95], dtype=torch.int32))
    assert regroup_queries(late, backend=backend)[0, :4].tolist() == [0, 2, 1, 3] == literal_ids(late)[0][:4]


def test_capacity_is_of_the_context_not_of_the_ids(backend):  # noqa: F811
    pages = torch.tensor([[0, 1], [70, 71], [1, 2], [71, 72]], dtype=torch.int32).view(1, 4, 1, 2)
    inside = PagePlan.for_prompt(pages, 16, 512 * 16 - 4, 4, regroup=64)
    assert inside.num_pages == 512 and regroups(inside)
    assert regroup_queries(inside, backend=backend)[0, :4].tolist() == [0, 2, 1, 3]
    beyond = PagePlan.for_prompt(pages, 16, 512 * 16 - 3, 4, regroup=64)
    assert beyond.num_pages == 513 and not regroups(beyond)
    assert regroup_queries(beyond, backend=backend)[0, :4].tolist() == [0, 1, 2, 3]
    wider = replace(beyond, capacity=1024)
    assert regroups(wider) and regroup_queries(wider, backend=backend)[0, :4].tolist() == [0, 2, 1, 3]
    assert not regroups(replace(inside, regroup=0))


@pytest.mark.parametrize("window", [64, 128])
def test_capacity_is_of_each_request(backend, window):  # noqa: F811
    # 32 pages fit to the token; 33 do not, of which one token.
    requests = [(window + 9, 900), (70, 512), (40, 513), (window, 300), (0, 2000)]
    one = page_cases.make(
        requests, heads=(2, 2), width=5, seed=window, local=True, sprinkle=False, regroup=window, capacity=32
    )
    ids, plain = regroup_queries(one.plan, backend=backend), regroup_queries(replace(one.plan, regroup=0))
    assert ids.tolist() == literal_ids(one.plan)
    ends = torch.tensor([-(-a // 8) * 8 for a, _ in requests]).cumsum(0).tolist()
    kept = [torch.equal(ids[:, a:b], plain[:, a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    assert kept == [True, False, True, False, True]
    # The order of one request does not depend on which others are in the call.
    alone = one.planned(
        pages=one.plan.pages[:, window + 9 : window + 79], positions=one.plan.positions[window + 9 : window + 79],
        kv_lens=one.plan.kv_lens[1:2], cu_seqlens=(0, 70), max_kv_len=512,
    ).plan  # fmt: skip
    there = ids[:, ends[0] : ends[1]]
    mine = regroup_queries(alone, backend=backend)
    assert torch.equal(torch.where(mine < 0, mine, mine + window + 9), there)


def test_who_is_beyond_the_capacity_is_counted_without_the_host_where_it_cannot_know():
    short, long = (4, 500), (4, 600)
    for requests, regroup, want, on_host in (
        ([short], 64, 0, True),
        ([long], 64, 1, True),
        ([long, long], 0, 0, True),
        ([short, short], 64, 0, True),
        ([long, short, long], 64, 2, False),
    ):
        plan = page_cases.make(requests, regroup=regroup, capacity=32).plan
        found = beyond_capacity(plan)
        assert found == want and isinstance(found, int) == on_host
        assert regroups(plan) == (regroup > 0 and requests != [long])


@pytest.mark.parametrize("pages", [1, 31, 32, 33, 64, 65, 500, 512])
def test_the_last_page_of_every_bitmap_size(backend, pages):  # noqa: F811
    rows = torch.tensor([[0], [pages - 1], [0], [pages - 1]], dtype=torch.int32).view(1, 4, 1, 1)
    plan = PagePlan.for_prompt(rows, 16, pages * 16 - 4, 4, regroup=64)
    want = [0, 1, 2, 3] if pages == 1 else [0, 2, 1, 3]
    assert regroup_queries(plan, backend=backend)[0, :4].tolist() == want


@pytest.mark.parametrize("seed", range(4))
def test_a_bijection_within_each_request_that_visits_no_more_pages(seed):
    requests = [(50, 900), (130, 200), (8, 8), (1, 900)]
    one = page_cases.make(
        requests, heads=(3, 3), page_size=16, width=6, seed=seed, local=True, sprinkle=False, regroup=128
    )
    ids = regroup_queries(one.plan, backend="torch")
    first = 0
    for begin, end in zip(one.plan.cu_seqlens, one.plan.cu_seqlens[1:], strict=False):
        slots = -(-(end - begin) // 8) * 8
        for line in ids[:, first : first + slots].tolist():
            assert sorted(line[: end - begin]) == list(range(begin, end)) and set(line[end - begin :]) <= {-1}
        first += slots
    plain = regroup_queries(replace(one.plan, regroup=0), backend="torch")
    count = [sum(len(g) for head in literal.walk(one.plan, x) for g in head) for x in (ids, plain)]
    assert count[0] < count[1]


def test_strided_selections_and_repeated_runs(backend):  # noqa: F811
    one = page_cases.make([(70, 300)], heads=(2, 2), page_size=8, seed=5, regroup=64)
    first = regroup_queries(one.plan, backend=backend)
    padded = torch.full((1, 70, 2, 9), 1, dtype=torch.int32)
    padded[..., ::2][..., :4] = one.plan.pages
    assert torch.equal(first, regroup_queries(replace(one.plan, pages=padded[..., ::2][..., :4]), backend=backend))


def test_bitmaps_that_do_not_fit_are_refused():
    pytest.importorskip("triton")
    plan = PagePlan.for_prompt(torch.zeros(1, 4, 1, 2, dtype=torch.int32), 16, 2049 * 16, 4, regroup=64, capacity=4096)
    with pytest.raises(BackendUnavailable, match="2050 pages"):
        regroup_queries(plan, backend="triton")


def test_bitmaps_are_of_the_capacity_where_a_request_is_longer():
    pytest.importorskip("triton")
    from prefill_kernels import triton_regroup

    plan = page_cases.make([(9, 16 * 2500), (9, 100)], regroup=64, capacity=64).plan
    assert triton_regroup.bits(plan) == 64 and triton_regroup.refusal(replace(plan, capacity=2048)) is None
    assert "2500 pages" in str(triton_regroup.refusal(replace(plan, capacity=4096)))
    if not torch.cuda.is_available():
        assert regroup_queries(plan, backend="triton").tolist() == literal_ids(plan)


def test_the_launch_table_can_be_changed(monkeypatch):
    pytest.importorskip("triton")
    from prefill_kernels import triton_regroup

    assert [triton_regroup.launch_options(w) for w in (64, 128)] == [{"num_warps": 2}, {"num_warps": 1}]
    monkeypatch.setitem(triton_regroup.WARPS, 128, 8)
    assert triton_regroup.launch_options(128) == {"num_warps": 8}


def test_selections_and_positions_are_checked():
    plan = page_cases.make([(9, 30)], regroup=64).plan
    with pytest.raises(ValueError, match="positions with strides .2,.: must be contiguous"):
        regroup_queries(replace(plan, positions=plan.positions.repeat_interleave(2)[::2]))


@pytest.mark.parametrize("regroup", [0, 64])
def test_what_is_returned_is_the_callers_own(backend, regroup):  # noqa: F811
    plan = page_cases.make([(13, 60), (8, 8)], heads=(2, 2), regroup=regroup).plan
    ids = regroup_queries(plan, backend=backend)
    want = ids.clone()
    ids += 1
    assert torch.equal(regroup_queries(plan, backend=backend), want)


def test_what_a_call_uses_itself_is_not_copied():
    """The original order is free: no kernel copies it in a call that does not search."""
    plan = page_cases.make([(20, 60)], heads=(2, 2)).plan
    first, second = (search_unions(plan, backend="torch").ids for _ in range(2))
    assert first.data_ptr() == second.data_ptr() != regroup_queries(plan).data_ptr()
