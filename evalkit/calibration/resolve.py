"""A cell whose method asks for a calibrated value, with the value put in; or an error that says how to get it."""

from __future__ import annotations

import dataclasses
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from ..config import Cell, method_name, shown_knobs
from ..errors import InputError
from ..methods.base import Knob, Method
from .file import OWN_FIELDS, Calibration, Entry, check_free, check_turns, knob_of, path_of, with_field


def asks(method: Any) -> bool:
    """Whether the method's knob is to be set by a calibration."""
    return any(getattr(method, name, None) is not None for name in OWN_FIELDS)


def calibrated(cell: Cell) -> Cell:
    """Put the calibrated value, or the table, into the cell's method; other cells are returned as they are.

    The value is that of the cell's length (``task.length``) and ``method.budget_target``.

    Raises:
        InputError: no calibration for this model, method, settings, length and target; the message names the command
            that makes it. Nothing has been loaded by then.
    """
    if not asks(cell.method):
        return cell
    method: Method = cell.method  # type: ignore[assignment]
    name, asked = _asked(method)
    knob, by = knob_of(method, name, asked), f"{name}={asked!r}"
    check_turns(method, knob)
    if method.calibration is None:  # one that names its file may hold the value already
        check_free(method, knob, by, {})
    _, calibration, entry = _lookup(cell, method)
    if entry is not None and entry.table is not None:
        if knob.table_field is None:
            raise InputError(name, str(calibration.path), f"a file without tables for {method_name(method)}")
        found: dict[str, Any] = {knob.table_field: str(calibration.path.parent / entry.table)}
    else:
        value = entry.value if entry is not None else _between(calibration, cell, method, knob)
        found = {knob.field: int(value) if knob.integer else value}
    check_free(method, knob, by, found)
    for dotted, value in found.items():
        method = with_field(method, dotted, value)
    method = dataclasses.replace(method, calibration=str(calibration.path))
    method.validate()
    return dataclasses.replace(cell, method=method)


def calibration_digest(cell: Cell) -> str:
    """Checksum of everything a cell reads of its calibration file."""
    _, calibration, entry = _lookup(cell, cell.method)  # type: ignore[arg-type]
    return calibration.digest(entry, cell.task.length)


def check_weights(cell: Cell, checksum: str) -> None:
    """Raise :class:`InputError` where the calibration was made with other weights than the cell runs.

    Args:
        cell: a calibrated cell.
        checksum: of the weights, as :func:`evalkit.models.loading.locate` gives it.
    """
    if asks(cell.method):
        name, calibration, _ = _lookup(cell, cell.method)  # type: ignore[arg-type]
        made_with = calibration.header["model"]["weights"]
        if made_with != checksum:
            message = f"a calibration of these weights ({checksum[:16]}, not {made_with[:16]}); run: {command(cell)}"
            raise InputError(name, str(calibration.path), message)


def command(cell: Cell) -> str:
    """The command that calibrates the cell's method at its length."""
    method: Method = cell.method  # type: ignore[assignment]
    preset = _preset(method.calibration)
    if preset is not None:
        return " ".join(["evalkit calibrate", f"preset={preset}", *_beyond_preset(preset, cell)])
    left_out = {f"method.{field}" for field in ("budget_target", method.knob.field if method.knob else "")}
    if method.knob and method.knob.table_field:
        left_out.add(f"method.{method.knob.table_field}")
    named = f"method={method_name(method)}"
    settings = [f"method.{item}" for item in shown_knobs(method, "method.", set())]
    kept = [item for item in settings if item.partition("=")[0] not in left_out]
    target = "<B>" if method.budget_target is None else f"{method.budget_target:g}"
    wanted = [f"calibrate.lengths=[{cell.task.length}]", f"calibrate.budgets=[{target}]"]
    return " ".join(["evalkit calibrate", *map(shlex.quote, [f"model={cell.model.name}", named, *kept]), *wanted])


def _lookup(cell: Cell, method: Method) -> tuple[str, Calibration, Entry | None]:
    """Setting to name in errors, file, and the entry that fits; no entry where the value lies between two trials."""
    target = method.budget_target
    name, value = _asked(method)
    knob = knob_of(method, name, value)
    if target is not None and not 0 < target < 1:
        raise InputError("method.budget_target", target, "above 0, below 1")
    path = path_of(method.calibration, cell.model.name, method)
    if not path.is_file():
        raise InputError(name, value, f"needs the calibration {path}, which is missing; run: {command(cell)}")
    calibration = Calibration.read(path, name)
    calibration.check_for(method, cell.model.name, name)
    length, factor = cell.task.length, cell.model.rope_factor(cell.task.length)
    entry = calibration.find(length, target, factor)
    if entry is None and (target is None or calibration.between(length, target, factor, knob) is None):
        asked = f"{length} tokens" + ("" if target is None else f" and budget {target:g}")
        raise InputError(name, value, f"{path} has no value for {asked}; run: {command(cell)}")
    return name, calibration, entry


def _asked(method: Method) -> tuple[str, Any]:
    """The setting that asks for a calibration, and its value."""
    if method.calibration:
        return "method.calibration", method.calibration
    return "method.budget_target", method.budget_target


def _between(calibration: Calibration, cell: Cell, method: Method, knob: Knob) -> float:
    assert method.budget_target is not None
    length = cell.task.length
    value = calibration.between(length, method.budget_target, cell.model.rope_factor(length), knob)
    assert value is not None
    return value


def _preset(calibration: str | None) -> str | None:
    """Name of the preset of ``evalkit calibrate`` that makes a file: the one of the file's own name."""
    if calibration is None:
        return None
    stem = Path(calibration).stem
    return stem if _preset_file(stem).is_file() else None


def _preset_file(name: str) -> Any:
    return files("evalkit.conf") / "preset" / f"{name}.yaml"


def _beyond_preset(name: str, cell: Cell) -> list[str]:
    """What a preset of ``evalkit calibrate`` has to be told to make the value of a cell."""
    content = yaml.safe_load(_preset_file(name).read_text(encoding="utf-8"))
    told = []
    if {"override /model": cell.model.name} not in content["defaults"]:
        told.append(shlex.quote(f"model={cell.model.name}"))
    if cell.task.length not in content["calibrate"]["budget_at"]:
        told.append(f"calibrate.lengths=[{cell.task.length}]")
    return told
