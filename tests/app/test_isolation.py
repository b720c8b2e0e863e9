import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest

from evalkit.app import isolation
from evalkit.app.isolation import report_directory, run_isolated


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def gone(pid):
    """No such process, or only its entry is left for a parent that never asks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_done(cell, notes):
    outcome = run_isolated(cell, "fake_runners:quiet")
    assert outcome.ok and outcome.reason == "" and outcome.directory == cell.out
    assert notes()[0]["label"] == cell.label == outcome.label
    assert notes()[0]["pid"] != os.getpid()


def test_no_state_is_carried_to_the_next_cell(cell, notes):
    for seed in (7, 7, 8):
        execution = dataclasses.replace(cell.execution, seed=seed, threads=1)
        assert run_isolated(dataclasses.replace(cell, execution=execution), "fake_runners:leaky").ok
    first, second, third = notes()
    facts = ("state", "torch", "python", "threads", "environment")
    assert [first[key] for key in facts] == [second[key] for key in facts]
    assert first["state"] == [] and first["environment"] is None and first["threads"] == 1
    assert third["torch"] != first["torch"] and third["python"] != first["python"]


@pytest.mark.parametrize(
    ("runner", "reason"),
    [
        ("raising", "RuntimeError: first line of the fault"),
        ("refusing", "59 sparse calls, 60 expected"),
        ("exiting", "SystemExit: 3"),
        ("vanishing", "process ended with exit code 7 and no result"),
        ("killed", "killed by SIGKILL (the system may have run out of memory)"),
        ("crashing", "killed by SIGSEGV"),
        ("with_grandchild", "killed by SIGKILL (the system may have run out of memory)"),
        ("absent", "AttributeError: module 'fake_runners' has no attribute 'absent'"),
    ],
)
def test_every_end_is_an_outcome(cell, runner, reason):
    outcome = run_isolated(cell, f"fake_runners:{runner}")
    assert (outcome.status, outcome.reason) == ("failed", reason)
    assert outcome.seconds < 20
    assert run_isolated(cell, "fake_runners:quiet").ok


def test_a_thread_left_behind_does_not_hold_up_the_sweep(cell, monkeypatch):
    monkeypatch.setattr(isolation, "_GRACE_S", 0.2)
    outcome = run_isolated(cell, "fake_runners:with_thread")
    assert outcome.ok and outcome.seconds < 20


def test_directory_is_known_even_after_sigkill(cell):
    assert run_isolated(cell, "fake_runners:killed").directory == cell.out / "cells" / "abc"


def test_traceback_goes_to_the_terminal_only_when_no_store_holds_it(cell):
    assert "second line" in run_isolated(cell, "fake_runners:raising").traceback
    assert run_isolated(cell, "fake_runners:raising_in_directory").traceback == ""
    assert run_isolated(cell, "fake_runners:refusing").traceback == ""


def test_reporting_a_directory_outside_a_cell_does_nothing():
    report_directory(Path("anywhere"))


def test_child_ends_with_a_killed_parent(start, notes):
    process = start("fake_runners:lingering", "run", "method=cosa", "task=perplexity", "out=runs")
    assert wait_until(notes)
    child = notes()[0]["pid"]
    assert not gone(child)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert wait_until(lambda: gone(child))


def test_interrupt_ends_the_sweep(start, notes):
    process = start(
        "fake_runners:lingering", "run", "-m", "method=cosa", "task=perplexity", "method.stride=4,8", "out=runs"
    )
    assert wait_until(notes)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: the child gets it too
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert wait_until(lambda: gone(notes()[0]["pid"]))
    assert len(notes()) == 1
    assert output.splitlines()[-1].startswith("interrupted: 0 of 2 cells ended")
    assert "Traceback" not in errors
