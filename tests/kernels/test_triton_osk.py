"""The Triton ordered-skipping kernel in the CPU interpreter against the reference and the literal loops."""

from __future__ import annotations

import literal
import pytest
import torch
from kernel_cases import paged, random_plan, tensors, threshold_margin
from prefill_kernels import BackendUnavailable, BlockPlan, block_attention, dense_attention

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")

B, D, SCALE = 16, 16, 0.25
CASES = [  # length, query heads, KV heads, offset, page size
    (1, 1, 1, 0, 16),
    (15, 3, 1, 0, 16),
    (16, 4, 4, 0, 32),
    (17, 4, 1, 0, 16),
    (61, 8, 1, 0, 64),
    (61, 3, 3, 32, 16),
    (80, 6, 2, 16, 256),
]


def compare(q, k, v, kv, plan, **tolerance):
    expected, want = block_attention(q, kv, plan, scale=SCALE, backend="torch")
    got, stats = block_attention(q, kv, plan, scale=SCALE, backend="triton")
    torch.testing.assert_close(got, expected, **tolerance)
    for name in ("visited_cells", "computed_cells", "visited_blocks", "computed_blocks"):
        assert torch.equal(getattr(stats, name).long(), getattr(want, name)), name
    return got, stats


@pytest.mark.parametrize("length,q_heads,kv_heads,offset,page_size", CASES)
@pytest.mark.parametrize("share", [-1.0, 0.3])
def test_equals_the_reference(length, q_heads, kv_heads, offset, page_size, share):
    q, k, v = tensors(length, q_heads, kv_heads, D, block=B, offset=offset, seed=length)
    plan = random_plan(length, q_heads, B, offset=offset, skip_scale=share * length, seed=length + q_heads)
    kv = paged(k, v, page_size)
    got, stats = compare(q, k, v, kv, plan, rtol=1e-4, atol=1e-5)
    assert torch.isfinite(got).all()
    if length == 61 and offset == 0 and share > 0:
        assert int(stats.computed_blocks.sum()) < int(stats.visited_blocks.sum()), "no skip was tested"


def test_equals_the_literal_loops():
    length, heads = 61, 4
    q, k, v = tensors(length, heads, 2, D, block=B, seed=1)
    plan = random_plan(length, heads, B, skip_scale=0.3 * length, seed=3)
    lists = [[[j for j in row if j >= 0] for row in head] for head in plan.order[0].tolist()]
    out, stats = block_attention(q, paged(k, v, 16), plan, scale=SCALE, backend="triton")
    expected, computed = literal.osk(q[0], k[0], v[0], lists, B, SCALE, plan.log_threshold)
    torch.testing.assert_close(out[0].double(), expected, rtol=1e-4, atol=1e-5)
    for h in range(heads):
        for t in range(4):
            if threshold_margin(q, k, plan, SCALE, h, t) > 1e-4:
                assert int(stats.computed_blocks[0, h, t]) == sum(computed[h][t])


def test_float16_and_head_dim_64():
    q, k, v = tensors(49, 2, 1, 64, block=32, dtype=torch.float16, seed=4)
    compare(q, k, v, paged(k, v, 16), random_plan(49, 2, 32, seed=4), rtol=4e-3, atol=4e-3)


def test_every_block_equals_dense_and_some_blocks_do_not():
    q, k, v = tensors(61, 2, 1, D, block=B, seed=5)
    dense = dense_attention(q, k, v, scale=SCALE)
    every = random_plan(61, 2, B, keep=1.0, diagonal=True, seed=5)
    out, _ = block_attention(q, paged(k, v, 16), every, scale=SCALE, backend="triton")
    torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-5)
    some = random_plan(61, 2, B, keep=0.5, seed=5)
    out, _ = block_attention(q, paged(k, v, 16), some, scale=SCALE, backend="triton")
    assert (out - dense).abs().max() > 0.1


def test_no_list_at_all_gives_zeros():
    q, k, v = tensors(33, 2, 1, D, block=B)
    plan = random_plan(33, 2, B)
    nothing = BlockPlan(torch.full_like(plan.order, -1), torch.zeros_like(plan.count), B, 0, 33, 33, 33)
    out, stats = block_attention(q, paged(k, v, 16), nothing, scale=SCALE, backend="triton")
    assert (out == 0).all() and int(stats.visited_cells.sum()) == 0 and int(stats.computed_blocks.sum()) == 0


def test_padding_rows_abstain():
    """17 tokens: the second tile has one row. Its padding (zero queries) would veto the skip of block 0."""
    q, k, v = tensors(17, 1, 1, D, block=B, uneven=False)
    q[0, 0, 16] = 3.0
    k[0, 0, :16], k[0, 0, 16] = -1.0, 1.0
    order = torch.tensor([[[[0, -1], [1, 0]]]], dtype=torch.int32)
    plan = BlockPlan(order, torch.tensor([[[1, 2]]], dtype=torch.int32), B, 0, 17, 17, 17, 1.0)
    _, stats = block_attention(q, paged(k, v, 16), plan, scale=SCALE, backend="triton")
    assert stats.computed_blocks[0, 0].tolist() == [1, 1] and stats.visited_blocks[0, 0].tolist() == [1, 2]


def test_threshold_is_clamped_and_the_first_block_stays():
    q, k, v = tensors(61, 4, 4, D, block=B, seed=6)
    spent = []
    for skip_scale in (61.0, 6100.0):
        plan = random_plan(61, 4, B, keep=1.0, skip_scale=skip_scale, seed=6)
        _, stats = block_attention(q, paged(k, v, 16), plan, scale=SCALE, backend="triton")
        assert (stats.computed_blocks >= (plan.count > 0)).all()
        spent.append(stats.computed_cells)
    assert torch.equal(*spent)


def test_nan_keys_are_not_skipped_away():
    q, k, v = tensors(33, 1, 1, D, block=B)
    k[0, 0, 3] = float("nan")
    plan = random_plan(33, 1, B, keep=1.0, diagonal=True, skip_scale=33.0)
    out, _ = block_attention(q, paged(k, v, 16), plan, scale=SCALE, backend="triton")
    assert torch.isnan(out[0, 0, 32]).all()


def test_batch_of_two_equals_each_alone():
    q, k, v = tensors(40, 2, 1, D, block=B, seed=7)
    other = tensors(40, 2, 1, D, block=B, seed=8)
    q2, k2, v2 = (torch.cat(x) for x in zip((q, k, v), other, strict=True))
    one, two = random_plan(40, 2, B, seed=1), random_plan(40, 2, B, seed=2)
    plan = BlockPlan(torch.cat([one.order, two.order]), torch.cat([one.count, two.count]), B, 0, 40, 40, 40)
    both, _ = block_attention(q2, paged(k2, v2, 16), plan, scale=SCALE, backend="triton")
    for b, (part, (x, y, z)) in enumerate(zip((one, two), ((q, k, v), other), strict=True)):
        alone, _ = block_attention(x, paged(y, z, 16), part, scale=SCALE, backend="triton")
        assert torch.equal(both[b : b + 1], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_that_the_interpreter_gets_wrong_are_refused(dtype):
    q, k, v = tensors(16, 1, 1, D, block=B, dtype=dtype)
    with pytest.raises(BackendUnavailable, match="dtype"):
        block_attention(q, paged(k, v, 16), random_plan(16, 1, B), scale=SCALE, backend="triton")


def test_hopper_needs_the_device():
    q, k, v = tensors(16, 1, 1, D, block=B)
    with pytest.raises(BackendUnavailable, match="9.0"):
        block_attention(q, paged(k, v, 16), random_plan(16, 1, B), scale=SCALE, backend="hopper")


def test_logical_skipping_gives_the_same_as_jumping():
    from prefill_kernels.triton_osk import block_mask, logical_skip_attention

    q, k, v = tensors(61, 4, 2, D, block=B, seed=9)
    plan, kv = random_plan(61, 4, B, seed=9), paged(k, v, 16)
    jumped, _ = block_attention(q, kv, plan, scale=SCALE, backend="torch")
    walked = logical_skip_attention(q, kv, block_mask(plan), plan, scale=SCALE)
    torch.testing.assert_close(walked, jumped, rtol=1e-4, atol=1e-5)
