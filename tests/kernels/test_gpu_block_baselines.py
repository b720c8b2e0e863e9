"""Scores and selections of the baselines on the device: against the float32 reference, twice, and at length."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import paged, tensors
from prefill_kernels import (
    PagedKV,
    flash_scores,
    flash_select,
    flex_select,
    plan_from_mask,
    sparge_select,
    xattn_scores,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = [  # length, query heads, KV heads, stride, offset, page size, head dim, dtype
    (1, 1, 1, 8, 0, 16, 128, torch.bfloat16),
    (127, 3, 1, 8, 0, 16, 128, torch.bfloat16),
    (129, 4, 4, 16, 0, 128, 128, torch.bfloat16),
    (3001, 8, 1, 8, 0, 64, 128, torch.bfloat16),
    (2048, 8, 2, 4, 1024, 256, 128, torch.bfloat16),
    (2500, 8, 2, 16, 384, 32, 64, torch.float16),
    (700, 6, 2, 2, 0, 128, 64, torch.bfloat16),
]


def single(kv: PagedKV) -> PagedKV:
    return PagedKV(kv.k_pages.float(), kv.v_pages.float(), kv.page_table, kv.kv_len)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("length,q_heads,kv_heads,stride,offset,page_size,dim,dtype", CASES)
def test_antidiagonal_scores(length, q_heads, kv_heads, stride, offset, page_size, dim, dtype, uneven):
    shape = {"block": 128, "offset": offset, "seed": length, "dtype": dtype, "device": "cuda", "uneven": uneven}
    q, k, v = tensors(length, q_heads, kv_heads, dim, **shape)
    kv = paged(k, v, page_size)
    settings = {"stride": stride, "scale": dim**-0.5, "q_offset": offset}
    got = xattn_scores(q, kv, backend="triton", **settings)
    want = xattn_scores(q.float(), single(kv), backend="torch", **settings)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert torch.equal(got, xattn_scores(q, kv, backend="triton", **settings))


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("length,q_heads,kv_heads,stride,offset,page_size,dim,dtype", CASES)
def test_mean_key_scores(length, q_heads, kv_heads, stride, offset, page_size, dim, dtype, uneven):
    shape = {"block": 128, "offset": offset, "seed": length, "dtype": dtype, "device": "cuda", "uneven": uneven}
    q, k, v = tensors(length, q_heads, kv_heads, dim, **shape)
    kv = paged(k, v, page_size)
    settings = {"scale": dim**-0.5, "q_offset": offset}
    got = flash_scores(q, kv, backend="triton", **settings)
    torch.testing.assert_close(got, flash_scores(q, kv, backend="torch", **settings), rtol=1e-3, atol=1e-3)
    assert torch.equal(got, flash_scores(q, kv, backend="triton", **settings))


@pytest.mark.parametrize("stride", [4, 16])
def test_scores_of_blocks_of_64_tokens(stride):
    q, k, v = tensors(1111, 6, 2, 128, block=64, dtype=torch.bfloat16, device="cuda")
    kv = paged(k, v, 64)
    for scores, settings in ((xattn_scores, {"stride": stride}), (flash_scores, {})):
        got = scores(q, kv, scale=0.09, block_size=64, backend="triton", **settings)
        want = scores(q, kv, scale=0.09, block_size=64, backend="torch", **settings)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tiles,first", [(1, 0), (5, 3), (300, 0), (3, 1500)])
@pytest.mark.parametrize("keep", [0.0, 0.2, 1.0])
def test_lists_of_a_mask(tiles, first, keep):
    blocks = first + tiles
    g = torch.Generator(device="cuda").manual_seed(blocks)
    mask = torch.rand(1, 3, tiles, blocks, generator=g, device="cuda") < keep
    shape = {"block_size": 128, "q_offset": first * 128, "q_len": tiles * 128, "prompt_len": blocks * 128}
    got, want = (plan_from_mask(mask, backend=x, **shape) for x in ("triton", "torch"))
    got.check()
    assert torch.equal(got.order, want.order) and torch.equal(got.count, want.count)


@pytest.mark.parametrize("length", [300, 3001])
def test_torch_selections_on_the_device_equal_the_cpus(length):
    q, k, v = tensors(length, 6, 2, 64, block=128, seed=length)
    settings = {"scale": 0.125, "block_size": 128}
    for select in (
        lambda x, kv: flex_select(x, kv, gamma=0.9, tau=0.3, min_budget=128, **settings).mask,
        lambda x, kv: sparge_select(x, kv, tau=0.8, theta=0.1, **settings),
    ):
        there = select(q.cuda(), paged(k.cuda(), v.cuda(), 64)).cpu()
        # Sums in another order may move a block across a threshold.
        assert float((there != select(q, paged(k, v, 64))).float().mean()) < 1e-3


def at_128k():
    g = torch.Generator(device="cuda").manual_seed(0)
    shape = {"generator": g, "device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(1, 131072, 32, 128, **shape).transpose(1, 2)
    pages = torch.randn(1024, 128, 8, 128, **shape)
    table = torch.arange(1024, dtype=torch.int32, device="cuda")[None]
    return q, PagedKV(pages, pages, table, 131072, in_order=True)


SELECTIONS = {
    "xattention": lambda q, kv: xattn_scores(q, kv, stride=8, scale=0.09),
    "flexprefill": lambda q, kv: flex_select(q, kv, gamma=0.95, tau=0.1, min_budget=1024, scale=0.09).mask,
    "flashprefill": lambda q, kv: flash_select(
        flash_scores(q, kv, scale=0.09),
        alpha=0.12,
        sink=2,
        window=4,
        last_full=2,
        first_tile=0,
        prompt_tiles=1024,
    ),
    "spargeattn": lambda q, kv: sparge_select(q, kv, tau=0.98, theta=0.6, scale=0.09),
}


@pytest.mark.parametrize("name", list(SELECTIONS))
def test_memory_at_128k_stays_bounded_and_nothing_waits_for_the_device(name):
    q, kv = at_128k()
    SELECTIONS[name](q[:, :, :4096], PagedKV(kv.k_pages, kv.v_pages, kv.page_table, 4096, in_order=True))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        SELECTIONS[name](q, kv)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2 << 30
