"""Vertical-slash attention and MInference's index estimates against literal loops and planted structure."""

from __future__ import annotations

import math
from dataclasses import replace

import literal_vertical_slash as literal
import pytest
import torch
from kernel_cases import paged, tensors
from prefill_kernels import (
    BlockPlan,
    HeadwisePlan,
    VerticalSlashPlan,
    block_attention,
    block_sparse_lists,
    causal_cells,
    dense_attention,
    sparse_attention,
    vertical_slash_attention,
    vertical_slash_scores,
)
from prefill_kernels.vertical_slash import STEP, slash_index
from prefill_kernels.vertical_slash_select import pooled_pairs, top_positions

D, SCALE = 16, 0.25
CASES = [  # length, query heads, KV heads, tile, page size, columns, slashes
    (1, 1, 1, 64, 16, 1, 1),
    (63, 3, 1, 64, 16, 9, 5),
    (64, 4, 4, 64, 64, 20, 3),
    (65, 4, 1, 64, 32, 10, 10),
    (200, 4, 1, 64, 256, 40, 6),
    (257, 3, 1, 128, 16, 30, 4),
    (300, 3, 3, 128, 128, 60, 12),
    (150, 2, 1, 64, 64, 0, 7),
    (150, 2, 1, 64, 64, 25, 0),
]


def as_lists(lists: torch.Tensor) -> list[list[int]]:
    """Lists of the heads of one sequence without their padding."""
    return [[x for x in row if x >= 0] for row in lists[0].tolist()]


def plan_of(columns: list[list[int]], slashes: list[list[int]], size: int, length: int) -> VerticalSlashPlan:
    def padded(lists: list[list[int]]) -> torch.Tensor:
        width = max(1, *map(len, lists))
        return torch.tensor([[sorted(x) + [-1] * (width - len(x)) for x in lists]], dtype=torch.int32)

    plan = VerticalSlashPlan(padded(columns), padded(slashes), size, length)
    plan.check()
    return plan


def random_vs_plan(length: int, heads: int, size: int, columns: int, slashes: int, seed: int = 0) -> VerticalSlashPlan:
    """Different numbers of random columns and slashes for each head, some of them close together."""
    g = torch.Generator().manual_seed(seed)

    def some(most: int) -> list[int]:
        count = int(torch.randint(most // 2, most + 1, (1,), generator=g))
        near = torch.randint(0, length, (1,), generator=g) + torch.arange(count // 2)
        return sorted({*torch.randperm(length, generator=g)[: count - count // 2].tolist(), *(near % length).tolist()})

    return plan_of([some(columns) for _ in range(heads)], [some(slashes) for _ in range(heads)], size, length)


def tile_sums(per_row: list[list[int]], size: int) -> torch.Tensor:
    return torch.tensor([[sum(row[i : i + size]) for i in range(0, len(row), size)] for row in per_row])


# ------------------------------------------------------------------------------------------------------- attention
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("length,q_heads,kv_heads,size,page_size,columns,slashes", CASES)
def test_attention_equals_the_literal_loops(length, q_heads, kv_heads, size, page_size, columns, slashes, whole):
    q, k, v = tensors(length, q_heads, kv_heads, D, block=16, seed=length, dtype=torch.float64)
    plan = replace(random_vs_plan(length, q_heads, size, columns, slashes, seed=length), whole_windows=whole)
    out, stats = vertical_slash_attention(q, paged(k, v, page_size), plan, scale=SCALE, backend="torch")
    listed = as_lists(plan.columns), as_lists(plan.slashes)
    expected, counts = literal.attend(q[0], k[0], v[0], *listed, SCALE, (size, STEP) if whole else None)
    torch.testing.assert_close(out[0], expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(stats.visited_cells[0], tile_sums(counts, size))
    assert torch.equal(stats.computed_cells, stats.visited_cells)
    _, executed = literal.attend(q[0], k[0], v[0], *listed, SCALE, (size, STEP))
    assert torch.equal((stats.computed_cells + stats.masked_cells)[0], tile_sums(executed, size))
    for h in range(q_heads):
        blocks = literal.executed_blocks(listed[0][h], listed[1][h], size, STEP, length)
        assert stats.visited_blocks[0, h].tolist() == stats.computed_blocks[0, h].tolist() == blocks


def test_a_cell_that_is_column_and_diagonal_is_one_cell():
    """All columns and all diagonals: every cell is both, and the result is dense attention counted once."""
    length = 130
    q, k, v = tensors(length, 2, 1, D, block=16)
    plan = plan_of([list(range(length))] * 2, [list(range(length))] * 2, 64, length)
    out, stats = vertical_slash_attention(q, paged(k, v, 16), plan, scale=SCALE, backend="torch")
    torch.testing.assert_close(out, dense_attention(q, k, v, scale=SCALE), rtol=1e-4, atol=1e-5)
    assert stats.visited_cells.sum(-1).tolist() == [[causal_cells(0, length)] * 2]
    assert stats.visited_blocks.tolist() == [[[1, 2, 3]] * 2]


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("length", [1, 64, 129, 300])
def test_every_diagonal_is_dense_and_counts_the_causal_blocks(size, length):
    q, k, v = tensors(length, 3, 1, D, block=16)
    plan = plan_of([[0]] * 3, [list(range(length))] * 3, size, length)
    out, stats = vertical_slash_attention(q, paged(k, v, 32), plan, scale=SCALE, backend="torch")
    torch.testing.assert_close(out, dense_attention(q, k, v, scale=SCALE), rtol=1e-4, atol=1e-5)
    assert int(stats.computed_cells.sum()) == 3 * causal_cells(0, length)
    assert stats.computed_blocks[0, 0].tolist() == list(range(1, math.ceil(length / size) + 1))


def test_a_sparse_plan_is_not_dense_and_axes_are_not_swapped():
    length = 200
    q, k, v = tensors(length, 2, 1, D, block=16, seed=3)
    kv = paged(k, v, 16)
    plan = plan_of([[3, 50]] * 2, [[0, 70]] * 2, 64, length)
    swapped = plan_of([[0, 70]] * 2, [[3, 50]] * 2, 64, length)
    out, stats = vertical_slash_attention(q, kv, plan, scale=SCALE)
    other, _ = vertical_slash_attention(q, kv, swapped, scale=SCALE)
    assert (out - dense_attention(q, k, v, scale=SCALE)).abs().max() > 0.1
    assert (out - other).abs().max() > 0.1
    # Row i: itself, 3, 50, i - 70; rows 3, 50, 73 and 120 meet a column on a diagonal.
    assert int(stats.visited_cells[0, 0].sum()) == 200 + 197 + 150 + 130 - 4


def test_a_query_without_any_key_gives_zeros():
    q, k, v = tensors(70, 1, 1, D, block=16)
    out, stats = vertical_slash_attention(q, paged(k, v, 16), plan_of([[5]], [[60]], 64, 70), scale=SCALE)
    assert (out[0, 0, :5] == 0).all() and (out[0, 0, 5:] != 0).any(-1).all()
    assert stats.visited_cells[0, 0].tolist() == [59 + 4, 6 + 6 - 1]  # row 65 meets column 5 on its diagonal


def test_windows_never_overlap_and_hold_every_diagonal():
    for seed in range(20):
        length, size = 700, (64, 128)[seed % 2]
        plan = random_vs_plan(length, 2, size, 1, (3, 40)[seed % 3 == 0], seed=seed)
        index = slash_index(plan)
        for line, slashes in enumerate(as_lists(plan.slashes)):
            starts = [x >> 1 for x in index.windows[line].tolist() if x >= 0]
            held = [y for at in starts for y in range(at, at + STEP)]
            assert len(held) == len(set(held)), "a key would be attended to twice"
            assert {y for s in slashes for y in range(s, s + size)} <= set(held)
            assert index.covered[line].nonzero().flatten().tolist() == [y for y in sorted(held) if y < length + size]


@pytest.mark.parametrize("size", [64, 128])
def test_full_windows_are_full(size):
    """The flag that spares a window its mask is set exactly where every pair lies on a listed diagonal."""
    length, at = 600, 5 * STEP
    first, last = at - size + 1, at + STEP - 1  # offsets that the window at this distance can meet
    for hole in (None, first - 1, first, at, last, last + 1):
        slashes = [s for s in range(length) if s != hole]
        index = slash_index(plan_of([[0]], [slashes], size, length))
        flags = {x >> 1: bool(x & 1) for x in index.windows[0].tolist() if x >= 0}
        for begin, full in flags.items():
            pairs = {r - c + begin - size + STEP for r in range(size) for c in range(STEP)}
            assert full == (pairs <= set(slashes))
        assert flags[at] == (hole not in (first, at, last)) and not flags[0]


def test_wrong_shapes_are_refused():
    q, k, v = tensors(70, 3, 1, D, block=16)
    kv = paged(k, v, 16)
    good = plan_of([[0]] * 3, [[0]] * 3, 64, 70)
    for plan, said in (
        (plan_of([[0]] * 3, [[0]] * 3, 64, 69), "the plan is for 69"),
        (plan_of([[0]] * 2, [[0]] * 2, 64, 70), "must lead with"),
    ):
        with pytest.raises(ValueError, match=said):
            vertical_slash_attention(q, kv, plan, scale=SCALE)
    with pytest.raises(ValueError, match="scale=0"):
        vertical_slash_attention(q, kv, good, scale=0)


@pytest.mark.parametrize(
    "columns,slashes,size,said",
    [
        ([3, 2], [0], 64, "columns: must ascend"),
        ([2, 2], [0], 64, "columns: must ascend"),
        ([-1, 2], [0], 64, "columns: must ascend"),
        ([2], [0, 70], 64, "slashes: must lie"),
        ([2], [0], 32, "block_size=32"),
    ],
)
def test_unsound_plans_are_named(columns, slashes, size, said):
    lists = [torch.tensor([[x]], dtype=torch.int32) for x in (columns, slashes)]
    with pytest.raises(ValueError, match=said):
        VerticalSlashPlan(*lists, size, 70).check()


# ------------------------------------------------------------------------------------------------------- selection
@pytest.mark.parametrize(
    "length,q_heads,kv_heads,last_q", [(1, 1, 1, 64), (40, 3, 1, 64), (64, 4, 4, 64), (150, 4, 1, 64), (99, 3, 3, 20)]
)
def test_mass_of_the_last_queries_equals_the_literal_loops(length, q_heads, kv_heads, last_q):
    q, k, v = tensors(length, q_heads, kv_heads, D, block=16, seed=length)
    kv = paged(k, v, 16)
    heads = list(range(q_heads))
    column, diagonal = vertical_slash_scores(q, kv, heads, scale=SCALE, last_q=last_q, backend="torch")
    want = literal.last_query_mass(q[0], k[0], SCALE, last_q)
    torch.testing.assert_close(column[0].double(), want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(diagonal[0].double(), want[1], rtol=1e-5, atol=1e-6)
    some = heads[1::2] or heads
    part = vertical_slash_scores(q, kv, some, scale=SCALE, last_q=last_q, backend="torch")
    assert torch.equal(part[0], column[:, some]) and torch.equal(part[1], diagonal[:, some])


@pytest.mark.parametrize("forced", [0, 3])
def test_top_positions_equal_a_sort(forced):
    g = torch.Generator().manual_seed(1)
    score = torch.randint(0, 4, (1, 3, 50), generator=g) * 0.25  # many ties
    sizes = [1, 7, 80]
    got = as_lists(top_positions(score, sizes, forced=forced))
    assert got == [literal.largest(score[0, h].tolist(), sizes[h], forced) for h in range(3)]


def test_top_positions_order_negative_and_extreme_scores():
    score = torch.tensor([[[-1.0, -3e38, 0.0, 3e38, -0.5, 1e-38]]])
    for size in range(1, 7):
        assert as_lists(top_positions(score, [size])) == [sorted([3, 5, 2, 4, 0, 1][:size])]
    assert as_lists(top_positions(score, [2], forced=2)) == [[0, 1]]


def directions(count: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Nearly orthogonal unit vectors."""
    x = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)


def test_a_planted_column_is_found():
    length, dim = 400, 64
    q, k, v = tensors(length, 4, 1, dim, block=16, uneven=False)
    k[0, 0, 173] = q[0, :, -64:].mean((0, 1)) * 60  # a key that every late query likes
    column, _ = vertical_slash_scores(q, paged(k, v, 16), range(4), scale=dim**-0.5)
    for head in as_lists(top_positions(column, [31] * 4, forced=30)):
        assert head == [*range(30), 173]


def test_a_planted_diagonal_is_found():
    length, dim, offset = 400, 64, 219
    codes = directions(length + offset, dim)
    q = (12 * dim**0.5 * codes[:length])[None, None].repeat(1, 3, 1, 1)
    k = codes[offset : offset + length][None, None]  # key j answers query j + offset
    _, diagonal = vertical_slash_scores(q, paged(k, k, 16), range(3), scale=dim**-0.5)
    for head in as_lists(top_positions(diagonal, [101] * 3, forced=100)):
        assert head == [*range(100), offset]


@pytest.mark.parametrize(
    "length,q_heads,kv_heads,size", [(50, 3, 1, 64), (129, 4, 4, 64), (300, 4, 1, 64), (300, 3, 3, 128)]
)
def test_pooled_blocks_equal_the_literal_loops(length, q_heads, kv_heads, size):
    q, k, v = tensors(length, q_heads, kv_heads, D, block=16, seed=length)
    top_k = [1 + h % 3 for h in range(q_heads)]
    heads = list(range(q_heads))
    order, count = block_sparse_lists(q, paged(k, v, 16), heads, top_k, block_size=size, scale=SCALE)
    for h in heads:
        want = literal.pooled_blocks(q[0], k[0], size, top_k[h], SCALE)[h]
        got = [[j for j in row if j >= 0] for row in order[0, h].tolist()]
        assert got == want and count[0, h].tolist() == [len(x) for x in want]
    part = block_sparse_lists(q, paged(k, v, 16), heads[1:], top_k[1:], block_size=size, scale=SCALE)
    assert torch.equal(part[1], count[:, 1:]) and torch.equal(part[0], order[:, 1:, :, : part[0].shape[-1]])
    assert pooled_pairs(length, size) == sum(t + 1 for t in range(math.ceil(length / size)))


def test_planted_blocks_are_found():
    blocks, dim = 6, 32
    codes = directions(blocks, dim, seed=2) * 8
    noise = tensors(blocks * 64, 3, 1, dim, block=16, uneven=False)
    k = noise[1] + codes.repeat_interleave(64, 0)
    # Tile t looks for block t // 2.
    q = noise[0] + codes[torch.arange(blocks) // 2].repeat_interleave(64, 0)
    order, _ = block_sparse_lists(q, paged(k, k, 16), range(3), [1] * 3, block_size=64, scale=dim**-0.5)
    assert order[0, :, :, 0].tolist() == [[t // 2 for t in range(blocks)]] * 3


def test_scores_refuse_what_does_not_fit():
    q, k, v = tensors(20, 1, 1, D, block=16)
    with pytest.raises(ValueError, match="last_q=0"):
        vertical_slash_scores(q, paged(k, v, 16), [0], scale=SCALE, last_q=0)
    with pytest.raises(ValueError, match="kv_len=20"):
        vertical_slash_scores(q[:, :, 1:], paged(k, v, 16), [0], scale=SCALE)


# ------------------------------------------------------------------------------------------------------ headwise
def test_heads_under_different_plans_equal_each_plan_alone():
    length = 150
    q, k, v = tensors(length, 3, 1, D, block=16, seed=5)
    kv = paged(k, v, 16)
    lines = plan_of([[0, 70], [], [3]], [[0, 9], [], [0]], 64, length)
    order, count = block_sparse_lists(q, kv, [1], [2], block_size=64, scale=SCALE)
    blocks = torch.full((1, 3, 3, 2), -1, dtype=torch.int32)
    counts = torch.zeros(1, 3, 3, dtype=torch.int32)
    blocks[:, 1:2], counts[:, 1:2] = order, count
    sparse = BlockPlan(blocks, counts, 64, 0, length, length, length)
    plan = HeadwisePlan((lines, sparse))
    plan.check()
    out, stats = sparse_attention(q, kv, plan, scale=SCALE)
    by_lines, line_stats = vertical_slash_attention(q, kv, lines, scale=SCALE)
    by_blocks, block_stats = block_attention(q, kv, sparse, scale=SCALE)
    for h, (want, spent) in enumerate(((by_lines, line_stats), (by_blocks, block_stats), (by_lines, line_stats))):
        assert torch.equal(out[:, h], want[:, h]) and (out[:, h] != 0).any()
        for name in ("visited_cells", "computed_cells", "visited_blocks", "computed_blocks"):
            assert torch.equal(getattr(stats, name)[:, h], getattr(spent, name)[:, h])
    assert stats.backend == "torch"
    wide = VerticalSlashPlan(lines.columns, lines.slashes, 128, length)
    with pytest.raises(ValueError, match="one block size"):
        HeadwisePlan((wide, sparse)).check()
