"""Union preparation and counts against their definitions, in the reference and in Triton."""

from __future__ import annotations

from dataclasses import replace

import literal_pages as literal
import page_cases
import pytest
import torch
from page_cases import backend  # noqa: F401 - a fixture
from prefill_kernels import PagePlan, prepare_unions, regroup_queries, regroups
from prefill_kernels.page_stats import page_stats
from prefill_kernels.unions import BINS, GroupQueue


def make(seed, **knobs):
    settings = {"heads": (4, 2), "page_size": 16, "width": 5, "seed": seed, **knobs}
    return page_cases.make([(19, 150), (1, 1), (16, 16), (3, 90)], **settings).plan


def assert_is_the_walk(unions, plan, ids):
    want = literal.walk(plan, ids)
    width = unions.pages.shape[2]
    assert unions.pages.shape == unions.members.shape == (plan.num_kv_heads, plan.groups, 8 * plan.width)
    for h, groups in enumerate(want):
        for g, bits in enumerate(groups):
            rest = width - len(bits)
            assert int(unions.count[h, g]) == len(bits)
            assert unions.pages[h, g].tolist() == [*bits, *[-1] * rest]
            assert unions.members[h, g].tolist() == [*bits.values(), *[0] * rest]
    assert all(
        x.dtype == torch.int32 for x in (unions.ids, unions.pages, unions.members, unions.count, unions.requests)
    )


@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("regroup", [0, 64])
def test_equals_the_definition(backend, regroup, width):  # noqa: F811
    plan = make(width, width=width, regroup=regroup)
    ids = regroup_queries(plan, backend="torch")
    unions = prepare_unions(plan, ids, backend=backend)
    assert_is_the_walk(unions, plan, ids)
    assert unions.requests.tolist() == [0, 0, 0, 1, 2, 2, 3] and unions.ids is ids


def test_any_permutation_of_slots(backend):  # noqa: F811
    plan = make(7)
    g = torch.Generator().manual_seed(1)
    ids = regroup_queries(plan, backend="torch").clone()
    ids[0, :24] = ids[0, torch.randperm(24, generator=g)]  # tail slots anywhere, and another order in each head
    assert_is_the_walk(prepare_unions(plan, ids, backend=backend), plan, ids)


def beyond_the_keys(**knobs):
    """Queries at and after the last token of their request, with pages there: of 41, 70 and 64 keys."""
    one = page_cases.make([(24, 41), (9, 70), (8, 64)], heads=(2, 2), page_size=16, seed=4, width=6, **knobs)
    pages = torch.arange(6, dtype=torch.int32).expand(1, 41, 2, 6).contiguous()
    positions = one.plan.positions.clone()
    positions[:8] += 60
    positions[8::3] += 33
    positions[40] = 64  # c = L, to the token
    return replace(one.plan, pages=pages, positions=positions)


@pytest.mark.parametrize("regroup", [0, 64])
def test_no_page_after_the_last_token_of_the_request(backend, regroup):  # noqa: F811
    plan = beyond_the_keys(regroup=regroup)
    ids = regroup_queries(plan, backend="torch")
    unions = prepare_unions(plan, ids, backend=backend)
    assert_is_the_walk(unions, plan, ids)
    assert [int(unions.pages[:, unions.requests == r].max()) for r in range(3)] == [2, 4, 3]
    assert torch.equal(regroup_queries(plan, backend=backend), ids)
    stats = page_stats(plan, unions, 2, regrouped=regroups(plan), backend=backend)
    cells = [sum(len(literal.tokens(plan, i, h)) for i in range(plan.length)) for h in range(2)]
    assert stats.visited_cells[0].sum(-1).tolist() == cells


def test_pages_far_beyond_the_capacity(backend):  # noqa: F811
    length = 16 * 65536  # a million tokens
    pages = torch.tensor([[65535, 65534, 0, 65535], [0, 65534, -5, 70000]], dtype=torch.int32).view(1, 2, 1, 4)
    plan = PagePlan.for_prompt(pages, 16, length - 2, 2, regroup=128)
    assert not regroups(plan)
    if backend == "torch":  # flags of every page; fine for two queries
        assert plan.num_pages == 65536
    unions = prepare_unions(plan, regroup_queries(plan, backend=backend), backend=backend)
    assert unions.pages[0, 0, :4].tolist() == [0, 65534, 65535, -1]
    assert unions.members[0, 0, :4].tolist() == [3, 3, 1, 0] and unions.count.tolist() == [[3]]


def test_unions_that_fill_every_place(backend):  # noqa: F811
    pages = torch.arange(32, dtype=torch.int32).flip(0).view(1, 8, 1, 4)
    plan = PagePlan.for_prompt(pages, 16, 1000, 8)
    unions = prepare_unions(plan, regroup_queries(plan), backend=backend)
    assert unions.pages[0, 0].tolist() == list(range(32)) and unions.count.tolist() == [[32]]
    assert unions.members[0, 0].tolist() == [1 << (7 - p // 4) for p in range(32)]


def test_a_group_without_any_page(backend):  # noqa: F811
    plan = PagePlan.for_prompt(torch.full((1, 9, 1, 3), -1, dtype=torch.int32), 16, 0, 9)
    unions = prepare_unions(plan, regroup_queries(plan), backend=backend)
    assert not unions.count.any() and (unions.pages == -1).all() and not unions.members.any()


@pytest.mark.parametrize("regroup", [0, 64])
def test_counts(backend, regroup):  # noqa: F811
    small = make(11, regroup=regroup)
    many = page_cases.make([(300, 310)], heads=(2, 2), page_size=64, seed=2, regroup=regroup).plan
    for plan in (small, many) if backend == "torch" else (small,):
        ids = regroup_queries(plan, backend="torch")
        unions = prepare_unions(plan, ids, backend="torch")
        stats = page_stats(plan, unions, 2 * plan.num_kv_heads, regrouped=regroups(plan), backend=backend)
        for h, groups in enumerate(literal.walk(plan, ids)):
            halves = [[sum(1 for b in g.values() if b & m) for m in (15, 240)] for g in groups]
            assert int(stats.union_pages[h]) == sum(map(len, groups))
            assert int(stats.half_pages[h]) == sum(map(sum, halves))
            assert int(stats.imbalance[h]) == sum(abs(a - b) for a, b in halves)
            sizes = [len(literal.support(plan, i, h)) for i in range(plan.length)]
            cells = [len(literal.tokens(plan, i, h)) for i in range(plan.length)]
            assert int(stats.member_pages[h]) == sum(sizes)
            for tile in range(-(-plan.length // 128)):
                some = slice(tile * 128, tile * 128 + 128)
                rows = len(sizes[some])
                for q_head in (2 * h, 2 * h + 1):
                    assert int(stats.visited_cells[0, q_head, tile]) == sum(cells[some])
                    assert int(stats.visited_blocks[0, q_head, tile]) == -(
                        -sum(sizes[some]) * plan.page_size // (rows * 128)
                    )
        assert stats.computed_cells is stats.visited_cells and stats.groups == plan.groups
        assert stats.regrouped == bool(regroup) and stats.visited_cells.shape == (
            1,
            2 * plan.num_kv_heads,
            -(-plan.length // 128),
        )


def test_regrouping_changes_the_unions_and_not_the_cells():
    plan = page_cases.make([(200, 2000)], page_size=16, width=6, seed=3, local=True, regroup=64).plan

    def counts(plan):
        unions = prepare_unions(plan, regroup_queries(plan))
        return page_stats(plan, unions, 1, regrouped=regroups(plan))

    on, off = counts(plan), counts(replace(plan, regroup=0))
    for name in ("visited_cells", "visited_blocks", "member_pages"):
        assert torch.equal(getattr(on, name), getattr(off, name))
    assert int(on.union_pages) < int(off.union_pages)


def test_the_counts_say_who_kept_the_order():
    plan = make(5, regroup=64, capacity=32)
    for change, want in (({}, 0), ({"page_size": 4}, 1), ({"page_size": 2}, 2), ({"page_size": 2, "regroup": 0}, 0)):
        some = replace(plan, **change)
        unions = prepare_unions(some, regroup_queries(some))
        assert page_stats(some, unions, 4, regrouped=regroups(some)).beyond_capacity == want


def test_what_does_not_belong_to_the_plan_is_refused():
    plan = make(1)
    ids = regroup_queries(plan)
    for wrong in (ids[:, :-8], ids[:1], ids.long()):
        with pytest.raises(ValueError, match="ids"):
            prepare_unions(plan, wrong)
    with pytest.raises(ValueError, match="kv_lens"):
        prepare_unions(replace(plan, kv_lens=plan.kv_lens.repeat_interleave(2)[::2]), ids)
    unions = prepare_unions(plan, ids)
    with pytest.raises(ValueError, match="members of the unions"):
        page_stats(plan, replace(unions, members=unions.members[..., :-1]), 4, regrouped=False)


def test_ids_with_strides(backend):  # noqa: F811
    plan = make(3)
    ids = regroup_queries(plan, backend="torch")
    wide = torch.zeros(len(ids), 2 * ids.shape[1], dtype=torch.int32)
    wide[:, ::2] = ids
    unions = prepare_unions(plan, wide[:, ::2], backend=backend)
    assert unions.ids.is_contiguous() and torch.equal(unions.ids, ids)
    assert_is_the_walk(unions, plan, ids)


@pytest.mark.parametrize("width", [8, 56, 64, 72, 128, 400, 512, 4096])
def test_bins_of_a_queue_are_in_descending_order_of_the_counts(width):
    shift = GroupQueue.bin_shift(width)
    found = [max(0, BINS - 1 - (count >> shift)) for count in range(width + 1)]
    assert found == sorted(found, reverse=True) and found[0] == BINS - 1
    assert len(set(found)) > min(width, BINS // 2)


def test_a_queue_of_unions_that_nobody_sorted_holds_each_group_once():
    for items in (1, 2, 77):
        queue, other = (GroupQueue.in_turn(items, torch.device("cpu")) for _ in range(2))
        assert queue.sizes.tolist() == [items] + [0] * BINS
        assert queue.lines.tolist() == [list(range(items))[::-1]]
        queue.sizes[BINS] = 3  # what a call counts is its own
        assert other.sizes[BINS] == 0 and GroupQueue.in_turn(items, torch.device("cpu")).sizes[BINS] == 0


def test_a_queue_of_another_shape_is_refused():
    one = page_cases.make([(20, 300)], heads=(2, 2), width=3)
    unions = prepare_unions(one.plan, regroup_queries(one.plan, backend="torch"), backend="torch")
    queue = GroupQueue.empty(2 * one.plan.groups, torch.device("cpu"))
    replace(unions, queue=queue).check_shapes(one.plan)
    for change in ({"sizes": queue.sizes[1:]}, {"lines": queue.lines[:, 1:]}, {"sizes": queue.sizes.long()}):
        with pytest.raises(ValueError, match=f"{next(iter(change))} of the unions' queue"):
            replace(unions, queue=replace(queue, **change)).check_shapes(one.plan)
