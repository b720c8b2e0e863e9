"""Reports: tables and Pareto plots of finished cells beside their dense twins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ..errors import InputError, near_matches
from . import pareto, table
from .load import load
from .page import page
from .rows import Rows, build_rows

FILES = {
    "markdown": "report.md",
    "csv": "report.csv",
    "latex": "report.tex",
    "png": "pareto.png",
    "svg": "pareto.svg",
    "html": "report.html",
}
ALIASES = {"md": "markdown", "tex": "latex"}
TERMINAL_WIDTH = 120
"""Columns where the output is no terminal."""


@dataclass(frozen=True)
class ReportPaths:
    """Files of a report; ``None`` for a format that was not asked for, or a plot with nothing to draw."""

    markdown: Path | None = None
    csv: Path | None = None
    latex: Path | None = None
    png: Path | None = None
    svg: Path | None = None
    html: Path | None = None


def write_report(
    directories: Iterable[str | Path],
    out: str | Path | None = None,
    *,
    formats: Sequence[str] = (),
    console: Console | None = None,
) -> ReportPaths:
    """Print the table of some results directories and write it, with the plot, to files.

    Args:
        directories: results directories of runs.
        out: where to write; ``None`` = the first directory.
        formats: keys of :data:`FILES` (or ``md``, ``tex``); empty = all.
        console: where to print.

    Returns:
        Paths of the files written.

    Raises:
        InputError: unknown format, or a directory that is missing, empty or without a finished cell.
        EvalkitError: a sparse cell has no dense twin; the message holds the command that makes it.
        StoreError: a cell is damaged, or a pair did not see the same samples and prompts.
    """
    given = [Path(item) for item in directories]
    wanted = _formats(formats)
    rows = build_rows(load(given))
    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else TERMINAL_WIDTH)
    table.print_rows(rows, console)
    target = Path(out) if out is not None else given[0]
    paths = _write(rows, target, wanted)
    for name in wanted:
        path = getattr(paths, name)
        if path is not None:
            console.print(f"wrote {path}", markup=False, soft_wrap=True)
    return paths


def _formats(names: Sequence[str]) -> list[str]:
    found = [ALIASES.get(name, name) for name in names]
    for name in found:
        if name not in FILES:
            raise InputError("format", name, near_matches(name, [*FILES, *ALIASES]))
    return [name for name in FILES if name in found or not found]


def _write(rows: Rows, target: Path, wanted: Sequence[str]) -> ReportPaths:
    figure = pareto.draw(rows) if {"png", "svg", "html"} & set(wanted) else None
    svg = None if figure is None else pareto.render(figure, "svg")
    makers: dict[str, Callable[[], str | bytes | None]] = {
        "markdown": lambda: table.markdown(rows),
        "csv": lambda: table.csv(rows),
        "latex": lambda: table.latex(rows),
        "png": lambda: None if figure is None else pareto.render(figure, "png"),
        "svg": lambda: svg,
        "html": lambda: page(rows, None if svg is None else svg.decode()),
    }
    paths: dict[str, Path] = {}
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in wanted:
            content = makers[name]()
            if content is None:
                continue
            paths[name] = target / FILES[name]
            paths[name].write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as exc:
        raise InputError("out", str(target), f"must be a directory that can be written to ({exc.strerror})") from None
    return ReportPaths(**paths)
