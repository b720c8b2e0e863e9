"""Rows as markdown, CSV, LaTeX and terminal tables. CSV keeps full precision, the others round for reading."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tabulate import tabulate

from .rows import METRICS, REFERENCE_MARK, Row, Rows, Work

DASH = "-"


@dataclass(frozen=True)
class Column:
    """A column of the readable tables.

    Attributes:
        title: heading.
        text: cell text of a row.
        left: aligned to the left (labels) and not to the right (numbers).
    """

    title: str
    text: Callable[[Row], str]
    left: bool = False


def number(value: float | None, digits: int, *, sign: bool = False) -> str:
    """A number, or a dash where there is none. Very wide bounds are shortened."""
    if value is None or math.isnan(value):
        return DASH
    plus = "+" if sign else ""
    if math.isinf(value) or abs(value) >= 1e6:
        return f"{value:{plus}.2g}"
    return f"{value:{plus}z.{digits}f}"  # z: never minus zero


def _interval(low: float | None, high: float | None, digits: int, *, sign: bool = False) -> str:
    if low is None or high is None:
        return DASH
    return f"[{number(low, digits, sign=sign)}, {number(high, digits, sign=sign)}]"


def _digits(row: Row) -> int:
    return METRICS[row.metric].digits


def _metric(row: Row) -> str:
    metric = METRICS[row.metric]
    name = f"{metric.name} ({metric.unit})" if metric.unit else metric.name
    return f"{row.subtask}: {name}" if row.subtask else name


def value_text(row: Row) -> str:
    """The row's number with its metric's decimals."""
    return number(row.value, _digits(row))


def interval_text(row: Row) -> str:
    """The number's interval."""
    return _interval(row.low, row.high, _digits(row))


def difference_text(row: Row) -> str:
    """The paired difference to dense and its interval."""
    if row.difference is None:
        return DASH
    interval = _interval(row.difference_low, row.difference_high, _digits(row), sign=True)
    return f"{number(row.difference, _digits(row), sign=True)} {interval}"


def bootstrap_text(row: Row) -> str:
    """The paired difference's interval by bootstrap."""
    return _interval(row.difference_bootstrap_low, row.difference_bootstrap_high, _digits(row), sign=True)


COLUMNS = (
    Column("method", lambda row: row.marked_method, True),
    Column("metric", _metric, True),
    Column("value", value_text),
    Column("n", lambda row: str(row.n)),
    Column("95 % interval", interval_text),
    Column("to dense (95 %)", difference_text),
    Column("B %", lambda row: number(row.B, 1)),
    Column("B_stage1 %", lambda row: number(row.B_stage1, 1)),
    Column("B_cost %", lambda row: number(row.B_cost, 1)),
    Column("fallback %", lambda row: number(row.fallback_share, 1)),
    Column("warnings", lambda row: str(row.warnings)),
)

SPARE = ("to dense (95 %)", "fallback %", "warnings")
"""Columns that the terminal goes without where they hold zeros and dashes only."""

EXPLANATION = (
    "B: computed cells over dense cells, all layers and heads, mean over samples weighted by prompt tokens; over "
    "lengths, accuracy is the plain mean and B is weighted by length. B_stage1 counts what the selection kept; B_cost "
    "counts the QK and V products that the kernel computes, by half each, and the selection itself. A kernel that "
    "masks tokens inside its tiles (MInference in token execution) computes more than B; what PageWeaver's unions add "
    "is in a table of its own. First answer token: probability, right after prefill, of a token that begins a correct "
    "answer. Intervals are 95 %; differences to dense are paired by sample; "
    "report.csv has a percentile bootstrap of them too (difference_bootstrap_low, _high). A dash: undefined, "
    "for instance a loss interval from one window. fallback: attention calls answered densely; warnings: samples "
    f"stored with one. {REFERENCE_MARK}: the torch reference ran calls that a GPU kernel was asked for."
)


@dataclass(frozen=True)
class Section:
    """Comparable rows under one heading.

    Attributes:
        heading: model, task and length.
        rows: the rows.
    """

    heading: str
    rows: tuple[Row, ...]


def sections(rows: Sequence[Row]) -> list[Section]:
    """Rows by model, task and length, in their order; subtasks apart."""

    def heading(row: Row) -> str:
        return f"{row.model}, {row.task}, {row.length} tokens" + (", by subtask" if row.subtask else "")

    return [Section(title, tuple(members)) for title, members in groupby(rows, key=heading)]


def _grid(rows: Sequence[Row], style: str, escape: str = "") -> str:
    def clean(text: str) -> str:
        return text.replace(escape, f"\\{escape}") if escape else text

    body = [[clean(column.text(row)) for column in COLUMNS] for row in rows]
    align = ["left" if column.left else "right" for column in COLUMNS]
    titles = [column.title for column in COLUMNS]
    return tabulate(body, headers=titles, tablefmt=style, colalign=align, disable_numparse=True)


WORK_TITLE = "Executed work"
WORK_EXPLANATION = (
    "What kernels executed beyond the cells of the budget, means over samples weighted by prompt tokens; a method's "
    "page says what it counts. A dash: not counted by that method."
)


def work_grid(work: Sequence[Work], style: str, escape: str = "") -> str:
    """One line a cell whose method counts work of its own, one column a ratio."""
    names = list(dict.fromkeys(name for one in work for name in one.ratios))
    labels = [[one.model, one.method, one.task, one.length] for one in work]
    if escape:
        labels = [[text.replace(escape, f"\\{escape}") for text in label] for label in labels]
    body = [
        [*label, *(number(one.ratios.get(name), 3) for name in names)] for label, one in zip(labels, work, strict=True)
    ]
    titles = ["model", "method", "task", "tokens", *(name.replace("_", " ") for name in names)]
    align = ["left"] * 3 + ["right"] * (len(names) + 1)
    return tabulate(body, headers=titles, tablefmt=style, colalign=align, disable_numparse=True)


def markdown(rows: Rows) -> str:
    """The report as markdown: a table for each model, task and length, then the notes."""
    parts = ["# Results", EXPLANATION]
    for section in sections(rows.level("cell", "average", "subtask")):
        parts += [f"## {section.heading}", _grid(section.rows, "pipe", escape="|")]
    if rows.work:
        parts += [f"## {WORK_TITLE}", WORK_EXPLANATION, work_grid(rows.work, "pipe", escape="|")]
    if rows.notes:
        parts += ["## Notes", "\n".join(f"- {note}" for note in rows.notes)]
    parts += ["## How it was measured", "\n".join(f"- {line}" for line in rows.provenance)]
    return "\n\n".join(parts) + "\n"


def csv(rows: Rows) -> str:
    """Every row in full precision, with the block-rounded and pooled budgets and the extremes over layers."""
    return str(rows.frame().to_csv(index=False, lineterminator="\n"))


def latex(rows: Rows) -> str:
    """The same tables as markdown, for LaTeX with ``booktabs``."""
    parts = []
    for section in sections(rows.level("cell", "average", "subtask")):
        parts += [f"% {section.heading}", _grid(section.rows, "latex_booktabs")]
    if rows.work:
        parts += [f"% {WORK_TITLE}", work_grid(rows.work, "latex_booktabs")]
    return "\n".join(parts) + "\n"


def print_rows(rows: Rows, console: Console) -> None:
    """A table for each metric of each section, then the notes; subtasks are in the files only."""
    for section in sections(rows.level("cell", "average")):
        console.print(Text(section.heading, style="bold underline"), soft_wrap=True)
        for _, members in groupby(section.rows, key=lambda row: row.metric):
            console.print(_terminal_table(list(members)))
            console.print()
    if rows.work:
        console.print(Text(WORK_TITLE, style="bold underline"), soft_wrap=True)
        console.print(f"{work_grid(rows.work, 'simple')}\n", markup=False, soft_wrap=True)
    for note in rows.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)


def _terminal_table(rows: Sequence[Row]) -> Table:
    """Rows of one metric; columns that say nothing here are left out."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    columns = []
    for column in COLUMNS:
        empty = column.title in SPARE and not any(column.text(row).strip(f"0.{DASH}") for row in rows)
        if column.title not in ("metric", "n") and not empty:
            columns.append(column)
            title = f"{_metric(rows[0])}, n = {rows[0].n}" if column.left else column.title
            table.add_column(title, justify="left" if column.left else "right", no_wrap=not column.left)
    for row in rows:
        style = "red" if row.suspect else "bold" if row.dense else ""
        table.add_row(*(Text(column.text(row), style=style) for column in columns))
    return table
