"""What one ``evalkit run`` has done so far, and what it tells the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from ..config import Cell
from . import estimate
from .isolation import CellOutcome


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = int(seconds + 0.5)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class Session:
    """Outcomes and progress of one invocation; one instance a process, :data:`SESSION`."""

    def __init__(self) -> None:
        self.reset(())

    def reset(self, cell_overrides: Iterable[str]) -> None:
        """Start over.

        Args:
            cell_overrides: command-line overrides that go to every cell of a multirun.
        """
        self.cell_overrides = list(cell_overrides)
        self.dry_run = False
        self.outcomes: list[CellOutcome] = []
        self.total = 0
        self.begun = time.monotonic()

    def begin(self, total: int) -> None:
        """Every cell is validated; ``total`` are about to run."""
        self.total = total
        if total > 1:
            _say(f"{total} cells")

    def listed(self, cells: Iterable[tuple[Cell, Iterable[str]]]) -> None:
        """Print the cells that would run, each with the overrides that compose it."""
        found = list(cells)
        for number, (cell, overrides) in enumerate(found, start=1):
            _say(f"[{number:>{len(str(len(found)))}}/{len(found)}] {cell.label}: {' '.join(overrides)}")

    def estimated(self, cells: Iterable[Cell]) -> None:
        """Print what the cells may cost on a GPU, where that can be told."""
        for line in estimate.lines(list(cells)):
            _say(line)

    def starting(self, label: str) -> None:
        """Print the line that a cell begins."""
        _say(f"{self._count(len(self.outcomes) + 1)}begin {label}")

    def ended(self, outcome: CellOutcome) -> None:
        """Record an outcome and print its line, with elapsed and remaining time."""
        self.outcomes.append(outcome)
        parts = [f"{self._count(len(self.outcomes))}{outcome.status} in {outcome.seconds:.1f} s"]
        if self.total > 1:
            parts.append(f"elapsed {clock(time.monotonic() - self.begun)}")
            remaining = self.total - len(self.outcomes)
            if remaining:
                parts.append(f"about {clock(self._mean_seconds() * remaining)} left")
        if not outcome.ok and self.total > 1:  # a single cell's reason is the last line, said once
            parts.append(outcome.reason)
        _say(", ".join(parts))
        if outcome.traceback:
            _say(outcome.traceback.rstrip())

    def collect(self, outcomes: Iterable[CellOutcome]) -> None:
        """Take the outcomes a launcher returned; those of cells run in this process are known already."""
        self.outcomes += [outcome for outcome in outcomes if outcome not in self.outcomes]

    def close(self) -> int:
        """Print the summary, failed cells last.

        Returns:
            Exit code: 0 all done, 1 a cell failed, 2 a cell was refused.
        """
        bad = [outcome for outcome in self.outcomes if not outcome.ok]
        done = len(self.outcomes) - len(bad)
        elapsed = clock(time.monotonic() - self.begun)
        if len(self.outcomes) > 1:
            failed = f", {len(bad)} failed" if bad else ""
            _say(f"{done} of {len(self.outcomes)} cells done{failed}, elapsed {elapsed}")
        for outcome in bad:
            if outcome.status == "invalid" and self.total <= 1:
                print(f"evalkit: {outcome.reason}", file=sys.stderr, flush=True)
                continue
            where = f" [{outcome.directory}]" if outcome.directory else ""
            _say(f"{outcome.status.upper()} {outcome.label}: {outcome.reason}{where}")
        if not bad:
            return 0
        return 2 if all(outcome.status == "invalid" for outcome in bad) else 1

    def interrupted(self) -> int:
        """Print what Ctrl-C left; returns the exit code of a process ended by SIGINT."""
        self.close()
        ended = f"{len(self.outcomes)} of {max(self.total, 1)} cells ended"
        _say(f"interrupted: {ended}; the same command goes on from here")
        return 130

    def _count(self, number: int) -> str:
        width = len(str(self.total))
        return f"[{number:>{width}}/{self.total}] " if self.total else ""

    def _mean_seconds(self) -> float:
        # A cell found finished takes no time and says nothing about those still to run.
        worked = [outcome.seconds for outcome in self.outcomes if outcome.seconds > 1.0]
        return sum(worked) / len(worked) if worked else 0.0


def _say(text: str) -> None:
    print(text, flush=True)


SESSION = Session()
