"""Which cells stand in a row of the paper's tables: one preset with one set of knobs, see :func:`choose`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ...config import plain
from ...errors import InputError
from ...methods import presets
from ...store import CellResult
from ..names import flat
from .published import METHODS, NOT_AS_PRINTED, OF_ONE_MODEL, SETTINGS, VARIANTS

ROWS = {**METHODS, **VARIANTS}


@dataclass(frozen=True)
class Variant:
    """A method preset with what was changed of it.

    Attributes:
        preset: name of the preset.
        changes: dotted settings of the method and their values, as text, where they are not the preset's own.
    """

    preset: str
    changes: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.preset, *(f"method.{name}={text}" for name, text in self.changes)])


@dataclass(frozen=True)
class Standing:
    """How a variant stands to a row of one model.

    Attributes:
        refused: why it may not stand there; empty if it may.
        differs: in what it differs from what the row was made with, empty at the row's own values.
        named: its preset, where the row has several and the paper does not say which is the model's.
    """

    refused: str = ""
    differs: tuple[str, ...] = ()
    named: tuple[str, ...] = ()


def variant(cell: CellResult) -> Variant:
    """The preset a cell was made from and the settings given on top of it; those at the preset's value are none."""
    name, given = cell.method, {}
    for item in cell.overrides:
        key, _, value = item.lstrip("+").partition("=")
        if key == "method":
            name = value
        elif key.startswith("method."):
            given[key.removeprefix("method.")] = value
    own = _values(name) if given else {}
    changed = {key: value for key, value in given.items() if key not in own or _value(value) != own[key]}
    return Variant(name, tuple(sorted(changed.items())))


def standing(row: str, found: Variant, model: str) -> Standing:
    """How ``found`` stands to a row.

    Args:
        row: one of :data:`ROWS`, which has the preset among its own.
        found: the variant.
        model: the paper's name of the model, empty for a model that the paper has not.
    """
    wanted = SETTINGS.get((model, found.preset), {})
    changes = {name: _value(text) for name, text in found.changes}
    home = OF_ONE_MODEL.get(found.preset, model)
    # A preset made for another model is this model's too where each of the settings that tell them apart was given.
    if model and home != model and not (wanted and wanted.keys() <= changes.keys()):
        return Standing(refused=f"preset {found.preset} is for {home}")
    name = (f"preset {found.preset}",)
    other = [f"method.{key}={text}" for key, text in found.changes if key not in wanted or wanted[key] != changes[key]]
    if not model:
        return Standing(differs=tuple(other), named=name if len(ROWS[row]) > 1 else ())
    return Standing(differs=(*(name if found.preset in NOT_AS_PRINTED[model] else ()), *other))


def choose(row: str, candidates: Mapping[Variant, Sequence[Any]], model: str) -> Variant | None:
    """The variant that a row shows, in all of its columns.

    The row's own preset at its own values; without such a cell, the variant with the most columns, then with the
    fewest differences. A preset for another of the paper's models is never shown.

    Args:
        row: one of :data:`ROWS`.
        candidates: measured columns of the row by variant.
        model: the paper's name of the model, empty for a model that the paper has not.
    """
    order = ROWS[row]

    def rank(found: Variant) -> tuple[Any, ...]:
        differs, place = standing(row, found, model).differs, order.index(found.preset)
        return (True, -len(candidates[found]), len(differs), place, found.changes) if differs else (False, place)

    own = [found for found in candidates if found.preset in order and not standing(row, found, model).refused]
    return min(own, key=rank, default=None)


def why_not(found: Variant, shown: Mapping[str, Variant], rows: Iterable[str], model: str) -> str:
    """Why none of ``rows`` shows ``found``, with what they show instead."""
    fitting = [row for row in rows if found.preset in ROWS[row]]
    if not fitting:
        return f"method={found.preset} is the preset of none of its rows"
    refused = standing(fitting[0], found, model).refused
    return refused or ", ".join(f"{row} shows {shown[row]}" for row in fitting if row in shown)


def _values(preset: str) -> dict[str, Any]:
    try:
        return dict(flat(plain(presets.preset(preset))))
    except InputError:  # of a configuration folder that is not here
        return {}


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
