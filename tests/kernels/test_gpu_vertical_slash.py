"""The Triton vertical-slash kernels on the device against the float32 reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import paged, poisoned, tensors
from prefill_kernels import (
    BlockPlan,
    HeadwisePlan,
    PagedKV,
    VerticalSlashPlan,
    block_sparse_lists,
    dense_attention,
    sparse_attention,
    vertical_slash_attention,
    vertical_slash_scores,
)
from prefill_kernels.vertical_slash_select import FORCED_COLUMNS, FORCED_SLASHES, top_positions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = [  # length, query heads, KV heads, tile, page size, head dim, dtype
    (1, 1, 1, 64, 16, 128, torch.bfloat16),
    (63, 3, 1, 64, 64, 128, torch.bfloat16),
    (128, 4, 4, 128, 128, 128, torch.bfloat16),
    (129, 8, 1, 64, 128, 128, torch.bfloat16),
    (1000, 8, 2, 128, 256, 128, torch.bfloat16),
    (1500, 6, 2, 64, 16, 128, torch.bfloat16),
    (2049, 4, 1, 128, 32, 64, torch.bfloat16),
    (1111, 3, 3, 64, 64, 64, torch.float16),
]


def relative(got, want):
    return float((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-20))


def single(kv: PagedKV) -> PagedKV:
    return PagedKV(kv.k_pages.float(), kv.v_pages.float(), kv.page_table, kv.kv_len)


def make(length, q_heads, kv_heads, page_size, dim, dtype, seed=0):
    q, k, v = tensors(length, q_heads, kv_heads, dim, block=64, seed=seed, dtype=dtype, device="cuda")
    return q, k, v, paged(k, v, page_size)


def random_plan(length, heads, size, seed, columns=0.1, slashes=0.1, diagonal=True):
    """Random columns and runs of slashes, different in each head."""
    g = torch.Generator().manual_seed(seed)

    def lists(share, always):
        keep = torch.rand(1, heads, length, generator=g) < share
        starts = torch.rand(1, heads, length, generator=g) < share / 100
        for step in range(1, 100):  # runs, so that some windows are full
            keep[..., step:] |= starts[..., : length - step] if step < length else False
        keep[..., 0] |= always
        place = torch.where(keep, torch.arange(length), length).sort(-1).values
        return torch.where(place < length, place, -1).int().cuda()

    plan = VerticalSlashPlan(lists(columns, False), lists(slashes, diagonal), size, length)
    plan.check()
    return plan


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("share", [0.002, 0.05, 0.5])
@pytest.mark.parametrize("length,q_heads,kv_heads,size,page_size,dim,dtype", CASES)
def test_equals_the_float32_reference(length, q_heads, kv_heads, size, page_size, dim, dtype, share, whole):
    q, k, v, kv = make(length, q_heads, kv_heads, page_size, dim, dtype, seed=length)
    scale = dim**-0.5
    for seed in range(2):
        plan = random_plan(length, q_heads, size, seed, columns=share, slashes=share, diagonal=seed == 0)
        plan = replace(plan, whole_windows=whole)
        want, expected = vertical_slash_attention(q.float(), single(kv), plan, scale=scale, backend="torch")
        got, stats = vertical_slash_attention(q, kv, plan, scale=scale, backend="triton")
        assert torch.isfinite(got).all()
        for name in ("visited_cells", "computed_cells", "visited_blocks", "computed_blocks"):
            assert torch.equal(getattr(stats, name).long(), getattr(expected, name)), name
        assert relative(got, want) < (4e-3 if dtype == torch.bfloat16 else 6e-4)


@pytest.mark.parametrize("size", [64, 128])
def test_every_diagonal_equals_dense_and_some_do_not(size):
    length = 1333
    q, k, v, kv = make(length, 4, 1, 64, 128, torch.bfloat16, seed=5)
    dense = dense_attention(q.float(), k.float(), v.float(), scale=128**-0.5)
    every = torch.arange(length, dtype=torch.int32, device="cuda").expand(1, 4, -1)
    plan = VerticalSlashPlan(every[..., :1], every, size, length)
    out, stats = vertical_slash_attention(q, kv, plan, scale=128**-0.5)
    assert stats.backend == "triton" and relative(out, dense) < 4e-3
    assert int(stats.computed_cells.sum()) == 4 * length * (length + 1) // 2
    tiles = -(-length // size)
    assert int(stats.computed_blocks.sum()) == 4 * tiles * (tiles + 1) // 2
    out, _ = vertical_slash_attention(q, kv, random_plan(length, 4, size, 1), scale=128**-0.5)
    assert relative(out, dense) > 0.1


@pytest.mark.parametrize("size", [64, 128])
def test_repeated_runs_are_bitwise_equal(size, monkeypatch):
    length = 4096
    q, k, v, kv = make(length, 8, 2, 128, 128, torch.bfloat16, seed=3)
    plan = random_plan(length, 8, size, 3)
    first, stats = vertical_slash_attention(q, kv, plan, scale=128**-0.5)
    monkeypatch.setattr(torch, "empty", poisoned)
    for _ in range(20):
        again, more = vertical_slash_attention(q, kv, plan, scale=128**-0.5)
        assert torch.equal(first, again) and torch.equal(stats.computed_cells, more.computed_cells)


def test_head_major_queries_and_a_batch():
    one, two = (make(300, 4, 2, 64, 128, torch.bfloat16, seed=s) for s in (7, 8))
    plans = [random_plan(300, 4, 64, s) for s in (1, 2)]
    width = max(p.columns.shape[-1] for p in plans)
    assert width == 300
    plan = VerticalSlashPlan(torch.cat([p.columns for p in plans]), torch.cat([p.slashes for p in plans]), 64, 300)
    q, k, v = (torch.cat([one[i], two[i]]).contiguous() for i in range(3))
    both, stats = vertical_slash_attention(q, paged(k, v, 64), plan, scale=128**-0.5)
    for b, (x, _, _, kv) in enumerate((one, two)):
        alone, counts = vertical_slash_attention(x, kv, plans[b], scale=128**-0.5)
        assert torch.equal(both[b : b + 1], alone)
        assert torch.equal(stats.computed_cells[b : b + 1], counts.computed_cells)


@pytest.mark.parametrize(
    "length,q_heads,kv_heads,page_size,dim", [(40, 3, 1, 16, 128), (5000, 8, 2, 64, 128), (3001, 6, 2, 256, 64)]
)
def test_mass_of_the_last_queries(length, q_heads, kv_heads, page_size, dim):
    q, k, v, kv = make(length, q_heads, kv_heads, page_size, dim, torch.bfloat16, seed=length)
    heads = list(range(q_heads))[::2]
    got = vertical_slash_scores(q, kv, heads, scale=dim**-0.5, backend="triton")
    want = vertical_slash_scores(q.float(), single(kv), heads, scale=dim**-0.5, backend="torch")
    for mine, reference in zip(got, want, strict=True):
        torch.testing.assert_close(mine, reference, rtol=2e-3, atol=1e-5)
    sizes = [min(length, 400)] * len(heads)
    for mine, reference, forced in zip(got, want, (FORCED_COLUMNS, FORCED_SLASHES), strict=True):
        a, b = (top_positions(x, sizes, forced=forced) for x in (mine, reference))
        # Positions whose masses differ by rounding alone may exchange places at the edge.
        kept = torch.zeros_like(mine, dtype=torch.bool).scatter_(-1, a.long(), True)
        assert float((~kept.gather(-1, b.long())).float().mean()) < 0.01


@pytest.mark.parametrize("size", [64, 128])
def test_heads_under_different_plans(size):
    length, heads = 1333, 4
    q, k, v, kv = make(length, heads, 2, 64, 128, torch.bfloat16, seed=8)
    lines = random_plan(length, heads, size, 1)
    mine = torch.tensor([True, False, True, False], device="cuda")[:, None]
    lines = VerticalSlashPlan(torch.where(mine, lines.columns, -1), torch.where(mine, lines.slashes, -1), size, length)
    order, count = block_sparse_lists(q, kv, [1, 3], [5, 5], block_size=size, scale=128**-0.5)
    blocks = torch.full((1, heads, *order.shape[2:]), -1, dtype=torch.int32, device="cuda")
    counts = torch.zeros(blocks.shape[:3], dtype=torch.int32, device="cuda")
    blocks[:, 1::2], counts[:, 1::2] = order, count
    plan = HeadwisePlan((lines, BlockPlan(blocks, counts, size, 0, length, length, length)))
    plan.check()
    want, expected = sparse_attention(q.float(), single(kv), plan, scale=128**-0.5, backend="torch")
    got, stats = sparse_attention(q, kv, plan, scale=128**-0.5)
    assert relative(got, want) < 4e-3 and "torch" not in stats.backend
    assert torch.equal(stats.computed_cells.long(), expected.computed_cells)


def test_nothing_waits_for_the_device():
    q, _, _, kv = make(2048, 8, 2, 64, 128, torch.bfloat16)
    heads = list(range(8))

    def call():
        column, diagonal = vertical_slash_scores(q, kv, heads, scale=128**-0.5)
        plan = VerticalSlashPlan(
            top_positions(column, [200] * 8, forced=30), top_positions(diagonal, [300] * 8, forced=100), 64, 2048
        )
        return vertical_slash_attention(q, kv, plan, scale=128**-0.5)

    call()  # compiles, and makes what is kept on the device
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
