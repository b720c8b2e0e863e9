"""The Triton mass kernel in the CPU interpreter against the reference and the literal loops."""

from __future__ import annotations

import literal_floors
import pytest
import torch
from kernel_cases import paged, tensors
from prefill_kernels import BackendUnavailable, block_mass

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")

B, D, SCALE = 16, 16, 0.25
CASES = [  # length, query heads, KV heads, offset, page size
    (1, 2, 1, 0, 16),
    (15, 3, 1, 0, 16),
    (17, 4, 4, 0, 32),
    (70, 8, 2, 0, 16),
    (100, 6, 2, 48, 16),
]


@pytest.mark.parametrize("length,q_heads,kv_heads,offset,page_size", CASES)
def test_equals_the_reference_and_the_literal_loops(length, q_heads, kv_heads, offset, page_size):
    q, k, v = tensors(length, q_heads, kv_heads, D, block=B, offset=offset, seed=length)
    kv = paged(k, v, page_size)
    settings = {"scale": SCALE, "block_size": B, "q_offset": offset}
    got = block_mass(q, kv, backend="triton", **settings)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, block_mass(q, kv, backend="torch", **settings), rtol=1e-4, atol=1e-5)
    want = literal_floors.mass(q[0], k[0], B, SCALE, offset)
    torch.testing.assert_close(got[0].double(), want, rtol=1e-4, atol=1e-5)


def test_calls_it_cannot_run_are_refused():
    q, k, v = tensors(32, 1, 1, 24, block=B)
    with pytest.raises(BackendUnavailable, match="head_dim=24"):
        block_mass(q, paged(k, v, 16), scale=SCALE, block_size=B, backend="triton")
    q, k, v = tensors(48, 1, 1, D, block=24)
    with pytest.raises(BackendUnavailable, match="block_size=24"):
        block_mass(q, paged(k, v, 16), scale=SCALE, block_size=24, backend="triton")
