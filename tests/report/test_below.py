"""Dense far below the published score, and which bests are shown to be best."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import synthetic
from rich.console import Console

from evalkit.benchmarks.ruler import TASKS
from evalkit.errors import InputError
from evalkit.report import stats, write_report
from evalkit.report.below import MISSING, NOTE, mark
from evalkit.report.load import load
from evalkit.report.page.document import build
from evalkit.report.paper import published
from evalkit.report.paper.layout import Pair, _winners
from evalkit.report.paper.measured import Measure
from evalkit.report.rows import build_rows
from evalkit.report.table import csv, markdown

PAPER = Path(__file__).parents[2] / "results" / "paper"
PRINTED = 95.46
"""Qwen3-8B, dense, RULER at 4K."""


def dense(out, score, *, n=10, model="qwen3-8b", tasks=tuple(TASKS), length=4096):
    scores = {name: [score] * n for name in tasks}
    made = synthetic.config("dense", task="ruler", length=length, limit=n, tasks=tasks, model=model)
    records = synthetic.ruler_records(scores, length=length)
    synthetic.write_cell(out, made, records, given_overrides=(f"model={model}", "method=dense", "task=ruler"))
    loaded = load([out])
    return mark(build_rows(loaded), loaded.cells, PAPER), loaded


def test_dense_far_below_is_a_suspect(tmp_path):
    rows, loaded = dense(tmp_path, 0.8)
    (row,) = (row for row in rows.level("cell") if row.metric == "accuracy")
    assert row.published == PRINTED and row.below_published and row.suspect and not row.beats_dense
    (note,) = (note for note in rows.notes if note.startswith(NOTE))
    assert "80.00" in note and "the paper prints 95.46" in note
    assert note in markdown(rows) and ",95.46," in csv(rows)
    (problem,) = (p for p in build(loaded, rows)["problems"] if p["kind"] == "below")
    assert "far below the published 95.46" in problem["text"]


def test_only_apart_intervals_are_far(tmp_path):
    """A score below the printed one that its interval allows for is no suspect: few samples say little."""
    for n, score, far in ((10, 0.8, True), (1, 0.8, False), (10, 0.95, False), (10, 1.0, False)):
        rows, _ = dense(tmp_path / f"{n}-{score}", score, n=n)
        (row,) = (row for row in rows.level("cell") if row.metric == "accuracy")
        low = 100 * stats.wilson(PRINTED / 100, row.n)[0]
        assert row.below_published == far == (row.high < low), (n, score)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "smollm2"},  # the paper does not print it
        {"tasks": tuple(TASKS)[:12]},  # another average
        {"length": 2048},
    ],
)
def test_what_the_paper_does_not_print_is_not_compared(tmp_path, other):
    rows, _ = dense(tmp_path, 0.1, **other)
    assert all(row.published is None and not row.suspect for row in rows.rows) and rows.notes == []


def test_longbench_is_compared_by_mode(tmp_path):
    made = synthetic.config("dense", task="ruler", length=131072, model="qwen3-8b")
    made["task"] = {"name": "longbench_v2", "mode": "direct", "data": "zai-org/LongBench-v2", "length": 131072}
    records = []
    for index in range(300):
        record, frame = synthetic.record(
            "longbench_v2_direct", 131072, index, {"score": float(index % 5 == 0)}, tokens=99
        )
        record["item"] = {"difficulty": ("easy", "hard")[index % 2], "length": "short", "id": str(index), "answer": "A"}
        records.append((record, frame))
    synthetic.write_cell(tmp_path, made, iter(records), given_overrides=("method=dense", "task=longbench-v2"))
    loaded = load([tmp_path])
    rows = mark(build_rows(loaded), loaded.cells, PAPER)
    (row,) = (row for row in rows.level("cell") if row.metric == "accuracy")
    assert row.published == pytest.approx((192 * 39.19 + 311 * 32.72) / 503) and row.below_published


def test_without_the_papers_numbers_a_note_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(published, "CHECKOUT", tmp_path / "nowhere")
    rows, loaded = dense(tmp_path / "runs", 0.1)
    plain = mark(build_rows(loaded), loaded.cells)
    assert all(row.published is None for row in plain.rows)
    (note,) = plain.notes
    assert note.startswith(f"{MISSING}, 1 cell: published='results/paper/ruler.csv'")
    assert [p["text"] for p in build(loaded, plain)["problems"]] == [note], "the page shows it too"
    with pytest.raises(InputError, match="published="):
        mark(rows, loaded.cells, tmp_path)


@pytest.mark.parametrize("other", [{"model": "smollm2"}, {"tasks": tuple(TASKS)[:12]}])
def test_no_note_where_nothing_would_have_been_compared(tmp_path, monkeypatch, other):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(published, "CHECKOUT", tmp_path / "nowhere")
    _, loaded = dense(tmp_path / "runs", 0.1, **other)
    assert mark(build_rows(loaded), loaded.cells).notes == []


@pytest.mark.parametrize("inside", [True, False])
def test_the_report_says_so_wherever_it_runs(tmp_path, monkeypatch, inside):
    monkeypatch.chdir(PAPER.parents[1] if inside else tmp_path)
    dense(tmp_path / "runs", 0.5)
    console = Console(file=io.StringIO(), width=140)
    paths = write_report([tmp_path / "runs"], tmp_path / "out", formats=["markdown"], console=console)
    assert NOTE in paths.markdown.read_text() and NOTE in console.file.getvalue()


# --------------------------------------------------------------------------------------------------------- winners
def pairs_of(**scores):
    """Methods with scores by column, 40 samples each."""
    found = {}
    for name, columns in scores.items():
        found[name] = {}
        for column, values in columns.items():
            measure = Measure({("t", i): v for i, v in enumerate(values)}, {"t": 1.0}, [], 20.0, 20.0, 1)
            found[name][column] = Pair("1/B", "m", "", name, column, None, measure)
    return found


WELL, WORSE, BAD = [1.0] * 36 + [0.0] * 4, [1.0] * 34 + [0.0] * 6, [1.0] * 10 + [0.0] * 30


def test_best_is_told_from_shown_to_be_best():
    (line,) = _winners(pairs_of(CoSA={"a": WELL}, XAttn={"a": WORSE}, Flex={"a": BAD}, Dense={"a": WELL}), {"a": "4K"})
    assert line == (
        "Best measured, paired tests at 95 % corrected for 2 comparisons (Holm). "
        "4K: CoSA better than Flex and not shown to be better than XAttn."
    )


def test_all_columns_of_a_table_are_corrected_together():
    base = [0.0] * 40
    ahead = [1.0] * 6 + [0.0] * 34
    p = stats.two_sided_p(stats.score_difference([(1.0, ahead)]))
    assert 0.01 < p < 0.05, "significant alone"
    alone = _winners(pairs_of(CoSA={"a": ahead}, XAttn={"a": base}), {"a": "4K"})
    assert "CoSA better than XAttn" in alone[0]
    columns = [f"c{i}" for i in range(5)]
    many = pairs_of(CoSA=dict.fromkeys(columns, ahead), XAttn=dict.fromkeys(columns, base))
    (line,) = _winners(many, {column: column for column in columns})
    assert "5 comparisons" in line and line.count("not shown to be better than XAttn") == 5


def test_one_method_alone_wins_nothing():
    assert _winners(pairs_of(CoSA={"a": WELL}, Dense={"a": BAD}), {"a": "4K"}) == []
    other = pairs_of(CoSA={"a": WELL}, XAttn={"a": BAD[:20]})
    assert _winners(other, {"a": "4K"}) == [], "methods on other samples cannot be paired"
