"""Reports: tables and Pareto plots of finished cells beside their dense twins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ..errors import InputError, near_matches
from . import pareto, table
from .below import mark
from .load import Loaded, load
from .page import build, page
from .rows import Rows, build_rows

FILES = {
    "markdown": "report.md",
    "csv": "report.csv",
    "latex": "report.tex",
    "png": "pareto.png",
    "svg": "pareto.svg",
    "pdf": "pareto.pdf",
    "html": "report.html",
}
IMAGES = ("png", "svg", "pdf")
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
    pdf: Path | None = None
    html: Path | None = None


def write_report(
    directories: Iterable[str | Path],
    out: str | Path | None = None,
    *,
    formats: Sequence[str] = (),
    html: str | Path | None = None,
    console: Console | None = None,
) -> ReportPaths:
    """Print the table of some results directories and write it, with the plot, to files.

    Args:
        directories: results directories of runs.
        out: where to write; ``None`` = the first directory.
        formats: keys of :data:`FILES` (or ``md``, ``tex``); empty = all, or with ``html`` nothing else.
        html: write the page to this file.
        console: where to print.

    Returns:
        Paths of the files written.

    Raises:
        InputError: unknown format, or a directory that is missing, empty or without a finished cell.
        EvalkitError: a sparse cell has no dense twin; the message holds the command that makes it.
        StoreError: a cell is damaged, or a pair did not see the same samples and prompts.
    """
    given = [Path(item) for item in directories]
    wanted = _formats([*formats, "html"] if html is not None else formats)
    loaded = load(given)
    rows = mark(build_rows(loaded), loaded.cells)
    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else TERMINAL_WIDTH)
    table.print_rows(rows, console)
    target = Path(out) if out is not None else given[0]
    files = {name: target / FILES[name] for name in wanted}
    if html is not None:
        files["html"] = _page_file(Path(html))
    paths = _write(rows, loaded, files)
    for name in wanted:
        path = getattr(paths, name)
        if path is not None:
            for file in (path, cost_file(path)) if name in IMAGES else (path,):
                console.print(f"wrote {file}", markup=False, soft_wrap=True)
    return paths


def cost_file(plot: Path) -> Path:
    """File of the plot against B_cost, beside the one against B."""
    return plot.with_stem(f"{plot.stem}_cost")


def _formats(names: Sequence[str]) -> list[str]:
    found = [ALIASES.get(name, name) for name in names]
    for name in found:
        if name not in FILES:
            raise InputError("format", name, near_matches(name, [*FILES, *ALIASES]))
    return [name for name in FILES if name in found or not found]


def _page_file(file: Path) -> Path:
    if file.is_dir():
        raise InputError("html", str(file), "must be a file; results directories come first: evalkit report DIR --html")
    return file


def _write(rows: Rows, loaded: Loaded, files: Mapping[str, Path]) -> ReportPaths:
    figures = [pareto.draw(rows, budget) for budget in pareto.AXES] if set(IMAGES) & set(files) else []
    makers: dict[str, Callable[[], str | bytes | None]] = {
        "markdown": lambda: table.markdown(rows),
        "csv": lambda: table.csv(rows),
        "latex": lambda: table.latex(rows),
        "html": lambda: page(build(loaded, rows)),
    }
    paths: dict[str, Path] = {}
    for name, path in files.items():
        if name in makers:
            contents = {path: makers[name]()}
        else:
            targets = (path, cost_file(path))
            contents = {
                file: None if figure is None else pareto.render(figure, name)
                for file, figure in zip(targets, figures, strict=True)
            }
        for file, content in contents.items():
            if content is None:
                continue
            paths[name] = path
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content.encode() if isinstance(content, str) else content)
            except OSError as exc:
                field = "html" if path.name != FILES[name] else "out"
                told = f"must be a place that can be written to ({exc.strerror})"
                raise InputError(field, str(file), told) from None
    return ReportPaths(**paths)
