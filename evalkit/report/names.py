"""What cells, methods and tasks are called in a report, and the command that makes a missing dense twin."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..store import CellResult
from . import longbench

SHOWN_SUBTASKS = 2
"""A task label names its subtasks up to this many, then counts them."""


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested settings as (dotted name, value), in their own order."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def model_label(cell: CellResult) -> str:
    """Name of the cell's model."""
    return str(cell.config.get("model", {}).get("name", "?"))


def task_label(cell: CellResult) -> str:
    """Task without its length: ``ruler (cwe, vt)``, ``ruler (13 tasks)``, ``perplexity (essays, last_quarter)``."""
    task = cell.config.get("task", {})
    name = str(task.get("name", "?"))
    if longbench.is_longbench(cell):
        return longbench.label(cell.config, longbench.is_small(cell))
    if "tasks" in task:
        subtasks = [str(item) for item in task["tasks"]]
        named = ", ".join(subtasks) if len(subtasks) <= SHOWN_SUBTASKS else f"{len(subtasks)} tasks"
        return f"{name} ({', '.join([named, *longbench.how(cell.config)])})"
    details = [Path(str(task[key])).name for key in ("corpus", "score") if task.get(key)]
    details += ["first tokens"] if task.get("windows") == "first" else []
    return f"{name} ({', '.join(details)})" if details else name


def method_labels(cells: Sequence[CellResult]) -> dict[str, str]:
    """Method labels by cell key: the method's name and the knobs that tell it from its neighbours.

    A knob is shown where its value differs between the cells of one method, or where the cell's own label shows it.
    The in-kernel skip and the visiting order are left out where the skip is off, as the order changes nothing then.
    """
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    origins: dict[tuple[str, str], set[str]] = defaultdict(set)
    for cell in cells:
        for part, name, value in _knobs(cell):
            values[cell.method, f"{part}.{name}"].add(str(value))
            origins[cell.method, _short(name)].add(f"{part}.{name}")

    def called(cell: CellResult, part: str, name: str) -> str:
        """Its last word; with what is before it where two knobs of the method end alike."""
        others = origins[cell.method, _short(name)]
        if len(others) == 1:
            return _short(name)
        apart = len({other.partition(".")[2] for other in others}) == len(others)
        return name if apart and "." in name else f"{part}.{name}"

    def label(cell: CellResult, idle: tuple[str, ...]) -> str:
        named = {word.partition("=")[0] for word in cell.label.split() if "=" in word}
        shown = [
            f"{called(cell, part, name)}={_text(value)}"
            for part, name, value in _knobs(cell)
            if value is not None
            and name not in idle
            # A word of the cell's own label may be any knob of that name; the method's counts.
            and (
                (name in named and (part == "method" or f"method.{name}" not in origins[cell.method, _short(name)]))
                or len(values[cell.method, f"{part}.{name}"]) > 1
            )
        ]
        return " ".join([cell.method, *shown])

    short = {cell.key: label(cell, () if _skips(cell) else ("skip_scale", "order")) for cell in cells}
    taken = Counter((cell.twin, short[cell.key]) for cell in cells)
    return {cell.key: short[cell.key] if taken[cell.twin, short[cell.key]] == 1 else label(cell, ()) for cell in cells}


def series_labels(cells: Sequence[CellResult]) -> dict[str, str]:
    """Series of a plot by cell key: the method, and what makes other points of it, as far as cells differ in it.

    That is a visiting order where an in-kernel skip lets it act, and a method's ``execution`` (of tokens or blocks).
    """
    skipping = {cell.method for cell in cells if _order(cell)}
    executions: dict[str, set[str]] = defaultdict(set)
    for cell in cells:
        executions[cell.method].add(_execution(cell))
    labels = {}
    for cell in cells:
        order = _order(cell)
        detail = f", {_execution(cell)}" if len(executions[cell.method]) > 1 and _execution(cell) else ""
        detail += f", skip, {order}" if order else ", no skip" if cell.method in skipping else ""
        labels[cell.key] = cell.method + detail
    return labels


def _execution(cell: CellResult) -> str:
    return str(cell.config.get("method", {}).get("execution") or "")


def _skips(cell: CellResult) -> bool:
    scale = cell.config.get("method", {}).get("skip_scale")
    return isinstance(scale, (int, float)) and scale > 0


def _order(cell: CellResult) -> str:
    return str(cell.config["method"].get("order") or "") if _skips(cell) else ""


def _knobs(cell: CellResult) -> Iterator[tuple[str, str, Any]]:
    """What can tell cells of a method apart, as (``method`` or ``execution``, name, value)."""
    for name, value in flat(cell.config.get("method", {})):
        if name not in ("name", "calibration"):  # the calibrated value is shown, not its file
            yield "method", name, value
    for name, value in flat(cell.identity["execution"]):
        if name != "threads":
            yield "execution", name, value


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def twin_command(cell: CellResult) -> str:
    """The command that makes (or finishes) the dense twin of ``cell``."""
    kept = [item for item in cell.overrides if not _sets_method(item)]
    if not cell.overrides:
        task = cell.config.get("task", {})
        kept = [f"model={model_label(cell)}", f"task={task.get('name')}"]
        kept += [f"task.{name}={task[name]}" for name in ("length", "limit") if task.get(name) is not None]
    return shlex.join(["evalkit", "run", "method=dense", *kept])


def _sets_method(override: str) -> bool:
    return override.lstrip("+~").startswith(("method=", "method.", "method@"))


def unique(items: Iterable[str]) -> list[str]:
    """Items without repeats, in their order."""
    return list(dict.fromkeys(items))
