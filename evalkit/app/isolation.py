"""One cell in one process: nothing carried over, nothing shared, no crash that reaches the next cell.

The child is forked from a server that has imported the heavy packages and run nothing. Two pipes tie it to its parent:
on one it reports, the other only ever says that the parent is gone.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ..config import Cell
from ..errors import EvalkitError

RUNNER = "evalkit.app.isolation:run_and_report"
PRELOAD: tuple[str, ...] = ("evalkit.app.preload",)
ORPHANED = 97  # exit code of a child that outlived its parent; nobody is left to read it
_GRACE_S = 5.0

_channel: Connection | None = None  # set in the child


@dataclass(frozen=True)
class CellOutcome:
    """How one cell ended.

    Args:
        label: the cell's label.
        status: ``done``, ``failed`` or ``invalid`` (refused before it ran).
        reason: one line; empty when done.
        directory: the cell's directory if the store had opened it, else the results directory.
        seconds: wall time.
        traceback: text for the terminal when no directory holds it.
    """

    label: str
    status: str
    reason: str = ""
    directory: Path | None = None
    seconds: float = 0.0
    traceback: str = ""

    @property
    def ok(self) -> bool:
        """The cell is finished and stored."""
        return self.status == "done"


def report_directory(path: Path) -> None:
    """Tell the parent which directory the running cell writes to; does nothing outside an isolated cell."""
    if _channel is not None:
        _channel.send(("directory", str(path)))


def run_and_report(cell: Cell) -> None:
    """Run a cell and tell the parent its directory as soon as it has one."""
    from ..runner import run_cell

    run_cell(cell, opened=report_directory)


def run_isolated(cell: Cell, target: str | None = None) -> CellOutcome:
    """Run ``target(cell)`` in a fresh process and report how it ended. Never raises for what happens in there.

    Args:
        cell: validated cell; it is pickled to the child.
        target: ``"package.module:function"``; ``None`` = :data:`RUNNER`.

    Raises:
        KeyboardInterrupt: after the child has been ended.
    """
    begin = time.monotonic()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    receiver, sender = context.Pipe(duplex=False)
    lifeline, anchor = context.Pipe(duplex=False)  # the parent holds the anchor; its end closes the lifeline
    process = context.Process(target=_child, args=(target or RUNNER, cell, sender, lifeline), name="evalkit-cell")
    messages: dict[str, Any] = {}
    try:
        process.start()
        sender.close()
        lifeline.close()
        messages = _listen(process, receiver)
    finally:
        _end(process)
        anchor.close()
        receiver.close()
    return _outcome(cell, messages, process.exitcode, time.monotonic() - begin)


def _listen(process: Any, receiver: Connection) -> dict[str, Any]:
    """Collect the child's messages until it says how it ended, or is gone.

    A grandchild may hold the pipe open after the child's death, so the process is watched beside the pipe.
    """
    messages: dict[str, Any] = {}
    while True:
        if receiver not in wait([receiver, process.sentinel]) and not receiver.poll(0):
            break
        try:
            kind, value = receiver.recv()
        except (EOFError, OSError):
            break
        messages[kind] = value
        if kind in ("done", "failed"):
            break
    process.join(_GRACE_S)  # exit handlers; a library's thread that never ends must not hold up the sweep
    return messages


def _end(process: Any) -> None:
    """End the child if it still runs. Its records are flushed one by one, so a kill loses the sample in flight."""
    if process.pid is None:
        return
    if process.is_alive():
        process.kill()
    process.join(_GRACE_S)


def _outcome(cell: Cell, messages: dict[str, Any], exitcode: int | None, seconds: float) -> CellOutcome:
    directory = Path(messages["directory"]) if "directory" in messages else cell.out
    if "done" in messages:
        return CellOutcome(cell.label, "done", "", directory, seconds)
    if "failed" in messages:
        reason, text = messages["failed"]
        text = "" if "directory" in messages else text  # the store keeps it
        return CellOutcome(cell.label, "failed", reason, directory, seconds, text)
    return CellOutcome(cell.label, "failed", _exit_reason(exitcode), directory, seconds)


def _exit_reason(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        try:
            name = signal.Signals(-exitcode).name
        except ValueError:
            name = f"signal {-exitcode}"
        hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"process ended with exit code {exitcode} and no result"


# ---------------------------------------------------------------------------------------------------------- child
def _child(target: str, cell: Cell, channel: Connection, lifeline: Connection) -> None:
    global _channel
    _channel = channel
    # Ctrl-C reaches the whole process group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, args=(lifeline,), daemon=True, name="evalkit-lifeline").start()
    try:
        function = _load(target)
        _fresh_state(cell)
        function(cell)
        channel.send(("done", None))
    except BaseException as exc:  # noqa: BLE001 - SystemExit and KeyboardInterrupt are failures of the cell too
        _flush()
        text = "" if isinstance(exc, EvalkitError) else traceback.format_exc()
        channel.send(("failed", (one_line(exc), text)))


def _follow_parent(lifeline: Connection) -> None:
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os._exit(ORPHANED)


def _load(target: str) -> Callable[[Cell], object]:
    module, _, attribute = target.partition(":")
    function: Callable[[Cell], object] = getattr(importlib.import_module(module), attribute)
    return function


def _fresh_state(cell: Cell) -> None:
    """Seed every generator and set the threads."""
    seed = cell.execution.seed
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.manual_seed(seed)
        if cell.execution.threads is not None:
            torch.set_num_threads(cell.execution.threads)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass


def one_line(exc: BaseException) -> str:
    """An exception as one line: the message of our own errors, the type and first line of any other."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    if isinstance(exc, EvalkitError):
        return " ".join(lines) or type(exc).__name__
    return f"{type(exc).__name__}: {lines[0]}" if lines else type(exc).__name__
