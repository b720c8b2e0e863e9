"""BLASST, the oracle and the floors: plans, counts and costs against brute force on the real budget meter."""

from __future__ import annotations

from dataclasses import replace

import literal
import literal_floors
import numpy as np
import pytest
import torch
from kernel_cases import paged, tensors
from prefill_kernels import block_attention, block_mass, causal_cells

from evalkit.budget import BudgetMeter
from evalkit.errors import InputError
from evalkit.methods import PlanContext
from evalkit.methods.blasst import BLASST
from evalkit.methods.oracle_topk import OracleTopK as Oracle
from evalkit.methods.random import Random
from evalkit.methods.streaming import Streaming

LENGTH, HEADS, KV, BLOCK, SCALE = 301, 6, 2, 64, 0.25
SPARSE = [
    BLASST(block_size=BLOCK, skip_scale=60.0),
    BLASST(block_size=BLOCK, skip_scale=60.0, order="descending"),
    Oracle(block_size=BLOCK, budget=0.4),
    Random(block_size=BLOCK, budget=0.6),
    Streaming(block_size=BLOCK, sink_blocks=1, window_blocks=2),
]


def inputs(length: int = LENGTH, offset: int = 0, seed: int = 0):
    q, k, v = tensors(length, HEADS, KV, 16, block=BLOCK, offset=offset, seed=seed)
    return q, k, v


def context(length: int = LENGTH, layer: int = 0, offset: int = 0) -> PlanContext:
    return PlanContext(layer, offset, length, SCALE, "torch")


@pytest.mark.parametrize("method", SPARSE, ids=str)
@pytest.mark.parametrize("length", [1, 63, 64, 65, LENGTH])
def test_counts_equal_a_brute_force_mask(method, length):
    method.validate()
    q, k, v = inputs(length)
    kv = paged(k, v, 32)
    plan = method.plan(q, kv, context(length))
    plan.check()
    _, stats = block_attention(q, kv, plan, scale=SCALE)
    meter = BudgetMeter(1, HEADS, BLOCK)
    meter.add_sparse(0, 0, length, stats, method.estimator_cells(0, length))
    record = meter.read().record()
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    visited = computed = 0
    for h, rows in enumerate(literal_floors.lists(plan)):
        for kind in ("visited", "computed"):
            mask = torch.zeros(length, length, dtype=torch.bool)
            for t, blocks in enumerate(rows):
                for s, j in enumerate(blocks):
                    if kind == "visited" or stats.computed[0, h, t, s]:
                        mask[t * BLOCK : (t + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] = True
            cells = int((mask & causal).sum())
            visited, computed = visited + cells * (kind == "visited"), computed + cells * (kind == "computed")
    assert (record["visited"], record["computed"]) == (visited, computed)
    dense = HEADS * length * (length + 1) // 2
    estimator = HEADS * method.estimator_cells(0, length)
    assert record["B_cost"] == pytest.approx((visited + computed + estimator) / (2 * dense))
    if length == LENGTH:
        assert record["B"] < 1, "a dense run must fail this test"


def test_chunks_are_planned_as_the_whole_is():
    q, k, v = inputs(320)
    for method in SPARSE:
        assert method.chunkable
        whole = literal_floors.lists(method.plan(q, paged(k, v, 32), context(320, layer=3)))
        for start, stop in ((0, 128), (128, 256), (256, 320)):
            kv = paged(k[:, :, :stop], v[:, :, :stop], 32)
            part = method.plan(q[:, :, start:stop], kv, context(320, layer=3, offset=start))
            part.check()
            assert part.prompt_len == 320
            assert literal_floors.lists(part) == [rows[start // BLOCK : -(-stop // BLOCK)] for rows in whole]


# ------------------------------------------------------------------------------------------------------- BLASST
@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("skip_scale", [-1.0, 30.0, 150.0])
def test_blasst_is_algorithm_a_over_all_blocks(order, skip_scale):
    q, k, v = (x.double() for x in tensors(200, 2, 1, 16, block=BLOCK, seed=3))
    method = BLASST(block_size=BLOCK, order=order, skip_scale=skip_scale)
    plan = method.plan(q, paged(k, v, 32), context(200))
    out, stats = block_attention(q, paged(k, v, 32), plan, scale=SCALE)
    lists = [[list(range(t + 1))[:: 1 if order == "ascending" else -1] for t in range(4)] for _ in range(2)]
    threshold = float(np.log(skip_scale / 200)) if skip_scale > 0 else None
    want, computed = literal.osk(q[0], k[0], v[0], lists, BLOCK, SCALE, threshold)
    torch.testing.assert_close(out[0], want, rtol=1e-9, atol=1e-10)
    for h in range(2):
        for t in range(4):
            assert stats.computed[0, h, t, : t + 1].tolist() == computed[h][t]
    skipped = sum(not x for rows in computed for done in rows for x in done)
    assert (skipped > 0) == (skip_scale > 0)


def test_blasst_pays_the_full_product():
    q, k, v = inputs()
    kv = paged(k, v, 32)
    method = BLASST(block_size=BLOCK, skip_scale=150.0)
    _, stats = block_attention(q, kv, method.plan(q, kv, context()), scale=SCALE)
    meter = BudgetMeter(1, HEADS, BLOCK)
    meter.add_sparse(0, 0, LENGTH, stats, method.estimator_cells(0, LENGTH))
    record = meter.read().record()
    assert record["B_stage1"] == 1.0 and record["B"] < 0.9
    assert record["B_cost"] == pytest.approx((1 + record["B"]) / 2) and record["B_cost"] > 0.5


def test_the_two_orders_of_blasst_skip_different_blocks():
    q, k, v = inputs()
    kv = paged(k, v, 32)
    counts = []
    for order in ("ascending", "descending"):
        plan = BLASST(block_size=BLOCK, skip_scale=60.0, order=order).plan(q, kv, context())
        counts.append(block_attention(q, kv, plan, scale=SCALE)[1].computed_blocks)
    assert not torch.equal(*counts)


# ------------------------------------------------------------------------------------------------------- oracle
@pytest.mark.parametrize("budget", [0.05, 0.25, 0.5, 0.9, 1.0])
def test_oracle_keeps_the_blocks_of_largest_mass(budget):
    q, k, v = tensors(200, 2, 1, 16, block=BLOCK)
    method = Oracle(block_size=BLOCK, budget=budget)
    plan = method.plan(q, paged(k, v, 32), context(200))
    mass = literal_floors.mass(q[0], k[0], BLOCK, SCALE)
    for h, rows in enumerate(literal_floors.lists(plan)):
        assert rows == [literal_floors.top_k(mass[h, t], t, budget) for t in range(4)]


def test_oracle_finds_planted_blocks():
    length, g = 512, torch.Generator().manual_seed(1)
    q, k = torch.randn(1, HEADS, length, 16, generator=g) * 0.1, torch.randn(1, KV, length, 16, generator=g) * 0.1
    q[..., 0] = 30.0
    k[:, 0, 64 * 2 + 5, 0], k[:, 1, 64 * 5 + 63, 0] = 4.0, 4.0  # a vertical line in one block for each KV head
    plan = Oracle(block_size=64, budget=0.01).plan(q, paged(k, k, 32), context(length))
    for h, rows in enumerate(literal_floors.lists(plan)):
        planted = 2 if h < 3 else 5
        for tile in range(planted + 1, 8):
            assert rows[tile] == [planted]


def test_no_selection_of_as_many_blocks_holds_more_mass_than_the_oracle():
    q, k, v = inputs()
    kv = paged(k, v, 32)
    mass = block_mass(q, kv, scale=SCALE, block_size=BLOCK)

    def recall(plan):
        return float(mass.gather(-1, plan.order.long().clamp(min=0)).mul(plan.order >= 0).sum())

    oracle = Oracle(block_size=BLOCK, budget=0.6).plan(q, kv, context())
    other = Random(block_size=BLOCK, budget=0.6).plan(q, kv, context())
    assert torch.equal(oracle.count[..., 2:], other.count[..., 2:]) and (oracle.count <= other.count).all()
    mass[:, :, :2] = 0.0
    assert recall(oracle) > recall(other) + 1


def test_the_oracle_costs_the_full_product():
    assert Oracle().estimator_cells(0, 1000) == 1000 * 1001 // 2
    assert Oracle().estimator_cells(256, 100) == causal_cells(256, 100) == sum(range(257, 357))


# ------------------------------------------------------------------------------------------------------- random
@pytest.mark.parametrize("budget", [0.01, 0.4, 0.75, 1.0])
def test_random_keeps_sink_and_diagonal_and_the_best_of_the_hash(budget):
    q, k, v = inputs()
    method = Random(block_size=BLOCK, budget=budget, seed=5)
    plan = method.plan(q, paged(k, v, 32), context(layer=7))
    for h, rows in enumerate(literal_floors.lists(plan)):
        for tile, blocks in enumerate(rows):
            count = literal_floors.kept(tile, budget, 2)
            inner = sorted(range(1, tile), key=lambda j: -literal_floors.random_score(5, 7, h, tile, j))
            assert blocks == sorted({0, tile, *inner[: max(0, count - 2)]})


def test_random_repeats_and_differs_by_layer_head_and_seed():
    q, k, v = inputs(1280)
    kv = paged(k, v, 32)
    method = Random(block_size=BLOCK, budget=0.4)

    def lists(m, layer):
        return literal_floors.lists(m.plan(q, kv, context(1280, layer)))

    first = lists(method, 0)
    assert first == lists(method, 0)
    assert first != lists(method, 1) and first != lists(replace(method, seed=1), 0)
    assert all(first[h] != first[0] for h in range(1, HEADS))


# ---------------------------------------------------------------------------------------------------- streaming
@pytest.mark.parametrize("sink,window", [(0, 1), (1, 1), (1, 3), (2, 2)])
def test_streaming_keeps_sink_and_window(sink, window):
    q, k, v = inputs()
    plan = Streaming(block_size=BLOCK, sink_blocks=sink, window_blocks=window).plan(q, paged(k, v, 32), context())
    want = [literal_floors.sink_window(t, sink, window) for t in range(5)]
    assert literal_floors.lists(plan) == [want] * HEADS


# --------------------------------------------------------------------------------------------------- validation
@pytest.mark.parametrize(
    "method,field",
    [
        (BLASST(block_size=100), "method.block_size"),
        (BLASST(order="hrm_first"), "method.order"),
        (BLASST(skip_scale=float("nan")), "method.skip_scale"),
        (Oracle(budget=0.0), "method.budget"),
        (Oracle(budget=1.1), "method.budget"),
        (Oracle(block_size=32), "method.block_size"),
        (Random(budget=float("nan")), "method.budget"),
        (Random(seed=-1), "method.seed"),
        (Random(block_size=32), "method.block_size"),
        (Streaming(sink_blocks=-1), "method.sink_blocks"),
        (Streaming(window_blocks=0), "method.window_blocks"),
        (Streaming(block_size=32), "method.block_size"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_values_out_of_range_are_named(method, field):
    with pytest.raises(InputError) as stop:
        method.validate()
    assert stop.value.field == field


def test_blasst_warns_of_a_clamped_threshold():
    assert "clamped" in BLASST(skip_scale=2000.0).warnings(1024)[0]
    assert BLASST(skip_scale=-1.0).warnings(1024) == []
