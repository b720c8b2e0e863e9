"""Both GPU ordered-skipping kernels on the device against the float32 reference."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import on, paged, poisoned, random_plan, tensors, threshold_margin
from prefill_kernels import BlockPlan, PagedKV, block_attention, dense_attention
from prefill_kernels.backends import hopper_problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

B = 128
CASES = [  # length, query heads, KV heads, offset, page size, head dim, dtype
    (1, 1, 1, 0, 16, 128, torch.bfloat16),
    (127, 3, 1, 0, 64, 128, torch.bfloat16),
    (128, 4, 4, 0, 128, 128, torch.bfloat16),
    (129, 8, 1, 0, 128, 128, torch.bfloat16),
    (1000, 8, 2, 0, 256, 128, torch.bfloat16),
    (1024, 6, 2, 0, 16, 128, torch.bfloat16),
    (1500, 4, 1, 384, 32, 128, torch.bfloat16),
    (2049, 4, 1, 1024, 64, 64, torch.bfloat16),
    (1111, 3, 3, 0, 128, 64, torch.float16),
    (900, 4, 1, 128, 128, 128, torch.float16),
]


@pytest.fixture(params=["triton", "hopper"])
def backend(request):
    if request.param == "hopper" and (problem := hopper_problem(torch.device("cuda", torch.cuda.current_device()))):
        pytest.skip(problem)
    return request.param


def relative(got, want):
    return float((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-20))


def in_float32(q, kv, plan, scale):
    single = PagedKV(kv.k_pages.float(), kv.v_pages.float(), kv.page_table, kv.kv_len)
    return block_attention(q.float(), single, plan, scale=scale, backend="torch")


def make(length, q_heads, kv_heads, offset, page_size, dim, dtype, seed=0):
    shape = {"block": B, "offset": offset, "seed": seed, "dtype": dtype, "device": "cuda"}
    q, k, v = tensors(length, q_heads, kv_heads, dim, **shape)
    return q, k, v, paged(k, v, page_size)


@pytest.mark.parametrize("share", [-1.0, 1e-3, 0.3])
@pytest.mark.parametrize("length,q_heads,kv_heads,offset,page_size,dim,dtype", CASES)
def test_equals_the_float32_reference(backend, length, q_heads, kv_heads, offset, page_size, dim, dtype, share):
    q, k, v, kv = make(length, q_heads, kv_heads, offset, page_size, dim, dtype, seed=length)
    scale = dim**-0.5
    for seed in range(2):
        plan = random_plan(
            length, q_heads, B, offset=offset, skip_scale=share * length, seed=seed, keep=0.7, device="cuda"
        )
        want, expected = in_float32(q, kv, plan, scale)
        got, stats = block_attention(q, kv, plan, scale=scale, backend=backend)
        assert torch.isfinite(got).all()
        assert torch.equal(stats.visited_blocks.long(), expected.visited_blocks)
        assert torch.equal(stats.visited_cells.long(), expected.visited_cells)
        differ = (stats.computed_cells.long() != expected.computed_cells)[0].nonzero().tolist()
        for h, t in differ:  # a vote may fall either way when it is a tie within rounding
            assert threshold_margin(q, k, plan, scale, h, t) < 1e-3
            rows = slice(t * B, (t + 1) * B)
            got[:, h, rows] = want[:, h, rows].to(dtype)
        assert len(differ) <= 1
        assert relative(got, want) < (4e-3 if dtype == torch.bfloat16 else 6e-4)
        assert float((got.float() - want).abs().max()) < (4e-2 if dtype == torch.bfloat16 else 6e-3)


def test_skips_are_really_tested():
    q, k, v, kv = make(1000, 8, 2, 0, 256, 128, torch.bfloat16, seed=1000)
    plan = random_plan(1000, 8, B, skip_scale=300.0, seed=0, keep=0.7, device="cuda")
    _, stats = in_float32(q, kv, plan, 128**-0.5)
    assert int(stats.computed_blocks.sum()) < 0.9 * int(stats.visited_blocks.sum())


@pytest.mark.parametrize("share", [-1.0, 0.3])
def test_repeated_runs_are_bitwise_equal(backend, share, monkeypatch):
    length = 4096
    q, k, v, kv = make(length, 8, 2, 0, 128, 128, torch.bfloat16, seed=3)
    plan = random_plan(length, 8, B, skip_scale=share * length, seed=3, device="cuda")
    first, stats = block_attention(q, kv, plan, scale=128**-0.5, backend=backend)
    monkeypatch.setattr(torch, "empty", poisoned)
    for _ in range(20):
        again, more = block_attention(q, kv, plan, scale=128**-0.5, backend=backend)
        assert torch.equal(first, again) and torch.equal(stats.computed_cells, more.computed_cells)


def test_every_block_equals_dense_and_some_blocks_do_not(backend):
    length = 1333
    q, k, v, kv = make(length, 4, 1, 0, 64, 128, torch.bfloat16, seed=5)
    scale = 128**-0.5
    dense = dense_attention(q.float(), k.float(), v.float(), scale=scale)
    every = random_plan(length, 4, B, keep=1.0, diagonal=True, seed=5, device="cuda")
    out, stats = block_attention(q, kv, every, scale=scale, backend=backend)
    assert relative(out, dense) < 4e-3
    assert int(stats.computed_cells.sum()) == 4 * length * (length + 1) // 2
    some = random_plan(length, 4, B, keep=0.5, seed=5, device="cuda")
    out, _ = block_attention(q, kv, some, scale=scale, backend=backend)
    assert relative(out, dense) > 0.1


def test_a_chunk_equals_the_rows_of_the_whole(backend):
    length, offset = 1000, 512
    q, k, v, kv = make(length, 4, 1, 0, 128, 128, torch.bfloat16, seed=6)
    plan = random_plan(length, 4, B, skip_scale=0.2 * length, seed=6, device="cuda")
    whole, stats = block_attention(q, kv, plan, scale=128**-0.5, backend=backend)
    tiles = offset // B
    part = BlockPlan(
        plan.order[:, :, tiles:], plan.count[:, :, tiles:], B, offset, length - offset, length, length, plan.skip_scale
    )
    out, part_stats = block_attention(q[:, :, offset:], kv, part, scale=128**-0.5, backend=backend)
    assert torch.equal(out, whole[:, :, offset:])
    assert torch.equal(part_stats.computed_cells, stats.computed_cells[:, :, tiles:])


def test_head_major_queries_and_a_batch(backend):
    one = make(300, 4, 2, 0, 64, 128, torch.bfloat16, seed=7)
    two = make(300, 4, 2, 0, 64, 128, torch.bfloat16, seed=8)
    plans = [random_plan(300, 4, B, seed=s, device="cuda") for s in (1, 2)]
    plan = BlockPlan(
        torch.cat([p.order for p in plans]), torch.cat([p.count for p in plans]), B, 0, 300, 300, 300, -1.0
    )
    q, k, v = (torch.cat([one[i], two[i]]).contiguous() for i in range(3))
    both, stats = block_attention(q, paged(k, v, 64), plan, scale=128**-0.5, backend=backend)
    for b, (x, _, _, kv) in enumerate((one, two)):
        alone, counts = block_attention(x, kv, plans[b], scale=128**-0.5, backend=backend)
        assert torch.equal(both[b : b + 1], alone)
        assert torch.equal(stats.computed_cells[b : b + 1], counts.computed_cells)


def test_nothing_listed_gives_zeros(backend):
    q, k, v, kv = make(300, 4, 2, 0, 64, 128, torch.bfloat16)
    plan = random_plan(300, 4, B, device="cuda")
    for skip_scale in (-1.0, 90.0):
        nothing = BlockPlan(
            torch.full_like(plan.order, -1), torch.zeros_like(plan.count), B, 0, 300, 300, 300, skip_scale
        )
        out, stats = block_attention(q, kv, nothing, scale=128**-0.5, backend=backend)
        assert (out == 0).all() and int(stats.visited_cells.sum()) == 0 and int(stats.computed_blocks.sum()) == 0


def test_first_block_stays_and_the_threshold_is_clamped(backend):
    q, k, v, kv = make(1000, 8, 2, 0, 128, 128, torch.bfloat16, seed=9)
    spent = []
    for skip_scale in (1000.0, 1e6):
        plan = random_plan(1000, 8, B, keep=1.0, skip_scale=skip_scale, seed=9, empty=0, device="cuda")
        _, stats = block_attention(q, kv, plan, scale=128**-0.5, backend=backend)
        assert (stats.computed_blocks >= 1).all()
        spent.append(stats.computed_cells)
    assert torch.equal(*spent)


def test_exact_ties_are_kept_and_one_step_below_is_skipped(backend):
    """Line 14 of Algorithm A skips strictly below ln(delta/N), 0 here."""
    q, k = torch.zeros(2, 1, 1, 640, 128, dtype=torch.bfloat16, device="cuda")
    q[..., 0], k[..., 0] = 1.0, 1.0
    order = torch.arange(5, dtype=torch.int32, device="cuda").expand(5, 5)
    count = torch.arange(1, 6, dtype=torch.int32, device="cuda")
    order = torch.where(order < count[:, None], order, -1)
    plan = BlockPlan(order[None, None], count[None, None], B, 0, 640, 640, 640, 640.0)
    plan.check()
    _, stats = block_attention(q, paged(k, k, 64), plan, scale=0.5, backend=backend)
    assert stats.computed_blocks[0, 0].tolist() == [1, 2, 3, 4, 5]
    k[:, :, 128:384, 0] = 1.0 - 2.0**-8
    _, stats = block_attention(q, paged(k, k, 64), plan, scale=0.5, backend=backend)
    assert stats.computed_blocks[0, 0].tolist() == [1, 1, 1, 2, 3]


def test_queries_at_an_odd_address_fall_back():
    """Tensor memory access needs 16-byte addresses; ``auto`` takes the next kernel instead of failing."""
    q, k, v, kv = make(300, 4, 2, 0, 64, 128, torch.bfloat16)
    odd = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(1, 300, 4, 128).transpose(1, 2)
    odd.copy_(q)
    plan = random_plan(300, 4, B, device="cuda")
    out, stats = block_attention(odd, kv, plan, scale=0.1)
    assert stats.backend == "triton"
    assert torch.equal(out, block_attention(q, kv, plan, scale=0.1, backend="triton")[0])


def test_nan_keys_are_not_skipped_away(backend):
    q, k, v, _ = make(300, 1, 1, 0, 64, 128, torch.bfloat16)
    k[0, 0, 3, 0] = float("nan")
    plan = random_plan(300, 1, B, keep=1.0, diagonal=True, skip_scale=300.0, device="cuda")
    out, _ = block_attention(q, paged(k, v, 64), plan, scale=128**-0.5, backend=backend)
    assert torch.isnan(out[0, 0, 256:]).all()


def test_auto_takes_the_fast_kernel_and_float32_the_reference():
    q, k, v, kv = make(300, 4, 2, 0, 64, 128, torch.bfloat16)
    plan = random_plan(300, 4, B, device="cuda")
    auto, stats = block_attention(q, kv, plan, scale=0.1)
    named = "triton" if hopper_problem(torch.device("cuda", torch.cuda.current_device())) else "hopper"
    assert torch.equal(auto, block_attention(q, kv, plan, scale=0.1, backend=named)[0]) and stats.computed is None
    single = PagedKV(kv.k_pages.float(), kv.v_pages.float(), kv.page_table, 300)
    assert block_attention(q.float(), single, on(plan, "cuda"), scale=0.1)[1].computed is not None


def test_logical_skipping_gives_the_same_as_jumping():
    from prefill_kernels.triton_osk import block_mask, logical_skip_attention

    q, k, v, kv = make(1000, 4, 1, 0, 64, 128, torch.bfloat16, seed=11)
    plan = random_plan(1000, 4, B, seed=11, device="cuda")
    want, _ = in_float32(q, kv, plan, 128**-0.5)
    assert relative(logical_skip_attention(q, kv, block_mask(plan), plan, scale=128**-0.5), want) < 4e-3
