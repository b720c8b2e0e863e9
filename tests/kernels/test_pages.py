"""Page plans: what they refuse, whom they let see what, and how requests are cut into groups and windows."""

from __future__ import annotations

from dataclasses import replace

import literal_pages as literal
import page_cases
import pytest
import torch
from prefill_kernels import (
    BlockPlan,
    PagePlan,
    attend_pages,
    kernels,
    kv_union_attention,
    page_attention,
    page_support,
    prepare_unions,
    regroup_queries,
    search_unions,
    sparse_attention,
)
from prefill_kernels.pages import canonical_rows, group_requests, identity_ids, query_requests, visible_tokens, windows

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(3))
def test_supports_equal_the_definition(seed):
    one = page_cases.make([(21, 40), (1, 1), (9, 77)], heads=(2, 2), page_size=4 if seed else 16, seed=seed, width=5)
    flags, rows, seen = page_support(one.plan), canonical_rows(one.plan), visible_tokens(one.plan)
    assert flags.shape == (31, 2, one.plan.num_pages)
    for i in range(31):
        assert int(seen[i]) == literal.seen(one.plan, i)
        for h in range(2):
            want = literal.support(one.plan, i, h)
            assert set(flags[i, h].nonzero().flatten().tolist()) == want
            listed = rows[i, h][: len(want)].tolist()
            assert listed == sorted(want) and (rows[i, h, len(want) :] == 2**31 - 1).all()


def test_a_page_that_the_query_only_starts_to_see_stays_and_the_next_leaves():
    pages = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32).expand(1, 3, 1, 4)
    plan = PagePlan.for_prompt(pages, 16, 15, 3)
    assert [sorted(literal.support(plan, i, 0)) for i in range(3)] == [[0], [0, 1], [0, 1]]
    assert page_support(plan)[:, 0].tolist() == [[True, False], [True, True], [True, True]]


def test_a_position_beyond_the_keys_is_cut_by_them():
    one = page_cases.make([(4, 20)], page_size=16)
    plan = replace(one.plan, positions=torch.tensor([3, 19, 25, 500], dtype=torch.int32))
    assert visible_tokens(plan).tolist() == [4, 20, 20, 20]


def test_groups_and_windows_stay_inside_requests():
    cu = (0, 3, 3, 20, 150)
    assert query_requests(CPU, cu).tolist() == [0] * 3 + [2] * 17 + [3] * 130
    assert group_requests(CPU, cu).tolist() == [0] + [2] * 3 + [3] * 17
    ids = identity_ids(CPU, cu, 2)
    assert ids.shape == (2, 21 * 8) and torch.equal(ids[0], ids[1])
    assert ids[0, :16].tolist() == [0, 1, 2, -1, -1, -1, -1, -1, *range(3, 11)]
    assert sorted(ids[0][ids[0] >= 0].tolist()) == list(range(150))
    # First query, queries, first slot, request.
    assert windows(CPU, cu, 64).tolist() == [
        [0, 3, 0, 0],
        [3, 17, 8, 2],
        [20, 64, 32, 3],
        [84, 64, 96, 3],
        [148, 2, 160, 3],
    ]


@pytest.mark.parametrize(
    "change,word",
    [
        ({"pages": torch.zeros(1, 8, 1, 4)}, "pages: must be int32"),
        ({"pages": torch.zeros(8, 1, 4, dtype=torch.int32)}, "pages"),
        ({"page_size": 0}, "page_size=0"),
        ({"page_size": 2.5}, "page_size=2.5: must be an integer"),
        ({"page_size": "16"}, "page_size='16': must be an integer"),
        ({"max_kv_len": 30.0}, "max_kv_len=30.0: must be an integer"),
        ({"regroup": 64.0}, "regroup=64.0: must be an integer"),
        ({"capacity": 512.0}, "capacity=512.0: must be an integer"),
        ({"cu_seqlens": [0, 8]}, r"cu_seqlens=\[0, 8\]: must be a tuple of integers"),
        ({"cu_seqlens": (0, 8.0)}, r"cu_seqlens=\(0, 8.0\): must be a tuple of integers"),
        ({"cu_seqlens": torch.tensor([0, 8])}, r"cu_seqlens=tensor\(\[0, 8\]\): must be a tuple of integers"),
        ({"positions": torch.zeros(7, dtype=torch.int32)}, "positions"),
        ({"positions": torch.full((8,), -1, dtype=torch.int32)}, "positions"),
        ({"positions": torch.zeros(8)}, "positions of torch.float32"),
        ({"positions": torch.zeros(8, dtype=torch.int32, device="meta")}, "positions of torch.int32 on meta"),
        ({"positions": torch.zeros(16, dtype=torch.int32)[::2]}, "positions with strides .2,.: must be contiguous"),
        ({"kv_lens": torch.zeros(2, dtype=torch.int32)}, "kv_lens"),
        ({"cu_seqlens": (0, 7)}, "cu_seqlens"),
        ({"cu_seqlens": (0, 9, 8)}, "cu_seqlens"),
        ({"max_kv_len": 31}, "max_kv_len=31"),
        ({"regroup": 32}, "regroup=32"),
        ({"capacity": 500}, "capacity=500"),
        ({"kv_dtype": "int8"}, "kv_dtype='int8'"),
    ],
)
def test_a_broken_plan_names_its_field(change, word):
    one = page_cases.make([(8, 30)])
    with pytest.raises(ValueError, match=word):
        replace(one.plan, **change).check()


def test_sparse_attention_runs_a_page_plan_and_nothing_else_on_e4m3():
    from prefill_kernels import quantize_kv

    one = page_cases.make([(9, 40)], seed=4)
    out, stats = sparse_attention(one.q, one.kv, one.plan, scale=one.scale)
    want = literal.attend(one.q, one.k, one.v, one.plan, one.scale)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
    assert stats.backend == "torch" and kernels()["page_attention"].page_remap
    lists = torch.zeros(1, 2, 1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="E4M3"):
        sparse_attention(one.q, quantize_kv(one.kv), BlockPlan(lists, lists[..., 0], 16, 0, 9, 9, 9), scale=1.0)


@pytest.mark.parametrize("change", [{"page_size": 2.5}, {"cu_seqlens": [0, 8]}])
def test_every_operation_on_a_plan_refuses_it_by_name(change):
    one = page_cases.make([(8, 30)])
    broken, ids = replace(one.plan, **change), regroup_queries(one.plan)
    for call in (
        lambda: page_attention(one.q, one.kv, broken, scale=1.0),
        lambda: attend_pages(one.q, one.kv, broken, 1.0),
        lambda: kv_union_attention(one.q, one.kv, broken, scale=1.0),
        lambda: regroup_queries(broken),
        lambda: search_unions(broken),
        lambda: prepare_unions(broken, ids),
    ):
        with pytest.raises(ValueError, match=next(iter(change))):
            call()
