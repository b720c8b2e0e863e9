"""One query of dense attention on the device: by a kernel that repeats itself bit for bit."""

from __future__ import annotations

import pytest
import torch
from prefill_kernels import dense_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def operands(kv_len: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(kv_len)
    shapes = (1, 9, 1, 64), (1, 3, kv_len, 64), (1, 3, kv_len, 64)
    return [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes]


@pytest.mark.parametrize("kv_len", [1, 4097, 8150])
def test_one_query_repeats_bit_for_bit(kv_len: int) -> None:
    q, k, v = operands(kv_len)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        dense_attention(q, k, v, scale=0.125, q_offset=kv_len - 1)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events()]
    assert kernels and not [name for name in kernels if "cudnn" in name]
    # Another order of the sums shows in the rounded result of few inputs only: many inputs, each some times.
    for seed in range(200):
        q = torch.randn(q.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(q.dtype)
        runs = torch.stack([dense_attention(q, k, v, scale=0.125, q_offset=kv_len - 1) for _ in range(10)])
        assert torch.equal(runs, runs[:1].expand_as(runs)), seed
