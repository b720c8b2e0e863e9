"""Budget: brute-force masks, ratio of sums, the estimator's share."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from prefill_kernels import KapScores, PagedKV, TileStats, block_attention

from evalkit.budget import COUNTS, BudgetMeter
from evalkit.methods.base import PlanContext
from evalkit.methods.cosa import CoSA, Select, share_over_kv_heads


def run(length: int, q_heads: int = 4, kv_heads: int = 2, method: CoSA | None = None, layers: int = 2):
    method = method or CoSA(block_size=64, stride=8, select=Select(p=0.7), skip_scale=0.2 * length)
    meter = BudgetMeter(layers, q_heads, method.block_size)
    masks = {"visited": 0, "computed": 0}
    per_head = np.zeros((layers, q_heads, 2), dtype=int)
    for layer in range(layers):
        torch.manual_seed(layer)
        q = torch.randn(1, q_heads, length, 16) * 2
        k, v = torch.randn(1, kv_heads, length, 16), torch.randn(1, kv_heads, length, 16)
        kv = PagedKV.from_dense(k, v, 32)
        plan = method.plan(q, kv, PlanContext(layer, 0, length, 0.25, "torch"))
        plan.check()
        _, stats = block_attention(q, kv, plan, scale=0.25)
        assert stats.computed is not None
        meter.add_sparse(layer, 0, length, stats, method.estimator_cells(0, length))
        # Brute force: a token-level mask of every cell, out of the block lists alone.
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        for h in range(q_heads):
            for kind, slot in (("visited", 0), ("computed", 1)):
                mask = torch.zeros(length, length, dtype=torch.bool)
                for t in range(plan.order.shape[2]):
                    for s, j in enumerate(plan.order[0, h, t].tolist()):
                        if j >= 0 and (kind == "visited" or stats.computed[0, h, t, s]):
                            mask[t * 64 : (t + 1) * 64, j * 64 : (j + 1) * 64] = True
                cells = int((mask & causal).sum())
                masks[kind] += cells
                per_head[layer, h, slot] = cells
    return meter.read(), masks, per_head


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200, 321])
def test_cells_equal_a_brute_force_mask(length):
    budget, masks, per_head = run(length)
    record = budget.record()
    assert record["dense"] == 2 * 4 * length * (length + 1) // 2
    assert record["visited"] == masks["visited"] and record["computed"] == masks["computed"]
    frame = budget.frame()
    assert frame["visited"].to_numpy().reshape(2, 4).tolist() == per_head[..., 0].tolist()
    assert frame["computed"].to_numpy().reshape(2, 4).tolist() == per_head[..., 1].tolist()
    assert list(frame.columns) == ["layer", "head", *COUNTS]
    assert frame["dense"].sum() == record["dense"]


def test_ratios_are_ratios_of_sums():
    meter = BudgetMeter(2, 1, 64)
    for layer, (length, spent) in enumerate(((10, 55), (10, 11))):
        one = torch.tensor([[[spent]]])
        meter.add_sparse(layer, 0, length, TileStats(one, one, one * 0 + 1, one * 0 + 1), 0)
    record = meter.read().record()
    assert record["B"] == pytest.approx(66 / 110)
    assert record["layer_min"] == pytest.approx(0.2) and record["layer_max"] == 1.0


def test_cost_counts_query_key_products_and_the_estimator():
    budget, masks, _ = run(321)
    record = budget.record()
    dense = record["dense"]
    estimator = CoSA(block_size=64, stride=8).estimator_cells(0, 321) * 8
    assert record["estimator"] == pytest.approx(estimator / (2 * dense))
    assert record["B_cost"] == pytest.approx((masks["visited"] + masks["computed"] + estimator) / (2 * dense))
    assert record["B"] < record["B_cost"]


def test_the_proxy_costs_about_one_in_two_s_squared():
    for stride in (4, 8, 16):
        length = 16384
        share = CoSA(stride=stride).estimator_cells(0, length) / (length * (length + 1))
        assert share == pytest.approx(1 / (2 * stride**2), rel=0.01)


def test_dense_calls_count_fully_and_fallbacks_are_named():
    meter = BudgetMeter(2, 3, 64)
    meter.add_dense(0, 0, 128, fallback=False)
    meter.add_dense(0, 128, 72, fallback=False)
    meter.add_dense(1, 0, 200, fallback=True, estimator_cells=7)
    record = meter.read().record()
    assert record["B"] == record["B_block"] == 1.0 and record["dense"] == 2 * 3 * 200 * 201 // 2
    assert record["dense_blocks"] == 2 * 3 * (4 * 5 // 2)
    assert record["fallback_share"] == pytest.approx(1 / 3)
    assert record["estimator"] == pytest.approx(21 / (2 * record["dense"]))


def test_block_rounded_budget_counts_edge_blocks_whole():
    budget, _, _ = run(65, method=CoSA(block_size=64, select=Select(p=1.0)))
    assert budget.record()["B_block"] == 1.0
    budget, _, _ = run(65, method=CoSA(block_size=64, select=Select(rule="budget", budget=0.5)), layers=1)
    record = budget.record()
    assert record["visited_blocks"] == 4 * 2 and record["dense_blocks"] == 4 * 3
    assert record["B_block"] == pytest.approx(2 / 3)


def test_counts_do_not_overflow_at_a_million_tokens():
    meter = BudgetMeter(1, 64, 128)
    meter.add_dense(0, 0, 2**20, fallback=False)
    assert meter.read().record()["dense"] == 64 * 2**20 * (2**20 + 1) // 2


def test_sharing_over_kv_heads_sums_scores_and_joins_flags():
    score = torch.arange(8.0).view(1, 4, 1, 2)
    flags = torch.tensor([[1, 0], [0, 0], [0, 0], [0, 1]]).bool().view(1, 4, 1, 2)
    shared = share_over_kv_heads(KapScores(score, flags), kv_heads=2)
    assert shared.score[0, :, 0].tolist() == [[2, 4], [2, 4], [10, 12], [10, 12]]
    assert shared.hrm[0, :, 0].tolist() == [[True, False]] * 2 + [[False, True]] * 2


def test_warnings_report_a_clamped_or_high_threshold():
    assert "clamped" in CoSA(skip_scale=2000.0).warnings(1024)[0]
    assert "above 0.5" in CoSA(skip_scale=2000.0).warnings(2048)[0]
    assert CoSA(skip_scale=2000.0).warnings(131072) == [] and CoSA().warnings(10) == []
    assert math.isclose(2000 / 2048, 0.9765625)
