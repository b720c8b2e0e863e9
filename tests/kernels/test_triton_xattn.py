"""XAttention's Triton scores in the CPU interpreter against the reference and the literal loops."""

from __future__ import annotations

import literal_proxies
import pytest
import torch
from kernel_cases import paged, tensors
from prefill_kernels import BackendUnavailable, xattn_scores

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")

B, D, SCALE = 16, 16, 0.25
CASES = [  # length, query heads, KV heads, stride, offset, page size
    (1, 2, 1, 8, 0, 16),
    (15, 3, 1, 4, 0, 16),
    (17, 4, 4, 16, 0, 32),
    (70, 8, 1, 4, 0, 16),
    (83, 3, 3, 2, 0, 64),
    (100, 6, 2, 8, 48, 16),
]


@pytest.mark.parametrize("length,q_heads,kv_heads,stride,offset,page_size", CASES)
def test_equals_the_reference_and_the_literal_loops(length, q_heads, kv_heads, stride, offset, page_size):
    q, k, v = tensors(length, q_heads, kv_heads, D, block=B, offset=offset, seed=length, uneven=length % 2 == 0)
    kv = paged(k, v, page_size)
    settings = {"stride": stride, "scale": SCALE, "block_size": B, "q_offset": offset}
    got = xattn_scores(q, kv, backend="triton", **settings)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, xattn_scores(q, kv, backend="torch", **settings), rtol=1e-4, atol=1e-5)
    want = literal_proxies.xattn(q[0], k[0], stride, B, SCALE, offset)
    torch.testing.assert_close(got[0].double(), want, rtol=1e-4, atol=1e-5)


def test_blocks_of_64_tokens():
    q, k, v = tensors(150, 3, 1, D, block=64)
    settings = {"stride": 8, "scale": SCALE, "block_size": 64}
    got, want = (xattn_scores(q, paged(k, v, 32), backend=x, **settings) for x in ("triton", "torch"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_far_apart_logits_neither_overflow_nor_vanish():
    q, k, v = tensors(64, 1, 1, D, block=B)
    kv = paged(40 * k, v, 16)
    settings = {"stride": 4, "scale": 1.0, "block_size": B}
    got = xattn_scores(40 * q, kv, backend="triton", **settings)
    torch.testing.assert_close(got, xattn_scores(40 * q, kv, backend="torch", **settings), rtol=1e-3, atol=1e-5)
    assert got.sum(-1)[0, 0].tolist() == pytest.approx([4] * 4, rel=1e-4)


def test_what_the_kernel_cannot_run_is_refused():
    q, k, v = tensors(32, 1, 1, 24, block=B)
    with pytest.raises(BackendUnavailable, match="head_dim=24"):
        xattn_scores(q, paged(k, v, 16), stride=4, scale=SCALE, block_size=B, backend="triton")
