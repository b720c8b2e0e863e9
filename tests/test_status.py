from __future__ import annotations

import io

import pytest
import synthetic
from rich.console import Console

from evalkit.errors import InputError
from evalkit.status import count_states, list_cells, print_status
from evalkit.store import CellStore


def fail(store: CellStore) -> None:
    try:
        raise RuntimeError("first line\nthe [red]last[/red] line")
    except RuntimeError as exc:
        store.fail(exc)


def some(settings, count):
    return iter(list(synthetic.perplexity_records(damage=0.1, share=0.5))[:count])


def partial(out, p, count=2, end=lambda store: None):
    settings = synthetic.config(p=p)
    return synthetic.write_cell(out, settings, some(settings, count), end=end, expected=4)


def printed(directories, width=100):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    code = print_status(directories, console)
    return code, console.file.getvalue()


def test_each_state(tmp_path):
    synthetic.perplexity_cell(tmp_path, "dense")
    partial(tmp_path, 0.9)
    partial(tmp_path, 0.8, count=1, end=fail)
    damaged = partial(tmp_path, 0.7)
    (damaged / "cell.json").write_text("{")
    settings = synthetic.config(p=0.6)
    with CellStore.open(
        tmp_path, synthetic.identity(settings), label="at work", overrides=(), cell_config=settings
    ) as store:
        store.append(*next(some(settings, 1)))
        rows = list_cells([tmp_path])
        code, text = printed([tmp_path])
    found = {row.state: (row.samples, row.expected) for row in rows}
    assert found == {"done": (4, 4), "running": (1, None), "abandoned": (2, 4), "failed": (1, 4), "damaged": (0, None)}
    assert [row.state for row in rows] == ["done", "running", "abandoned", "failed", "damaged"]
    assert count_states(rows) == dict.fromkeys(found, 1)
    assert code == 1
    assert "the [red]last[/red] line" in text and "first line" not in text
    assert "4/4" in text and "1/?" in text and "at work" in text and damaged.name in text
    assert text.splitlines()[-1] == "5 cells: 1 done, 1 running, 1 abandoned, 1 failed, 1 damaged"
    assert {row.state for row in list_cells([tmp_path])} == {"done", "abandoned", "failed", "damaged"}


@pytest.mark.parametrize("state", ["failed", "damaged"])
def test_a_failed_or_damaged_cell_sets_the_exit_code(tmp_path, state):
    path = partial(tmp_path, 0.9, end=fail if state == "failed" else lambda store: None)
    if state == "damaged":
        (path / "samples.jsonl").write_text("{}\n")
    code, text = printed([tmp_path])
    assert code == 1 and text.splitlines()[-1] == f"1 cells: 1 {state}"


def test_partial_cells_are_no_failure(tmp_path):
    synthetic.perplexity_cell(tmp_path, "dense")
    partial(tmp_path, 0.9)
    code, text = printed([tmp_path])
    assert code == 0 and text.splitlines()[-1] == "2 cells: 1 done, 1 abandoned"


def test_looking_does_not_stop_a_writer(tmp_path):
    """The look takes the lock for an instant; a writer that starts in that instant waits."""
    import fcntl
    import os
    import threading

    path = partial(tmp_path, 0.9)
    handle = os.open(path / ".lock", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    threading.Timer(0.2, os.close, [handle]).start()
    settings = synthetic.config(p=0.9)
    with CellStore.open(tmp_path, synthetic.identity(settings), label="x", overrides=(), cell_config=settings) as store:
        assert len(store.completed) == 2


def test_missing_and_empty_directories(tmp_path):
    with pytest.raises(InputError, match="no such directory"):
        list_cells([tmp_path / "absent"])
    with pytest.raises(InputError, match="holds no cell"):
        list_cells([tmp_path])
