"""Stand-ins for ``evalkit.runner.run_cell``: what a cell may do to the process it runs in."""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from evalkit.app.isolation import report_directory
from evalkit.errors import IntegrityError

STATE: list[str] = []


def note(cell, **facts):
    cell.out.mkdir(parents=True, exist_ok=True)
    with (cell.out / "notes.jsonl").open("a") as stream:
        stream.write(json.dumps({"label": cell.label, "overrides": cell.overrides, "pid": os.getpid(), **facts}) + "\n")


def quiet(cell):
    note(cell)


def leaky(cell):
    """Notes the state it finds, then spoils it."""
    import torch

    found = {
        "state": list(STATE),
        "torch": torch.rand(1).item(),
        "python": random.random(),
        "threads": torch.get_num_threads(),
        "environment": os.environ.get("LEAKED"),
    }
    note(cell, **found)
    STATE.append(cell.label)
    torch.manual_seed(999)
    torch.set_default_dtype(torch.float64)
    os.environ["LEAKED"] = "yes"


def raising(cell):
    raise RuntimeError("first line of the fault\nsecond line")


def refusing(cell):
    raise IntegrityError("59 sparse calls, 60 expected")


def raising_in_directory(cell):
    report_directory(cell.out / "cells" / "abc")
    raise RuntimeError("kept by the store")


def exiting(cell):
    sys.exit(3)


def vanishing(cell):
    os._exit(7)


def killed(cell):
    report_directory(cell.out / "cells" / "abc")
    os.kill(os.getpid(), signal.SIGKILL)


def crashing(cell):
    signal.raise_signal(signal.SIGSEGV)


def with_thread(cell):
    """Leaves behind a thread that the interpreter waits for."""
    threading.Thread(target=time.sleep, args=(60,)).start()


def with_grandchild(cell):
    """Leaves behind a process that holds every inherited pipe open."""
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def lingering(cell):
    note(cell)
    while True:
        time.sleep(0.05)
        Path(cell.out / "alive").write_text(str(time.time()))


def by_p(cell):
    """One sweep with every way to end: the method's p picks."""
    {0.6: raising, 0.7: killed, 0.8: refusing}.get(cell.method.select.p, quiet)(cell)
