from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import synthetic

from evalkit.analysis import remap
from evalkit.analysis.remap import Point, gain_table, interpolate, matched_gain
from evalkit.analysis.settings import PAPER_SCALES, RemapAnalysis
from evalkit.app.isolation import CellOutcome
from evalkit.config import ExecutionConfig, ModelConfig, PerplexityConfig
from evalkit.errors import EvalkitError, InputError
from evalkit.runner import run_cell
from evalkit.store import read_cells

LENGTH = 2048


# ---------------------------------------------------------------------------------------------------- interpolation
def test_interpolation_by_hand():
    assert interpolate(0.25, [0.0, 0.5, 0.2], [1.0, 4.0, 1.0]) == pytest.approx(1.5)
    assert interpolate(0.5, [0.0, 0.5], [1.0, 4.0]) == 4.0
    assert math.isnan(interpolate(0.51, [0.0, 0.5], [1.0, 4.0])), "nothing is extrapolated"
    assert interpolate(0.2, [0.2, 0.2, 0.4], [3.0, 2.0, 5.0]) == 2.0


def test_gain_is_against_the_better_fixed_order():
    up = ([0.0, 0.4], [math.log(10), math.log(40)])
    down = ([0.0, 0.4], [math.log(10), math.log(22.5)])
    gain, against = matched_gain(0.2, math.log(12), {"ascending": up, "descending": down})
    # Half way, log-perplexity is linear: sqrt(10 x 40) = 20 and sqrt(10 x 22.5) = 15.
    assert gain == pytest.approx(15 - 12) and against == "descending"
    gain, against = matched_gain(0.2, math.log(12), {"ascending": up})
    assert gain == pytest.approx(20 - 12) and against == "ascending"
    short = ([0.0, 0.1], [math.log(10), math.log(11)])
    assert math.isnan(matched_gain(0.2, 1.0, {"ascending": up, "descending": short})[0]), "the better is not known"
    assert math.isnan(matched_gain(0.2, 1.0, {})[0])


def point(order, scale, ratio, perplexity, windows=6, budget=0.54):
    rng = np.random.default_rng(0)
    tokens = np.full(windows, 100.0)
    base = rng.normal(0, 0.1, windows)
    nll = tokens * (math.log(perplexity) + base - base.mean())
    visited, dense = np.full(windows, 200.0), np.full(windows, 400.0)
    return Point(budget, 0.9, scale, order, nll, tokens, visited, visited * (1 - ratio), dense, f"{order}{scale}")


def test_gains_on_a_made_up_grid():
    grid = [
        point("off", -1, 0.0, 10.0),
        point("hrm_first", 100, 0.2, 11.0), point("hrm_first", 500, 0.4, 13.0), point("hrm_first", 700, 0.55, 15.0),
        point("hrm_first", 900, 0.8, 20.0),
        point("ascending", 100, 0.1, 11.0), point("ascending", 500, 0.6, 30.0),
        point("descending", 100, 0.2, 12.0), point("descending", 500, 0.5, 18.0),
    ]  # fmt: skip
    counts = remap.bootstrap.draws([0] * 6, 100, 0)
    table = gain_table(grid, counts)
    first, second, third, fourth, mean = table[table["row"] != "one"].to_dict("records")
    up = math.exp(np.interp(0.2, [0.1, 0.6], np.log([11.0, 30.0])))
    down = 12.0
    assert first["gain"] == pytest.approx(min(up, down) - 11.0) and first["against"] == "descending"
    down = math.exp(np.interp(0.4, [0.2, 0.5], np.log([12.0, 18.0])))
    up = math.exp(np.interp(0.4, [0.1, 0.6], np.log([11.0, 30.0])))
    assert down < up and second["gain"] == pytest.approx(down - 13.0) and second["skip_ratio"] == pytest.approx(0.4)
    assert math.isnan(third["gain"]), "descending never skips 55 %"
    assert math.isnan(fourth["gain"]), "the fixed orders never skip 80 %"
    alone = {(row["skip_scale"], row["against"]): row for row in table[table["row"] == "one"].to_dict("records")}
    assert set(alone) == {
        (100, "ascending"),
        (100, "descending"),
        (500, "ascending"),
        (500, "descending"),
        (700, "ascending"),
    }
    up_there = math.exp(np.interp(0.55, [0.1, 0.6], np.log([11.0, 30.0])))
    row = alone[700, "ascending"]
    assert row["gain"] == pytest.approx(up_there - 15.0) and row["low"] <= row["gain"] <= row["high"]
    assert alone[500, "ascending"]["gain"] == pytest.approx(up - 13.0)
    more = {"B_stage1": 0.5, "skip_ratio": 0.0, "perplexity": 9.0, "windows": 6, "delta_over_N": 0.1}
    budgets = pd.DataFrame([{**vars(p), "stage1_budget": p.budget, **more} for p in grid])
    budgets.loc[len(budgets)] = {**budgets.iloc[0], "order": "dense"}
    said = remap.report(budgets, table)
    assert sum("55.0%" in line and "not all fixed orders reach it" in line for line in said) == 1
    assert sum("55.0%" in line and "against ascending alone" in line for line in said) == 1
    assert not any("40.0%" in line and "alone" in line for line in said)
    assert mean["row"] == "mean" and mean["gain"] == pytest.approx((first["gain"] + second["gain"]) / 2)
    # All curves move together from draw to draw: far narrower than the perplexities themselves.
    assert first["low"] <= first["gain"] <= first["high"] and first["high"] - first["low"] < 0.2


def test_the_point_without_a_skip_is_on_every_curve():
    """A gain below what the fixed orders' smallest scale skips is against the line to no skip at all."""
    grid = [point("off", -1, 0.0, 10.0), point("hrm_first", 100, 0.1, 10.5)]
    grid += [point("ascending", 100, 0.2, 14.4), point("descending", 100, 0.4, 90.0)]
    row = gain_table(grid, remap.bootstrap.draws([0] * 6, 100, 0)).iloc[0]
    # Half way from 10 to 14.4 by logarithms is 12; descending, a quarter of the way to 90, is at 17.3.
    assert row["gain"] == pytest.approx(12.0 - 10.5) and row["against"] == "ascending"


def test_without_a_difference_there_is_no_gain():
    grid = [point("off", -1, 0.0, 10.0)]
    grid += [point(order, 100, 0.3, 11.0) for order in ("hrm_first", "ascending", "descending")]
    row = gain_table(grid, remap.bootstrap.draws([0] * 6, 100, 0)).iloc[0]
    assert row["gain"] == pytest.approx(0.0, abs=1e-9) and row["low"] == pytest.approx(0.0, abs=1e-9)


def test_skip_ratio_is_skipped_over_visited():
    found = point("ascending", 100, 0.25, 10.0)
    assert found.skip_ratio(np.ones((1, 6)))[0] == pytest.approx(0.25), "of visited blocks, not of all"


# ---------------------------------------------------------------------------------------------------------- settings
def analysis(tmp_path, **more):
    model = ModelConfig(name="tiny", path="org/tiny", native_context=131072)
    task = PerplexityConfig(length=LENGTH, limit=4, score="all", fidelity=False)
    base = {"runs": str(tmp_path / "runs"), "out": str(tmp_path / "out"), "budgets": (1.0, 0.42), "resamples": 100}
    found = RemapAnalysis(model, task, **{**base, **more})
    found.validate()
    return found


def test_ratios_stand_for_skip_scales(tmp_path):
    assert analysis(tmp_path).scales == list(PAPER_SCALES)
    short = analysis(tmp_path, ratios=(0.25, -1.0, 0.06))
    assert short.scales == [-1.0, 0.06 * LENGTH, 0.25 * LENGTH]
    assert analysis(tmp_path, ratios=(0.06,)).scales == [0.06 * LENGTH]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"ratios": (1.5,)}, "ratios"),
        ({"ratios": (-1.0,)}, "ratios"),
        ({"skip_scales": (-1.0,)}, "skip_scales"),
        ({"skip_scales": (-1.0, 100.0), "ratios": (0.1,)}, "skip_scales"),
        ({"skip_scales": (100.0, 100.0)}, "skip_scales"),
        ({"orders": ("hrm_first",)}, "orders"),
        ({"orders": ("ascending", "descending")}, "orders"),
        ({"orders": ("hrm_first", "upwards")}, "orders"),
        ({"budgets": (0.0,)}, "budgets"),
        ({"tolerance": 0.2}, "tolerance"),
        ({"stride": 0}, "stride"),
        ({"workers": 0}, "workers"),
    ],
)
def test_bad_settings_are_refused(tmp_path, change, field):
    with pytest.raises(InputError) as error:
        analysis(tmp_path, **change)
    assert error.value.field == field


def test_windows_of_one_block_are_refused(tmp_path):
    for length, fits in ((100, False), (255, False), (256, True)):
        task = PerplexityConfig(length=length, limit=4, score="all", fidelity=False)
        settings = replace(analysis(tmp_path), task=task)
        if fits:
            settings.validate()
            continue
        with pytest.raises(InputError, match=f"^task.length={length}: at least 256, two blocks of 128 tokens"):
            settings.validate()


# ------------------------------------------------------------------------------------------------- the whole analysis
class FakeRuns:
    """Stands in for the model: writes cells whose budgets and losses follow from the settings."""

    def __init__(self):
        self.ran, self.dies_after = [], 10**9

    def __call__(self, cell):
        settings = cell.as_dict()
        key = synthetic.cell_key(synthetic.identity(settings))
        path = cell.out / "cells" / key
        if not (path / "cell.json").exists():
            if len(self.ran) == self.dies_after:
                raise KeyboardInterrupt
            self.ran.append(cell)
            synthetic.write_cell(cell.out, settings, self.records(cell), given_overrides=cell.overrides)
        return CellOutcome(cell.label, "done", "", path, 1.0)

    def records(self, cell):
        method, limit = cell.as_dict()["method"], cell.task.limit
        dense = method["name"] == "dense"
        for index in range(limit):
            visited, ratio, damage = 4000, 0.0, 0.0
            if not dense:
                p, scale = method["select"]["p"], method["skip_scale"]
                # All windows together spend two points more than the first ones.
                visited = 4000 if p >= 1 else round(4000 * (p**3 + (0.04 if index >= 2 else 0.0)))
                gain = {"hrm_first": 1.0, "ascending": 0.6, "descending": 0.8}[method["order"]]
                ratio = min(0.9, gain * max(0.0, scale) / LENGTH * 2)
                damage = (1 - p) + (max(0.0, scale) / LENGTH) ** 2
            computed = round(visited * (1 - ratio))
            cells = {"dense": 4000, "visited": visited, "computed": computed}
            cells |= {f"{name}_blocks": value for name, value in cells.items()}
            frame = pd.DataFrame({"layer": [0], "head": [0], **{name: [value] for name, value in cells.items()}})
            metrics = {"nll": 100 * (2.5 + 0.1 * index + damage), "tokens": 100}
            record, _ = synthetic.record("perplexity", LENGTH, index, metrics)
            record["budget"] = {**record["budget"], **cells}
            yield record, frame[list(synthetic.frame(128, 1.0).columns)]


def test_the_whole_grid_through_the_store(tmp_path, capsys):
    settings, runs = analysis(tmp_path, ratios=(-1.0, 0.06, 0.25), search_limit=2), FakeRuns()
    assert remap.run(settings, "evalkit analyze remap", ["model=tiny", "ratios=[1]"], runs) == 0
    table = pd.read_csv(tmp_path / "out" / "remap.csv")
    # Dense, and for each budget one point without a skip and two scales in three orders.
    assert len(table) == 1 + 2 * (1 + 2 * 3) and set(table["order"]) == {
        "dense", "off", "hrm_first", "ascending", "descending",
    }  # fmt: skip
    spent = table[table["order"] == "off"].set_index("stage1_budget")["B_stage1"]
    assert spent[1.0] == 1.0 and abs(spent[0.42] - 0.42) <= settings.tolerance, (
        "over all windows, not the searched ones"
    )
    row = table[(table["order"] == "ascending") & (table["stage1_budget"] == 1.0) & (table["delta_over_N"] > 0.2)].iloc[
        0
    ]
    assert row["skip_ratio"] == pytest.approx(0.3) and row["skip_scale"] == pytest.approx(0.25 * LENGTH)
    assert row["perplexity"] == pytest.approx(math.exp(2.65 + 0.0625), rel=1e-6)
    gains = pd.read_csv(tmp_path / "out" / "remap_gain.csv")
    mine = gains[(gains["stage1_budget"] == 1.0) & (gains["row"] == "point")].iloc[0]
    # HRM-first skips 12 % at 0.06; descending interpolates between 9.6 % (0.06) and 40 % (0.25).
    down = np.interp(0.12, [0.096, 0.4], [2.65 + 0.06**2, 2.65 + 0.25**2])
    assert mine["against"] == "descending" and mine["skip_ratio"] == pytest.approx(0.12)
    assert mine["gain"] == pytest.approx(math.exp(down) - math.exp(2.65 + 0.06**2), rel=1e-3)
    said = capsys.readouterr().out
    assert "gain at matched skip ratio 12.0% (delta 122.88) against descending" in said and "Stage-1 budget 42%" in said
    assert (tmp_path / "out" / "remap.png").stat().st_size > 1000
    # Every cell is one of evalkit run, told by overrides that compose it again.
    cell = next(cell for cell in runs.ran if cell.method.name == "cosa" and cell.method.order == "descending")
    assert {"model=tiny", "method=cosa", "method.order=descending", "task=perplexity", "task.score=all"} <= set(
        cell.overrides
    )
    assert not any(item.startswith("ratios") for item in cell.overrides)
    before = len(runs.ran)
    remap.run(settings, "c", [], runs)
    assert len(runs.ran) == before, "finished cells are not run again"


def test_a_search_on_more_windows_than_there_are_is_said(tmp_path, capsys):
    remap.run(analysis(tmp_path, ratios=(0.25,), search_limit=9), "c", [], FakeRuns())
    assert "search_limit=9 is more than task.limit=4: p is searched on all of them" in capsys.readouterr().out


def test_a_killed_grid_goes_on(tmp_path):
    settings, runs = analysis(tmp_path, ratios=(-1.0, 0.25), budgets=(1.0, 0.42)), FakeRuns()
    runs.dies_after = 5
    with pytest.raises(KeyboardInterrupt):
        remap.run(settings, "c", [], runs)
    runs.dies_after = 10**9
    remap.run(settings, "c", [], runs)
    keys = [synthetic.cell_key(synthetic.identity(cell.as_dict())) for cell in runs.ran]
    assert len(keys) == len(set(keys))


def test_several_cells_at_a_time_give_the_same(tmp_path):
    tables = []
    for workers in (1, 3):
        settings = analysis(tmp_path / str(workers), ratios=(-1.0, 0.06, 0.25), workers=workers)
        remap.run(settings, "c", [], FakeRuns())
        tables.append(pd.read_csv(tmp_path / str(workers) / "out" / "remap.csv"))
    pd.testing.assert_frame_equal(*tables)

    def fails(cell):
        ok = cell.method.name == "dense"
        return FakeRuns()(cell) if ok else CellOutcome(cell.label, "failed", "out of memory", tmp_path, 1.0)

    with pytest.raises(EvalkitError, match="out of memory"):
        remap.run(analysis(tmp_path / "fails", workers=3), "c", [], fails)


def test_searches_that_meet_in_a_cell_do_not_run_it_side_by_side(tmp_path):
    inner, running = FakeRuns(), set()

    def one_at_a_time(cell):
        if cell.label in running:
            return CellOutcome(cell.label, "failed", "in use by another process", tmp_path, 1.0)
        running.add(cell.label)
        time.sleep(0.02)
        try:
            return inner(cell)
        finally:
            running.remove(cell.label)

    budgets = (0.54, 0.42, 0.32, 0.28)
    remap.run(analysis(tmp_path, ratios=(-1.0, 0.25), budgets=budgets, workers=4), "c", [], one_at_a_time)
    assert len(inner.ran) == len({cell.label for cell in inner.ran}), "and do not run it twice"


def test_orders_share_the_selection(tmp_path):
    runs = FakeRuns()
    remap.run(analysis(tmp_path, ratios=(-1.0, 0.25), budgets=(0.42,)), "c", [], runs)
    skipping = [cell.method for cell in runs.ran if getattr(cell.method, "skip_scale", -1) > 0]
    assert {method.order for method in skipping} == {"hrm_first", "ascending", "descending"}
    assert len({method.select.p for method in skipping}) == 1


def test_a_budget_that_cannot_be_reached(tmp_path):
    class Coarse(FakeRuns):
        def records(self, cell):
            for record, frame in super().records(cell):
                if cell.method.name == "cosa" and cell.method.select.p < 1:
                    for name in ("visited", "computed", "visited_blocks", "computed_blocks"):
                        frame[name] = record["budget"][name] = 3000 if cell.method.select.p > 0.7 else 1000
                yield record, frame

    with pytest.raises(EvalkitError, match="budgets=0.42: no p brings"):
        remap.run(analysis(tmp_path, ratios=(0.25,)), "c", [], Coarse())


def test_a_failed_cell_ends_the_analysis_with_its_reason(tmp_path):
    def fails(cell):
        return CellOutcome(cell.label, "failed", "out of memory", tmp_path, 1.0)

    with pytest.raises(EvalkitError, match="dense .* out of memory; the same command goes on"):
        remap.run(analysis(tmp_path), "c", [], fails)


def test_on_a_small_model(model_config, tmp_path):
    """The real runner, in this process: the grid's cells are finished, pair with dense, and skip."""

    def runs(cell):
        directory = []
        run_cell(cell, opened=directory.append)
        return CellOutcome(cell.label, "done", "", directory[-1], 0.1)

    (tmp_path / "text.txt").write_text(" ".join(str(i * i) for i in range(1500)))
    task = PerplexityConfig(corpus=str(tmp_path / "text.txt"), length=512, limit=2, score="all", fidelity=False)
    settings = analysis(tmp_path, ratios=(-1.0, 0.25), budgets=(1.0, 0.8), tolerance=0.05, search_limit=2)
    settings = replace(settings, model=model_config, task=task, execution=ExecutionConfig(device="cpu"))
    assert remap.run(settings, "c", [], runs) == 0
    table = pd.read_csv(tmp_path / "out" / "remap.csv")
    assert len(table) == 1 + 2 * 4 and table[table["order"] == "off"]["skip_ratio"].eq(0).all()
    whole = table[(table["order"] == "off") & (table["stage1_budget"] == 1.0)].iloc[0]
    assert whole["perplexity"] == pytest.approx(table[table["order"] == "dense"].iloc[0]["perplexity"], rel=1e-5)
    assert all(cell.done for cell in read_cells([tmp_path / "runs"]))
