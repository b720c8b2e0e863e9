from __future__ import annotations

import shlex

import pytest
import synthetic

from evalkit.errors import EvalkitError, InputError, StoreError
from evalkit.report import names
from evalkit.report.load import load
from evalkit.store import read_cells


def fail(store):
    try:
        raise RuntimeError("it broke")
    except RuntimeError as exc:
        store.fail(exc)


def test_twins_are_found_by_samples_not_by_order(cells):
    cells.perplexity(p=0.9, damage=0.1, share=0.4)
    cells.perplexity(p=0.9, damage=0.1, share=0.4, length=4096)
    cells.perplexity("dense", length=4096)
    cells.perplexity("dense")
    loaded = load([cells.out])
    found = {cell.config["task"]["length"]: loaded.twins[cell.key] for cell in loaded.cells if not cell.is_dense}
    assert {length: twin.config["task"]["length"] for length, twin in found.items()} == {2048: 2048, 4096: 4096}
    assert all(twin.is_dense for twin in found.values())


def test_a_twin_executed_alike_comes_first(cells):
    for page_size in (16, 128, 64):
        cells.perplexity("dense", page_size=page_size)
    cells.perplexity(p=0.9, damage=0.1, share=0.4, page_size=128)
    loaded = load([cells.out])
    (twin,) = loaded.twins.values()
    assert twin.identity["execution"]["page_size"] == 128


def test_a_sparse_cell_without_its_twin_is_refused_with_the_command(cells):
    cells.perplexity("dense", length=4096)
    cells.perplexity(p=0.9, damage=0.1, share=0.4)
    with pytest.raises(EvalkitError) as caught:
        load([cells.out])
    message = str(caught.value)
    assert "tiny cosa select.p=0.9 perplexity@2048" in message
    assert message.endswith(
        "run it with: evalkit run method=dense model=tiny task=perplexity task.length=2048 task.limit=4"
    )


def test_each_missing_twin_is_commanded_once(cells):
    for p in (0.9, 0.8):
        cells.perplexity(p=p, damage=0.1, share=p / 2)
    cells.perplexity(p=0.8, damage=0.1, share=0.4, length=4096)
    with pytest.raises(EvalkitError, match="3 sparse cells") as caught:
        load([cells.out])
    commands = str(caught.value).partition("run it with: ")[2].split(" && ")
    assert len(commands) == len(set(commands)) == 2
    assert sorted(word for word in shlex.split(" ".join(commands)) if word.startswith("task.length")) == [
        "task.length=2048",
        "task.length=4096",
    ]


@pytest.mark.parametrize("state", ["failed", "partial"])
def test_an_unfinished_twin_is_no_twin(cells, state):
    settings = synthetic.config("dense")
    few = iter(list(synthetic.perplexity_records())[:2])
    end = fail if state == "failed" else (lambda store: None)
    synthetic.write_cell(cells.out, settings, few, end=end, expected=4)
    cells.perplexity(p=0.9, damage=0.1, share=0.4)
    with pytest.raises(EvalkitError, match="no finished dense twin"):
        load([cells.out])


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["model=smollm2", "method=cosa", "task=ruler", "method.select.p=0.9"], "model=smollm2 task=ruler"),
        (["method=cosa", "+method.extra=1", "~method.share", "++method.order=ascending", "out=a"], "out=a"),
        (["method=cosa", "task.tasks=[vt,cwe]", "out=a b"], "'task.tasks=[vt,cwe]' 'out=a b'"),
        (["methods=3", "model.method=x"], "methods=3 model.method=x"),
        ([], "model=tiny task=perplexity task.length=2048 task.limit=4"),
    ],
)
def test_twin_command(cells, given, kept):
    settings = synthetic.config()
    synthetic.write_cell(cells.out, settings, synthetic.perplexity_records(share=0.4), given_overrides=given)
    (cell,) = read_cells([cells.out])
    assert names.twin_command(cell) == f"evalkit run method=dense {kept}"


def alter(cells, change):
    """A dense cell, and a sparse one of whose records ``change`` makes others."""
    cells.perplexity("dense")
    records = list(synthetic.perplexity_records(damage=0.1, share=0.4))
    synthetic.write_cell(cells.out, synthetic.config(p=0.9), iter(change(records)))


def test_another_prompt_is_refused(cells):
    def change(records):
        records[2][0]["prompt"]["sha256"] = "0" * 64
        records[3][0]["prompt"]["sha256"] = "1" * 64
        return records

    alter(cells, change)
    with pytest.raises(StoreError, match=r"cosa select\.p=0\.9.* tiny dense .*perplexity@2048\[2\] has another prompt"):
        load([cells.out])


def test_another_sample_set_is_refused(cells):
    alter(cells, lambda records: records[:1] + records[2:])
    with pytest.raises(StoreError, match=r"perplexity@2048\[1\] is missing from .*cells"):
        load([cells.out])


def test_another_number_of_scored_tokens_is_refused(cells):
    def change(records):
        records[0][0]["metrics"]["tokens"] += 1
        return records

    alter(cells, change)
    with pytest.raises(StoreError, match=r"perplexity@2048\[0\] is scored on another number"):
        load([cells.out])


def test_a_record_without_a_prompt_digest_is_refused(cells):
    def change(records):
        del records[0][0]["prompt"]["sha256"]
        return records

    alter(cells, change)
    with pytest.raises(StoreError, match=r"perplexity@2048\[0\] has no prompt\.sha256"):
        load([cells.out])


def test_unfinished_and_failed_cells_are_named(cells):
    cells.perplexity("dense")
    for p, end in ((0.9, fail), (0.8, lambda store: None)):
        few = iter(list(synthetic.perplexity_records(share=0.4))[:2])
        synthetic.write_cell(cells.out, synthetic.config(p=p), few, end=end, expected=4)
    loaded = load([cells.out])
    assert [cell.is_dense for cell in loaded.cells] == [True]
    assert sorted(loaded.notes) == [
        "left out, abandoned with 2 of 4 samples: tiny cosa select.p=0.8 perplexity@2048",
        "left out, failed with 2 of 4 samples: tiny cosa select.p=0.9 perplexity@2048 (RuntimeError: it broke)",
    ]


def test_nothing_finished(cells):
    synthetic.write_cell(cells.out, synthetic.config(), iter([]), end=fail, expected=4)
    with pytest.raises(InputError, match="holds no finished cell"):
        load([cells.out])


def test_a_cell_stored_twice_counts_once(cells, tmp_path):
    cells.perplexity("dense")
    other = synthetic.perplexity_cell(tmp_path / "other", "dense")
    loaded = load([cells.out, tmp_path / "other"])
    assert len(loaded.cells) == 1 and f"{other} is not" in loaded.notes[0]


def test_missing_directory(tmp_path):
    with pytest.raises(InputError, match="no such directory"):
        load([tmp_path / "absent"])


# --------------------------------------------------------------------------------------------------------- labels
def labels(cells):
    found = read_cells([cells.out])
    return sorted(names.method_labels(found).values()), sorted(set(names.series_labels(found).values()))


def test_methods_are_told_apart_by_what_differs(cells):
    cells.demo()
    methods, series = labels(cells)
    assert methods == [
        "cosa p=0.8",
        "cosa p=0.8",
        "cosa p=0.95",
        "cosa p=0.95 order=ascending skip_scale=512",
        "cosa p=0.95 order=hrm_first skip_scale=512",
        "cosa p=0.99",
        "dense",
        "dense",
    ]
    assert series == ["cosa, no skip", "cosa, skip, ascending", "cosa, skip, hrm_first", "dense"]


def test_no_two_methods_of_a_group_share_a_label(cells):
    for order in ("hrm_first", "ascending"):
        cells.perplexity(p=0.9, order=order, share=0.4)
    methods, series = labels(cells)
    assert methods == ["cosa p=0.9 order=ascending", "cosa p=0.9 order=hrm_first"]
    assert series == ["cosa"]


def test_task_labels(cells):
    cells.ruler("dense")
    cells.ruler("dense", scores={"vt": [1.0]}, length=8192)
    cells.ruler("dense", scores={name: [1.0] for name in ("vt", "cwe", "fwe")}, length=256)
    cells.perplexity("dense")
    found = {cell.config["task"]["length"]: names.task_label(cell) for cell in read_cells([cells.out])}
    assert found == {
        4096: "ruler (niah_multikey_1, vt)",
        8192: "ruler (vt)",
        256: "ruler (3 tasks)",
        2048: "perplexity (essays, last_quarter)",
    }
