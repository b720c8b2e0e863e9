"""The Triton proxy in the CPU interpreter against the reference and the literal loops."""

from __future__ import annotations

import literal
import pytest
import torch
from kernel_cases import paged, tensors
from prefill_kernels import BackendUnavailable, kap_scores

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")

B, D, SCALE = 16, 16, 0.25
CASES = [  # length, query heads, KV heads, stride, offset, page size
    (1, 2, 1, 8, 0, 16),
    (15, 3, 1, 4, 0, 16),
    (17, 4, 4, 16, 0, 32),
    (70, 8, 1, 4, 0, 16),
    (97, 3, 3, 1, 0, 64),
    (100, 6, 2, 8, 48, 16),
    # More query heads of a KV head than a program takes: 16 in two parts, 12 in one and a half.
    (37, 16, 1, 1, 0, 16),
    (33, 24, 2, 1, 16, 16),
]


@pytest.mark.parametrize("length,q_heads,kv_heads,stride,offset,page_size", CASES)
def test_equals_the_reference_and_the_literal_loops(length, q_heads, kv_heads, stride, offset, page_size):
    q, k, v = tensors(length, q_heads, kv_heads, D, block=B, offset=offset, seed=length, uneven=length % 2 == 0)
    kv = paged(k, v, page_size)
    settings = {"stride": stride, "scale": SCALE, "block_size": B, "q_offset": offset}
    got = kap_scores(q, kv, backend="triton", **settings)
    reference = kap_scores(q, kv, backend="torch", **settings)
    assert got.score.dtype == torch.float32 and got.hrm.dtype == torch.bool
    torch.testing.assert_close(got.score, reference.score, rtol=1e-4, atol=1e-5)
    score, flag, margin = literal.kap(q[0], k[0], stride, B, SCALE, offset)
    torch.testing.assert_close(got.score[0].double(), score, rtol=1e-4, atol=1e-5)
    assert not ((got.hrm[0] != flag) & (margin > 1e-4)).any()


def test_ties_flag_both_blocks():
    q, k, v = tensors(32, 1, 1, D, block=B)
    k[:, :, 16:] = k[:, :, :16]
    got = kap_scores(q, paged(k, v, 16), stride=16, scale=SCALE, block_size=B, backend="triton")
    assert got.hrm[0, 0, 1].all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("below", [2.0**-7, 2.0**-12, 2.0**-23])
def test_a_block_just_below_the_maximum_is_not_flagged(below, backend):
    """Equation 12 asks for equality: every logit here is exact in float32."""
    q, k = torch.zeros(1, 1, 48, D), torch.zeros(1, 1, 48, D)
    q[..., 0] = 1.0
    k[0, 0, 0, 0], k[0, 0, 16, 0], k[0, 0, 32, 0] = 1.0 - below, 1.0, 1.0 - below
    got = kap_scores(q, paged(k, k, 16), stride=16, scale=1.0, block_size=B, backend=backend)
    assert got.hrm[0, 0, 1].tolist() == [False, True, False]
    assert got.hrm[0, 0, 2].tolist() == [False, True, False]


def test_a_stride_that_does_not_divide_the_block_is_refused():
    q, k, v = tensors(32, 1, 1, D, block=B)
    with pytest.raises(BackendUnavailable, match="stride=12"):
        kap_scores(q, paged(k, v, 16), stride=12, scale=SCALE, block_size=B, backend="triton")
