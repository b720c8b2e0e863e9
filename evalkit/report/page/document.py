"""The page's document, from loaded cells and the rows of the report. Its form is in :mod:`.schema`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from ...store import BUDGET, CellResult
from .. import palette, pareto, table
from ..below import NOTE
from ..load import Loaded
from ..names import flat, method_labels, unique
from ..provenance import command, environment
from ..rows import METRICS, REFERENCE_MARK, Row, Rows
from . import answer, budgets, schema

TITLE = "Accuracy against realized budget"
QUESTION = (
    "How much of prefill attention can be left out before the model gets worse, and which method leaves out most?"
)
ANSWER_NOTE = (
    "A setting keeps accuracy within a margin where its loss against dense, paired by sample, is shown to be smaller "
    "than the margin at 95 %, corrected for all settings compared there (Holm). The budget is the lowest such one that "
    "was measured. Few samples show little: a difference that is not significant is no proof that there is none."
)
SETTINGS = ("method", "execution", "task", "generation")
"""Sections of a cell's settings that the page shows; a cell need not have them all."""
_SORTED_BY = {
    "method": "method",
    "value": "value",
    "n": "n",
    "to dense (95 %)": "difference",
    "B %": "B",
    "B_stage1 %": "B_stage1",
    "B_cost %": "B_cost",
}
_COPIED = [name for name in schema.ROW_FIELDS if name not in ("suspect", "cells", "seconds", "bootstrap", "text")]


def build(loaded: Loaded, rows: Rows) -> schema.Document:
    """Put together everything that the page shows.

    Args:
        loaded: finished cells with their twins.
        rows: what :func:`evalkit.report.rows.build_rows` makes of them.

    Raises:
        StoreError: a cell's stored budgets do not cover its samples.
    """
    position = {cell.key: at for at, cell in enumerate(loaded.cells)}
    seconds = {cell.key: prefill_seconds(cell) for cell in loaded.cells}
    number = {id(row): at for at, row in enumerate(rows.rows)}
    panels = list(_panels(rows))
    environments = unique(environment(cell) for cell in loaded.cells)
    return {
        "format": schema.FORMAT,
        "title": TITLE,
        "question": QUESTION,
        "summary": _summary(loaded),
        "margins": [answer.margin_name(margin) for margin in answer.MARGINS],
        "margin": answer.DEFAULT_MARGIN,
        "answer_note": ANSWER_NOTE,
        "answers": list(_answers(rows, panels, number)),
        "explanation": table.EXPLANATION,
        "metrics": {
            name: {"name": metric.name, "unit": metric.unit, "higher": metric.higher_is_better}
            for name, metric in METRICS.items()
        },
        "series": _series(rows),
        "columns": [
            {"title": column.title, "left": column.left, "sort": _SORTED_BY.get(column.title, "")}
            for column in table.COLUMNS
        ],
        "environments": environments,
        "cells": _cells(loaded.cells, environments),
        "rows": {
            "fields": list(schema.ROW_FIELDS),
            "data": [_row(row, position, seconds) for row in rows.rows],
        },
        "panels": [_panel(panel, number) for panel in panels],
        "sections": [
            {
                "heading": section.heading,
                "subtasks": bool(section.rows[0].subtask),
                "rows": [number[id(row)] for row in section.rows],
            }
            for section in table.sections(rows.level("cell", "average", "subtask"))
        ],
        "problems": _problems(loaded, rows, position),
    }


def prefill_seconds(cell: CellResult) -> float | None:
    """Median measured prefill time of a sample; ``None`` where no time was stored."""
    found = [record["seconds"]["prefill"] for record in cell.records if (record.get("seconds") or {}).get("prefill")]
    return median(found) if found else None


def _summary(loaded: Loaded) -> str:
    samples = sum(len(cell.records) for cell in loaded.cells)
    models = unique(str(cell.config.get("model", {}).get("name", "?")) for cell in loaded.cells)
    methods = sorted({cell.method for cell in loaded.cells if not cell.is_dense})
    left = f"; {_count(len(loaded.unfinished), 'cell')} not finished" if loaded.unfinished else ""
    against = f"{', '.join(methods)} beside dense" if methods else "dense only"
    return f"{_count(len(loaded.cells), 'cell')}, {_count(samples, 'sample')}: {', '.join(models)}; {against}{left}."


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# ------------------------------------------------------------------------------------------------------ rows and cells
def _row(row: Row, position: Mapping[str, int], seconds: Mapping[str, float | None]) -> list[Any]:
    keys = row.key.split()
    times = [seconds[key] for key in keys]
    values: dict[str, Any] = {name: _plain(getattr(row, name)) for name in _COPIED}
    values["suspect"] = row.suspect
    values["cells"] = [position[key] for key in keys]
    values["seconds"] = None if None in times else fmean(time for time in times if time is not None)
    values["bootstrap"] = None if row.difference_bootstrap_low is None else table.bootstrap_text(row)
    values["text"] = [column.text(row) for column in table.COLUMNS]
    return [values[name] for name in schema.ROW_FIELDS]


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cells(cells: Sequence[CellResult], environments: Sequence[str]) -> list[schema.Cell]:
    labels = method_labels(cells)
    where = {text: at for at, text in enumerate(environments)}
    return [
        {
            "key": cell.key,
            "method": labels[cell.key],
            "settings": list(_settings(cell)),
            "command": command(cell),
            "environment": where[environment(cell)],
            "warnings": unique(str(text) for record in cell.records for text in record.get("warnings") or ()),
            "budget": budgets.pack(budgets.by_head(cell)) if (cell.path / BUDGET).is_file() else None,
        }
        for cell in cells
    ]


def _settings(cell: CellResult) -> Iterator[tuple[str, str]]:
    for section in SETTINGS:
        for name, value in flat(cell.config.get(section) or {}):
            if value is not None:
                yield f"{section}.{name}", f"{value:g}" if isinstance(value, float) else str(value)


def _series(rows: Rows) -> list[schema.Series]:
    return [
        {
            "name": name,
            "colour": style.colour,
            "dark": style.on_dark,
            "marker": style.marker,
            "filled": style.filled,
            "bound": pareto.is_bound(name),
        }
        for name, style in palette.styles(row.series for row in rows.rows).items()
    ]


# --------------------------------------------------------------------------------------------------- panels and answers
def _panels(rows: Rows) -> Iterator[pareto.Panel]:
    """Every group and metric with a sparse row: those of the static figure, and the lengths behind an average."""
    members: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows.level("average", "cell"):
        members[row.group, row.metric].append(row)
    for (_, metric), found in members.items():
        if any(not row.dense for row in found):
            yield pareto.Panel(metric, tuple(found))


def _panel(panel: pareto.Panel, number: Mapping[int, int]) -> schema.Panel:
    first = panel.rows[0]
    return {
        "model": first.model,
        "task": first.task,
        "length": first.length,
        "metric": panel.metric,
        "n": max(row.n for row in panel.rows),
        "rows": [number[id(row)] for row in panel.rows],
    }


def _answers(rows: Rows, panels: Sequence[pareto.Panel], number: Mapping[int, int]) -> Iterator[schema.Answer]:
    """An answer for each panel of the static figure that holds accuracy or perplexity."""
    at = {(panel.rows[0].group, panel.metric): index for index, panel in enumerate(panels)}
    for panel in pareto.panels(rows):
        if panel.metric not in answer.ANSWERED:
            continue
        first = panel.rows[0]
        findings = [answer.find(panel, margin) for margin in answer.MARGINS]
        yield {
            "heading": f"{first.model}, {first.task}, {first.length} tokens",
            "panel": at[first.group, panel.metric],
            "verdicts": [
                {"kept": found.kept, "text": found.text, "row": None if found.row is None else number[id(found.row)]}
                for found in findings
            ],
        }


# ------------------------------------------------------------------------------------------------------------- problems
def _problems(loaded: Loaded, rows: Rows, position: Mapping[str, int]) -> list[schema.Problem]:
    """What needs a look, worst first; notes of the report that say none of it come last."""
    found: list[schema.Problem] = []

    def add(kind: str, where: str, text: str, cell: int | None = None) -> None:
        found.append({"kind": kind, "where": where, "text": text, "cell": cell})

    for cell in loaded.unfinished:
        expected = "?" if cell.expected_samples is None else cell.expected_samples
        again = f"; go on with: {command(cell)}" if command(cell) else ""
        text = f"{cell.state} with {len(cell.records)} of {expected} samples"
        add("failed" if cell.error else "unfinished", cell.label, f"{text}{cell.error and f' ({cell.error})'}{again}")
    for row in rows.level("cell", "average"):
        where = f"{row.model}, {row.method}, {row.task}, {row.length} tokens"
        cell_at = position[row.key.split()[0]]
        if row.beats_dense:
            text = f"{METRICS[row.metric].name} is better than dense beyond its interval: {table.difference_text(row)}"
            add("suspect", where, text, cell_at)
        if row.below_published:
            ours = f"{table.value_text(row)} {table.interval_text(row)}"
            add("below", where, f"dense is far below the published {row.published:.2f}: {ours}", cell_at)
    for row in _once(rows.level("cell")):
        where = f"{row.model}, {row.method}, {row.task}, {row.length} tokens"
        cell_at = position[row.key]
        if row.reference_share:
            text = f"the torch reference ran {row.reference_share:.1f} % of the calls that a GPU kernel was asked for"
            add("torch", where, text, cell_at)
        if row.fallback_share:
            add("fallback", where, f"{row.fallback_share:.1f} % of the attention calls were answered densely", cell_at)
    said = ("left out, ", "sparse > dense: ", NOTE, REFERENCE_MARK)
    for note in rows.notes:
        if not note.startswith(said):
            add("warning" if note.startswith("warning") else "note", "", note)
    order = ("failed", "unfinished", "below", "suspect", "torch", "fallback", "warning", "note")
    return sorted(found, key=lambda problem: order.index(problem["kind"]))


def _once(rows: Sequence[Row]) -> Iterator[Row]:
    """One row a cell, whatever its metrics."""
    yield from {row.key: row for row in reversed(rows)}.values()
