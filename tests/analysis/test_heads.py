from __future__ import annotations

import pandas as pd
import pytest
import torch
from prefill_kernels import BlockPlan, DensePlan, dense_attention

from evalkit.analysis import heads
from evalkit.analysis.heads import head_sums, summarise
from evalkit.analysis.settings import HeadsAnalysis
from evalkit.attention import Session
from evalkit.methods.cosa import CoSA, Select
from evalkit.methods.streaming import Streaming


def test_error_and_budget_of_a_planted_plan(call_inputs):
    q, kv, context = call_inputs(length=256)
    dense = dense_attention(q, *kv.gather(), scale=context.scale)
    # Head 0 leaves out block 0 for tile 3; the others keep everything.
    order = torch.full((1, 4, 4, 4), -1, dtype=torch.int32)
    for tile in range(4):
        order[:, :, tile, : tile + 1] = torch.arange(tile + 1)
    order[0, 0, 3] = torch.tensor([1, 2, 3, -1])
    plan = BlockPlan(order, (order >= 0).sum(-1).int(), 64, 0, 256, 256, 256)
    frame = head_sums(plan, Streaming(64), q, kv, context, dense)
    assert frame["dense"].tolist() == [256 * 257 // 2] * 4 and frame["dense_blocks"].tolist() == [10] * 4
    assert frame["computed"].tolist() == [256 * 257 // 2 - 64 * 64] + [256 * 257 // 2] * 3
    assert frame["computed_blocks"].tolist() == [9, 10, 10, 10]
    k, v = (x.repeat_interleave(2, 1)[0, 0] for x in kv.gather())
    logits = q[0, 0] @ k.T * context.scale
    logits.masked_fill_(torch.ones(256, 256).triu(1).bool(), -torch.inf)
    logits[192:, :64] = -torch.inf
    expected = (logits.softmax(-1) @ v - dense[0, 0]).double().square().sum()
    assert frame["square_error"][0] == pytest.approx(float(expected), rel=1e-4)
    assert frame["square_error"][1:].max() < 1e-8
    assert frame["square_norm"].tolist() == pytest.approx(dense[0].double().square().sum((1, 2)).tolist())
    fallback = head_sums(DensePlan("fallback"), Streaming(64), q, kv, context, dense)
    assert (fallback["computed"] == fallback["dense"]).all() and (fallback["square_error"] == 0).all()


def test_prompts_are_pooled_as_sums():
    rows = [("m", 0, 0, 10, 8, 4, 4, 2, 1.0, 4.0), ("m", 0, 0, 30, 30, 30, 12, 12, 8.0, 32.0)]
    table = summarise(pd.DataFrame(rows, columns=["method", "layer", "head", *heads.SUMS]))
    (row,) = table.to_dict("records")
    assert row["B"] == pytest.approx(34 / 40) and row["B_stage1"] == pytest.approx(38 / 40)
    assert row["B_block"] == pytest.approx(14 / 16) and row["error"] == pytest.approx((9 / 36) ** 0.5)


@pytest.mark.parametrize("states", ["dense", "own"])
def test_whole_analysis(settings_for, states, capsys):
    methods = ("cosa:select.p=0.6:block_size=64", "streaming:window_blocks=2:block_size=64")
    settings = settings_for(HeadsAnalysis, methods=methods, states=states, samples=1)
    assert heads.run(settings, "evalkit analyze heads") == 0
    table = pd.read_csv("out/heads.csv")
    assert len(table) == 2 * 2 * 4 and (table["error"] > 0).all() and table["B"].between(0.05, 0.99).all()
    assert "worst" in capsys.readouterr().out
    # Budgets of a run of its own: in the first layer the inputs are the same, later ones only with own states.
    bench = heads.Workbench(settings, "check", "c", [heads])
    with Session(bench.model, CoSA(64, select=Select(p=0.6))) as session:
        session.prefill(torch.tensor(bench.prompts[0].ids), keep_from=0)
        frame = session.account().budget.frame()
    mine = table[table["method"] == methods[0]].reset_index(drop=True)
    match = (mine["B"] - frame["computed"] / frame["dense"]).abs() < 1e-7
    assert match[frame["layer"] == 0].all()
    assert match.all() == (states == "own")
