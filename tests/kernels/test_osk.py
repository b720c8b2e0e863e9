"""The ordered-skipping kernel against the literal loops, dense attention, and the properties the method rests on."""

from __future__ import annotations

import math

import literal
import pytest
import torch
from prefill_kernels import BlockPlan, PagedKV, block_attention, causal_blocks, causal_cells, dense_attention

B, D, SCALE = 16, 8, 0.4


def tensors(length: int, q_heads: int, kv_heads: int, seed: int = 0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(1, q_heads, length, D, generator=g, dtype=torch.float64) * 2
    k = torch.randn(1, kv_heads, length, D, generator=g, dtype=torch.float64)
    v = torch.randn(1, kv_heads, length, D, generator=g, dtype=torch.float64)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def uneven(length: int, q_heads: int, kv_heads: int, seed: int = 0):
    """Tensors whose key blocks differ in weight for all rows alike, so that a whole tile can agree on a skip."""
    q, k, v = tensors(length, q_heads, kv_heads, seed=seed)
    q[..., 0] = 3.0
    lift = torch.randn(1, kv_heads, math.ceil(length / B), generator=torch.Generator().manual_seed(seed + 1))
    k[..., 0] = 2.0 * lift.repeat_interleave(B, -1)[..., :length].to(k.dtype)
    return q, k, v


def paged(k, v, page_size=16, seed=9):
    return PagedKV.from_dense(k, v, page_size, generator=torch.Generator().manual_seed(seed))


def plan_of(lists, length, skip_scale=-1.0, offset=0, prompt_len=None, block=B) -> BlockPlan:
    """lists[head][tile] -> BlockPlan."""
    width = max((len(x) for head in lists for x in head), default=0)
    order = torch.full((1, len(lists), len(lists[0]), width), -1, dtype=torch.int32)
    count = torch.zeros(1, len(lists), len(lists[0]), dtype=torch.int32)
    for h, head in enumerate(lists):
        for t, blocks in enumerate(head):
            order[0, h, t, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            count[0, h, t] = len(blocks)
    plan = BlockPlan(order, count, block, offset, length - offset, length, prompt_len or length, skip_scale)
    plan.check()
    return plan


def random_lists(length, heads, seed, keep=0.6, first_tile=0, diagonal=False):
    """Random subsets of the causal blocks, in random order, some of them empty."""
    g = torch.Generator().manual_seed(seed)
    lists = []
    for _ in range(heads):
        head = []
        for i in range(first_tile, math.ceil(length / B)):
            chosen = [j for j in torch.randperm(i + 1, generator=g).tolist() if torch.rand(1, generator=g) < keep]
            if diagonal and i not in chosen:
                chosen.append(i)
            head.append(chosen)
        lists.append(head)
    return lists


def full_lists(length, heads, seed=None):
    g = torch.Generator().manual_seed(seed or 0)
    tiles = math.ceil(length / B)
    return [
        [torch.randperm(i + 1, generator=g).tolist() if seed else list(range(i + 1)) for i in range(tiles)]
        for _ in range(heads)
    ]


LENGTHS = [1, 2, 15, 16, 17, 33, 61]
HEADS = [(1, 1), (3, 1), (4, 2), (8, 1)]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("q_heads,kv_heads", HEADS)
def test_matches_the_literal_loops(length, q_heads, kv_heads):
    q, k, v = uneven(length, q_heads, kv_heads, seed=length)
    lists = random_lists(length, q_heads, seed=length * 7 + q_heads)
    for skip_scale in (-1.0, 0.3 * length):
        plan = plan_of(lists, length, skip_scale)
        out, stats = block_attention(q, paged(k, v), plan, scale=SCALE)
        expected, computed = literal.osk(q[0], k[0], v[0], lists, B, SCALE, plan.log_threshold)
        torch.testing.assert_close(out[0], expected, rtol=1e-10, atol=1e-12)
        for h in range(q_heads):
            for t, done in enumerate(computed[h]):
                assert stats.computed[0, h, t, : len(done)].tolist() == done
        if length == 61 and q_heads == 8 and skip_scale > 0:
            assert not all(done for head in computed for tile in head for done in tile), "no skip was tested"


@pytest.mark.parametrize("offset", [16, 32])
def test_a_chunk_is_the_slice_of_the_whole(offset):
    length, heads = 61, 3
    q, k, v = tensors(length, heads, 1)
    lists = random_lists(length, heads, seed=4)
    whole, stats = block_attention(q, paged(k, v), plan_of(lists, length, 9.0), scale=SCALE)
    tiles = offset // B
    part_plan = plan_of([head[tiles:] for head in lists], length, 9.0, offset=offset)
    part, part_stats = block_attention(q[:, :, offset:], paged(k, v), part_plan, scale=SCALE)
    torch.testing.assert_close(part, whole[:, :, offset:], rtol=1e-12, atol=1e-14)
    assert torch.equal(part_stats.computed_cells, stats.computed_cells[:, :, tiles:])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("page_size", [16, 32])
def test_all_blocks_in_any_order_equal_dense(length, page_size):
    q, k, v = tensors(length, 4, 2, seed=length)
    out, stats = block_attention(q, paged(k, v, page_size), plan_of(full_lists(length, 4, seed=3), length), scale=SCALE)
    torch.testing.assert_close(out, dense_attention(q, k, v, scale=SCALE), rtol=1e-10, atol=1e-12)
    assert int(stats.computed_cells.sum()) == 4 * causal_cells(0, length)
    assert int(stats.computed_blocks.sum()) == 4 * causal_blocks(0, length, B)


def test_dense_output_fails_the_sparse_check():
    q, k, v = tensors(61, 2, 1)
    lists = random_lists(61, 2, seed=1)
    out, _ = block_attention(q, paged(k, v), plan_of(lists, 61), scale=SCALE)
    assert (out - dense_attention(q, k, v, scale=SCALE)).abs().max() > 0.1


def test_without_skip_the_order_does_not_matter():
    q, k, v = tensors(61, 3, 1)
    lists = random_lists(61, 3, seed=2, diagonal=True)
    out, _ = block_attention(q, paged(k, v), plan_of(lists, 61), scale=SCALE)
    for rearranged in ([[sorted(x) for x in h] for h in lists], [[x[::-1] for x in h] for h in lists]):
        again, _ = block_attention(q, paged(k, v), plan_of(rearranged, 61), scale=SCALE)
        assert (again - out).abs().max() < 1e-10


def computed_sets(lists, stats):
    return [
        [{j for j, done in zip(x, stats.computed[0, h, t].tolist(), strict=False) if done} for t, x in enumerate(head)]
        for h, head in enumerate(lists)
    ]


def global_rule(q, k, lists, threshold):
    """Blocks that the rule keeps when every row's true maximum over its list is known in advance."""
    heads, length = q.shape[1], q.shape[2]
    keep = []
    for h in range(heads):
        logits = (q[0, h] @ k[0, h // (heads // k.shape[1])].T * SCALE).masked_fill(
            torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf
        )
        keep.append([])
        for t, blocks in enumerate(lists[h]):
            rows = slice(t * B, min((t + 1) * B, length))
            local = {j: logits[rows, j * B : (j + 1) * B].amax(-1) for j in blocks}
            if not blocks:
                keep[h].append(set())
                continue
            top = torch.stack(list(local.values())).amax(0)
            keep[h].append({j for j in blocks if not (local[j] - top).max() < threshold})
    return keep


@pytest.mark.parametrize("seed", range(4))
def test_running_maximum_skips_a_subset_of_what_the_global_maximum_would(seed):
    q, k, v = uneven(61, 3, 1, seed=seed)
    lists = random_lists(61, 3, seed=seed, keep=0.9)
    plan = plan_of(lists, 61, 0.2 * 61)
    _, stats = block_attention(q, paged(k, v), plan, scale=SCALE)
    skipped = 0
    for got, allowed in zip(computed_sets(lists, stats), global_rule(q, k, lists, plan.log_threshold), strict=True):
        for t, (kept, needed) in enumerate(zip(got, allowed, strict=True)):
            assert needed <= kept, t
            skipped += kept != set(range(t + 1))
    assert skipped, "nothing was skipped: the property was not tested"


@pytest.mark.parametrize("seed", range(4))
def test_after_the_row_maximum_blocks_the_global_rule_decides(seed):
    q, k, v = uneven(61, 3, 1, seed=seed)
    lists, heads_of_list = [], []
    for h in range(3):
        logits = (q[0, h] @ k[0, 0].T * SCALE).masked_fill(torch.ones(61, 61).triu(1).bool(), -math.inf)
        lists.append([])
        heads_of_list.append([])
        for t in range(4):
            rows = logits[t * B : (t + 1) * B]
            hrm = sorted({int(c) // B for c in rows.argmax(-1)})
            lists[h].append(hrm + [j for j in range(t + 1) if j not in hrm])
            heads_of_list[h].append(hrm)
    plan = plan_of(lists, 61, 0.2 * 61)
    _, stats = block_attention(q, paged(k, v), plan, scale=SCALE)
    rule = global_rule(q, k, lists, plan.log_threshold)
    later = 0
    for got, want, heads in zip(computed_sets(lists, stats), rule, heads_of_list, strict=True):
        for kept, needed, hrm in zip(got, want, heads, strict=True):
            assert kept - set(hrm) == needed - set(hrm)
            later += len(needed)
    assert later


def test_a_skipped_block_changes_nothing():
    q, k, v = uneven(61, 3, 1, seed=5)
    lists = random_lists(61, 3, seed=5, keep=0.9)
    out, stats = block_attention(q, paged(k, v), plan_of(lists, 61, 0.3 * 61), scale=SCALE)
    kept = [
        [[j for j, done in zip(x, stats.computed[0, h, t].tolist(), strict=False) if done] for t, x in enumerate(head)]
        for h, head in enumerate(lists)
    ]
    assert kept != lists
    again, _ = block_attention(q, paged(k, v), plan_of(kept, 61), scale=SCALE)
    assert torch.equal(again, out)


def test_larger_skip_scale_computes_less_and_clamps_at_the_prompt_length():
    q, k, v = uneven(61, 24, 24, seed=6)
    lists = full_lists(61, 24, seed=2)
    spent = []
    for skip_scale in (-1.0, 1e-4, 1e-2, 1.0, 61.0, 6100.0):
        _, stats = block_attention(q, paged(k, v), plan_of(lists, 61, skip_scale), scale=SCALE)
        spent.append(int(stats.computed_cells.sum()))
        assert int(stats.visited_cells.sum()) == 24 * causal_cells(0, 61)
    assert spent == sorted(spent, reverse=True) and len(set(spent)) >= 4, spent
    assert spent[4] == spent[5], "delta / N is clamped at 1"


def test_threshold_uses_the_prompt_length_not_the_chunk():
    q, k, v = uneven(61, 3, 1, seed=6)
    lists = full_lists(61, 3)
    short, _ = block_attention(q, paged(k, v), plan_of(lists, 61, 20.0), scale=SCALE)
    scaled, _ = block_attention(q, paged(k, v), plan_of(lists, 61, 2000.0, prompt_len=6100), scale=SCALE)
    other, _ = block_attention(q, paged(k, v), plan_of(lists, 61, 20.0, prompt_len=6100), scale=SCALE)
    assert torch.equal(short, scaled) and not torch.equal(short, other)


def test_first_visited_block_is_never_skipped():
    q, k, v = tensors(48, 1, 1)
    _, stats = block_attention(q, paged(k, v), plan_of([[[0], [0], [0]]], 48, 48.0), scale=SCALE)
    assert stats.computed.all()


def test_rows_beyond_the_sequence_do_not_vote():
    """17 tokens: the second tile has one row. Its padding (zero queries) would veto the skip of block 0."""
    q, k, v = tensors(17, 1, 1)
    q[0, 0, 16] = 3.0
    k[0, 0, :16], k[0, 0, 16] = -1.0, 1.0
    _, stats = block_attention(q, paged(k, v), plan_of([[[0], [1, 0]]], 17, 1.0), scale=SCALE)
    assert stats.computed[0, 0, 1].tolist() == [True, False]


def test_empty_lists_give_zeros():
    q, k, v = tensors(40, 2, 1)
    out, stats = block_attention(q, paged(k, v), plan_of([[[], [1], []], [[], [], []]], 40), scale=SCALE)
    assert torch.isfinite(out).all()
    assert (out[0, 0, :16] == 0).all() and (out[0, 0, 32:] == 0).all() and (out[0, 1] == 0).all()
    assert (out[0, 0, 16:32] != 0).any()
    assert int(stats.computed_cells.sum()) == 16 * 17 // 2


def test_nan_keys_are_not_skipped_away():
    q, k, v = tensors(33, 1, 1)
    k[0, 0, 3] = math.nan
    out, _ = block_attention(q, paged(k, v), plan_of(full_lists(33, 1), 33, 33.0), scale=SCALE)
    assert torch.isnan(out[0, 0, 32]).all()


def test_float32_and_bfloat16_accumulate_in_float32():
    q, k, v = tensors(61, 4, 2, seed=8)
    lists = random_lists(61, 4, seed=8, diagonal=True)
    exact, _ = block_attention(q, paged(k, v), plan_of(lists, 61), scale=SCALE)
    single, _ = block_attention(q.float(), paged(k.float(), v.float()), plan_of(lists, 61), scale=SCALE)
    torch.testing.assert_close(single.double(), exact, rtol=1e-4, atol=1e-5)
    qb, kb, vb = (x.bfloat16() for x in (q, k, v))
    half, _ = block_attention(qb, paged(kb, vb), plan_of(lists, 61), scale=SCALE)
    of_rounded, _ = block_attention(qb.double(), paged(kb.double(), vb.double()), plan_of(lists, 61), scale=SCALE)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), of_rounded, rtol=2**-8, atol=1e-5)


def test_counts_equal_a_brute_force_mask():
    for length, offset in ((61, 0), (61, 32), (17, 16), (16, 0), (1, 0)):
        first = offset // B
        lists = random_lists(length, 3, seed=length, first_tile=first)
        plan = plan_of(lists, length, 8.0, offset=offset)
        q, k, v = uneven(length, 3, 1, seed=length)
        _, stats = block_attention(q[:, :, offset:], paged(k, v), plan, scale=SCALE)
        for h in range(3):
            for t, blocks in enumerate(lists[h]):
                cells = {"visited": 0, "computed": 0}
                for slot, j in enumerate(blocks):
                    mask = sum(
                        key <= row
                        for row in literal.rows_of(first + t, B, length)
                        for key in literal.rows_of(j, B, length)
                    )
                    cells["visited"] += mask
                    cells["computed"] += mask * bool(stats.computed[0, h, t, slot])
                assert int(stats.visited_cells[0, h, t]) == cells["visited"]
                assert int(stats.computed_cells[0, h, t]) == cells["computed"]
                assert int(stats.visited_blocks[0, h, t]) == len(blocks)


def test_batch_of_two_equals_each_alone():
    (q1, k1, v1), (q2, k2, v2) = tensors(40, 4, 2, seed=1), tensors(40, 4, 2, seed=2)
    lists = random_lists(40, 4, seed=3, diagonal=True)
    plan = plan_of(lists, 40)
    both = BlockPlan(plan.order.repeat(2, 1, 1, 1), plan.count.repeat(2, 1, 1), B, 0, 40, 40, 40)
    out, _ = block_attention(torch.cat([q1, q2]), paged(torch.cat([k1, k2]), torch.cat([v1, v2])), both, scale=SCALE)
    for i, (q, k, v) in enumerate(((q1, k1, v1), (q2, k2, v2))):
        alone, _ = block_attention(q, paged(k, v), plan, scale=SCALE)
        torch.testing.assert_close(out[i : i + 1], alone, rtol=1e-12, atol=1e-14)


def test_plans_that_cannot_be_right_are_refused():
    ok = dict(length=40)
    with pytest.raises(ValueError, match="not causal"):
        plan_of([[[1], [0], [0]]], **ok)
    with pytest.raises(ValueError, match="twice"):
        plan_of([[[0], [1, 1], [0]]], **ok)
    with pytest.raises(ValueError, match="prompt_len"):
        plan_of([[[0], [0], [0]]], prompt_len=39, **ok)
    plan = plan_of([[[0], [0], [0]]], **ok)
    q, k, v = tensors(40, 2, 1)
    with pytest.raises(ValueError, match="must lead with"):
        block_attention(q, paged(k, v), plan, scale=SCALE)
    with pytest.raises(ValueError, match="the plan is for 40"):
        block_attention(q[:, :1, :39], paged(k, v), plan, scale=SCALE)
    q3, k2, v2 = tensors(40, 3, 2)
    with pytest.raises(ValueError, match="multiple of 2 KV heads"):
        block_attention(q3, paged(k2, v2), plan_of([[[0], [0], [0]]] * 3, 40), scale=SCALE)
