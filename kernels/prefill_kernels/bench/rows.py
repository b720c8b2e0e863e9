"""The rows of a benchmark file: one number each, written as they come."""

from __future__ import annotations

import csv
import re
import subprocess
from pathlib import Path

import torch

from .config import BenchError

COLUMNS = "bench,variant,tokens,setting,metric,value,unit,device,torch,triton,commit,command".split(",")
UNITS = {
    "ms": "ms",
    "host_ms": "ms",
    "plan_ms": "ms",
    "attention_ms": "ms",
    "tflops": "TF/s",
    "attention_tflops": "TF/s",
    "ttft": "s",
    "loss": "s",
    "peak_memory": "GiB",
    "plan_memory": "GiB",
    "graph_ms": "ms",
    "regroup_ms": "ms",
    "union_ms": "ms",
    "reduction_ms": "ms",
    "host_plan_ms": "ms",
    "useful_tflops": "TF/s",
    "break_even_native_tflops": "TF/s",
    "partials": "GiB",
    "prefill": "s",
    "throughput": "tokens/s",
    "mean_union": "pages",
    "mean_halves": "pages",
    "mean_imbalance": "pages",
}
"""Units by metric; every other metric is a ratio."""


class Rows:
    """Appends rows to a CSV file and prints them.

    Args:
        path: the file; it and its directory are made if missing.
        command: the command that reproduces the rows.
        commit: commit of the measured code.
        device: name of the device; None = that of the CUDA device.

    Raises:
        BenchError: the file exists and has other columns, or cannot be written to.
    """

    def __init__(self, path: Path, command: str, commit: str, device: str | None = None) -> None:
        self.path = path
        self.machine = [device or torch.cuda.get_device_name(), torch.__version__, _triton(), commit, command]
        header = ",".join(COLUMNS)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or not path.stat().st_size:
                path.write_text(header + "\n")
            with path.open() as file:
                first = file.readline().rstrip("\n")
        except OSError as error:
            raise BenchError("out", str(path), f"a file that can be written to ({error.strerror})") from None
        if first != header:
            raise BenchError("out", str(path), f"a new file, or one whose first line is {header}")

    def add(self, bench: str, variant: str, tokens: int, setting: str, **values: float) -> None:
        """Append one row a value."""
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            for metric, value in values.items():
                unit = UNITS.get(metric, "ratio")
                writer.writerow([bench, variant, tokens, setting, metric, f"{value:.5g}", unit, *self.machine])
        shown = " ".join(f"{metric}={value:.4g}" for metric, value in values.items())
        print(f"{bench} {variant} {tokens} [{setting}] {shown}", flush=True)


def default_out(device: str) -> Path:
    """Where a device's rows belong: ``results/h200/benchmarks.csv`` for an "NVIDIA H200"."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia ")).strip("-")
    return Path("results") / name / "benchmarks.csv"


def checkout_commit() -> str:
    """Commit of the checkout this package lies in, marked where its sources have changed; "unknown" elsewhere."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    root = git("rev-parse", "--show-toplevel")
    commit = git("rev-parse", "--short", "HEAD")
    # A package installed below somebody's checkout is not that checkout's.
    if not root or not commit or git("ls-files", "--error-unmatch", str(here / "rows.py")) is None:
        return "unknown"
    # Results change while they are measured; that says nothing about the measured code.
    changed = git("-C", root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)results")
    return f"{commit}-dirty" if changed else commit


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)
