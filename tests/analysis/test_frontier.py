from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import synthetic

from evalkit.analysis import bootstrap, frontier
from evalkit.analysis.frontier import Entry, Panel, area_between, best_rows, panel_notes, quality_integral
from evalkit.analysis.settings import FrontierAnalysis
from evalkit.errors import EvalkitError
from evalkit.report.load import load
from evalkit.report.stats import Estimate, holm_adjusted, two_sided_p

SETTINGS = FrontierAnalysis(directories=(".",), budgets=(0.2, 0.4), resamples=200)


# ------------------------------------------------------------------------------------------------------------ areas
def test_areas_by_hand():
    line = [(0.1, 10.0), (0.3, 20.0), (0.5, 40.0)]
    # Steps from 0.1 to 0.5: 0.2 x 10 + 0.2 x 20. Straight lines: 0.2 x 15 + 0.2 x 30.
    assert quality_integral(line, 0.1, 0.5) == pytest.approx(6.0)
    assert quality_integral(line, 0.1, 0.5, interpolation="linear") == pytest.approx(9.0)
    assert quality_integral(line, 0.2, 0.4) == pytest.approx(0.1 * 10 + 0.1 * 20)
    # Straight: from 15 at 0.2 over 20 at 0.3 to 30 at 0.4.
    assert quality_integral(line, 0.2, 0.4, interpolation="linear") == pytest.approx(0.1 * 17.5 + 0.1 * 25)
    assert quality_integral(line, 0.0, 0.2) == pytest.approx(0.2 * 10), "before the first point its value stays"


def test_area_between_frontiers_by_hand():
    good, bad = [(0.1, 50.0), (0.3, 90.0), (0.2, 40.0)], [(0.1, 50.0), (0.2, 60.0), (0.5, 90.0)]
    # (0.2, 40) is on no frontier. From 0.1 to 0.5: good 0.2 x 50 + 0.2 x 90, bad 0.1 x 50 + 0.3 x 60.
    assert area_between(good, bad, 0.1, 0.5, higher_is_better=True) == pytest.approx((28 - 23) / 0.4)
    assert area_between(bad, good, 0.1, 0.5, higher_is_better=True) == pytest.approx(-(28 - 23) / 0.4)
    # Lower is better: 20 throughout against 30 and then 10 from 0.3 on.
    low = area_between([(0.1, 20.0)], [(0.1, 30.0), (0.3, 10.0)], 0.1, 0.5, higher_is_better=False)
    assert low == pytest.approx((0.2 * 10 - 0.2 * 10) / 0.4)
    assert area_between([(0.1, 20.0)], [(0.1, 30.0)], 0.1, 0.5, higher_is_better=False) == pytest.approx(10.0)


def panel(metric="accuracy", *, strata=None, dense=None, **cells):
    """Cells by name: (group, budget, values)."""
    entries = []
    for name, (group, budget, values) in cells.items():
        values = np.asarray(values, dtype=float)
        entries.append(Entry(group, name, name, values, np.full(len(values), budget)))
    n = len(entries[0].sums)
    of = np.zeros(n, dtype=int) if strata is None else np.asarray(strata)
    return Panel(metric, "m, t, 1 tokens", of, np.ones(n), np.full(n, 100.0), tuple(entries), dense)


def test_values_and_budgets_of_a_panel():
    found = panel(a=("x", 0.25, [1, 0, 1, 1, 0]), strata=[0, 0, 1, 1, 1])
    whole = np.ones((1, 5))
    # Subtasks weigh the same: (1/2 + 2/3) / 2.
    assert found.values(found.entries[0], whole)[0] == pytest.approx(100 * (0.5 + 2 / 3) / 2)
    twice = np.array([[2.0, 0, 1, 2, 0]])
    assert found.values(found.entries[0], twice)[0] == pytest.approx(100.0)
    entry = Entry("x", "a", "a", np.array([2.0, 6.0]), np.array([0.2, 0.4]))
    loss = Panel("perplexity", "t", np.zeros(2, int), np.array([1.0, 3.0]), np.array([1.0, 3.0]), (entry,), None)
    assert loss.values(entry, np.ones((1, 2)))[0] == pytest.approx(np.exp(8 / 4))
    assert loss.budgets(entry, np.ones((1, 2)))[0] == pytest.approx((0.2 + 1.2) / 4), "longer prompts weigh more"


def test_bootstrap_draws_pairs_within_subtasks():
    counts = bootstrap.draws([0, 0, 1, 1, 1], 500, 0)
    assert (counts[:, :2].sum(1) == 2).all() and (counts[:, 2:].sum(1) == 3).all()
    assert np.array_equal(counts, bootstrap.draws([0, 0, 1, 1, 1], 500, 0))
    assert bootstrap.interval(np.arange(1001.0)) == pytest.approx((25.0, 975.0))
    assert all(np.isnan(bootstrap.interval(np.array([1.0, np.nan, np.nan]))))


def test_area_intervals_are_paired():
    """A constant advantage has an interval of no width, however much samples differ."""
    rng = np.random.default_rng(0)
    hard = rng.normal(2.0, 1.0, 40)
    found = panel(
        "kl", a=("one", 0.1, hard), b=("one", 0.5, hard - 0.5), c=("two", 0.1, hard + 0.3), d=("two", 0.5, hard)
    )
    (row,) = frontier.area_rows(found, SETTINGS)
    assert row["method"] == "one" and row["against"] == "two" and (row["from_B"], row["to_B"]) == (0.1, 0.5)
    assert row["advantage"] == pytest.approx(0.3) and row["low"] == pytest.approx(0.3)
    assert row["high"] == pytest.approx(0.3)
    noise = rng.normal(0.0, 0.5, 40)
    found = panel("kl", a=("one", 0.1, hard), b=("one", 0.5, hard), c=("two", 0.1, hard + noise), d=("two", 0.5, hard))
    (row,) = frontier.area_rows(found, SETTINGS)
    assert row["low"] < noise.mean() < row["high"] and row["high"] - row["low"] > 0.1
    apart = panel("kl", a=("one", 0.1, hard), c=("two", 0.5, hard))
    assert frontier.area_rows(apart, SETTINGS) == [], "frontiers that share no budget have no area between them"


# ------------------------------------------------------------------------------------------------------------- holm
def test_holm_by_hand():
    assert holm_adjusted([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm_adjusted([0.5, 0.9]) == [1.0, 1.0] and holm_adjusted([]) == []
    assert holm_adjusted([0.02, 0.02, 0.02]) == pytest.approx([0.06] * 3)


def test_p_is_below_five_percent_exactly_where_zero_is_outside():
    assert two_sided_p(Estimate(1.0, 9, 0.0, 2.0)) == pytest.approx(0.05)
    assert two_sided_p(Estimate(1.0, 9, 0.0, 2.0), freedom=8) == pytest.approx(0.05)
    assert two_sided_p(Estimate(-1.0, 9, -1.9, -0.1)) < 0.05 < two_sided_p(Estimate(1.0, 9, -0.1, 2.1))
    assert two_sided_p(Estimate(1.0, 1)) == 1.0 and two_sided_p(Estimate(0.0, 3, 0.0, 0.0)) == 1.0


def losses(*shifts, n=12, noise=0.02, seed=1):
    rng = np.random.default_rng(seed)
    base = rng.normal(3.0, 0.5, n)
    return [base + shift + rng.normal(0, noise, n) for shift in shifts]


def test_best_method_at_a_budget_and_whether_it_is_shown():
    a, b, c, d = losses(0.0, 0.5, 0.001, -1.0)
    found = panel(
        "kl", a=("one", 0.19, a), worse=("one", 0.1, b), b=("two", 0.2, b), c=("three", 0.204, c), d=("four", 0.3, d)
    )
    rows = pd.DataFrame(best_rows(found, SETTINGS))
    at = rows[rows["budget"] == 0.2].set_index("against")
    assert set(at["best"]) <= {"one", "three"} and "four" not in at.index, "what costs more does not compete"
    assert at.loc["two", "significant"] and at.loc["two", "p_holm"] < 0.05
    close = "three" if "three" in at.index else "one"
    assert not at.loc[close, "significant"]
    assert set(rows[rows["budget"] == 0.4]["best"]) == {"four"}
    assert set(rows["comparisons"]) == {2 + 3}, "corrected for all comparisons of the panel"


def test_correction_takes_back_what_one_test_alone_would_claim():
    rng = np.random.default_rng(3)
    base = rng.normal(0, 1, 10)
    step = np.array([1, -1] * 5) * 0.5
    # Alone, 0.4 +- 0.38 over ten windows is significant; as the least of six comparisons it is not.
    others = {f"x{i}": (f"m{i}", 0.2, base + 0.4 + step) for i in range(6)}
    alone = pd.DataFrame(best_rows(panel("kl", a=("best", 0.2, base), x0=others["x0"]), SETTINGS))
    assert alone["p"].iloc[0] < 0.05 and alone["significant"].all()
    many = pd.DataFrame(best_rows(panel("kl", a=("best", 0.2, base), **others), SETTINGS))
    assert (many["p"] < 0.05).all() and not many["significant"].any()


def test_bounds_do_not_compete():
    a, b = losses(0.0, -1.0)
    rows = best_rows(panel("kl", a=("one", 0.2, a), o=("oracle_topk", 0.2, b), r=("random", 0.1, b)), SETTINGS)
    assert {row["best"] for row in rows} == {"one"} and all(row["against"] == "" for row in rows)


def test_accuracy_goes_up():
    right, wrong = [1.0] * 20, [0.0] * 10 + [1.0] * 10
    rows = pd.DataFrame(best_rows(panel(a=("one", 0.2, wrong), b=("two", 0.2, right)), SETTINGS))
    assert set(rows["best"]) == {"two"} and rows["significant"].all()
    assert rows["difference"].iloc[0] == pytest.approx(50.0) and rows["value"].iloc[0] == 100.0


# ------------------------------------------------------------------------------------------------------ whole store
def test_whole_analysis(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "runs"
    synthetic.perplexity_cell(out, "dense", limit=8)
    for p, damage, share in [(0.99, 0.005, 0.6), (0.9, 0.04, 0.3)]:
        synthetic.perplexity_cell(out, p=p, damage=damage, share=share, limit=8)
    for p, damage, share in [(0.99, 0.02, 0.7), (0.9, 0.2, 0.25)]:
        synthetic.perplexity_cell(out, "xattention", p=p, damage=damage, share=share, limit=8)
    scores = {"niah_multikey_1": [1.0, 1.0, 0.0, 1.0], "vt": [0.4, 0.6, 1.0, 0.2]}
    synthetic.ruler_cell(out, "dense", scores)
    synthetic.ruler_cell(out, "cosa", scores, share=0.4)
    settings = FrontierAnalysis(directories=("runs",), budgets=(0.35, 0.6), resamples=200, out="here")
    settings.validate()
    assert frontier.run(settings, "evalkit analyze frontier") == 0
    points = pd.read_csv("here/frontier.csv")
    assert set(points["metric"]) == {"accuracy", "perplexity", "kl"} and set(points["method"]) == {
        "cosa", "xattention", "dense",
    }  # fmt: skip
    losses = points[(points["metric"] == "perplexity") & (points["method"] != "dense")]
    assert losses["on_frontier"].all() and losses["n"].eq(8).all()
    areas = pd.read_csv("here/frontier_areas.csv").set_index("metric")
    assert areas.loc["kl", "advantage"] > 0 and areas.loc["kl", "from_B"] == pytest.approx(0.3, abs=0.01)
    best = pd.read_csv("here/frontier_best.csv")
    mine = best[(best["metric"] == "kl") & (best["budget"] == 0.35)].iloc[0]
    assert mine["best"] == "cosa" and mine["significant"] and mine["against"] == "xattention"
    said = capsys.readouterr().out
    assert "better than xattention" in said and "the only method measured there" in said
    assert all((tmp_path / "here" / f"frontier.{kind}").exists() for kind in ("png", "svg", "pdf", "json"))


def test_series_tell_orders_apart(tmp_path):
    synthetic.perplexity_cell(tmp_path, "dense")
    for order in ("ascending", "hrm_first"):
        synthetic.perplexity_cell(tmp_path, skip_scale=500.0, order=order, damage=0.01)
    loaded = load([tmp_path])
    assert {e.group for e in frontier.panels(loaded)[0][0].entries} == {"cosa"}
    by_series = frontier.panels(loaded, by="series")[0][0]
    assert {e.group for e in by_series.entries} == {"cosa, skip, ascending", "cosa, skip, hrm_first"}


def test_a_store_of_dense_cells_alone(tmp_path):
    synthetic.perplexity_cell(tmp_path, "dense")
    with pytest.raises(EvalkitError, match="no finished sparse cell"):
        frontier.run(FrontierAnalysis(directories=(str(tmp_path),), out=str(tmp_path / "out")), "c")


def analysed(tmp_path, capsys, **more):
    """Runs the analysis on ``runs``; what it says, points, best methods and areas as their files hold them."""
    given = {"directories": (str(tmp_path / "runs"),), "out": str(tmp_path / "out"), "resamples": 100, **more}
    settings = FrontierAnalysis(**given)
    settings.validate()
    assert frontier.run(settings, "c") == 0
    files = ("frontier", "frontier_best", "frontier_areas")
    return capsys.readouterr().out, *(pd.read_csv(tmp_path / "out" / f"{name}.csv") for name in files)


def test_nothing_at_or_below_the_asked_budgets(tmp_path, capsys):
    synthetic.perplexity_cell(tmp_path / "runs", "dense")
    synthetic.perplexity_cell(tmp_path / "runs", damage=0.01, share=0.6)
    said, points, best, areas = analysed(tmp_path, capsys, budgets=(0.1, 0.2))
    assert len(points) == 4 and len(best) == len(areas) == 0
    assert list(best) == list(frontier.BEST_COLUMNS) and list(areas) == list(frontier.AREA_COLUMNS)
    assert "note: tiny, " in said and "no method at or below B = 10%, 20%: the cheapest is " in said
    assert " at 60.0%" in said


def test_bounds_alone_beside_dense(tmp_path, capsys):
    synthetic.perplexity_cell(tmp_path / "runs", "dense")
    for name, share in (("oracle_topk", 0.2), ("random", 0.3)):
        synthetic.perplexity_cell(tmp_path / "runs", name, damage=0.01, share=share)
    said, points, best, _ = analysed(tmp_path, capsys)
    assert set(points["method"]) == {"dense", "oracle_topk", "random"} and best.empty
    assert "only bounds (oracle_topk, random) beside dense: no method to name as best" in said


def test_a_suspect_is_marked_and_wins_nothing(tmp_path, capsys):
    synthetic.perplexity_cell(tmp_path / "runs", "dense")
    synthetic.perplexity_cell(tmp_path / "runs", damage=-0.3, share=0.15)  # far better than dense
    synthetic.perplexity_cell(tmp_path / "runs", "xattention", damage=0.02, share=0.3)
    said, points, best, areas = analysed(tmp_path, capsys, budgets=(0.2, 0.4))
    losses = points[points["metric"] == "perplexity"].set_index("method")
    assert losses["suspect"].to_dict() == {"cosa": True, "xattention": False, "dense": False}
    assert points[points["metric"] == "kl"].set_index("method")["suspect"]["cosa"], "in every panel"
    assert not losses.loc["cosa", "on_frontier"] and losses.loc["xattention", "on_frontier"]
    mine = best[best["metric"] == "perplexity"].set_index("budget")
    assert mine.loc[0.4, "best"] == "xattention" and " at 15.0%" in mine.loc[0.4, "suspects"]
    assert pd.isna(mine.loc[0.2, "best"]) and " at 15.0%" in mine.loc[0.2, "suspects"]
    assert areas.empty or "perplexity" not in set(areas["metric"])
    assert "B <= 20%: no method; left out as SUSPECT: " in said
    assert "the only method measured there (n = 4, paired, Holm); left out as SUSPECT: " in said
    assert "perplexity: SUSPECT, wins nothing until it is checked" in said


def test_suspects_are_in_no_area():
    lines = {"a": ("one", 0.1, [2.0, 2.2]), "b": ("one", 0.5, [1.0, 1.2])}
    lines |= {"c": ("two", 0.1, [2.0, 2.2]), "d": ("two", 0.5, [0.1, 0.3])}
    found = panel("kl", **lines)
    assert frontier.area_rows(found, replace(SETTINGS, interpolation="linear"))[0]["advantage"] < 0
    sound = replace(found, entries=tuple(replace(e, suspect=e.group == "two") for e in found.entries))
    assert frontier.area_rows(sound, SETTINGS) == []
    assert {row["best"] for row in best_rows(sound, SETTINGS)} == {"one"}
    assert sum("SUSPECT" in note for note in panel_notes(sound, SETTINGS)) == 2
    none = replace(found, entries=tuple(replace(e, suspect=True) for e in found.entries))
    assert "only suspect cells beside dense" in panel_notes(none, SETTINGS)[-1]


def test_suspects_are_on_no_frontier_and_hide_no_other():
    found = panel("kl", a=("one", 0.1, [0.1, 0.1]), b=("one", 0.3, [0.2, 0.2]), c=("one", 0.3, [0.2, 0.2]))
    assert list(frontier.point_table(found)["on_frontier"]) == [True, False, False]
    marked = replace(found, entries=tuple(replace(e, suspect=e.setting in "ac") for e in found.entries))
    table = frontier.point_table(marked).set_index("setting")
    assert table["on_frontier"].to_dict() == {"a": False, "b": True, "c": False}
    assert table["suspect"].to_dict() == {"a": True, "b": False, "c": True}


def test_what_was_left_out_is_said(tmp_path, capsys):
    synthetic.perplexity_cell(tmp_path / "runs", "dense")
    synthetic.perplexity_cell(tmp_path / "runs", damage=0.01, share=0.3)
    settings = synthetic.config(p=0.5)
    records = list(synthetic.perplexity_records(damage=0.1, share=0.2))[:2]
    died = RuntimeError("out of memory")
    synthetic.write_cell(tmp_path / "runs", settings, iter(records), end=lambda store: store.fail(died), expected=4)
    said, *_ = analysed(tmp_path, capsys)
    which = "tiny cosa select.p=0.5 perplexity@2048 (RuntimeError: out of memory)"
    assert f"note: left out, failed with 2 of 4 samples: {which}" in said


def test_a_cell_that_lacks_a_metric_leaves_the_others(tmp_path, capsys):
    synthetic.perplexity_cell(tmp_path / "runs", "dense")
    synthetic.perplexity_cell(tmp_path / "runs", damage=0.01, share=0.3)
    records = list(synthetic.perplexity_records(damage=0.1, share=0.2))
    del records[1][0]["metrics"]["kl"]
    synthetic.write_cell(tmp_path / "runs", synthetic.config(p=0.5), iter(records))
    said, points, *_ = analysed(tmp_path, capsys)
    count = points[points["method"] == "cosa"].groupby("metric").size()
    assert count.to_dict() == {"perplexity": 2, "kl": 1}
    note = "left out of kl, 1 of 4 samples lack kl: tiny cosa select.p=0.5 perplexity@2048"
    assert f"note: {note}" in said
    assert note in json.loads((tmp_path / "out" / "frontier.json").read_text())["notes"]


def test_equal_methods_have_an_advantage_of_zero():
    cheap, dear = [0.3, 0.1], [0.1, 0.1]
    found = panel("kl", a=("one", 0.1, cheap), b=("one", 0.5, dear), c=("two", 0.1, cheap), d=("two", 0.5, dear))
    areas = pd.DataFrame(frontier.area_rows(found, SETTINGS))
    (line,) = frontier.report(areas, pd.DataFrame(columns=list(frontier.BEST_COLUMNS)))
    assert "one over two, mean advantage 0 [0, 0] for B" in line
    assert [str(frontier._or_zero(value)) for value in (-0.0, -2e-16, 1e-16, 0.01)] == ["0.0", "0.0", "0.0", "0.01"]
