from __future__ import annotations

import base64
import html.parser
import json
import math
import tomllib
from importlib.resources import files
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic

from evalkit.errors import StoreError
from evalkit.report import pareto, table
from evalkit.report.load import load
from evalkit.report.page import answer, budgets, build, embed, page, schema
from evalkit.report.rows import Row, build_rows
from evalkit.store import read_cell


def document_of(cells):
    loaded = load([cells.out])
    rows = build_rows(loaded)
    return build(loaded, rows), rows


def objects(document):
    return [dict(zip(document["rows"]["fields"], row, strict=True)) for row in document["rows"]["data"]]


# ----------------------------------------------------------------------------------------------------------- document
def test_every_number_is_the_one_of_the_tables(cells):
    cells.demo()
    document, rows = document_of(cells)
    found = objects(document)
    assert len(found) == len(rows.rows)
    assert [column["title"] for column in document["columns"]] == [column.title for column in table.COLUMNS]
    for given, row in zip(found, rows.rows, strict=True):
        assert given["text"] == [column.text(row) for column in table.COLUMNS]
        for name in ("value", "low", "high", "n", "difference", "difference_low", "B", "B_stage1", "B_cost"):
            assert given[name] == getattr(row, name)
        assert [document["cells"][at]["key"] for at in given["cells"]] == row.key.split()
    for made, section in zip(
        document["sections"], table.sections(rows.level("cell", "average", "subtask")), strict=True
    ):
        assert made["heading"] == section.heading
        assert [rows.rows[at] for at in made["rows"]] == list(section.rows)


def test_it_has_the_fields_of_its_schema_and_is_json(cells):
    cells.demo()
    document, _ = document_of(cells)
    assert set(document) == set(schema.Document.__annotations__)
    for name, kind in [("cells", schema.Cell), ("panels", schema.Panel), ("answers", schema.Answer)]:
        assert all(set(item) == set(kind.__annotations__) for item in document[name])
    json.dumps(document, allow_nan=False)


def test_what_is_not_finite_is_null(cells):
    cells.perplexity("dense", limit=1)
    cells.perplexity(p=0.9, damage=0.1, share=0.4, limit=1)
    document, _ = document_of(cells)
    assert all(row["low"] is None for row in objects(document) if row["metric"] == "perplexity")


def test_panels_hold_all_lengths_and_answers_only_the_averages(cells):
    for length in (4096, 8192):
        cells.ruler("dense", length=length)
        cells.ruler(length=length, share=0.4)
    document, rows = document_of(cells)
    assert sorted(panel["length"] for panel in document["panels"]) == ["4096", "8192", "mean of 4096, 8192"]
    (given,) = document["answers"]
    assert document["panels"][given["panel"]]["length"] == "mean of 4096, 8192"
    (average,) = [row for row in objects(document) if row["level"] == "average" and not row["dense"]]
    assert len(average["cells"]) == 2


def test_prefill_time_is_the_median(cells, tmp_path):
    items = list(synthetic.perplexity_records(limit=3))
    for (record, _), seconds in zip(items, (0.1, 0.3, 9.0), strict=True):
        record["seconds"]["prefill"] = seconds
    synthetic.write_cell(cells.out, synthetic.config("dense", limit=3), iter(items))
    items = list(synthetic.perplexity_records(limit=3, share=0.5))
    for record, _ in items:
        del record["seconds"]
    synthetic.write_cell(cells.out, synthetic.config(p=0.5, limit=3), iter(items))
    document, _ = document_of(cells)
    assert {(row["dense"], row["seconds"]) for row in objects(document)} == {(True, 0.3), (False, None)}


def test_commands_settings_and_environment_of_a_cell(cells):
    cells.perplexity("dense")
    cells.perplexity(p=0.9, damage=0.1, share=0.4)
    document, _ = document_of(cells)
    (cell,) = [cell for cell in document["cells"] if cell["method"].startswith("cosa")]
    assert cell["command"].startswith("evalkit run model=tiny method=cosa task=perplexity method.select.p=0.9")
    assert ("method.select.p", "0.9") in cell["settings"] and ("task.length", "2048") in cell["settings"]
    assert "torch 2" in document["environments"][cell["environment"]]


def test_problems_are_named_worst_first(cells):
    cells.perplexity("dense")
    cells.perplexity(p=0.9, damage=-0.5, share=0.4)
    records = synthetic.perplexity_records(share=0.3, damage=0.1, warnings=["odd"], fallback=0.25)
    synthetic.write_cell(cells.out, synthetic.config(p=0.8), records)
    few = iter(list(synthetic.perplexity_records(share=0.4))[:1])
    failing = synthetic.config(p=0.5)
    synthetic.write_cell(cells.out, failing, few, end=lambda store: store.fail(ValueError("out of luck")), expected=4)
    document, _ = document_of(cells)
    problems = document["problems"]
    assert [problem["kind"] for problem in problems] == ["failed", "suspect", "fallback", "warning"]
    assert "out of luck" in problems[0]["text"] and "evalkit run model=tiny method=cosa" in problems[0]["text"]
    assert "better than dense beyond its interval" in problems[1]["text"] and "p=0.9" in problems[1]["where"]
    assert problems[2]["text"].startswith("25.0 %") and "odd" in problems[3]["text"]
    assert "1 cell not finished" in document["summary"]


# ------------------------------------------------------------------------------------------------------------ budgets
def test_layers_average_to_the_cells_budget(cells):
    path = cells.perplexity(p=0.9, share=0.37)
    cells.perplexity("dense")
    document, rows = document_of(cells)
    shares = budgets.by_head(read_cell(path))
    (row,) = [row for row in rows.rows if row.metric == "perplexity" and not row.dense]
    assert shares.shape == (synthetic.LAYERS, synthetic.HEADS)
    assert 100 * shares.mean() == pytest.approx(row.B, abs=1e-9)
    given = document["cells"][objects(document)[rows.rows.index(row)]["cells"][0]]["budget"]
    assert np.mean(given["layers"]) == pytest.approx(row.B, abs=0.01)


def test_samples_weigh_by_their_tokens_and_heads_keep_their_place(cells):
    def sample(index, tokens, shares):
        dense = tokens * (tokens + 1) // 2
        record, frame = synthetic.record("vt", 4096, index, {"score": 1.0}, share=0.5, tokens=tokens)
        frame = frame.assign(computed=np.round(dense * np.asarray(shares).ravel()).astype(np.int64))
        frame["visited"] = frame["computed"]
        for name in ("computed", "visited"):
            record["budget"][name] = int(frame[name].sum())
        return record, frame

    low = [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]
    high = [[0.2, 0.4], [0.5, 0.6], [0.7, 1.0]]
    # The store sorts samples by index; the records stay in the order they were run.
    items = [sample(1, 3000, high), sample(0, 1000, low)]
    path = synthetic.write_cell(cells.out, synthetic.config(task="ruler", tasks=("vt",), length=4096), iter(items))
    expected = (np.array(low) + 3 * np.array(high)) / 4
    np.testing.assert_allclose(budgets.by_head(read_cell(path)), expected, atol=1e-6)
    packed = budgets.pack(expected)
    assert list(base64.b64decode(packed["map"])) == [18, 35, 45, 55, 65, 90] and packed["heads"] == 2
    assert packed["layers"] == [26.25, 50.0, 77.5]


def test_budgets_that_lack_a_sample_are_refused(cells):
    path = cells.perplexity("dense")
    frame = pd.read_parquet(path / "budget.parquet")
    cell = read_cell(path)
    frame[frame["index"] > 0].to_parquet(path / "budget.parquet")
    with pytest.raises(StoreError, match="do not cover"):
        budgets.by_head(cell)
    frame.iloc[1:].to_parquet(path / "budget.parquet")
    with pytest.raises(StoreError, match="do not cover"):
        budgets.by_head(cell)


# ------------------------------------------------------------------------------------------------------------- answer
def row_of(method, B, value, difference=None, half=1.0, *, metric="accuracy", n=100, **more):
    against = {}
    if difference is not None:
        low, high = difference - half, difference + half
        against = {"difference": difference, "difference_low": low, "difference_high": high}
        if metric == "perplexity":  # a dense perplexity that is certain
            against |= {"ratio_low": 1 + low / (value - difference), "ratio_high": 1 + high / (value - difference)}
    labels = {"level": "cell", "group": "g", "family": "f", "model": "m", "method": method, "series": method.split()[0]}
    rest = {"task": "t", "length": "4096", "low": value - 1, "high": value + 1, "dense": method == "dense"}
    return Row(**labels, **rest, metric=metric, value=value, n=n, B=B, **against, **more)


def panel_of(*rows):
    return pareto.Panel(rows[0].metric, rows)


DENSE = row_of("dense", 100.0, 80.0)


def test_the_lowest_budget_that_is_shown_to_keep_accuracy_is_named():
    good, cheaper = row_of("cosa p=.9", 40.0, 79.8, -0.2, 0.5), row_of("cosa p=.8", 30.0, 79.6, -0.4, 0.5)
    bad, other = row_of("cosa p=.5", 10.0, 70.0, -10.0), row_of("xattention", 50.0, 79.9, -0.1, 0.5)
    never = row_of("minference", 20.0, 60.0, -20.0)
    found = answer.find(panel_of(DENSE, good, cheaper, bad, other, never), 2.0)
    assert found.kept and found.row is cheaper
    assert found.text.startswith("cosa p=.8 keeps accuracy within 2 points of dense at a realized budget of 30.0 %")
    assert "79.60 [78.60, 80.60] against 80.00 of dense" in found.text
    assert "-0.40 [-0.90, +0.10], n = 100." in found.text
    assert found.text.endswith("Next: xattention at 50.0 %. Not shown for: minference.")


def test_a_wide_interval_shows_nothing():
    found = answer.find(panel_of(DENSE, row_of("cosa", 30.0, 80.0, 0.0, 8.0)), 2.0)
    assert not found.kept and found.row is not None
    assert found.text.startswith("No setting is shown to keep accuracy within 2 points of dense: with n = 100")


def test_the_nearest_is_named_where_none_keeps_accuracy():
    near, far = row_of("cosa p=.9", 40.0, 70.0, -10.0), row_of("cosa p=.1", 5.0, 20.0, -60.0)
    found = answer.find(panel_of(DENSE, near, far), 2.0)
    assert not found.kept and found.row is near and "none was measured within it" in found.text


def test_bounds_are_no_answer():
    found = answer.find(
        panel_of(DENSE, row_of("oracle_topk", 5.0, 80.0, 0.0, 0.1), row_of("cosa", 9.0, 80.0, 0.0, 0.1)), 1
    )
    assert found.row is not None and found.row.method == "cosa" and "oracle" not in found.text


def test_a_suspect_is_no_answer_beside_a_sound_one():
    odd, sound = row_of("cosa", 9.0, 85.0, 5.0, 0.1), row_of("xattention", 50.0, 80.0, 0.0, 0.1)
    alone, both = answer.find(panel_of(DENSE, odd), 1), answer.find(panel_of(DENSE, odd, sound), 1)
    assert not alone.kept and alone.row is odd and "marked as suspect" in alone.text
    assert both.kept and both.row is sound and both.text.endswith("Left out as suspect: cosa at 9.0 %.")


def test_a_loss_of_exactly_the_margin_was_measured_within_it():
    found = answer.find(panel_of(DENSE, row_of("cosa", 30.0, 78.0, 100 * (0.78 - 0.8), 5.0)), 2.0)
    assert "By its measured value alone, cosa" in found.text


def test_perplexity_margin_is_relative():
    dense = row_of("dense", 100.0, 20.0, metric="perplexity")
    sparse = row_of("cosa", 30.0, 20.3, 0.3, 0.05, metric="perplexity")
    assert answer.loss(sparse) == pytest.approx(1.5)
    assert answer.find(panel_of(dense, sparse), 2.0).kept and not answer.find(panel_of(dense, sparse), 1.0).kept


def test_perplexity_margin_is_tested_on_the_ratio_to_dense():
    """That dense varies between windows widens the difference, and not what it is in percent."""
    row = row_of("cosa", 30.0, 101.0, 1.0, 1.5, metric="perplexity", n=20)
    assert answer.within([row], 2.0) == [False]
    row.ratio_low, row.ratio_high = 1.005, 1.015
    assert answer.within([row], 2.0) == [True] and answer.within([row], 1.2) == [False]


@pytest.mark.parametrize("metric", ["accuracy", "perplexity"])
def test_the_test_agrees_with_the_interval(metric):
    """Alone in its panel, a setting is within the margin exactly where its interval is."""
    for bound in (1.99, 2.01):
        if metric == "accuracy":
            row = row_of("cosa", 30.0, 79.0, -1.0, bound - 1)
        else:
            row = row_of("cosa", 30.0, 101.0, 1.0, bound - 1, metric=metric, n=5)
        assert answer.within([row], 2.0) == [bound < 2]


def test_many_settings_are_corrected_for():
    row = row_of("cosa", 30.0, 79.9, -0.1, 1.6)
    assert answer.within([row], 2.0) == [True]
    assert answer.within([row, *[row_of("cosa", 20.0, 50.0, -30.0)] * 30], 2.0)[0] is False


def test_holm():
    assert answer.holm([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]
    assert answer.holm([0.04, 0.02], 0.05) == [True, True]
    assert answer.holm([0.03, 0.03], 0.05) == [False, False]
    assert answer.holm([], 0.05) == []


def test_one_window_shows_nothing():
    row = row_of("cosa", 30.0, 20.0, 0.0, metric="perplexity", n=1)
    row.difference_low = row.difference_high = row.ratio_low = row.ratio_high = None
    assert answer.within([row], 5.0) == [False]


# --------------------------------------------------------------------------------------------------------------- page
class Elements(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.loaded, self.handlers = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action") and not value.startswith("#"):
                self.loaded.append(value)
            if name.startswith("on"):
                self.handlers.append(name)


def test_the_page_loads_nothing_and_holds_what_is_hostile_as_data(cells):
    cells.perplexity("dense", model=f"tiny{synthetic.HOSTILE}")
    records = list(synthetic.perplexity_records(share=0.4))
    records[0][0]["warnings"] = [synthetic.HOSTILE]
    synthetic.write_cell(cells.out, synthetic.config(p=0.5, model=f"tiny{synthetic.HOSTILE}"), iter(records))
    document, _ = document_of(cells)
    text = page(document)
    found = Elements()
    found.feed(text)
    assert not found.loaded and not found.handlers and "img" not in found.tags
    assert found.tags.count("script") == 2 and "link" not in found.tags
    assert "default-src 'none'" in text and "unsafe" not in text.partition("</head>")[0]
    data = text.partition('id="document">')[2].partition("</script>")[0]
    assert "<" not in data and "\u2028" not in data
    assert json.loads(data) == json.loads(json.dumps(document))


def test_what_is_not_finite_cannot_be_embedded(cells):
    cells.perplexity("dense")
    document, _ = document_of(cells)
    document["rows"]["data"][0][8] = math.inf
    with pytest.raises(ValueError):
        embed(document)


def test_assets_travel_with_the_package():
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["evalkit"]
    for asset in (files("evalkit.report.page") / "assets").iterdir():
        assert f"**/*{Path(asset.name).suffix}" in patterns, asset.name
