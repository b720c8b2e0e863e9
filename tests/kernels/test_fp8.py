"""E4M3 caches and rows."""

from __future__ import annotations

import page_cases
import pytest
import torch
from prefill_kernels import PagedKV, attend_pages, kv_union_attention, page_attention, quantize_kv, quantize_rows
from prefill_kernels.fp8 import to_e4m3


@pytest.fixture(params=["by groups", "by pages"])
def attend(request):
    """Attention of q, kv, plan and scale in the reference, by either union."""

    def call(q, kv, plan, scale):
        if request.param == "by pages":
            return kv_union_attention(q, kv, plan, scale=scale)
        return page_attention(q, kv, plan, scale=scale)[0]

    return call


def dense(kv, length):
    """Keys and values [Hkv, length, d] of the first sequence."""
    token = torch.arange(length)
    page = kv.page_table[0, token // kv.page_size].long()
    return [x[page, token % kv.page_size].transpose(0, 1) for x in (kv.k_pages, kv.v_pages)]


def test_scales_are_of_the_valid_tokens_of_each_head():
    one = page_cases.make([(5, 37), (3, 20)], heads=(2, 2), seed=1)
    got = quantize_kv(one.kv, kv_lens=one.plan.kv_lens)
    for name, x in (("k_scale", one.k), ("v_scale", one.v)):
        held = torch.cat([x[0, :, :37], x[1, :, :20]], 1)
        assert torch.equal(getattr(got, name), held.abs().amax((1, 2)) / 448)
    assert got.vt_pages.shape == (got.k_pages.shape[0], 2, 16, 16) and got.vt_pages.is_contiguous()
    back = got.dequantize()
    for mine, real in zip(dense(back, 37), (one.k[0, :, :37], one.v[0, :, :37]), strict=True):
        scale = real.abs().amax((1, 2), keepdim=True) / 448
        # Half a step of three mantissa bits, or of the smallest step.
        assert ((mine - real).abs() <= real.abs() / 16 + scale * 2**-10).all() and not torch.equal(mine, real)
    assert (got.k_pages.float().isfinite()).all() and (got.vt_pages.float().isfinite()).all()


def test_slots_without_a_token_are_zero_and_broken_tokens_are_not():
    one = page_cases.make([(5, 37)], seed=1)
    got = quantize_kv(one.kv)
    last = int(one.kv.page_table[0, 2])
    assert not got.k_pages[last, 5:].float().any() and not got.vt_pages[last, ..., 5:].float().any()
    page = int(one.kv.page_table[0, 0])
    one.kv.k_pages[page, 3] = float("nan")
    assert quantize_kv(one.kv).k_pages[page, 3].float().isnan().all()


@pytest.mark.parametrize("scale", [0.5, 0.0, float("nan"), float("inf")])
def test_slots_without_a_token_are_zero_under_any_scale(scale):
    one = page_cases.make([(5, 37)], seed=1)
    got = quantize_kv(one.kv, torch.tensor([scale]), torch.tensor([scale]))
    last = int(one.kv.page_table[0, 2])
    spare = [i for i in range(len(got.k_pages)) if i not in one.kv.page_table[0, :3].tolist()]
    for k, vt in ((got.k_pages[last, 5:], got.vt_pages[last, ..., 5:]), (got.k_pages[spare], got.vt_pages[spare])):
        assert k.numel() and not k.float().any() and not vt.float().any()


def test_one_broken_token_leaves_the_slots_without_a_token_zero():
    one = page_cases.make([(5, 37)], seed=1)
    one.kv.v_pages[int(one.kv.page_table[0, 0]), 3] = float("nan")
    assert not quantize_kv(one.kv).vt_pages[int(one.kv.page_table[0, 2]), ..., 5:].float().any()


def test_scales_of_another_shape_are_refused():
    one = page_cases.make([(5, 37)], heads=(2, 2))
    good = torch.ones(2)
    for name, wrong in (("k_scale", good[:1]), ("v_scale", good.double()), ("v_scale", torch.ones(1).expand(2))):
        with pytest.raises(ValueError, match=name):
            quantize_kv(one.kv, **{"k_scale": good, "v_scale": good, name: wrong})


def test_given_scales_and_saturation():
    one = page_cases.make([(5, 37)], seed=1)
    scale = torch.tensor([0.001])
    got = quantize_kv(one.kv, scale, scale)
    assert got.k_scale is scale and float(got.k_pages.float().abs().max()) == 448
    assert to_e4m3(torch.tensor([1e9, -1e9, 448.0, 0.0])).float().tolist() == [448, -448, 448, 0]


def test_zero_heads_and_zero_rows_have_scale_one():
    kv = PagedKV.from_dense(torch.zeros(1, 1, 20, 16), torch.zeros(1, 1, 20, 16), 16)
    got = quantize_kv(kv)
    assert got.k_scale.tolist() == got.v_scale.tolist() == [1] and not got.k_pages.float().any()
    rows, scale = quantize_rows(torch.tensor([[0.0, 0.0], [1.0, -2.0]]))
    assert scale[0].item() == 1 and rows[0].float().tolist() == [0, 0]
    assert rows[1].float().tolist() == [224, -448] and scale[1].item() == pytest.approx(2 / 448)


def test_v_pages_is_a_view_in_the_usual_layout():
    one = page_cases.make([(5, 37)], heads=(2, 2), seed=1)
    got = quantize_kv(one.kv)
    assert got.v_pages.shape == got.k_pages.shape == one.kv.v_pages.shape
    assert got.v_pages.data_ptr() == got.vt_pages.data_ptr()


@pytest.mark.parametrize("ratio", [1, 3, 4, 16])
def test_error_of_the_products_and_of_the_cache_apart(ratio):
    one = page_cases.make([(40, 300)], heads=(ratio, 1), dim=64, page_size=32, width=4, seed=ratio)
    kv = quantize_kv(one.kv)
    out, _ = page_attention(one.q, kv, one.plan, scale=one.scale)

    def relative(got, want):
        return float((got.double() - want).norm() / want.norm())

    exact = attend_pages(one.q.double(), kv, one.plan, one.scale)
    original = PagedKV(one.kv.k_pages.double(), one.kv.v_pages.double(), one.kv.page_table, one.kv.kv_len)
    assert 1e-3 < relative(out, exact) < 5e-2
    assert 1e-3 < relative(exact, attend_pages(one.q.double(), original, one.plan, one.scale)) < 1e-1
    # The plan's own switch quantises in the call, by the same scales.
    again, _ = page_attention(one.q, one.kv, one.planned(kv_dtype="fp8").plan, scale=one.scale)
    assert torch.equal(out, again)


def test_the_sum_is_of_the_probabilities_before_rounding():
    """One page, one query: 448 p rounds by up to a sixteenth, and the sum must not follow it."""
    one = page_cases.make([(1, 16)], heads=(1, 1), sprinkle=False, width=1, seed=2)
    one.v.fill_(1.0)
    kv = quantize_kv(page_cases.cache(one.k, one.v, 16, [16]))
    out, _ = page_attention(one.q, kv, one.planned(pages=torch.zeros(1, 1, 1, 1, dtype=torch.int32)).plan, scale=0.25)
    q8, q_scale = quantize_rows(one.q)
    logits = (q8.float() @ dense(kv.dequantize(), 16)[0].mT * q_scale * 0.25).flatten()
    p = (logits - logits.max()).exp()
    want = (to_e4m3(p * 448).float().sum() / 448 / p.sum()).item()
    assert out.flatten().tolist() == pytest.approx([want] * 16, rel=1e-5) and abs(want - 1) > 1e-4


@pytest.mark.parametrize("pool", ["k_pages", "v_pages"])
def test_one_broken_token_reaches_every_row_of_its_kv_head(pool):
    one = page_cases.make([(16, 64)], heads=(4, 2), seed=3, sprinkle=False, width=1)
    pages = torch.tensor([0, 1] * 8, dtype=torch.int32).view(1, 16, 1, 1).repeat(1, 1, 2, 1)
    one = one.planned(pages=pages)
    getattr(one.kv, pool)[int(one.kv.page_table[0, 0]), 4, 0] = float("nan")
    kv = quantize_kv(one.kv)
    assert kv.k_scale.isnan().tolist() == [pool == "k_pages", False]
    out, _ = page_attention(one.q, kv, one.plan, scale=one.scale)
    assert out[0, :2].isnan().all() and out[0, 2:].isfinite().all()
    # In the model's dtype a key reaches only the queries that selected page 0.
    plain, _ = page_attention(one.q, one.kv, one.plan, scale=one.scale)
    assert plain[0, 2:].isfinite().all() and (pool == "v_pages" or plain[0, :2, 1::2].isfinite().all())


def test_tiny_rows_are_quantised_in_proportion():
    """Down to the smallest bfloat16, 2^-133: no scale whose reciprocal is infinite, and zeros stay zeros."""
    row = torch.tensor([0.0, 1.0, -0.5, 0.25], dtype=torch.float64)
    for exponent in (-100, -120, -126, -127, -131):
        real = (row * 2.0**exponent)[None]
        rows, scale = quantize_rows(real.bfloat16())
        assert rows.float().isfinite().all() and rows[0, 0].float() == 0
        torch.testing.assert_close(rows.double() * scale.double(), real, rtol=0.07, atol=0)


def test_tiny_rows_attend(attend):
    one = page_cases.make([(20, 60)], dim=32, page_size=32)
    one.q[..., ::5] = 0
    for first, size in ((1, 1e-36), (2, 1e-38), (3, 1e-40)):
        one.q[:, :, first::4] *= size
    kv = quantize_kv(one.kv)
    out = attend(one.q, kv, one.plan, one.scale)
    want = attend_pages(one.q.double(), kv, one.plan, one.scale)
    assert out.isfinite().all() and float((out - want).norm() / want.norm()) < 5e-2


def test_scales_are_of_each_kv_head(attend):
    """Four KV heads whose keys and values differ by orders of magnitude, and queries that make up for the keys."""
    one = page_cases.make([(40, 300)], heads=(8, 4), dim=64, page_size=32, seed=5, sprinkle=False)
    k_size, v_size = (torch.tensor(x)[:, None, None] for x in ([1, 30, 0.02, 500], [1, 1e-3, 40, 1e4]))
    q = one.q / k_size.repeat_interleave(2, 0)
    real = page_cases.cache(one.k * k_size, one.v * v_size, 32, [300])
    kv = quantize_kv(real)
    exact, ideal = (attend_pages(q.double(), x, one.plan, one.scale) for x in (kv, page_cases.double(real)))
    out = attend(q, kv, one.plan, one.scale)
    for head in range(8):
        assert 1e-3 < float((out - exact)[:, head].norm() / exact[:, head].norm()) < 6e-2
        assert 1e-3 < float((exact - ideal)[:, head].norm() / ideal[:, head].norm()) < 0.1


def test_scales_of_a_call_are_of_the_tokens_of_each_request(attend):
    """Large numbers in the slots after the shorter of two requests of as many pages."""
    one = page_cases.make([(20, 60), (9, 50)], heads=(4, 2), dim=32, page_size=32, seed=6, kv_dtype="fp8")
    found = []
    for value in (0.0, 1e4):
        for pool in (one.kv.k_pages, one.kv.v_pages):
            pool[int(one.kv.page_table[1, 1]), 50 - 32 :] = value
        found.append(attend(one.q, one.kv, one.plan, one.scale))
    assert found[0].any() and torch.equal(*found)
