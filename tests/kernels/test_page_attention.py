"""Page attention by unions against the loops of equations (1)-(2), in the reference and in Triton."""

from __future__ import annotations

import importlib
from dataclasses import replace

import literal_pages as literal
import page_cases
import pytest
import torch
from page_cases import CASES, backend, double  # noqa: F401 - a fixture among them
from prefill_kernels import (
    BackendUnavailable,
    PagePlan,
    attend_pages,
    dense_attention,
    executed,
    kv_union_attention,
    page_attention,
    prepare_unions,
    quantize_kv,
    regroup_queries,
    union_attention,
)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_loops(backend, name):  # noqa: F811
    one = page_cases.make(**CASES[name], seed=len(name))
    want = literal.attend(one.q, one.k, one.v, one.plan, one.scale)
    torch.testing.assert_close(attend_pages(one.q.double(), double(one.kv), one.plan, one.scale), want)
    out, stats = page_attention(one.q, one.kv, one.plan, scale=one.scale, backend=backend)
    assert stats.backend == backend and out.shape == one.q.shape
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    # Dense attention would not pass.
    n, keys = one.plan.cu_seqlens[1], int(one.plan.kv_lens[0])
    first = (one.q[:, :, :n], one.k[:1, :, :keys], one.v[:1, :, :keys])
    dense = dense_attention(*first, scale=one.scale, q_offset=keys - n)
    assert (dense - out[:, :, :n]).norm() > 0.1 * dense.norm()


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_in_float64(seed):
    g = torch.Generator().manual_seed(1000 + seed)

    def draw(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=g))]

    requests = []
    for _ in range(draw(1, 2, 4)):
        keys = draw(1, 7, 64, 130)
        requests.append((min(keys, draw(1, 8, 9, 40)), keys))
    kv_heads = draw(1, 2)
    one = page_cases.make(
        requests, heads=(kv_heads * draw(1, 3, 5), kv_heads), page_size=draw(3, 8, 16, 64), physical=draw(4, 16, 24),
        width=draw(1, 2, 6), seed=seed, dtype=torch.float64, local=draw(True, False), regroup=draw(0, 64, 128),
    )  # fmt: skip
    out, _ = page_attention(one.q, one.kv, one.plan, scale=one.scale, backend="torch")
    torch.testing.assert_close(out, literal.attend(one.q, one.k, one.v, one.plan, one.scale), rtol=1e-10, atol=1e-12)


def test_empty_supports_are_exact_zeros(backend):  # noqa: F811
    one = page_cases.make([(20, 60)], heads=(2, 1), seed=2)
    pages = one.plan.pages.clone()
    pages[0, 3:14] = -1  # a whole group among them
    pages[0, 14] = 3  # a page that starts after the query
    one = one.planned(pages=pages, positions=one.plan.positions.clone().index_fill_(0, torch.tensor([14]), 20))
    out, _ = page_attention(one.q, one.kv, one.plan, scale=one.scale, backend=backend)
    assert not out[0, :, 3:15].any() and out[0, :, 15:].abs().sum(-1).gt(0).any()


def test_a_page_that_one_half_did_not_select(backend):  # noqa: F811
    one = page_cases.halves()
    out, stats = page_attention(one.q, one.kv, one.plan, scale=one.scale, backend=backend)
    torch.testing.assert_close(
        out.double(), literal.attend(one.q, one.k, one.v, one.plan, one.scale), rtol=1e-4, atol=1e-5
    )
    assert int(stats.half_pages) == int(stats.union_pages) > 0 and int(stats.imbalance) == 1 + 1 + 3


@pytest.mark.parametrize("heads,page_size,dtype", [((3, 1), 16, torch.float32), ((2, 2), 32, torch.float16)])
def test_regrouping_changes_no_bit(backend, heads, page_size, dtype):  # noqa: F811
    if backend == "torch" and dtype == torch.float16:
        pytest.skip("the reference multiplies in float32")
    one = page_cases.make([(40, 333), (9, 9)], heads=heads, page_size=page_size, seed=6, dtype=dtype, local=True)
    plain, before = page_attention(one.q, one.kv, one.plan, scale=one.scale, backend=backend)
    grouped, after = page_attention(one.q, one.kv, one.planned(regroup=64).plan, scale=one.scale, backend=backend)
    assert int(after.union_pages.sum()) != int(before.union_pages.sum()) and after.regrouped and not before.regrouped
    assert torch.equal(plain, grouped)


def test_other_queries_of_the_group_change_no_bit(backend):  # noqa: F811
    one = page_cases.make([(16, 200)], heads=(2, 1), seed=8, width=4, sprinkle=False)
    pages = one.plan.pages.clone()
    pages[0, 1::2] = torch.tensor([0, 5, 6, 11], dtype=torch.int32)
    other = one.planned(pages=pages)
    a, _ = page_attention(one.q, one.kv, one.plan, scale=one.scale, backend=backend)
    b, _ = page_attention(other.q, other.kv, other.plan, scale=one.scale, backend=backend)
    assert torch.equal(a[:, :, ::2], b[:, :, ::2]) and not torch.equal(a[:, :, 1::2], b[:, :, 1::2])


def test_e4m3_reference_does_not_depend_on_the_group():
    one = page_cases.make([(40, 333)], heads=(4, 1), dim=32, page_size=32, seed=6, local=True, kv_dtype="fp8")
    kv = quantize_kv(one.kv)
    plain, before = page_attention(one.q, kv, one.plan, scale=one.scale)
    grouped, after = page_attention(one.q, kv, one.planned(regroup=64).plan, scale=one.scale)
    assert int(after.union_pages) < int(before.union_pages) and torch.equal(plain, grouped)


def test_strided_queries_and_duplicate_pages(backend):  # noqa: F811
    one = page_cases.make([(18, 90)], heads=(4, 2), seed=9)
    want, _ = page_attention(one.q, one.kv, one.plan, scale=one.scale, backend=backend)
    wide = torch.zeros(1, 6, 18, 20)
    wide[:, 1:5, :, :16] = one.q
    doubled = one.planned(pages=torch.cat([one.plan.pages, one.plan.pages.flip(-1)], -1)).plan
    out, _ = page_attention(wide[:, 1:5, :, :16], one.kv, doubled, scale=one.scale, backend=backend)
    assert torch.equal(out, want)


def test_a_broken_key_shows_where_it_is_attended_to_and_nowhere_else(backend):  # noqa: F811
    one = page_cases.make([(16, 64)], heads=(2, 1), seed=3, sprinkle=False, width=1)
    pages = torch.tensor([0, 1] * 8, dtype=torch.int32).view(1, 16, 1, 1)
    one = one.planned(pages=pages)
    one.kv.k_pages[int(one.kv.page_table[0, 0]), 4] = float("nan")
    out, _ = page_attention(one.q, one.kv, one.plan, scale=one.scale, backend=backend)
    assert out[0, :, ::2].isnan().all() and out[0, :, 1::2].isfinite().all()


def test_every_page_is_dense_attention(backend):  # noqa: F811
    one = page_cases.make([(20, 50)], heads=(2, 1), seed=1)
    one = one.planned(pages=torch.arange(4, dtype=torch.int32).expand(1, 20, 1, 4))
    out, stats = page_attention(one.q, one.kv, one.plan, scale=one.scale, backend=backend)
    torch.testing.assert_close(
        out, dense_attention(one.q, one.k, one.v, scale=one.scale, q_offset=30), rtol=1e-4, atol=1e-5
    )
    assert int(stats.visited_cells[0, 0].sum()) == 20 * 30 + 20 * 21 // 2


@pytest.mark.parametrize("heads,page_size", [((2, 1), 16), ((4, 2), 32)])
def test_positions_beyond_the_keys(backend, heads, page_size):  # noqa: F811
    """c_i >= L_i: a query sees every token of the request and no slot after the last, in a group with others or not."""
    one = page_cases.make([(24, 41), (9, 70)], heads=heads, page_size=page_size, seed=4, sprinkle=False, regroup=64)
    pages = one.plan.pages.clone()
    pages[0, ..., 0] = torch.tensor([41 // page_size] * 24 + [70 // page_size] * 9, dtype=torch.int32)[:, None]
    positions = one.plan.positions.clone()
    positions[:8] += 60
    positions[8::3] += 33
    one = one.planned(pages=pages, positions=positions)
    want = literal.attend(one.q, one.k, one.v, one.plan, one.scale)
    out, _ = page_attention(one.q, one.kv, one.plan, scale=one.scale, backend=backend)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(attend_pages(one.q.double(), double(one.kv), one.plan, one.scale), want)


def test_a_request_beyond_the_capacity_among_others(backend):  # noqa: F811
    one = page_cases.make(
        [(40, 700), (66, 300)], heads=(2, 1), seed=7, local=True, sprinkle=False, regroup=64, capacity=32
    )
    out, stats = page_attention(one.q, one.kv, one.plan, scale=one.scale, backend=backend)
    plain, before = page_attention(one.q, one.kv, one.planned(regroup=0).plan, scale=one.scale, backend=backend)
    assert torch.equal(out, plain) and int(stats.union_pages) < int(before.union_pages)
    assert stats.regrouped and int(stats.beyond_capacity) == 1
    assert not before.regrouped and before.beyond_capacity == 0


def test_no_counts_where_none_are_asked_for():
    one = page_cases.make([(5, 9)])
    out, stats = page_attention(one.q, one.kv, one.plan, scale=one.scale, stats=False)
    assert stats is None and torch.equal(out, page_attention(one.q, one.kv, one.plan, scale=one.scale)[0])


def test_no_queries_at_all():
    one = page_cases.make([(1, 9)])
    plan = PagePlan.for_prompt(torch.zeros(1, 0, 1, 4, dtype=torch.int32), 16, 9, 0)
    out, stats = page_attention(one.q[:, :, :0], one.kv, plan, scale=1.0)
    assert out.shape == (1, 2, 0, 16) and stats.visited_cells.shape == (1, 2, 0)


def test_calls_that_do_not_belong_together():
    one = page_cases.make([(5, 30)], heads=(4, 2))
    call = {"scale": one.scale, "backend": "torch"}
    with pytest.raises(ValueError, match="q "):
        page_attention(one.q[:, :, :4], one.kv, one.plan, **call)
    with pytest.raises(ValueError, match="KV heads"):
        page_attention(one.q, one.kv, one.planned(pages=one.plan.pages[:, :, :1]).plan, **call)
    with pytest.raises(ValueError, match="query heads"):
        page_attention(one.q[:, :3], one.kv, one.plan, **call)
    with pytest.raises(ValueError, match="kv_len"):
        page_attention(one.q, one.kv, one.planned(max_kv_len=31).plan, **call)
    with pytest.raises(ValueError, match="page_table"):
        page_attention(one.q, replace(one.kv, page_table=one.kv.page_table.repeat(2, 1)), one.plan, **call)
    table = one.kv.page_table
    wide = torch.zeros(1, 2 * table.shape[1], dtype=torch.int32)
    for wrong, word in (
        (table.long(), "must be int32"),
        (wide[:, ::2], "contiguous rows"),
        (table.to("meta"), "on meta"),
        (table[0], "must be .R, pages."),
        (table[:, :1], "do not hold kv_len=30"),
    ):
        with pytest.raises(ValueError, match=word):
            page_attention(one.q, replace(one.kv, page_table=wrong), one.plan, **call)
    with pytest.raises(ValueError, match="values"):
        page_attention(one.q, replace(one.kv, v_pages=one.kv.v_pages[..., :8]), one.plan, **call)
    with pytest.raises(ValueError, match="head_dim=8"):
        page_attention(one.q[..., :8], one.kv, one.plan, **call)
    with pytest.raises(ValueError, match="positions"):
        page_attention(one.q, one.kv, one.planned(positions=torch.zeros(10, dtype=torch.int32)[::2]).plan, **call)
    with pytest.raises(ValueError, match="scale=0"):
        page_attention(one.q, one.kv, one.plan, scale=0.0)
    with pytest.raises(BackendUnavailable, match="nonsense"):
        page_attention(one.q, one.kv, one.plan, scale=1.0, backend="nonsense")


def test_e4m3_caches_that_do_not_fit():
    one = page_cases.make([(5, 30)], heads=(4, 2))
    kv = quantize_kv(one.kv)
    for change, word in (
        ({"vt_pages": kv.vt_pages.transpose(2, 3)[..., :8, :]}, "vt_pages"),
        ({"vt_pages": kv.vt_pages.view(torch.int8)}, "vt_pages of torch.int8"),
        ({"k_pages": kv.k_pages.view(torch.int8)}, "k_pages of torch.int8"),
        ({"k_pages": kv.k_pages[0]}, "k_pages"),
        ({"k_scale": kv.k_scale[:1]}, "k_scale"),
        ({"v_scale": kv.v_scale.double()}, "v_scale of torch.float64"),
        ({"v_scale": torch.ones(1).expand(2)}, "v_scale with strides"),
    ):
        for attend in (page_attention, kv_union_attention):
            with pytest.raises(ValueError, match=word):
                attend(one.q, replace(kv, **change), one.plan, scale=1.0)


def test_unions_of_another_plan_are_refused():
    one = page_cases.make([(20, 60)], heads=(4, 2))
    unions = prepare_unions(one.plan, regroup_queries(one.plan))
    call = {"scale": one.scale, "backend": "torch"}
    for change in (
        {"ids": unions.ids[:, :-8]},
        {"pages": unions.pages[..., :-1]},
        {"members": unions.members.long()},
        {"count": unions.count.T.contiguous().T},
        {"requests": unions.requests[:1]},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(change))} of the unions"):
            union_attention(one.q, one.kv, one.plan, replace(unions, **change), **call)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for GPU backends where there is no GPU")
@pytest.mark.parametrize("name", ["hopper", "cluster"])
def test_a_named_backend_is_refused_before_anything_is_prepared(name, monkeypatch):
    # The package's name for the module is the function.
    monkeypatch.setattr(importlib.import_module("prefill_kernels.page_attention"), "_search", None)
    one = page_cases.make([(20, 60)], kv_dtype="fp8", regroup=64)
    with pytest.raises(BackendUnavailable, match=f"backend='{name}': .*compute capability 9.0"):
        page_attention(one.q, one.kv, one.plan, scale=1.0, backend=name)


def test_a_search_that_triton_cannot_hold_runs_in_torch_and_is_recorded():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    many = page_cases.make([(9, 16 * 2100)], width=2, seed=3, regroup=64, capacity=4096)
    with executed() as ran:
        out, stats = page_attention(many.q, many.kv, many.plan, scale=many.scale, backend="triton")
    assert dict(ran.counts) == {
        ("regroup", "torch"): 1, ("union", "triton"): 1, ("attention", "triton"): 1, ("count", "triton"): 1,
    }  # fmt: skip
    assert list(ran.refused) == [("regroup", "triton")] and "2100 pages" in ran.refused["regroup", "triton"]
    want = literal.attend(many.q, many.k, many.v, many.plan, many.scale)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    assert stats.regrouped

    # Many ids a query: search, unions and counts.
    wide = page_cases.make([(9, 40)], seed=3, regroup=64)
    wide = wide.planned(pages=wide.plan.pages.repeat(1, 1, 1, 150))
    with executed() as ran:
        out, _ = page_attention(wide.q, wide.kv, wide.plan, scale=wide.scale, backend="triton")
    assert {stage for stage, by in ran.counts if by == "torch"} == {"regroup", "union", "count"}
    assert set(ran.refused) == {("regroup", "triton"), ("union", "triton"), ("count", "triton")}
    want = literal.attend(wide.q, wide.k, wide.v, wide.plan, wide.scale)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    # Nothing is said of a search that was not asked for.
    with executed() as ran:
        page_attention(many.q, many.kv, many.planned(regroup=0).plan, scale=1.0, backend="triton")
    assert not ran.refused


def test_what_the_kernels_cannot_run_is_refused():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("messages of the interpreter")
    for changes, word in (
        ({"dim": 24}, "head_dim=24"),
        ({"page_size": 24}, "page_size=24"),
        ({"heads": (17, 1)}, "17 query heads"),
        ({"dtype": torch.bfloat16}, "dtype"),
    ):
        one = page_cases.make([(5, 30)], **changes)
        with pytest.raises(BackendUnavailable, match=word):
            page_attention(one.q, one.kv, one.plan, scale=1.0, backend="triton")
    one = page_cases.make([(5, 30)], dim=32, page_size=32)
    unions = prepare_unions(one.plan, regroup_queries(one.plan))
    with pytest.raises(BackendUnavailable, match="E4M3"):
        union_attention(one.q, quantize_kv(one.kv), one.plan, unions, scale=1.0, backend="triton")


def test_no_step_of_a_long_page_reads_the_page_table_after_its_end(monkeypatch):
    """The second step of the last page lies beyond the keys, where a table of exactly the keys' pages has no entry."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    from triton.runtime.interpreter import InterpreterBuilder

    one = page_cases.make([(9, 600)], heads=(2, 1), page_size=256, physical=128, width=3, sprinkle=False)
    pages = torch.arange(3, dtype=torch.int32).expand(1, 9, 1, 3).contiguous()
    one = one.planned(pages=pages)
    wide = torch.zeros(1, 64, dtype=torch.int32)
    wide[:, :5] = one.kv.page_table[:, :5]
    first, loaded = wide.data_ptr() // 4, set()
    load = InterpreterBuilder.create_masked_load

    def recorded(self, ptrs, mask, *rest):
        at = ptrs.data[mask.data].astype("int64").ravel() // 4 - first
        loaded.update(at[(at >= 0) & (at < 64)].tolist())
        return load(self, ptrs, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", recorded)
    kv = replace(one.kv, page_table=wide[:, :5])
    out, _ = page_attention(one.q, kv, one.plan, scale=one.scale, backend="triton")
    assert loaded == {0, 1, 2, 3, 4}
    want = literal.attend(one.q, one.k, one.v, one.plan, one.scale)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
