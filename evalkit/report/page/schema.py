"""The document that the page shows: everything on the page comes from it, as JSON.

Numbers are in the units of the tables (accuracy, agreement and budgets in percent); a number that does not exist or is
not finite is ``null``. Rows, cells and environments are referred to by their position in the document's lists.
"""

from __future__ import annotations

from typing import Any, TypedDict

FORMAT = 1
ROW_FIELDS = (
    "level",
    "metric",
    "series",
    "method",
    "subtask",
    "dense",
    "suspect",
    "cells",
    "value",
    "low",
    "high",
    "n",
    "difference",
    "difference_low",
    "difference_high",
    "B",
    "B_stage1",
    "B_cost",
    "seconds",
    "bootstrap",
    "text",
)
"""What a row of the document holds, in this order: the fields of :class:`evalkit.report.rows.Row`, and

* ``cells``: positions of the cells behind it, one, or for an average one a length;
* ``seconds``: median measured prefill seconds of a sample, for an average the mean over its lengths;
* ``bootstrap``: the paired difference's interval by bootstrap, as text;
* ``text``: the columns of the readable table, as the table module writes them.
"""


class Series(TypedDict):
    """How a series is drawn: colour on white, colour on dark, marker as matplotlib names it, filled or an outline.

    ``bound`` marks what bounds the methods and is on no frontier.
    """

    name: str
    colour: str
    dark: str
    marker: str
    filled: bool
    bound: bool


class Metric(TypedDict):
    """A metric's name and unit (``%``, ``nats`` or empty), and whether more is better."""

    name: str
    unit: str
    higher: bool


class Column(TypedDict):
    """A table column: title, aligned to the left or not, and the row field to sort it by (empty: not sortable)."""

    title: str
    left: bool
    sort: str


class Cell(TypedDict):
    """A finished cell: its key, labels, settings as (name, value), the command that makes it, and its environment.

    ``budget`` is ``None`` where the store has no budgets to read, ``warnings`` lists each distinct text once.
    """

    key: str
    method: str
    settings: list[tuple[str, str]]
    command: str
    environment: int
    warnings: list[str]
    budget: Budget | None


class Budget(TypedDict):
    """B by layer in percent (their mean is the cell's B), and by head in whole percent.

    ``map`` is base64 of one byte a head, layer by layer.
    """

    layers: list[float]
    heads: int
    map: str


class Panel(TypedDict):
    """Rows that may be plotted together: one model, task, length and metric, on the same samples."""

    model: str
    task: str
    length: str
    metric: str
    n: int
    rows: list[int]


class Section(TypedDict):
    """Rows of one table."""

    heading: str
    subtasks: bool
    rows: list[int]


class Verdict(TypedDict):
    """The answer for one margin: a sentence, whether any setting keeps it, and the row that it speaks of."""

    kept: bool
    text: str
    row: int | None


class Answer(TypedDict):
    """The answer for one model, task and length; ``verdicts`` in the order of the document's margins."""

    heading: str
    panel: int
    verdicts: list[Verdict]


class Problem(TypedDict):
    """Something to look at.

    Kinds: ``failed``, ``unfinished``, ``below`` (dense far below the published score), ``suspect`` (better than dense),
    ``torch``, ``fallback``, ``warning``, ``note``.
    """

    kind: str
    where: str
    text: str
    cell: int | None


class Rows(TypedDict):
    """Rows as lists, in the order of ``fields``."""

    fields: list[str]
    data: list[list[Any]]


class Document(TypedDict):
    """All of it."""

    format: int
    title: str
    question: str
    summary: str
    margins: list[str]
    margin: int
    answer_note: str
    answers: list[Answer]
    explanation: str
    metrics: dict[str, Metric]
    series: list[Series]
    columns: list[Column]
    environments: list[str]
    cells: list[Cell]
    rows: Rows
    panels: list[Panel]
    sections: list[Section]
    problems: list[Problem]
