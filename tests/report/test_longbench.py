"""LongBench-v2 in the report: categories, unparsed answers, the mean of both modes, what counts as the benchmark."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import synthetic

from evalkit.report import averages, longbench, table
from evalkit.report.load import Loaded, find_twins, load
from evalkit.report.rows import build_rows
from evalkit.store import CellResult, cell_key, read_cells, twin_key

LENGTHS = ("short", "medium", "long")


def settings(method, mode="direct", *, thinking=False, data="zai-org/LongBench-v2", seed=0, sampling="greedy", p=0.95):
    made = synthetic.config(method, p=p, length=131072, limit=1, model="qwen")
    generation = {
        "sampling": sampling,
        "seed": seed,
        "max_new_tokens": None,
        "thinking_tokens": 512 if thinking else None,
    }
    made["model"]["thinking"] = thinking
    made["task"] = {
        "name": "longbench_v2", "mode": mode, "data": data, "length": 131072, "truncate_at": 120000, "limit": None,
        "generation": generation,
    }  # fmt: skip
    return made


def records(scores, *, task="longbench_v2_direct", share=1.0, unparsed=()):
    """``scores`` by difficulty; lengths take turns."""
    index = 0
    for difficulty, values in scores.items():
        for value in values:
            metrics = {"score": float(value), "unparsed": float(index in unparsed)}
            record, frame = synthetic.record(task, 131072, index, metrics, share=share, tokens=1000 + index)
            record["item"] = {
                "id": f"q{index}", "difficulty": difficulty, "length": LENGTHS[index % 3], "domain": "d",
                "sub_domain": "s", "answer": "A", "prediction": "A" if value else None, "empty": False,
            }  # fmt: skip
            if "loglikelihood" in task:
                del record["metrics"]["unparsed"]
            yield record, frame
            index += 1


def write(out, made, scores, **more):
    return synthetic.write_cell(out, made, records(scores, **more), given_overrides=())


def in_memory(made, scores, **more):
    """A finished cell that was never on disk: writing 503 samples takes its time."""
    identity = synthetic.identity(made)
    return CellResult(
        path=Path("none"), key=cell_key(identity), twin=twin_key(identity), label="", status="done", live=False,
        overrides=(), config=made, identity=identity, expected_samples=None,
        records=tuple(record for record, _ in records(scores, **more)),
    )  # fmt: skip


def report(out):
    return build_rows(load([out]))


def test_categories_are_means_over_their_own_questions(tmp_path):
    dense, sparse = {"easy": [1, 1, 0], "hard": [1, 0, 0, 0]}, {"easy": [1, 0, 0], "hard": [1, 0, 1, 0]}
    write(tmp_path, settings("dense"), dense)
    write(tmp_path, settings("cosa"), sparse, share=0.3, unparsed=(1, 6))
    rows = report(tmp_path)
    found = {(row.method.split()[0], row.subtask): row for row in rows.level("subtask")}
    flat = [*sparse["easy"], *sparse["hard"]]
    expected = {"easy": 100 / 3, "hard": 50.0}
    expected |= {name: 100 * sum(flat[i::3]) / len(flat[i::3]) for i, name in enumerate(LENGTHS)}
    assert {name: found["cosa", name].value for name in expected} == pytest.approx(expected)
    assert [found["cosa", name].n for name in ("easy", "hard", *LENGTHS)] == [3, 4, 3, 2, 2]
    assert found["cosa", "easy"].difference == pytest.approx(-100 / 3)
    assert found["cosa", "hard"].difference == pytest.approx(25)
    (overall,) = [r for r in rows.level("cell") if r.metric == "accuracy" and not r.dense]
    assert overall.value == pytest.approx(100 * 3 / 7) and overall.n == 7
    (lost,) = [r for r in rows.level("cell") if r.metric == "unparsed" and not r.dense]
    assert lost.value == pytest.approx(100 * 2 / 7) and lost.difference == pytest.approx(100 * 2 / 7)
    assert "no answer found" in table.markdown(rows)
    assert any("2 of 7 answers" in note for note in rows.notes)


def test_a_category_without_questions_has_no_row(tmp_path):
    write(tmp_path, settings("dense"), {"hard": [1, 0]})
    assert {row.subtask for row in report(tmp_path).level("subtask")} == {"hard", "short", "medium"}


def test_the_mean_of_both_modes_is_the_published_rule():
    no_cot = {"easy": [1] * 80 + [0] * 112, "hard": [1] * 90 + [0] * 221}
    cot = {"easy": [1] * 85 + [0] * 107, "hard": [1] * 120 + [0] * 191}
    worse = {"easy": [1] * 70 + [0] * 122, "hard": [1] * 80 + [0] * 231}
    cells = [
        in_memory(settings("dense"), no_cot),
        in_memory(settings("dense", thinking=True), cot),
        in_memory(settings("cosa"), worse, share=0.2),
        in_memory(settings("cosa", thinking=True), cot, share=0.2),
    ]
    rows = build_rows(Loaded(cells, find_twins(cells), []))
    dense, sparse = sorted(rows.level("average"), key=lambda row: not row.dense)
    shares = [{name: sum(values) / len(values) for name, values in mode.items()} for mode in (no_cot, cot)]
    assert dense.value == pytest.approx(100 * averages.longbench_v2(*shares))
    assert dense.task == "longbench_v2 (mean of w/o and w/ CoT)" and dense.group == sparse.group
    assert sparse.difference == pytest.approx(-100 * 20 / 503 / 2) and sparse.B == pytest.approx(20, abs=0.5)
    assert dense.n == 1006


def test_two_stages_are_the_cot_of_a_model_that_does_not_think(tmp_path):
    write(tmp_path, settings("dense"), {"easy": [1], "hard": [0]})
    write(tmp_path, settings("dense", "cot"), {"easy": [1], "hard": [1]}, task="longbench_v2_cot")
    write(tmp_path, settings("dense", "loglikelihood"), {"easy": [0], "hard": [0]}, task="longbench_v2_loglikelihood")
    (mean,) = report(tmp_path).level("average")
    assert mean.value == pytest.approx(75)
    modes = {cell.config["task"]["mode"]: longbench.paper_mode(cell) for cell in read_cells([tmp_path])}
    assert modes == {"direct": "no_cot", "cot": "cot", "loglikelihood": None}


@pytest.mark.parametrize("what", ["method", "seed", "questions"])
def test_modes_that_differ_in_more_are_not_averaged(tmp_path, what):
    one, other = {"easy": [1], "hard": [0]}, {"easy": [1], "hard": [0, 1]}
    for made in (settings("dense", seed=s, sampling="recommended") for s in (1, 2)):
        write(tmp_path, made, one)
    second = {
        "method": settings("cosa", thinking=True, sampling="recommended", seed=1),
        "seed": settings("dense", thinking=True, sampling="recommended", seed=3),
        "questions": settings("dense", thinking=True, sampling="recommended", seed=1),
    }[what]
    if what == "method":
        dense = {**second, "method": settings("dense")["method"]}
        write(tmp_path, dense, other)
    write(tmp_path, second, other if what == "questions" else one if what == "seed" else other)
    assert not report(tmp_path).level("average")


def test_seeds_stand_apart_and_each_has_its_mean(tmp_path):
    for seed, thinking in itertools.product((1, 2), (False, True)):
        made = settings("dense", thinking=thinking, sampling="recommended", seed=seed)
        write(tmp_path, made, {"easy": [seed - 1], "hard": [1]})
    rows = report(tmp_path)
    assert sorted(row.value for row in rows.level("average")) == [50.0, 100.0]
    assert len({row.task for row in rows.level("cell")}) == 4


def test_the_self_made_set_is_labelled_and_never_the_paper(tmp_path):
    write(tmp_path, settings("dense", data="small"), {"easy": [1], "hard": [1]}, task="longbench_v2_small_direct")
    copy = settings("dense", data="/data/data.jsonl", thinking=True)
    write(tmp_path, copy, {"easy": [1], "hard": [1]}, task="longbench_v2_small_direct")
    cells = read_cells([tmp_path])
    assert all(longbench.paper_mode(cell) is None and not longbench.is_official(cell) for cell in cells)
    assert all("self-made set" in row.task for row in report(tmp_path).rows)


def test_only_the_whole_set_is_the_official_one():
    whole, part = (in_memory(settings("dense"), {"easy": [1] * n, "hard": [0] * 311}) for n in (192, 191))
    assert longbench.is_official(whole) and not longbench.is_official(part)
    assert longbench.difficulty_scores(whole) == {"easy": 1.0, "hard": 0.0}


def test_labels_say_mode_thinking_sampling_and_file():
    config = settings("dense", "direct", thinking=True, data="/x/my.jsonl", sampling="recommended", seed=4)
    assert longbench.label(config, False) == "longbench_v2 (direct, thinking 512, sampled, seed 4, my.jsonl)"
    assert longbench.label(settings("dense", "cot"), False) == "longbench_v2 (cot)"
    assert longbench.label(settings("dense", "cot", data="small"), True) == "longbench_v2 (cot, self-made set)"
