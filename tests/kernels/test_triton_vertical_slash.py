"""The Triton vertical-slash kernels in the CPU interpreter against the reference and the literal loops."""

from __future__ import annotations

from dataclasses import replace

import literal_vertical_slash as literal
import pytest
import torch
from kernel_cases import paged, tensors
from prefill_kernels import (
    BackendUnavailable,
    VerticalSlashPlan,
    dense_attention,
    vertical_slash_attention,
    vertical_slash_scores,
)
from prefill_kernels.vertical_slash import STEP

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")

D, SCALE = 16, 0.25
CASES = [  # length, query heads, KV heads, tile, page size, columns, slashes
    (1, 1, 1, 64, 16, [0], [0]),
    (65, 3, 1, 64, 16, [0, 3, 64], [0, 1, 2, 40]),
    (130, 2, 2, 64, 256, [1, 5, 100, 129], [0, 127, 129]),  # far diagonals, single ones
    (200, 4, 1, 128, 32, list(range(0, 200, 7)), [0, 1, *range(60, 80), 190]),
    (300, 3, 3, 128, 16, list(range(0, 90)), [*range(0, 200), 290]),
    (200, 1, 1, 64, 64, [], list(range(20, 200))),  # full windows, one of them cut short; queries without a key
    (140, 1, 1, 64, 64, list(range(90)), []),  # columns alone, more than a step of them
]


def plan_of(columns, slashes, size, length, heads):
    """The same columns for every head, and slashes that lose one to each next head."""
    lists = [slashes[: max(0, len(slashes) - h)] for h in range(heads)]
    wide = max(1, len(slashes))
    slash = torch.tensor([[x + [-1] * (wide - len(x)) for x in lists]], dtype=torch.int32)
    column = torch.tensor(columns, dtype=torch.int32).expand(1, heads, -1)
    plan = VerticalSlashPlan(column, slash, size, length)
    plan.check()
    return plan, lists


def assert_same_stats(got, want):
    for name in ("visited_cells", "computed_cells", "visited_blocks", "computed_blocks", "masked_cells"):
        assert torch.equal(getattr(got, name).long(), getattr(want, name)), name


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("length,q_heads,kv_heads,size,page_size,columns,slashes", CASES)
def test_equals_the_reference_and_the_loops(length, q_heads, kv_heads, size, page_size, columns, slashes, whole):
    # Even weights where windows are cut short: a key that does not exist must not hide behind a large maximum.
    q, k, v = tensors(length, q_heads, kv_heads, D, block=16, seed=length, uneven=bool(columns))
    plan, lists = plan_of(columns, slashes, size, length, q_heads)
    plan = replace(plan, whole_windows=whole)
    kv = paged(k, v, page_size)
    want, expected = vertical_slash_attention(q, kv, plan, scale=SCALE, backend="torch")
    got, stats = vertical_slash_attention(q, kv, plan, scale=SCALE, backend="triton")
    assert stats.backend == "triton" and stats.visited_cells.dtype == torch.int32
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert_same_stats(stats, expected)
    out, _ = literal.attend(q[0], k[0], v[0], [columns] * q_heads, lists, SCALE, (size, STEP) if whole else None)
    torch.testing.assert_close(got[0].double(), out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [64, 128])
def test_windows_and_bits_equal_the_reference(size):
    from prefill_kernels.triton_vertical_slash import prepared
    from prefill_kernels.vertical_slash import slash_index

    length = 700
    g = torch.Generator().manual_seed(size)
    for share in (0.0, 0.004, 0.02, 0.6, 1.0):
        listed = [torch.nonzero(torch.rand(length, generator=g) < share).flatten().tolist() for _ in range(2)]
        width = max(1, *map(len, listed))
        slashes = torch.tensor([[x + [-1] * (width - len(x)) for x in listed]], dtype=torch.int32)
        plan = VerticalSlashPlan(slashes, slashes, size, length)
        want, got = slash_index(plan), prepared(plan)
        assert torch.equal(got.window_count, want.window_count)
        assert torch.equal(got.covered.bool(), want.covered)
        for line, offsets in enumerate(listed):
            count = int((want.windows[line] >= 0).sum())
            assert torch.equal(got.windows[line, :count], want.windows[line, :count])
            places = {got.origin - s for s in offsets}
            for word, bits in enumerate(got.words[line].tolist()):
                assert bits % (1 << 64) == sum(1 << bit for bit in range(64) if word * 64 + bit in places)


def test_every_diagonal_is_dense():
    length = 130
    q, k, v = tensors(length, 1, 1, D, block=16, seed=2)
    plan, _ = plan_of([0], list(range(length)), 64, length, 1)
    out, stats = vertical_slash_attention(q, paged(k, v, 16), plan, scale=SCALE, backend="triton")
    torch.testing.assert_close(out, dense_attention(q, k, v, scale=SCALE), rtol=1e-4, atol=1e-5)
    assert stats.computed_blocks.tolist() == [[[1, 2, 3]]] and int(stats.computed_cells.sum()) == 130 * 131 // 2


def test_a_column_inside_a_window_is_not_gathered_again(monkeypatch):
    """The inputs of these tests notice a kernel that forgets which columns its windows hold."""
    from prefill_kernels import triton_vertical_slash

    length = 100
    q, k, v = tensors(length, 1, 1, D, block=16, seed=3)
    kv = paged(k, v, 16)
    plan, _ = plan_of([0, 40, 70], [0, 1, 2, 30], 64, length, 1)
    want, expected = vertical_slash_attention(q, kv, plan, scale=SCALE, backend="torch")
    real = triton_vertical_slash.prepared

    def forgetful(plan):
        index = real(plan)
        return replace(index, covered=torch.zeros_like(index.covered))

    monkeypatch.setattr(triton_vertical_slash, "prepared", forgetful)
    got, stats = vertical_slash_attention(q, kv, plan, scale=SCALE, backend="triton")
    assert (got - want).abs().max() > 1e-2
    assert not torch.equal(stats.visited_blocks.long(), expected.visited_blocks)


def test_head_groups_that_share_the_list_memory(monkeypatch):
    from prefill_kernels import triton_vertical_slash

    length = 70
    q, k, v = (
        torch.cat([x, y]) for x, y in zip(*(tensors(length, 2, 1, D, block=16, seed=s) for s in (4, 5)), strict=True)
    )
    kv = paged(k, v, 16)
    one, _ = plan_of([3, 9], [0, 30], 64, length, 2)
    two, _ = plan_of([8, 60], [2, 3], 64, length, 2)
    plan = VerticalSlashPlan(torch.cat([one.columns, two.columns]), torch.cat([one.slashes, two.slashes]), 64, length)
    want, expected = vertical_slash_attention(q, kv, plan, scale=SCALE, backend="torch")
    monkeypatch.setattr(triton_vertical_slash, "_MAX_GATHERED", 3 * 2 * 2)  # three of the four lines at a time
    got, stats = vertical_slash_attention(q, kv, plan, scale=SCALE, backend="triton")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert_same_stats(stats, expected)


def test_float16_and_head_dim_64():
    q, k, v = tensors(70, 1, 1, 64, block=16, dtype=torch.float16, seed=6)
    plan, _ = plan_of([0, 9], [0, 5, 66], 64, 70, 1)
    kv = paged(k, v, 16)
    want, _ = vertical_slash_attention(q, kv, plan, scale=0.125, backend="torch")
    got, _ = vertical_slash_attention(q, kv, plan, scale=0.125, backend="triton")
    torch.testing.assert_close(got, want, rtol=4e-3, atol=4e-3)


def test_nan_keys_show_where_they_are_attended_to():
    q, k, v = tensors(70, 1, 1, D, block=16, seed=7)
    k[0, 0, 9] = float("nan")
    plan, _ = plan_of([9], [0], 64, 70, 1)
    out, _ = vertical_slash_attention(q, paged(k, v, 16), plan, scale=SCALE, backend="triton")
    assert torch.isnan(out[0, 0, 9:]).all() and torch.isfinite(out[0, 0, :9]).all()


@pytest.mark.parametrize(
    "length,q_heads,kv_heads,last_q,page_size",
    [(1, 1, 1, 64, 16), (40, 3, 1, 64, 16), (150, 4, 2, 64, 64), (99, 3, 3, 20, 32), (530, 1, 1, 64, 256)],
)
def test_mass_of_the_last_queries(length, q_heads, kv_heads, last_q, page_size):
    q, k, v = tensors(length, q_heads, kv_heads, D, block=16, seed=length)
    kv = paged(k, v, page_size)
    heads = list(range(q_heads))[::2]
    settings = {"scale": SCALE, "last_q": last_q}
    got = vertical_slash_scores(q, kv, heads, backend="triton", **settings)
    want = vertical_slash_scores(q, kv, heads, backend="torch", **settings)
    for mine, reference in zip(got, want, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)
    if length < 160:
        column, diagonal = literal.last_query_mass(
            q[0, heads], k[0, [h // (q_heads // kv_heads) for h in heads]], SCALE, last_q
        )
        torch.testing.assert_close(got[0][0].double(), column, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got[1][0].double(), diagonal, rtol=1e-4, atol=1e-5)


def test_what_the_kernels_cannot_run_is_refused():
    q, k, v = tensors(20, 1, 1, D, block=16, dtype=torch.bfloat16)
    plan, _ = plan_of([0], [0], 64, 20, 1)
    with pytest.raises(BackendUnavailable, match="dtype"):
        vertical_slash_attention(q, paged(k, v, 16), plan, scale=SCALE, backend="triton")
    q, k, v = tensors(20, 1, 1, 24, block=16)
    with pytest.raises(BackendUnavailable, match="head_dim=24"):
        vertical_slash_attention(q, paged(k, v, 16), plan, scale=SCALE, backend="triton")
    with pytest.raises(BackendUnavailable, match="head_dim=24"):
        vertical_slash_scores(q, paged(k, v, 16), [0], scale=SCALE, backend="triton")
    q, k, v = tensors(20, 1, 1, D, block=16)
    with pytest.raises(BackendUnavailable, match="last_q=129"):
        vertical_slash_scores(q, paged(k, v, 16), [0], scale=SCALE, last_q=129, backend="triton")
