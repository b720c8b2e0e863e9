from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import store_child
import synthetic
from store_child import SAMPLES

from evalkit.errors import InputError, IntegrityError, StoreError
from evalkit.store import CellStore, canonical_json, cell_directories, cell_key, is_locked, read_cells, twin_key

HERE = Path(__file__).parent


def open_cell(out: Path, settings=None, **more):
    settings = settings or synthetic.config()
    values = {"label": "a cell", "overrides": ("method=cosa",), "cell_config": settings, "expected_samples": 4, **more}
    return CellStore.open(out, synthetic.identity(settings), **values)


def items(**more):
    return list(synthetic.perplexity_records(damage=0.1, share=0.4, **more))


def partial_cell(out: Path, count: int = 3) -> Path:
    with open_cell(out) as store:
        for item in items()[:count]:
            store.append(*item)
    return store.path


# ------------------------------------------------------------------------------------------------------- identity
def test_key_survives_a_json_round_trip_and_integer_keys():
    settings = synthetic.config()
    settings["model"]["rope"] = {"type": "yarn", "factors": {131072: 4.0, 32768: 1.0, 65536: 2.0}}
    identity = synthetic.identity(settings)
    assert cell_key(identity) == cell_key(json.loads(json.dumps(identity)))
    assert len(cell_key(identity)) == 16


@pytest.mark.parametrize("section", ["model", "method", "task", "execution", "data", "versions", "device"])
def test_every_section_changes_the_key_and_only_method_and_execution_keep_the_twin(section):
    identity = synthetic.identity(synthetic.config())
    changed = {**identity, section: {**identity[section], "new": 1}}
    assert cell_key(changed) != cell_key(identity)
    assert (twin_key(changed) == twin_key(identity)) == (section in ("method", "execution"))


def test_identity_with_a_wrong_section_is_refused():
    identity = synthetic.identity(synthetic.config())
    del identity["device"]
    with pytest.raises(StoreError, match="device"):
        cell_key(identity)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, object()])
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises(StoreError, match="not storable"):
        canonical_json({"x": value})


# -------------------------------------------------------------------------------------------------------- writing
def test_a_finished_cell_is_read_back(tmp_path):
    written = items()
    with open_cell(tmp_path) as store:
        assert not store.done and not store.completed
        for item in written:
            store.append(*item)
        store.finish({"perplexity": 15.5})
        assert store.done
    (cell,) = read_cells([tmp_path])
    assert cell.done and cell.state == "done" and cell.method == "cosa" and not cell.is_dense
    assert cell.records == tuple(record for record, _ in written)
    assert cell.summary == {"perplexity": 15.5}
    assert cell.expected_samples == 4
    assert sorted(path.name for path in cell.path.iterdir()) == [
        ".lock",
        "budget.parquet",
        "cell.json",
        "samples.jsonl",
    ]
    merged = pd.read_parquet(cell.path / "budget.parquet")
    assert list(merged.columns[:5]) == ["task", "length", "index", "layer", "head"]
    assert len(merged) == 4 * synthetic.LAYERS * synthetic.HEADS
    for record, frame in written:
        mine = merged[merged["index"] == record["index"]].reset_index(drop=True)
        pd.testing.assert_frame_equal(mine[frame.columns.tolist()], frame)


def test_merged_budget_does_not_depend_on_the_order_of_the_samples(tmp_path):
    merged = []
    for order in (1, -1):
        with open_cell(tmp_path / str(order)) as store:
            for item in items()[::order]:
                store.append(*item)
            store.finish({})
        merged.append((store.path / "budget.parquet").read_bytes())
    assert merged[0] == merged[1]


def test_a_finished_cell_takes_no_more_and_opens_as_done(tmp_path):
    with open_cell(tmp_path) as store:
        for item in items():
            store.append(*item)
        store.finish({})
        with pytest.raises(StoreError, match="done"):
            store.append(*synthetic.record("perplexity", 2048, 9, {"nll": 1.0, "tokens": 1}))
    before = {path: path.read_bytes() for path in store.path.iterdir() if path.name != ".lock"}
    with open_cell(tmp_path, label="another label") as again:
        assert again.done and len(again.completed) == 4
    assert before == {path: path.read_bytes() for path in store.path.iterdir() if path.name != ".lock"}


def test_label_is_no_part_of_the_key_and_follows_the_last_run(tmp_path):
    first = partial_cell(tmp_path)
    with open_cell(tmp_path, label="renamed", overrides=("a=1",)) as store:
        assert store.path == first and len(store.completed) == 3
    (cell,) = read_cells([tmp_path])
    assert cell.label == "renamed" and cell.overrides == ("a=1",)


def test_a_sample_is_taken_once(tmp_path):
    with open_cell(tmp_path) as store:
        store.append(*items()[0])
        with pytest.raises(StoreError, match=r"perplexity@2048\[0\] is stored already"):
            store.append(*items()[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": ""}, "task must be a name"),
        ({"length": "2048"}, "length must be an integer"),
        ({"index": True}, "index must be an integer"),
        ({"metrics": None}, "metrics must be an object"),
        ({"metrics": {"nll": {1.0}}}, "not storable"),
    ],
)
def test_a_broken_record_is_refused_and_nothing_is_written(tmp_path, change, message):
    record, frame = items()[0]
    with open_cell(tmp_path) as store:
        with pytest.raises(StoreError, match=message):
            store.append({**record, **change}, frame)
        store.append(record, frame)
        assert len((store.path / "samples.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_named_with_its_sample(tmp_path, value):
    record, frame = items()[0]
    with open_cell(tmp_path) as store:
        for change, name in (({"metrics": {"kl": value}}, r"metrics\.kl"), ({"more": [1.0, value]}, r"more\[1\]")):
            where = rf"sample {record['task']}@{record['length']}\[{record['index']}\]"
            with pytest.raises(IntegrityError, match=rf"{where}: {name} is {value}; a finite number"):
                store.append({**record, **change}, frame)
        assert not store.completed


def test_a_budget_that_does_not_add_up_is_refused(tmp_path):
    record, frame = items()[0]
    with open_cell(tmp_path) as store:
        with pytest.raises(IntegrityError, match="budget.computed"):
            store.append(record, frame.assign(computed=frame["computed"] + 1))
        with pytest.raises(IntegrityError, match="columns"):
            store.append(record, frame.drop(columns="visited"))
        assert not store.completed


def test_finish_needs_every_sample(tmp_path):
    with open_cell(tmp_path) as store:
        store.append(*items()[0])
        with pytest.raises(StoreError, match="1 samples, 4 make the cell"):
            store.finish({})
    assert read_cells([tmp_path])[0].state == "abandoned"


def test_task_names_cannot_leave_the_directory(tmp_path):
    with open_cell(tmp_path, expected_samples=1) as store:
        store.append(*synthetic.record("../../x y/z", 256, 0, {"score": 1.0}))
        assert len(list((store.path / "budget").glob("*.parquet"))) == 1
        store.finish({})
    assert pd.read_parquet(store.path / "budget.parquet")["task"].unique().tolist() == ["../../x y/z"]


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    real = os.write
    calls = []

    def full(handle: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return real(handle, data[:10])
        raise OSError(28, "No space left on device")

    with open_cell(tmp_path) as store:
        store.append(*items()[0])
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(StoreError, match="No space left"):
                store.append(*items()[1])
        assert len(calls) == 2
        store.append(*items()[1])
    assert [record["index"] for record in read_cells([tmp_path])[0].records] == [0, 1]


# ------------------------------------------------------------------------------------------------------- failures
def test_failure_keeps_traceback_and_samples_and_the_next_run_goes_on(tmp_path):
    def crash(store: CellStore) -> None:
        store.append(*items()[0])
        raise RuntimeError("out of\nmemory")

    with pytest.raises(RuntimeError), open_cell(tmp_path) as store:
        crash(store)
    (cell,) = read_cells([tmp_path])
    assert (cell.state, cell.error, len(cell.records)) == ("failed", "memory", 1)
    text = (cell.path / "traceback.txt").read_text()
    assert "in crash" in text and "RuntimeError: out of" in text
    with open_cell(tmp_path) as store:
        assert list(store.completed) == [("perplexity", 2048, 0)]
        assert not (store.path / "traceback.txt").exists()
        for item in items()[1:]:
            store.append(*item)
        store.finish({})
    assert read_cells([tmp_path])[0].state == "done"


def test_an_interrupt_leaves_a_partial_cell(tmp_path):
    with pytest.raises(KeyboardInterrupt), open_cell(tmp_path) as store:
        store.append(*items()[0])
        raise KeyboardInterrupt
    assert read_cells([tmp_path])[0].state == "abandoned"


def test_failing_never_hides_the_first_error(tmp_path, monkeypatch):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    with pytest.raises(RuntimeError, match="the cause"), open_cell(tmp_path):
        monkeypatch.setattr(os, "replace", no_space)
        raise RuntimeError("the cause")


def test_a_second_writer_is_refused_and_reading_needs_no_lock(tmp_path):
    with open_cell(tmp_path) as store:
        store.append(*items()[0])
        with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
            open_cell(tmp_path)
        (cell,) = read_cells([tmp_path])
        assert cell.live and cell.state == "running" and len(cell.records) == 1
    assert not is_locked(store.path)
    open_cell(tmp_path).close()


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    store = open_cell(tmp_path)
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(0)
    try:
        assert is_locked(store.path)
        store.close()
        deadline = time.monotonic() + 10
        while is_locked(store.path) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_locked(store.path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_out_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="file"):
        open_cell(tmp_path / "file")


# ----------------------------------------------------------------------------------------------------- kill for real
def run_child(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "helpers" / "store_child.py"), str(out)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def run_forked(out: Path, place: str, at: int) -> int:
    """Write the cell in a fork of this process that kills itself; much quicker than a fresh interpreter."""
    child = os.fork()
    if child == 0:
        try:
            store_child.main(str(out), place, at)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def contents(out: Path) -> tuple[bytes, bytes, dict]:
    (path,) = cell_directories([out])
    meta = json.loads((path / "cell.json").read_text())
    rest = {name: meta[name] for name in meta if name not in ("created", "updated")}
    assert sorted(item.name for item in path.iterdir()) == [".lock", "budget.parquet", "cell.json", "samples.jsonl"]
    return (path / "samples.jsonl").read_bytes(), (path / "budget.parquet").read_bytes(), rest


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    store_child.main(str(out))
    return contents(out)


def test_kill_at_random_moments_loses_at_most_the_sample_in_flight(tmp_path, uninterrupted):
    rng = random.Random(7)
    kills = 0
    for _ in range(6):
        child = run_child(tmp_path)
        assert child.stdout is not None
        first = child.stdout.readline()  # it works now; the kill falls somewhere into the next few samples
        time.sleep(rng.uniform(0.0, 0.015))
        child.kill()
        told = [first, *child.stdout.readlines()]
        if child.wait() != -signal.SIGKILL or told[-1] == "finished\n":
            break
        kills += 1
        (cell,) = read_cells([tmp_path])
        stored = [record["index"] for record in cell.records]
        acknowledged = int(told[-1]) + 1
        assert stored == list(range(len(stored)))
        assert acknowledged <= len(stored) <= acknowledged + 1
        assert cell.state == "abandoned" or (cell.state == "done" and len(stored) == SAMPLES)
    assert kills >= 3
    store_child.main(str(tmp_path))
    assert contents(tmp_path) == uninterrupted


@pytest.mark.parametrize(
    ("place", "at", "left"),
    [
        ("before parquet", 0, 0),
        ("before parquet", 5, 5),
        ("half a rename", 5, 5),
        ("between parquet and line", 5, 5),
        ("half a line", 5, 5),
        ("before parquet", SAMPLES, SAMPLES),
        ("half a rename", SAMPLES, SAMPLES),
        ("before done", SAMPLES, SAMPLES),
        ("before clean-up", SAMPLES, SAMPLES),
    ],
)
def test_kill_at_each_place(tmp_path, uninterrupted, place, at, left):
    assert run_forked(tmp_path, place, at) == -signal.SIGKILL
    (cell,) = read_cells([tmp_path])
    assert len(cell.records) == left
    assert cell.state == ("done" if place == "before clean-up" else "abandoned")
    store_child.main(str(tmp_path))
    assert contents(tmp_path) == uninterrupted


# --------------------------------------------------------------------------------------------------------- damage
def test_half_written_last_line_is_cut_off_with_a_notice(tmp_path, caplog):
    path = partial_cell(tmp_path)
    file = path / "samples.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:50])
    assert len(read_cells([tmp_path])[0].records) == 3
    assert file.read_bytes() == whole + whole[:50], "reading must change nothing"
    with open_cell(tmp_path) as store:
        assert len(store.completed) == 3
        assert "half-written last line (50 bytes)" in store.notices[0] and "half-written" in caplog.text
    assert file.read_bytes() == whole


def test_last_line_that_lacks_only_its_end_runs_again(tmp_path):
    file = partial_cell(tmp_path) / "samples.jsonl"
    file.write_bytes(file.read_bytes()[:-1])
    with open_cell(tmp_path) as store:
        assert len(store.completed) == 2
        for item in items()[2:]:  # the Parquet file of sample 2 is there already and is overwritten
            store.append(*item)
        store.finish({})
    assert len(read_cells([tmp_path])[0].records) == 4


@pytest.mark.parametrize("line", ["{broken", "[]", '{"task": "perplexity", "length": 2048, "metrics": {}}', ""])
def test_broken_middle_line_is_named(tmp_path, line):
    file = partial_cell(tmp_path) / "samples.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], line, *lines[1:]]) + "\n")
    for use in (lambda: open_cell(tmp_path), lambda: read_cells([tmp_path])):
        with pytest.raises(StoreError, match=r"samples\.jsonl:2: broken record"):
            use()


def test_duplicate_sample_is_named(tmp_path):
    file = partial_cell(tmp_path) / "samples.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, lines[1]]) + "\n")
    with pytest.raises(StoreError, match=r"samples\.jsonl:4: sample perplexity@2048\[1\] is already on line 2"):
        open_cell(tmp_path)


def test_budget_file_without_a_record_is_overwritten(tmp_path):
    path = partial_cell(tmp_path)
    stray = path / "budget" / "perplexity@2048-3.parquet"
    stray.write_bytes(b"half a file")
    with open_cell(tmp_path) as store:
        store.append(*items()[3])
        store.finish({})
    assert len(pd.read_parquet(path / "budget.parquet")) == 4 * synthetic.LAYERS * synthetic.HEADS


@pytest.mark.parametrize("missing", [True, False])
def test_damaged_budget_of_a_sample_is_named(tmp_path, missing):
    path = partial_cell(tmp_path)
    file = path / "budget" / "perplexity@2048-1.parquet"
    data = file.read_bytes()
    file.unlink()
    if not missing:
        file.write_bytes(data[: len(data) // 2])
    word = "missing" if missing else "unreadable"
    with pytest.raises(StoreError, match=rf"perplexity@2048-1\.parquet: budget of sample .* is {word}"):
        open_cell(tmp_path)
    assert not is_locked(path)


@pytest.mark.parametrize("name", ["budget.parquet", "samples.jsonl"])
@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_damage_to_a_finished_cell_is_named(tmp_path, name, damage):
    file = synthetic.perplexity_cell(tmp_path) / name
    data = file.read_bytes()
    changed = {"truncated": data[:-7], "changed": data.replace(b"1", b"2", 1), "missing": None}[damage]
    file.unlink()
    if changed is not None:
        assert changed != data
        file.write_bytes(changed)
    settings = synthetic.config()
    for use in (lambda: open_cell(tmp_path, settings), lambda: read_cells([tmp_path])):
        with pytest.raises(StoreError, match=name.replace(".", r"\.")):
            use()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "unreadable"),
        (b'{"key": ', "unreadable"),
        (b"\xff\xfe", "unreadable"),
        (b"[]", "store format"),
        (b'{"format": 99}', "store format"),
        (b'{"format": 1}', "field key"),
    ],
)
def test_unreadable_cell_json_is_named(tmp_path, text, message):
    path = partial_cell(tmp_path)
    (path / "cell.json").write_bytes(text)
    for use in (lambda: open_cell(tmp_path), lambda: read_cells([tmp_path])):
        with pytest.raises(StoreError, match=rf"cell\.json: .*{message}"):
            use()


def test_samples_without_cell_json(tmp_path):
    path = partial_cell(tmp_path)
    (path / "cell.json").unlink()
    for use in (lambda: open_cell(tmp_path), lambda: read_cells([tmp_path])):
        with pytest.raises(StoreError, match=r"cell\.json: missing"):
            use()


def test_edited_identity_and_renamed_directory_are_found(tmp_path):
    path = partial_cell(tmp_path)
    kept = (path / "cell.json").read_text()
    synthetic.edit_meta(path, lambda meta: meta["identity"]["method"]["select"].update(p=0.5))
    for use in (lambda: open_cell(tmp_path), lambda: read_cells([tmp_path])):
        with pytest.raises(StoreError, match="identity hashes to"):
            use()
    (path / "cell.json").write_text(kept)
    shutil.move(path, path.with_name("0123456789abcdef"))
    with pytest.raises(StoreError, match="renamed"):
        read_cells([tmp_path])


def test_unknown_status(tmp_path):
    path = partial_cell(tmp_path)
    synthetic.edit_meta(path, lambda meta: meta.update(status="fine"))
    with pytest.raises(StoreError, match="unknown status 'fine'"):
        read_cells([tmp_path])


# ---------------------------------------------------------------------------------------------------- directories
def test_directories_are_found_in_each_form_once(tmp_path):
    path = synthetic.perplexity_cell(tmp_path)
    assert cell_directories([path]) == cell_directories([tmp_path]) == cell_directories([tmp_path / "cells"]) == [path]
    assert len(cell_directories([tmp_path, path, str(tmp_path / "cells")])) == 1


def test_missing_and_empty_directories(tmp_path):
    with pytest.raises(InputError, match="no such directory"):
        read_cells([tmp_path / "absent"])
    with pytest.raises(InputError, match="holds no cell"):
        read_cells([tmp_path])
    with pytest.raises(InputError, match="at least one"):
        read_cells([])
