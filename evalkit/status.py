"""``evalkit status``: which cells of a sweep are done, failed or partial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .errors import StoreError
from .store import cell_directories, read_cell

STATES = ("done", "running", "abandoned", "failed", "damaged")
"""In the order in which a table lists them: what needs attention comes last, next to the prompt."""
_STYLE = {"done": "green", "running": "cyan", "abandoned": "yellow", "failed": "bold red", "damaged": "bold red"}


@dataclass(frozen=True)
class StatusRow:
    """One cell of a results directory.

    Attributes:
        path: the cell's directory.
        state: one of :data:`STATES`; ``running`` and ``abandoned`` are partial, with and without a live process.
        label: the cell's label; its key where the label cannot be read.
        samples: finished samples.
        expected: samples of the whole cell; ``None`` if unknown.
        detail: last line of a failed cell's traceback, or what is damaged.
    """

    path: Path
    state: str
    label: str
    samples: int
    expected: int | None
    detail: str = ""


def list_cells(directories: Iterable[str | Path]) -> list[StatusRow]:
    """Look at every cell below some results directories; a damaged one is a row, not an error.

    Raises:
        InputError: a directory does not exist or holds no cell.
    """
    rows = [_row(path) for path in cell_directories(directories)]
    return sorted(rows, key=lambda row: (STATES.index(row.state), row.label, str(row.path)))


def _row(path: Path) -> StatusRow:
    try:
        cell = read_cell(path)
    except StoreError as exc:
        return StatusRow(path, "damaged", path.name, 0, None, str(exc))
    return StatusRow(path, cell.state, cell.label, len(cell.records), cell.expected_samples, cell.error)


def count_states(rows: Sequence[StatusRow]) -> dict[str, int]:
    """Number of cells by state, every state of :data:`STATES` present."""
    counts = Counter(row.state for row in rows)
    return {state: counts[state] for state in STATES}


def status_table(rows: Sequence[StatusRow]) -> Table:
    """Rows as a table for the terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("state", no_wrap=True)
    table.add_column("samples", justify="right", no_wrap=True)
    table.add_column("cell", overflow="fold")
    for row in rows:
        expected = "?" if row.expected is None else row.expected
        what = Text(row.label)
        if row.detail:
            what.append(f"\n{row.detail}", style="red")
        if row.state in ("failed", "damaged"):
            what.append(f"\n{row.path}", style="dim")
        table.add_row(Text(row.state, style=_STYLE[row.state]), f"{row.samples}/{expected}", what)
    return table


def print_status(directories: Iterable[str | Path], console: Console | None = None) -> int:
    """Print the table and a line of counts.

    Returns:
        Exit code: 1 if a cell failed or is damaged, else 0.
    """
    rows = list_cells(directories)
    counts = count_states(rows)
    console = console or Console(highlight=False)
    console.print(status_table(rows))
    said = ", ".join(f"{number} {state}" for state, number in counts.items() if number)
    console.print(f"{len(rows)} cells: {said}", soft_wrap=True)
    return 1 if counts["failed"] + counts["damaged"] else 0
