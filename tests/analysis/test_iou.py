from __future__ import annotations

import json

import pandas as pd
import pytest
import torch
from prefill_kernels import block_mass

from evalkit.analysis import iou, proxies, work
from evalkit.analysis.iou import counts, kept_blocks, summarise
from evalkit.analysis.proxies import Ranking
from evalkit.analysis.settings import IouAnalysis
from evalkit.errors import InputError


def test_blocks_of_a_row():
    assert kept_blocks(10, 0.25).tolist() == [1, 1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert kept_blocks(4, 1.0).tolist() == [1, 2, 3, 4]


def test_iou_by_hand():
    # Four tiles, half of the blocks: K = 1, 1, 2, 2. Shared 1, 0, 1, 2; unions 1, 2, 3, 2.
    oracle = torch.tensor([[0, 4, 4, 4], [0, 1, 4, 4], [0, 1, 2, 4], [0, 1, 2, 3]])[None, None]
    own = torch.tensor([[0, 4, 4, 4], [1, 0, 4, 4], [2, 0, 1, 4], [1, 0, 3, 2]])[None, None]
    mass = torch.tensor([[8.0, 0, 0, 0], [6, 2, 0, 0], [4, 3, 1, 0], [3, 2, 2, 1]])[None, None]
    (row,) = counts(own, oracle, mass, 0.5).to_dict("records")
    assert (row["shared"], row["union"], row["rows"], row["blocks"], row["causal_blocks"]) == (4, 8, 4, 6, 10)
    assert row["row_iou"] == pytest.approx(1 + 0 + 1 / 3 + 1)
    assert row["mass"] == 8 + 2 + (3 + 1) + 5 and row["oracle_mass"] == 8 + 6 + 7 + 5


def test_heads_are_pooled_over_prompts_and_spread_over_heads():
    def part(sample, head, layer, shared, union):
        same = {"row_iou": 1.0, "rows": 4, "blocks": 5, "causal_blocks": 10, "mass": 3.0, "oracle_mass": 4.0}
        where = {"task": "t", "sample": sample, "prompt_tokens": 4, "layer": layer, "head": head}
        return {**where, "proxy": "kap", "budget": 0.5, "shared": shared, "union": union, **same}

    rows = [part(0, 0, 0, 1, 4), part(1, 0, 0, 3, 4), part(0, 1, 0, 4, 4), part(1, 1, 0, 4, 4)]
    rows += [part(0, 0, 1, 0, 4), part(1, 0, 1, 2, 4), part(0, 1, 1, 2, 4), part(1, 1, 1, 0, 4)]
    heads, table = summarise(pd.DataFrame(rows))
    assert heads["iou"].tolist() == [0.5, 1.0, 0.25, 0.25]
    (line,) = table.to_dict("records")
    assert line["iou"] == 0.5 and line["heads"] == 4 and line["B"] == 0.5
    assert line["iou_sd"] == pytest.approx(pd.Series([0.5, 1.0, 0.25, 0.25]).std())
    assert line["iou_layer_sd"] == pytest.approx(pd.Series([0.75, 0.25]).std())
    assert line["mass"] == pytest.approx(6 / 8) and line["oracle_mass"] == pytest.approx(1.0)


def test_an_exact_proxy_scores_one_and_a_reversed_one_little(settings_for, monkeypatch):
    def exact(call, sign=1):
        mass = block_mass(call.q, call.kv, scale=call.context.scale, block_size=call.block_size)
        return Ranking(sign * mass)

    monkeypatch.setitem(proxies._PROXIES, "kap", exact)
    monkeypatch.setitem(proxies._PROXIES, "random", lambda call: exact(call, -1))
    settings = settings_for(IouAnalysis, proxies=("kap", "random"), budgets=(0.2, 0.5), block_size=64)
    assert iou.run(settings, "evalkit analyze iou") == 0
    table = pd.read_csv("out/iou.csv").set_index(["proxy", "budget"])
    assert (table.loc["kap", ["iou", "iou_rows"]] == 1.0).all().all()
    assert table.loc[("random", 0.2), "iou"] < 0.35 and (table["heads"] == 8).all()
    heads = pd.read_parquet("out/iou_heads.parquet")
    assert len(heads) == 2 * 4 * 2 * 2 and (heads["mass"] <= heads["oracle_mass"] + 1e-9).all()
    facts = json.loads(open("out/iou.json").read())
    assert len(facts["prompts"]) == 2 and facts["command"] == "evalkit analyze iou"
    for kind in ("png", "svg", "pdf"):
        assert (settings_path := work.Path(f"out/iou.{kind}")).stat().st_size > 1000, settings_path


def test_slices_of_heads_change_nothing(settings_for, monkeypatch, call_inputs):
    settings = settings_for(IouAnalysis, budgets=(0.1, 0.4), block_size=64)
    call = proxies.Call(*call_inputs(), 64, 8)
    whole = iou.layer_counts(call, settings)
    slices = proxies.head_slices
    monkeypatch.setattr(proxies, "head_slices", lambda heads, blocks: slices(heads, blocks, most=blocks * blocks))
    keys = ["proxy", "budget", "head"]
    one_by_one = iou.layer_counts(call, settings)
    pd.testing.assert_frame_equal(
        whole.sort_values(keys).reset_index(drop=True), one_by_one.sort_values(keys).reset_index(drop=True)
    )


def test_a_killed_analysis_goes_on(settings_for, monkeypatch, capsys):
    settings = settings_for(IouAnalysis, proxies=("kap",), budgets=(0.3,), samples=3)
    measure, measured = iou.measure, []

    def dies(bench, given, prompt):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(prompt.index)
        return measure(bench, given, prompt)

    monkeypatch.setattr(iou, "measure", dies)
    with pytest.raises(KeyboardInterrupt):
        iou.run(settings, "c")
    monkeypatch.setattr(iou, "measure", lambda *a: measured.append(a[2].index) or measure(*a))
    assert iou.run(settings, "c") == 0
    assert measured == [0, 1, 2], "what was measured is not measured again"
    first = open("out/iou.csv").read()
    monkeypatch.setattr(work, "load_model", None)
    assert iou.run(settings, "c") == 0, "and no model is loaded where nothing is missing"
    assert open("out/iou.csv").read() == first and "3/3] niah_single_1-2" in capsys.readouterr().out


def test_more_samples_keep_the_parts_and_other_settings_do_not(settings_for, monkeypatch):
    made = []
    measure = iou.measure
    monkeypatch.setattr(iou, "measure", lambda *a: made.append(a[2].index) or measure(*a))
    few = {"proxies": ("random",), "budgets": (0.3,)}
    iou.run(settings_for(IouAnalysis, samples=1, **few), "c")
    iou.run(settings_for(IouAnalysis, samples=2, **few), "c")
    assert made == [0, 1]
    iou.run(settings_for(IouAnalysis, samples=1, **{**few, "budgets": (0.4,)}), "c")
    assert made == [0, 1, 0]


def test_forced_blocks_come_first_unless_they_are_not_asked_for(settings_for, monkeypatch, call_inputs):
    """A proxy whose own scores are those of the oracle, and which always keeps the block of least mass."""
    call = proxies.Call(*call_inputs(), 64, 8)
    mass = block_mass(call.q, call.kv, scale=call.context.scale, block_size=64)
    causal = torch.ones(call.blocks, call.blocks).tril().bool()
    worst = mass.masked_fill(~causal, torch.inf).argmin(-1, keepdim=True)
    least = torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, worst, True)
    monkeypatch.setitem(proxies._PROXIES, "kap", lambda _: Ranking(mass, forced=least))
    few = {"proxies": ("kap",), "budgets": (0.02,), "block_size": 64}  # one block a row
    free = iou.layer_counts(call, settings_for(IouAnalysis, forced=False, **few))
    held = iou.layer_counts(call, settings_for(IouAnalysis, forced=True, **few))
    assert (free["shared"] == call.blocks).all(), "by its scores it is the oracle"
    assert (held["shared"] == 1).all(), "forced blocks take the place; only the first row has no other"


def test_realized_shares_are_shown(settings_for, monkeypatch, capsys):
    """Rows keep one block at least, and halves are rounded up: 20 % of ten blocks a side are more than that."""
    drawn = []
    save = iou.figures.save
    monkeypatch.setattr(iou.figures, "save", lambda figure, stem: drawn.append(figure) or save(figure, stem))
    settings = settings_for(IouAnalysis, proxies=("kap",), budgets=(0.2,), samples=1, block_size=64)
    iou.run(settings, "c")
    share = pd.read_csv("out/iou.csv")["B"].iloc[0]
    assert share > 0.215
    assert f"realized       {share:7.1%}" in capsys.readouterr().out
    assert drawn[0].axes[1].get_title(loc="left") == f"mean of each layer at B = {share:.1%} (asked: 20%)"


def test_a_device_that_is_not_here_goes_by_the_name_of_its_setting(settings_for, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="^device='cuda': cpu or auto"):
        iou.run(settings_for(IouAnalysis, device="cuda"), "c")
