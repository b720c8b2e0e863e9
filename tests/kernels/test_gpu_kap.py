"""The Triton proxy and selection on the device against the float32 reference."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import paged, tensors
from prefill_kernels import KapScores, PagedKV, kap_scores, order_blocks, select_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = [  # length, query heads, KV heads, stride, offset, page size, head dim, dtype
    (1, 1, 1, 8, 0, 16, 128, torch.bfloat16),
    (127, 3, 1, 8, 0, 16, 128, torch.bfloat16),
    (129, 4, 4, 16, 0, 128, 128, torch.bfloat16),
    (3000, 8, 1, 8, 0, 64, 128, torch.bfloat16),
    (2048, 8, 2, 4, 1024, 256, 128, torch.bfloat16),
    (2500, 8, 2, 16, 384, 32, 64, torch.float16),
    (700, 2, 1, 1, 0, 128, 64, torch.bfloat16),
]


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("length,q_heads,kv_heads,stride,offset,page_size,dim,dtype", CASES)
def test_scores_and_flags_equal_the_float32_reference(
    length, q_heads, kv_heads, stride, offset, page_size, dim, dtype, uneven
):
    shape = {"block": 128, "offset": offset, "seed": length, "dtype": dtype, "device": "cuda", "uneven": uneven}
    q, k, v = tensors(length, q_heads, kv_heads, dim, **shape)
    kv = paged(k, v, page_size)
    settings = {"stride": stride, "scale": dim**-0.5, "q_offset": offset}
    got = kap_scores(q, kv, backend="triton", **settings)
    single = PagedKV(kv.k_pages.float(), kv.v_pages.float(), kv.page_table, kv.kv_len)
    want = kap_scores(q.float(), single, backend="torch", **settings)
    torch.testing.assert_close(got.score, want.score, rtol=1e-3, atol=1e-4)
    # Two blocks whose maxima differ by rounding alone may exchange a flag.
    assert float((got.hrm != want.hrm).float().mean()) < 1e-3
    again = kap_scores(q, kv, backend="triton", **settings)
    assert torch.equal(got.score, again.score) and torch.equal(got.hrm, again.hrm)


def test_a_block_just_below_the_maximum_is_not_flagged():
    q = torch.zeros(1, 1, 384, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.zeros_like(q)
    q[..., 0] = 1.0
    k[0, 0, 0, 0], k[0, 0, 128, 0], k[0, 0, 256, 0] = 1.0 - 2.0**-8, 1.0, 1.0 - 2.0**-8
    got = kap_scores(q, paged(k, k, 64), stride=8, scale=1.0, backend="triton")
    assert got.hrm[0, 0, 1:].tolist() == [[False, True, False]] * 2


def test_a_nan_key_shows_in_the_scores_of_the_tiles_that_see_it():
    shape = {"block": 128, "seed": 1, "dtype": torch.bfloat16, "device": "cuda"}
    q, k, v = tensors(700, 4, 2, 128, **shape)
    k[0, 0, 160, 5] = float("nan")
    kv = paged(k, v, 64)
    got, want = (kap_scores(q, kv, stride=8, scale=0.1, backend=name) for name in ("triton", "torch"))
    assert torch.equal(got.score.isnan(), want.score.isnan()) and not got.hrm[0, :2, 2:].any()
    assert want.score[0, :2, 1:].isnan().any(-1).all() and not want.score[0, 2:].isnan().any()
    geometry = {"block_size": 128, "q_offset": 0, "q_len": 700, "prompt_len": 700, "p": 0.5}
    plan, expected = (select_blocks(got, backend=name, **geometry) for name in ("triton", "torch"))
    assert torch.equal(plan.order, expected.order) and plan.count[0, 0].tolist() == [1, 2, 3, 4, 5, 6]


def test_minus_zero_and_negative_scores_lose_no_block():
    score = torch.tensor([0.5, -0.0, 0.0, -0.0, -1.0, -2.0, 1.0, -0.5], device="cuda").view(1, 1, 1, 8)
    s = KapScores(score, torch.zeros_like(score, dtype=torch.bool))
    assert order_blocks(s, first_tile=7, backend="triton")[0, 0, 0].tolist() == [6, 0, 1, 2, 3, 7, 4, 5]


@pytest.mark.parametrize("blocks,heads", [(5, 3), (200, 3), (1024, 1), (2500, 1)])
@pytest.mark.parametrize("ties", [False, True])
def test_order_and_selection_equal_the_reference(blocks, heads, ties):
    first = max(0, blocks - 150)
    g = torch.Generator(device="cuda").manual_seed(blocks)
    score = torch.rand(1, heads, blocks - first, blocks, generator=g, device="cuda") * 16
    if ties:
        score = score.round()
    causal = torch.ones(blocks, blocks, device="cuda").tril()[first:]
    hrm = (torch.rand(score.shape, generator=g, device="cuda") < 0.05) & causal.bool()
    s = KapScores(score * causal, hrm)
    ordered = order_blocks(s, first_tile=first, backend="triton")
    assert torch.equal(ordered, order_blocks(s, first_tile=first, backend="torch"))
    length = blocks * 128
    shape = {"block_size": 128, "q_offset": first * 128, "q_len": length - first * 128, "prompt_len": length}
    long = blocks > 1024  # compiling a long sort takes seconds
    for rule in ({"p": 0.9},) if long else ({"p": 0.9}, {"p": 1.0}, {"budget": 0.3}):
        for order in ("hrm_first",) if long else ("hrm_first", "ascending", "descending"):
            settings = {"order": order, "force_sink_diagonal": order == "descending", **shape, **rule}
            got, want = (select_blocks(s, backend=x, **settings) for x in ("triton", "torch"))
            assert torch.equal(got.order, want.order) and torch.equal(got.count, want.count)


def test_order_of_a_million_tokens():
    """8192 blocks, the most that the sort takes; one tile, since compiling it is what takes time."""
    g = torch.Generator(device="cuda").manual_seed(1)
    score = (torch.rand(1, 2, 2, 8192, generator=g, device="cuda") * 16).round(decimals=2)
    score[0, :, 0, 8191] = 0
    hrm = torch.rand(score.shape, generator=g, device="cuda") < 0.01
    hrm[0, :, 0, 8191] = False
    shape = {"block_size": 128, "q_offset": 8190 * 128, "q_len": 256, "prompt_len": 8192 * 128}
    got, want = (select_blocks(KapScores(score, hrm), p=0.7, backend=x, **shape) for x in ("triton", "torch"))
    assert torch.equal(got.order, want.order) and torch.equal(got.count, want.count)
