"""The direct KV-page union against the loops, and its inverted plan."""

from __future__ import annotations

from dataclasses import replace

import literal_pages as literal
import page_cases
import pytest
import torch
from page_cases import CASES, backend, double  # noqa: F401 - a fixture among them
from prefill_kernels import BackendUnavailable, attend_pages, kv_union_attention, quantize_kv
from prefill_kernels.kv_union import invert_plan, partial_bytes


@pytest.mark.parametrize("name", [name for name in CASES if name != "long pages"])
def test_equals_the_loops(backend, name):  # noqa: F811
    one = page_cases.make(**CASES[name], seed=100 + len(name))
    want = literal.attend(one.q, one.k, one.v, one.plan, one.scale)
    out = kv_union_attention(one.q, one.kv, one.plan, scale=one.scale, backend=backend)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_random_calls_in_float64(seed):
    one = page_cases.make(
        [(1 + 7 * seed, 60), (3, 3)], heads=(6, 2), page_size=(8, 16, 24)[seed % 3], physical=16, width=1 + seed,
        seed=seed, dtype=torch.float64,
    )  # fmt: skip
    out = kv_union_attention(one.q, one.kv, one.plan, scale=one.scale, backend="torch")
    torch.testing.assert_close(out, literal.attend(one.q, one.k, one.v, one.plan, one.scale), rtol=1e-10, atol=1e-12)


def test_the_inverted_plan_lists_each_pair_once():
    one = page_cases.make([(30, 100), (9, 40)], heads=(2, 2), seed=5)
    plan, inverted = one.plan, invert_plan(one.plan)
    for h in range(2):
        supports = [sorted(literal.support(plan, i, h)) for i in range(plan.length)]
        assert inverted.counts[h].tolist() == [len(s) for s in supports]
        for number in range(plan.requests * plan.num_pages):
            request, page = divmod(number, plan.num_pages)
            got = inverted.slots[h, int(inverted.starts[h, number]) : int(inverted.starts[h, number + 1])].tolist()
            want = [
                i * plan.width + s.index(page)
                for i, s in enumerate(supports)
                if page in s and literal.request_of(plan, i) == request
            ]
            assert got == want


def test_a_page_that_many_queries_chose(backend):  # noqa: F811
    """More than one chunk of queries for one page, the last one short."""
    one = page_cases.make([(150, 150)], heads=(1, 1), width=2, seed=6, sprinkle=False)
    pages = one.plan.pages.clone()
    pages[..., 0] = 0
    one = one.planned(pages=pages)
    out = kv_union_attention(one.q, one.kv, one.plan, scale=one.scale, backend=backend)
    want = attend_pages(one.q.double(), double(one.kv), one.plan, one.scale)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


def test_empty_supports_are_exact_zeros(backend):  # noqa: F811
    one = page_cases.make([(10, 40)], heads=(2, 1), seed=7)
    pages = one.plan.pages.clone()
    pages[0, :9] = -1
    out = kv_union_attention(one.q, one.kv, one.planned(pages=pages).plan, scale=one.scale, backend=backend)
    assert not out[:, :, :9].any() and out[:, :, 9].any()


def test_positions_beyond_the_keys(backend):  # noqa: F811
    one = page_cases.make([(24, 41), (9, 70)], heads=(4, 2), seed=4, sprinkle=False)
    pages = one.plan.pages.clone()
    pages[0, ..., 0] = torch.tensor([41 // 16] * 24 + [70 // 16] * 9, dtype=torch.int32)[:, None]
    positions = one.plan.positions.clone()
    positions[::3] += 60
    one = one.planned(pages=pages, positions=positions)
    want = literal.attend(one.q, one.k, one.v, one.plan, one.scale)
    out = kv_union_attention(one.q, one.kv, one.plan, scale=one.scale, backend=backend)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


def test_calls_that_do_not_belong_together():
    one = page_cases.make([(10, 40)], seed=7)
    with pytest.raises(ValueError, match="positions"):
        strided = one.planned(positions=one.plan.positions.repeat_interleave(2)[::2])
        kv_union_attention(one.q, one.kv, strided.plan, scale=one.scale)
    with pytest.raises(ValueError, match="page_table"):
        kv_union_attention(one.q, replace(one.kv, page_table=one.kv.page_table.long()), one.plan, scale=one.scale)


def test_half_precision_partials(backend):  # noqa: F811
    one = page_cases.make([(20, 90)], heads=(2, 1), seed=8)
    exact = kv_union_attention(one.q, one.kv, one.plan, scale=one.scale, backend=backend)
    rough = kv_union_attention(one.q, one.kv, one.plan, scale=one.scale, backend=backend, partial_dtype=torch.float16)
    assert 0 < float((rough - exact).norm() / exact.norm()) < 1e-3


def test_e4m3_reference():
    one = page_cases.make([(40, 300)], heads=(4, 1), dim=64, page_size=32, seed=3)
    kv = quantize_kv(one.kv)
    want = attend_pages(one.q.double(), kv, one.plan, one.scale)
    out = kv_union_attention(one.q, kv, one.plan, scale=one.scale)
    assert 1e-3 < float((out.double() - want).norm() / want.norm()) < 5e-2
    again = kv_union_attention(one.q, one.kv, one.planned(kv_dtype="fp8").plan, scale=one.scale)
    assert torch.equal(out, again)


def test_bytes_of_the_partials():
    plan = page_cases.make([(64, 64)], heads=(16, 1), width=16).plan
    assert partial_bytes(plan, 16, 128) == 64 * 16 * 16 * (128 * 4 + 8)
    assert partial_bytes(plan, 16, 128, torch.bfloat16) == 64 * 16 * 16 * (128 * 2 + 8)


def test_pages_that_do_not_stay_on_the_chip_are_refused():
    pytest.importorskip("triton")
    one = page_cases.make([(9, 600)], heads=(2, 1), page_size=256)
    with pytest.raises(BackendUnavailable, match="page_size=256"):
        kv_union_attention(one.q, one.kv, one.plan, scale=one.scale, backend="triton")


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.float64, torch.bool])
def test_partials_of_another_dtype_are_refused(backend, dtype):  # noqa: F811
    one = page_cases.make([(10, 40)], seed=7)
    with pytest.raises(ValueError, match=f"partial_dtype={dtype}: must be one of torch.float32, torch.bfloat16, "):
        kv_union_attention(one.q, one.kv, one.plan, scale=one.scale, backend=backend, partial_dtype=dtype)
