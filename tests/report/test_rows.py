from __future__ import annotations

import math

import numpy as np
import pytest
import synthetic

from evalkit.errors import StoreError
from evalkit.report import rows as module
from evalkit.report import stats, table
from evalkit.report.load import load
from evalkit.report.rows import build_rows


def built(cells):
    return build_rows(load([cells.out]))


def one(rows, **wanted):
    (row,) = [row for row in rows.rows if all(getattr(row, name) == value for name, value in wanted.items())]
    return row


def test_perplexity_rows(cells):
    cells.perplexity("dense")
    cells.perplexity(p=0.9, damage=0.1, share=0.4)
    rows = built(cells)
    assert [(row.method, row.metric) for row in rows.rows] == [
        (method, metric) for metric in ("perplexity", "kl", "top1") for method in ("dense", "cosa p=0.9")
    ]
    records = {"dense": [r for r, _ in synthetic.perplexity_records()]}
    records["cosa p=0.9"] = [r for r, _ in synthetic.perplexity_records(damage=0.1, share=0.4)]
    for method, found in records.items():
        nll, tokens = (np.array([record["metrics"][name] for record in found]) for name in ("nll", "tokens"))
        row = one(rows, method=method, metric="perplexity")
        assert row.value == pytest.approx(math.exp(nll.sum() / tokens.sum())) and row.n == 4
        assert row.low < row.value < row.high
    sparse, dense = (one(rows, method=method, metric="perplexity") for method in ("cosa p=0.9", "dense"))
    assert sparse.difference == pytest.approx(sparse.value - dense.value)
    assert 0 < sparse.difference_low < sparse.difference < sparse.difference_high
    assert sparse.difference_high - sparse.difference_low < 0.5 * (sparse.high - sparse.low)
    assert dense.difference is None and dense.dense and dense.B == 100
    top1 = one(rows, method="cosa p=0.9", metric="top1")
    expected = [record["metrics"]["top1"] for record in records["cosa p=0.9"]]
    assert top1.value == pytest.approx(100 * np.mean(expected)) and 0 < top1.low < top1.high <= 100
    assert one(rows, method="cosa p=0.9", metric="kl").difference is None


def test_cells_without_fidelity_have_perplexity_only(cells):
    records = list(synthetic.perplexity_records())
    for record, _ in records:
        del record["metrics"]["kl"], record["metrics"]["top1"]
    synthetic.write_cell(cells.out, synthetic.config("dense"), iter(records))
    assert [row.metric for row in built(cells).rows] == ["perplexity"]


def test_first_answer_token_beside_accuracy(cells):
    probabilities = {"dense": [0.9, 0.7, 0.8], "cosa": [0.5, 0.6, 0.1]}
    for method, values in probabilities.items():
        for length, factor in ((4096, 1.0), (8192, 0.5)):
            records = list(synthetic.ruler_records({"vt": [1.0, 0.0, 1.0]}, length=length))
            for (record, _), value in zip(records, values, strict=True):
                record["metrics"]["first_token"] = factor * value
            settings = synthetic.config(method, task="ruler", length=length, limit=3, tasks=("vt",))
            synthetic.write_cell(cells.out, settings, iter(records))
    rows = built(cells)
    row = one(rows, metric="first_token", length="4096", dense=False)
    assert row.value == pytest.approx(40.0) and row.difference == pytest.approx(
        100 * stats.score_difference([(1.0, [-0.4, -0.1, -0.7])]).value
    )
    assert one(rows, metric="accuracy", length="4096", dense=False).value == pytest.approx(200 / 3)
    assert one(rows, metric="first_token", level="average", dense=True).value == pytest.approx(60.0)
    assert one(rows, metric="accuracy", level="average", dense=True).value == pytest.approx(200 / 3)


def test_one_window_has_no_interval(cells):
    cells.perplexity("dense", limit=1)
    cells.perplexity(p=0.9, damage=0.1, share=0.4, limit=1)
    row = one(built(cells), method="cosa p=0.9", metric="perplexity")
    assert (row.low, row.high, row.difference_low, row.difference_high) == (None,) * 4
    assert row.difference > 0 and row.n == 1 and not row.beats_dense


def test_ruler_accuracy_is_the_mean_over_subtasks_of_the_mean_over_samples(cells):
    dense = {"a": [1.0, 1.0, 1.0, 0.0], "b": [0.5, 0.5, 0.0, 0.0]}
    sparse = {"a": [1.0, 1.0, 0.0, 0.0], "b": [0.5, 0.5, 0.0, 0.0]}
    cells.ruler("dense", dense)
    cells.ruler("cosa", sparse, share=0.3)
    rows = built(cells)
    row = one(rows, level="cell", dense=False)
    assert row.value == pytest.approx(100 * (0.5 + 0.25) / 2) and row.n == 8
    assert row.difference == pytest.approx(-12.5)
    expected = stats.mean_score([(0.5, sparse["a"]), (0.5, sparse["b"])]).times(100)
    assert (row.low, row.high) == pytest.approx(expected.interval)
    differences = [(0.5, np.subtract(sparse[name], dense[name])) for name in "ab"]
    expected = stats.score_difference(differences).times(100)
    assert (row.difference_low, row.difference_high) == pytest.approx(expected.interval)
    subtasks = {row.subtask: row for row in rows.level("subtask") if not row.dense}
    assert (subtasks["a"].value, subtasks["b"].value, subtasks["a"].difference) == pytest.approx((50, 25, -25))
    assert subtasks["a"].n == 4


def test_a_single_subtask_is_not_listed_again(cells):
    cells.ruler("dense", {"vt": [0.0, 1.0]})
    assert [row.level for row in built(cells).rows] == ["cell"]


def test_subtasks_of_unequal_counts_weigh_the_same(cells):
    settings = synthetic.config("dense", task="ruler", tasks=("a", "b"))
    synthetic.write_cell(cells.out, settings, synthetic.ruler_records({"a": [1.0], "b": [0.0, 0.0, 0.0]}))
    assert one(built(cells), level="cell").value == 50


def test_budget_is_weighted_by_prompt_tokens(cells):
    records = [
        synthetic.record("vt", 4096, 0, {"score": 1.0}, share=0.6, tokens=1000, fallback=0.5),
        synthetic.record("vt", 4096, 1, {"score": 1.0}, share=0.2, tokens=3000, warnings=["w", "v"]),
    ]
    parts = [record["budget"] for record, _ in records]
    found = module.budget([record for record, _ in records])
    for name in ("B", "B_stage1", "B_cost", "B_block", "B_stage1_block"):
        assert found[name] == pytest.approx(100 * (parts[0][name] * 1000 + parts[1][name] * 3000) / 4000)
    assert found["B"] == pytest.approx(30, abs=0.1)
    assert found["B_pooled"] == pytest.approx(100 * (0.6 * 1000**2 + 0.2 * 3000**2) / (1000**2 + 3000**2), abs=0.1)
    assert (found["fallback_share"], found["warnings"]) == (25, 1)
    assert found["layer_min"] == pytest.approx(20, abs=0.1) and found["layer_max"] == pytest.approx(60, abs=0.1)


def test_a_record_without_a_budget_is_named(cells):
    records = list(synthetic.perplexity_records())
    del records[0][0]["budget"]
    synthetic.write_cell(cells.out, synthetic.config("dense"), iter(records))
    with pytest.raises(StoreError, match="lack budget"):
        built(cells)


def test_records_of_two_kinds_are_refused(cells):
    records = [*synthetic.perplexity_records(limit=1), *synthetic.ruler_records({"vt": [1.0]})]
    synthetic.write_cell(cells.out, synthetic.config("dense"), iter(records))
    with pytest.raises(StoreError, match=r"metrics\.score"):
        built(cells)


# ------------------------------------------------------------------------------------------- averages over lengths
def scores(level):
    return {"a": [1.0, level, 0.0, 1.0], "b": [0.5, 0.5, level, 0.0]}


def test_averages_follow_the_design(cells):
    runs = [(4096, 1.0, 0.6), (8192, 0.5, 0.4), (16384, 0.0, 0.2)]
    for length, level, share in runs:
        cells.ruler("dense", scores(1.0), length=length)
        cells.ruler("cosa", scores(level), length=length, share=share)
    rows = built(cells)
    singles = {int(row.length): row for row in rows.level("cell") if not row.dense}
    average = one(rows, level="average", dense=False)
    assert average.length == "mean of 4096, 8192, 16384" and average.n == 24
    assert average.value == pytest.approx(np.mean([row.value for row in singles.values()]))
    weights = list(singles)
    for name in ("B", "B_stage1", "B_cost", "B_block", "B_pooled"):
        expected = np.average([getattr(row, name) for row in singles.values()], weights=weights)
        assert getattr(average, name) == pytest.approx(expected)
    assert average.B < np.mean([row.B for row in singles.values()]) - 5, "not the plain mean"
    strata = [(1 / 6, values) for _, level, _ in runs for values in scores(level).values()]
    expected = stats.mean_score(strata).times(100)
    assert average.value == pytest.approx(expected.value)
    assert (average.low, average.high) == pytest.approx(expected.interval)
    dense = one(rows, level="average", dense=True)
    assert dense.group == average.group and average.difference == pytest.approx(average.value - dense.value)
    assert (average.layer_min, average.layer_max) == pytest.approx((20, 60), abs=0.1)


def test_no_average_of_one_length_or_of_perplexity(cells):
    cells.ruler("dense")
    for length in (2048, 4096):
        cells.perplexity("dense", length=length)
    assert not built(cells).level("average")


def test_dense_is_averaged_over_the_lengths_of_each_sparse_run(cells):
    for length in (4096, 8192, 16384):
        cells.ruler("dense", scores(1.0), length=length)
    for length in (4096, 8192):
        cells.ruler("cosa", scores(0.5), length=length, share=0.4)
    found = {(row.method, row.length) for row in built(cells).level("average")}
    assert found == {
        ("dense", "mean of 4096, 8192, 16384"),
        ("dense", "mean of 4096, 8192"),
        ("cosa p=0.95", "mean of 4096, 8192"),
    }


def test_models_and_methods_are_averaged_apart(cells):
    for length in (4096, 8192):
        for model in ("tiny", "other"):
            cells.ruler("dense", scores(1.0), length=length, model=model)
        for p in (0.9, 0.8):
            cells.ruler("cosa", scores(p), length=length, share=p / 2, p=p)
    found = [(row.model, row.method) for row in built(cells).level("average")]
    assert sorted(found) == [("other", "dense"), ("tiny", "cosa p=0.8"), ("tiny", "cosa p=0.9"), ("tiny", "dense")]


def test_two_runs_of_a_length_give_no_average_and_a_note(cells):
    for length in (4096, 8192):
        cells.ruler("dense", scores(1.0), length=length)
    settings = synthetic.config("dense", task="ruler", length=4096, limit=4, tasks=("a", "b"))
    again = synthetic.ruler_records(scores(1.0))
    synthetic.write_cell(cells.out, settings, again, data={"samples": "others", "weights": "w0"})
    rows = built(cells)
    assert not rows.level("average")
    assert [note for note in rows.notes if note.startswith("no average over lengths")]
    assert len({row.task for row in rows.level("cell") if row.length == "4096"}) == 2, "told apart"


# ---------------------------------------------------------------------------------------------------------- notes
def test_sparse_above_dense_is_flagged_beyond_the_interval_only(cells):
    low, high = {"a": [0.0] * 12, "b": [0.0] * 12}, {"a": [1.0] * 12, "b": [0.0] * 12}
    slightly = {"a": [1.0] + [0.0] * 11, "b": [0.0] * 12}
    cells.ruler("dense", low)
    cells.ruler("cosa", high, p=0.9, share=0.4)
    cells.ruler("cosa", slightly, p=0.8, share=0.3)
    cells.perplexity("dense")
    cells.perplexity(p=0.9, damage=-0.1, share=0.4)
    cells.perplexity(p=0.8, damage=0.1, share=0.3)
    flagged = [note for note in built(cells).notes if note.startswith("sparse > dense: check")]
    assert flagged == [
        "sparse > dense: check tiny, cosa p=0.9, perplexity (essays, last_quarter), 2048, perplexity",
        "sparse > dense: check tiny, cosa p=0.9, ruler (a, b), 4096, accuracy",
    ]


def test_warnings_are_counted_and_quoted(cells):
    cells.perplexity("dense")
    records = list(synthetic.perplexity_records(share=0.4))
    records[1][0]["warnings"] = ["delta/N is 0.6"]
    records[2][0]["warnings"] = ["delta/N is 0.6", "delta/N is 0.6"]
    synthetic.write_cell(cells.out, synthetic.config(p=0.9), iter(records))
    rows = built(cells)
    assert one(rows, metric="perplexity", dense=False).warnings == 2
    cell = "tiny, cosa p=0.9, perplexity (essays, last_quarter) at 2048"
    assert f"warning in 2 of 4 samples of {cell}: delta/N is 0.6" in rows.notes


def test_reading_order(cells):
    cells.demo()
    cells.ruler("dense", length=512)
    rows = built(cells).rows
    assert [(row.task.split()[0], row.length, row.level) for row in rows if row.dense and row.metric != "kl"] == [
        ("perplexity", "2048", "cell"),
        ("perplexity", "2048", "cell"),
        ("ruler", "512", "cell"),
        ("ruler", "4096", "cell"),
        ("ruler", "mean of 512, 4096", "average"),
        ("ruler", "512", "subtask"),
        ("ruler", "512", "subtask"),
        ("ruler", "4096", "subtask"),
        ("ruler", "4096", "subtask"),
    ]
    perplexity = [row for row in rows if row.metric == "perplexity"]
    assert perplexity[0].dense and [row.B for row in perplexity] == sorted((row.B for row in perplexity), reverse=True)


def test_provenance_names_machine_versions_commit_and_commands(cells):
    from evalkit.report.table import markdown

    cells.perplexity("dense")
    path = cells.perplexity(p=0.9, damage=0.1, share=0.4)
    synthetic.edit_meta(
        path, lambda m: m["config"].update(provenance={"machine": "EPYC, 2 threads", "commit": "abc-dirty"})
    )
    rows = built(cells)
    text = "\n".join(rows.provenance)
    assert "EPYC, 2 threads" in text and "commit abc-dirty" in text and "torch" in text
    commands = [line for line in rows.provenance if line.startswith("`evalkit run ")]
    assert len(commands) == 2 and any("method=dense" in line for line in commands)
    assert all(line in markdown(rows) for line in rows.provenance)


# ------------------------------------------------------------------------------ what the kernels really were
@pytest.mark.parametrize(
    ("asked", "device", "backends", "marked"),
    [
        ("auto", "cuda", [{"hopper": 3}, {"hopper": 2, "torch": 1}], True),
        ("hopper", "cuda", [{"torch": 3}, {"torch": 3}], True),
        ("auto", "cuda", [{"hopper": 3}, {"triton": 3}], False),
        ("torch", "cuda", [{"torch": 3}, {"torch": 3}], False),
        ("auto", "cpu", [{"torch": 3}, {"torch": 3}], False),
        ("auto", "cuda", [None, None], False),
        # Records that tell of proxy and selection too: attention alone decides.
        ("auto", "cuda", [{"proxy:torch": 3, "select:torch": 3, "hopper": 3}] * 2, False),
        (
            "auto",
            "cuda",
            [{"proxy:triton": 3, "hopper": 3}, {"proxy:triton": 3, "select:triton": 3, "hopper": 2, "torch": 1}],
            True,
        ),
    ],
)
def test_the_reference_in_place_of_a_gpu_kernel_is_marked(cells, monkeypatch, asked, device, backends, marked):
    identity = synthetic.identity
    monkeypatch.setattr(
        synthetic, "identity", lambda settings, data=None: {**identity(settings, data), "device": {"type": device}}
    )
    cells.perplexity("dense")
    settings = synthetic.config(p=0.9)
    settings["execution"]["backend"] = asked
    items = list(synthetic.perplexity_records(share=0.4, limit=4))
    for i, (record, _) in enumerate(items):
        if backends[i % 2] is not None:
            record["backends"] = backends[i % 2]
    synthetic.write_cell(cells.out, settings, iter(items))
    rows = build_rows(load([cells.out]))
    sparse = [row for row in rows.rows if not row.dense]
    assert all(row.marked_method.endswith(" [torch]") == row.suspect == marked for row in sparse)
    notes = [note for note in rows.notes if note.startswith("[torch] ")]
    assert len(notes) == int(marked)
    assert ("cosa p=0.9 [torch]" in table.markdown(rows) or "cosa [torch]" in table.markdown(rows)) == marked
    if asked == "auto" and marked:
        assert sparse[0].reference_share == pytest.approx(100 / 6)
        assert "backend=auto on CUDA" in notes[0] and notes[0].endswith("10 by hopper, 2 by torch")
    assert not any(row.suspect for row in rows.rows if row.dense)
