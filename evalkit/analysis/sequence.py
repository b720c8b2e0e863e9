"""``evalkit analyze figures_...``: several commands one after another, each in a process of its own."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time

from ..app.session import clock
from .settings import FiguresAnalysis


def run(settings: FiguresAnalysis, command: str) -> int:
    """Run the steps in their order. Each resumes where it stopped, so the whole does too.

    Args:
        settings: validated settings.
        command: as typed; not used.

    Returns:
        Exit code: that of the first step that failed, 0 if none did.
    """
    begin, failed = time.monotonic(), 0
    for number, step in enumerate(settings.steps, start=1):
        print(f"[{number}/{len(settings.steps)}] evalkit {step}", flush=True)
        started = time.monotonic()
        code = subprocess.run([sys.executable, "-m", "evalkit.cli", *shlex.split(step)], check=False).returncode
        took, whole = clock(time.monotonic() - started), clock(time.monotonic() - begin)
        print(f"[{number}/{len(settings.steps)}] exit code {code} in {took}, {whole} in all", flush=True)
        if code and not failed:
            failed = code
        if code and not settings.keep_going:
            print("the same command goes on from here", flush=True)
            break
    return failed
