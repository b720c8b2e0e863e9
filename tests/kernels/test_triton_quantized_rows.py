"""Rows of queries as E4M3 in Triton against the reference, in the interpreter, which cannot multiply them."""

from __future__ import annotations

import pytest
import torch
from prefill_kernels import quantize_rows

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from prefill_kernels.triton_page_attention import _quantized_rows  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")


@triton.jit
def quantize_kernel(q, rows, scales, ROWS: tl.constexpr, D: tl.constexpr):
    row = tl.arange(0, ROWS)
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    quantized, scale = _quantized_rows(tl.load(q + at))
    tl.store(rows + at, quantized.to(tl.float32))
    tl.store(scales + row, scale)


def test_tiny_rows_equal_the_reference():
    """From 1e-30 down to the smallest bfloat16, zeros among their numbers, and a row of zeros."""
    q = torch.randn(16, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    q[:, ::3] = 0
    q *= 10.0 ** -(30 + 0.7 * torch.arange(16, dtype=torch.float64))[:, None]
    q[15] = 0
    q = q.bfloat16().float()  # the interpreter widens subnormal bfloat16 wrongly
    assert (q[14] != 0).any() and q[14].abs().max() < 2**-126
    rows, scales = torch.empty(16, 32), torch.empty(16)
    quantize_kernel[(1,)](q, rows, scales, ROWS=16, D=32)
    want, scale = quantize_rows(q)
    assert rows.isfinite().all() and torch.equal(scales[:, None], scale)
    # Rounding up to a power of two loses the carry in the interpreter: 7.9 becomes 4.
    torch.testing.assert_close(rows, want.float(), rtol=0.51, atol=2**-9)
