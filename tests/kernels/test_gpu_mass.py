"""The Triton mass kernel on the device against the float32 reference, and its memory at 128K."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import paged, tensors
from prefill_kernels import PagedKV, block_mass, random_scores

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = [  # length, query heads, KV heads, offset, page size, head dim, block, dtype
    (1, 1, 1, 0, 16, 128, 128, torch.bfloat16),
    (127, 3, 1, 0, 16, 128, 128, torch.bfloat16),
    (129, 4, 4, 0, 128, 128, 128, torch.bfloat16),
    (3000, 8, 1, 0, 64, 128, 128, torch.bfloat16),
    (2048, 8, 2, 1024, 256, 128, 64, torch.bfloat16),
    (2500, 6, 2, 384, 32, 64, 128, torch.float16),
]


@pytest.mark.parametrize("length,q_heads,kv_heads,offset,page_size,dim,block,dtype", CASES)
def test_mass_equals_the_float32_reference(length, q_heads, kv_heads, offset, page_size, dim, block, dtype):
    shape = {"block": block, "offset": offset, "seed": length, "dtype": dtype, "device": "cuda"}
    q, k, v = tensors(length, q_heads, kv_heads, dim, **shape)
    kv = paged(k, v, page_size)
    settings = {"scale": dim**-0.5, "q_offset": offset, "block_size": block}
    got = block_mass(q, kv, backend="triton", **settings)
    single = PagedKV(kv.k_pages.float(), kv.v_pages.float(), kv.page_table, kv.kv_len)
    want = block_mass(q.float(), single, backend="torch", **settings)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
    assert torch.equal(got, block_mass(q, kv, backend="triton", **settings))


def test_no_matrix_of_logits_at_128k():
    length, heads = 131072, 32
    q = torch.randn(1, heads, length, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 8, length, 128, device="cuda", dtype=torch.bfloat16)
    kv = PagedKV.from_dense(k, k, 64)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = block_mass(q, kv, scale=0.1)
    assert torch.cuda.max_memory_allocated() - before < 256 << 20
    torch.testing.assert_close(got[0, 5, -1].sum(), torch.tensor(128.0, device="cuda"), rtol=1e-3, atol=1e-2)


def test_random_scores_are_those_of_the_cpu_and_bounded_at_128k():
    settings = {"seed": 3, "layer": 2, "block_size": 128, "q_offset": 256, "q_len": 2000}
    here = random_scores(4, device=torch.device("cuda"), **settings)
    assert torch.equal(here.cpu(), random_scores(4, **settings))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    big = {"seed": 3, "layer": 2, "block_size": 128, "q_offset": 0, "q_len": 131072}
    random_scores(32, device=torch.device("cuda"), **big)
    assert torch.cuda.max_memory_allocated() - before < 2 << 30
