"""Dense attention: the math at an offset, and one query by a kernel that repeats itself bit for bit."""

from __future__ import annotations

import pytest
import torch
from prefill_kernels import dense, dense_attention


def operands(q_len: int, kv_len: int, device: str = "cpu", dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(kv_len)
    shapes = (1, 9, q_len, 64), (1, 3, kv_len, 64), (1, 3, kv_len, 64)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize(("q_len", "q_offset"), [(1, 0), (1, 200), (7, 0), (7, 130)])
def test_each_query_sees_the_keys_up_to_its_own_position(q_len: int, q_offset: int) -> None:
    q, k, v = operands(q_len, q_offset + q_len)
    scores = q @ k.repeat_interleave(3, 1).mT * 0.2
    future = torch.arange(q_offset + q_len) > torch.arange(q_offset, q_offset + q_len)[:, None]
    want = scores.masked_fill(future, -torch.inf).softmax(-1) @ v.repeat_interleave(3, 1)
    torch.testing.assert_close(dense_attention(q, k, v, scale=0.2, q_offset=q_offset), want)


def test_one_query_does_not_run_on_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = []
    real = dense.scaled_dot_product_attention

    def watched(*args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(dense, "scaled_dot_product_attention", watched)
    dense_attention(*operands(1, 64), scale=0.2, q_offset=63)
    dense_attention(*operands(64, 64), scale=0.2)
    assert enabled == [False, True]
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_len", [1, 4097, 8150])
def test_one_query_repeats_bit_for_bit(kv_len: int) -> None:
    q, k, v = operands(1, kv_len, "cuda", torch.bfloat16)
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
