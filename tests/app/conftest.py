import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evalkit.app import isolation, main
from evalkit.app.isolation import CellOutcome
from evalkit.config import cell_from_mapping

FAKES = Path(__file__).parent / "fakes"


@pytest.fixture
def cell(tmp_path):
    """A small valid cell whose results go to a temporary directory."""
    return cell_from_mapping(
        {
            "model": {"name": "toy", "path": "owner/toy", "native_context": 4096},
            "method": {"name": "cosa"},
            "task": {"name": "perplexity", "length": 1024},
            "execution": {"seed": 7},
            "out": str(tmp_path / "runs"),
        }
    )


@pytest.fixture(autouse=True)
def light_server(monkeypatch):
    """Fork cells from a server that has imported only what the fakes need."""
    monkeypatch.setattr(isolation, "PRELOAD", ("evalkit.methods.cosa",))
    monkeypatch.syspath_prepend(str(FAKES))


@pytest.fixture
def notes(tmp_path):
    """What the fake runners noted."""

    def read():
        path = tmp_path / "runs" / "notes.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    return read


class Launched:
    """Runs the application in this process; cells are recorded instead of run."""

    def __init__(self):
        self.cells = []

    def __call__(self, *argv):
        return main.run(list(argv))

    def record(self, cell):
        self.cells.append(cell)
        return CellOutcome(cell.label, "done", "", cell.out, 2.0)


@pytest.fixture
def application(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    launched = Launched()
    monkeypatch.setattr(main, "run_isolated", launched.record)
    return launched


@pytest.fixture
def start(tmp_path):
    """Start the console command with a fake runner in a process group of its own."""
    started = []

    def begin(target, *arguments):
        process = subprocess.Popen(
            [sys.executable, str(FAKES / "drive.py"), target, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FAKES), os.environ.get("PYTHONPATH", "")])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A shell starts what it runs in the background with SIGINT ignored, which would be inherited.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
