"""``evalkit report --paper``: our cells beside the numbers that the CoSA paper prints, in the layout of its tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text
from tabulate import tabulate

from ...errors import InputError, near_matches
from ..load import load
from ..provenance import provenance
from .layout import APART, CHANGED, OVERLAP, Cell, Pair, Sheet, sheets, signed
from .measured import measure
from .published import read, usual_folder

FILES = {"markdown": "paper.md", "csv": "paper.csv", "latex": "paper.tex"}
ALIASES = {"md": "markdown", "tex": "latex"}
COLUMNS = (
    "table", "model", "data", "method", "column", "published", "measured", "low", "high", "n", "difference",
    "intervals_overlap", "published_B", "measured_B_block", "B_difference", "measured_B", "to_dense", "to_dense_low",
    "to_dense_high", "to_base", "to_base_low", "to_base_high", "runs", "published_runs", "decoding", "notes",
)  # fmt: skip

EXPLANATION = (
    "Accuracy and budgets in percent, differences in points, measured minus published. B is counted in whole blocks, "
    "as the paper counts it; B in causal cells is in the CSV file. Best and second best are marked among the sparse "
    f"methods, printed and measured apart. After a difference, {OVERLAP} says that the 95 % intervals overlap and "
    f"{APART} that they do not: ours is that of the measured samples; the paper prints none, so Wilson's stands for "
    "it, of its 192 easy and 311 hard questions on LongBench-v2, and of as many samples as measured on RULER, where it "
    "does not tell its number. Over lengths accuracy is the plain mean and B is weighted by length; on LongBench-v2 "
    "easy and hard weigh by their numbers of questions, then the two modes weigh the same. Runs of several seeds are "
    "averaged by question. A row shows the preset of its model at the preset's values; one with changed settings "
    f"stands there only where that was not run, and is marked {CHANGED}; one for another of the paper's models never "
    "does."
)


def write_paper(
    directories: Iterable[str | Path],
    out: str | Path | None = None,
    *,
    published: str | Path | None = None,
    formats: Sequence[str] = (),
    console: Console | None = None,
) -> dict[str, Path]:
    """Print the tables and write them.

    Args:
        directories: results directories of runs.
        out: where to write; ``None`` = the first directory.
        published: folder with the paper's numbers; ``None`` = :func:`.published.usual_folder`.
        formats: keys of :data:`FILES` (or ``md``, ``tex``); empty = all.
        console: where to print.

    Returns:
        Paths of the files written, by format.

    Raises:
        InputError: unknown format, missing or unreadable numbers, no finished cell, or none that is in these tables.
        EvalkitError: a sparse cell has no dense twin; the message holds the command that makes it.
        StoreError: a cell is damaged, or a pair did not see the same samples and prompts.
    """
    given = [Path(item) for item in directories]
    wanted = _formats(formats)
    numbers = read(Path(published) if published is not None else usual_folder())
    loaded = load(given)
    measured = measure(loaded.cells)
    found, pairs = sheets(measured, numbers)
    if not found:
        names = ", ".join(str(item) for item in given)
        raise InputError(
            "directory", names, "holds no RULER or LongBench-v2 cell of a method preset in the paper's tables"
        )
    notes = [*loaded.notes, *measured.notes]
    console = console or Console(highlight=False, soft_wrap=True)
    for sheet in found:
        body = [sheet.title, _grid(sheet, "simple", _terminal), *sheet.remarks]
        console.print(Text("\n".join(body) + "\n"), soft_wrap=True)
    for note in notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)
    makers: dict[str, Callable[[], str]] = {
        "markdown": lambda: _markdown(found, pairs, notes, provenance(loaded.cells)),
        "csv": lambda: _csv(pairs),
        "latex": lambda: "\n".join(_tex(sheet) for sheet in found) + "\n",
    }
    target = Path(out) if out is not None else given[0]
    paths = {}
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in wanted:
            paths[name] = target / FILES[name]
            paths[name].write_text(makers[name]())
    except OSError as exc:
        raise InputError("out", str(target), f"must be a directory that can be written to ({exc.strerror})") from None
    for path in paths.values():
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    return paths


def _formats(names: Sequence[str]) -> list[str]:
    found = [ALIASES.get(name, name) for name in names]
    for name in found:
        if name not in FILES:
            raise InputError("format", name, f"with --paper: {near_matches(name, [*FILES, *ALIASES])}")
    return [name for name in FILES if name in found or not found]


# ---------------------------------------------------------------------------------------------------------- formats
def _terminal(cell: Cell) -> str:
    return cell.text + {0: "", 1: "*", 2: "'"}[cell.rank] + (f" {cell.mark}" if cell.mark else "")


def _md(cell: Cell) -> str:
    text = {0: "{}", 1: "**{}**", 2: "<u>{}</u>"}[cell.rank].format(cell.text.replace("|", "\\|"))
    return f"{text} {cell.mark}" if cell.mark else text


def _latex(cell: Cell) -> str:
    text = cell.text.replace("%", r"\%").replace("_", r"\_").replace(OVERLAP, r"$\sim$")
    mark = {"": "", CHANGED: r"$^\dagger$"}[cell.mark]
    return {0: "{}", 1: r"\textbf{{{}}}", 2: r"\underline{{{}}}"}[cell.rank].format(text) + mark


def _tex(sheet: Sheet) -> str:
    remarks = [f"% {line}" for line in sheet.remarks]
    return "\n".join([f"% {sheet.title}", *remarks, _grid(sheet, "latex_raw", _latex)])


def _grid(sheet: Sheet, style: str, text: Callable[[Cell], str]) -> str:
    body = [[text(cell) for cell in row] for row in sheet.rows]
    headers = [_latex(Cell(head)) if style.startswith("latex") else head for head in sheet.headers]
    labels = 2 if sheet.number != "3" else 7
    align = ["left"] * labels + ["right"] * (len(headers) - labels)
    return tabulate(body, headers=headers, tablefmt=style, colalign=align, disable_numparse=True)


def _markdown(found: Sequence[Sheet], pairs: Sequence[Pair], notes: Sequence[str], origins: Sequence[str]) -> str:
    parts = ["# Beside the published numbers", EXPLANATION]
    for sheet in found:
        parts += [f"## {sheet.title}", _grid(sheet, "pipe", _md)]
        if sheet.remarks:
            parts.append("\n".join(f"- {line}" for line in sheet.remarks))
    parts += ["## Intervals", _intervals(pairs)]
    if notes:
        parts += ["## Notes", "\n".join(f"- {note}" for note in notes)]
    parts += ["## How it was measured", "\n".join(f"- {line}" for line in origins)]
    return "\n\n".join(parts) + "\n"


def _intervals(pairs: Sequence[Pair]) -> str:
    headers = (
        "table",
        "model",
        "method",
        "column",
        "published",
        "measured",
        "95 % interval",
        "n",
        "overlap",
        "to dense",
        "to Base",
    )
    body = []
    for pair in pairs:
        if pair.measured is None:
            continue
        ours = pair.measured.estimate
        body.append(
            [
                pair.table,
                f"{pair.model}, {pair.data}" if pair.data else pair.model,
                pair.method,
                pair.column,
                "-" if pair.published is None else f"{pair.published.accuracy:.2f}",
                f"{ours.value:.2f}",
                f"[{ours.low:.2f}, {ours.high:.2f}]",
                str(ours.n),
                {True: "yes", False: "no", None: "-"}[pair.overlap],
                signed(pair.to_dense),
                signed(pair.to_base),
            ]
        )
    align = ["left"] * 4 + ["right"] * 7
    return tabulate(body, headers=headers, tablefmt="pipe", colalign=align, disable_numparse=True)


def _csv(pairs: Sequence[Pair]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for pair in pairs:
        row: dict[str, object] = {
            "table": pair.table,
            "model": pair.model,
            "data": pair.data,
            "method": pair.method,
            "column": pair.column,
            "difference": pair.difference,
            "intervals_overlap": pair.overlap,
            "B_difference": pair.budget_difference,
            "published_runs": pair.published_runs,
        }
        if pair.published is not None:
            row |= {"published": pair.published.accuracy, "published_B": pair.published.budget}
        if pair.measured is not None:
            ours = pair.measured
            estimate = ours.estimate
            row |= {"measured": estimate.value, "low": estimate.low, "high": estimate.high, "n": estimate.n}
            row |= {
                "measured_B_block": ours.B_block,
                "measured_B": ours.B,
                "runs": ours.runs,
                "decoding": ours.decoding,
            }
            row["notes"] = "; ".join(ours.notes)
        for name, found in (("to_dense", pair.to_dense), ("to_base", pair.to_base)):
            if found is not None:
                row |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
        writer.writerow(row)
    return stream.getvalue()
