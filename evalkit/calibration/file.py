"""The file that ``evalkit calibrate`` writes and ``method.calibration`` names: values with where they come from."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..assets import sha256_file
from ..config import method_name, plain
from ..errors import InputError
from ..methods.base import Knob, Method, default_setting, setting, taken
from ..store import first_difference
from .settings import CLOSE

FORMAT = 1
FOLDER = Path("results/calibration")
"""Where calibrations are written and looked for when no file is named."""

OWN_FIELDS = ("calibration", "budget_target")


@dataclass(frozen=True)
class Entry:
    """One calibrated value.

    Attributes:
        length: prompt length, tokens.
        kind: ``budget`` or ``recall``.
        target: what was asked for.
        measure: the budget that was meant, or ``recall``.
        reached: what the value gives on the calibration windows.
        value: the knob's value; with a table the recall of every head that the table stands for.
        table: file with the table, beside the calibration's own; None for a scalar.
        rope_factor: of the model at this length.
        windows: calibration windows.
        interval: half the width of the 95 % interval of ``reached``, from the scatter between windows: how far other
            text of this kind and amount may be off.
        achieved: every budget there, and the recall where it was measured.
        measured: value and measured target of each trial.
        characters: ranges of the text the windows were cut from.
        made_by: package versions, device, dtype and backend.
    """

    length: int
    kind: str
    target: float
    measure: str
    reached: float
    value: float
    table: str | None = None
    rope_factor: float = 1.0
    windows: int = 0
    interval: float | None = None
    achieved: dict[str, float] = field(default_factory=dict)
    measured: list[list[float]] = field(default_factory=list)
    characters: list[list[int]] = field(default_factory=list)
    made_by: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, str, str, float, bool]:
        """What tells an entry from the others of its file."""
        return self.length, self.kind, self.measure, self.target, self.table is not None


@dataclass(frozen=True)
class Calibration:
    """A calibration file.

    Attributes:
        path: the file.
        header: model, method with its fixed settings, knob, and text with its fingerprints.
        entries: calibrated values.
    """

    path: Path
    header: dict[str, Any]
    entries: tuple[Entry, ...]

    @classmethod
    def read(cls, path: Path, name: str = "method.calibration") -> Calibration:
        """Read a file; one read before is read again only when it has changed.

        Raises:
            InputError: not readable, or not a calibration; the message names the setting ``name``.
        """
        try:
            state = path.stat()
        except OSError as error:
            raise InputError(name, str(path), f"a readable file ({error.strerror})") from None
        return _read(path, state.st_mtime_ns, state.st_size, name)

    def write(self) -> None:
        """Replace the file in one step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, **self.header, "entries": [plain(entry) for entry in self.entries]}
        write_yaml(self.path, content)

    def with_entry(self, entry: Entry) -> Calibration:
        """The calibration with an entry added, in place of an older one for the same target."""
        kept = [other for other in self.entries if other.key != entry.key]
        return dataclasses.replace(self, entries=tuple(sorted([*kept, entry], key=lambda e: e.key)))

    def check_for(self, method: Method, model: str, name: str) -> None:
        """Raise :class:`InputError` where the file was made for another model, method or setting."""
        found, wanted = self.header["method"], fixed_settings(method)
        if self.header["model"]["name"] != model:
            raise InputError(
                name, str(self.path), f"a calibration of model {model} (not {self.header['model']['name']})"
            )
        if found["name"] != wanted["name"]:
            raise InputError(name, str(self.path), f"a calibration of {wanted['name']} (not of {found['name']})")
        difference = first_difference(found, wanted)
        if difference:
            raise InputError(
                name,
                str(self.path),
                f"a calibration of these settings (method.{difference} was {_leaf(found, difference)!r}, "
                f"is {_leaf(wanted, difference)!r})",
            )

    def find(self, length: int, budget: float | None, rope_factor: float) -> Entry | None:
        """The entry of a length: the one with the target ``budget``, or the only one where ``budget`` is None.

        Raises:
            InputError: several entries and no ``budget`` to choose one by.
        """
        here = [e for e in self.entries if e.length == length and e.rope_factor == rope_factor]
        if budget is None:
            if len(here) > 1:
                targets = ", ".join(f"{e.kind} {e.target:g}" for e in here)
                raise InputError(
                    "method.budget_target", None, f"a budget: {self.path} has {targets} at {length} tokens"
                )
            return here[0] if here else None
        exact = [e for e in here if e.kind == "budget" and e.measure == "B" and math.isclose(e.target, budget)]
        # A file may hold a value and a table for one target: the table is the more particular.
        return max(exact, key=lambda e: e.table is not None, default=None)

    def between(self, length: int, budget: float, rope_factor: float, knob: Knob) -> float | None:
        """A value between two that were measured, where they enclose ``budget`` so closely that none can be far off.

        The budget grows with the knob, so between two measured values at most :data:`CLOSE` apart in budget every
        value is within that of the target. None where there are no two such.
        """
        if knob.integer:
            return None
        points = sorted(
            (reached, value)
            for e in self.entries
            if (e.length, e.rope_factor, e.measure, e.table) == (length, rope_factor, "B", None)
            for value, reached in e.measured
        )
        for (low, first), (high, second) in zip(points, points[1:], strict=False):
            if low <= budget <= high and high - low <= CLOSE:
                share = (budget - low) / (high - low) if high > low else 0.0
                return first + (second - first) * share
        return None

    def digest(self, entry: Entry | None, length: int) -> str:
        """Checksum of what a cell reads of the file: its entry, or all entries of its length where it lies between."""
        used = [entry] if entry is not None else [e for e in self.entries if e.length == length]
        # Fingerprints grow with every length that is added; what they are of is in the entry.
        header = {**self.header, "text": self.header["text"]["sha256"]}
        content: dict[str, Any] = {"header": header, "entries": [plain(e) for e in used]}
        tables = [sha256_file(self.path.parent / e.table) for e in used if e.table is not None]
        return hashlib.sha256(json.dumps([content, tables], sort_keys=True).encode()).hexdigest()


@functools.lru_cache(maxsize=64)
def _read(path: Path, changed: int, size: int, name: str) -> Calibration:
    problem = "a file of evalkit calibrate"
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        if content["format"] != FORMAT:
            raise InputError(name, str(path), f"{problem} of format {FORMAT} (it has {content['format']!r})")
        entries = tuple(Entry(**entry) for entry in content["entries"])
        header = {key: content[key] for key in ("model", "method", "knob", "text")}
        for part, name_in_it in (("model", "name"), ("model", "weights"), ("method", "name"), ("text", "sha256")):
            header[part][name_in_it]
    except InputError:
        raise
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(name, str(path), f"{problem} ({type(error).__name__}: {first})") from None
    return Calibration(path, header, entries)


def write_yaml(path: Path, content: Any) -> None:
    """Write YAML so that the file is seen whole or not at all, also after a loss of power."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with open(scratch, "w", encoding="utf-8") as stream:
        yaml.safe_dump(content, stream, sort_keys=False, width=120)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(scratch, path)


# ---------------------------------------------------------------------------------------------------- method fields
def knob_of(method: Method, name: str, value: object) -> Knob:
    """The method's knob; :class:`InputError` naming the setting ``name`` where it has none."""
    knob = getattr(method, "knob", None)
    if knob is None:
        raise InputError(name, value, f"null: no single knob steers the budget of {method_name(method)}")
    return knob


def check_turns(method: Method, knob: Knob) -> None:
    """Raise :class:`InputError` where another setting leaves the knob without effect, so that it spends no budget.

    A table in the knob's place is for :func:`check_free`: it may be what the calibration gave.
    """
    by = method.inert().get(knob.field)
    if by is not None and by != knob.table_field:
        allowed = f"null where method.{knob.field} is calibrated, which cannot act beside it; or set method.{by} alone"
        raise InputError(f"method.{by}", setting(method, by), f"{allowed}, without a calibration")


def check_free(method: Method, knob: Knob, by: str, found: Mapping[str, Any]) -> None:
    """Raise :class:`InputError` where the knob or its table was given, and not as ``found``: it would be replaced.

    Args:
        method: a method that asks for a calibrated value.
        knob: its knob.
        by: what asks, for the error.
        found: the setting that the calibration gives, by name; empty where it is not known yet.
    """
    for dotted in filter(None, (knob.field, knob.table_field)):
        default = default_setting(type(method), dotted)
        if setting(method, dotted) not in (default, found.get(dotted, default)):
            raise taken(method, dotted, f"{by}, whose calibrated value takes its place")


def with_field(settings: Any, dotted: str, value: Any) -> Any:
    """A frozen dataclass with one (nested) field changed."""
    first, _, rest = dotted.partition(".")
    return dataclasses.replace(
        settings, **{first: with_field(getattr(settings, first), rest, value) if rest else value}
    )


def fixed_settings(method: Method) -> dict[str, Any]:
    """The settings under which a knob's value was found: all but the knob and the calibration's own.

    Files among them are named by their content.
    """
    settings = {"name": method_name(method), **plain(method)}
    knob = method.knob
    dropped = [*OWN_FIELDS] + ([knob.field] if knob else []) + ([knob.table_field] if knob and knob.table_field else [])
    for dotted in method.file_fields:
        named = _leaf(settings, dotted)
        if dotted not in dropped and named is not None:
            _set(settings, dotted, f"sha256:{sha256_file(Path(named).expanduser())}")
    for dotted in dropped:
        _set(settings, dotted, None)
    return settings


def path_of(named: str | None, model: str, method: Method) -> Path:
    """The calibration file of a model.

    Args:
        named: what ``method.calibration`` names; ``{model}`` in it stands for the model's name.
        model: name of the model.
        method: decides the name where none is given.
    """
    return Path(named.replace("{model}", model)).expanduser() if named else default_path(model, method)


def default_path(model: str, method: Method) -> Path:
    """Where the calibration of a model and these settings is kept unless it is told otherwise."""
    digest = hashlib.sha256(json.dumps(fixed_settings(method), sort_keys=True).encode()).hexdigest()[:8]
    return FOLDER / f"{model}-{method_name(method)}-{digest}.yaml"


def _leaf(settings: Mapping[str, Any], dotted: str) -> Any:
    node: Any = settings
    for part in dotted.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _set(settings: dict[str, Any], dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    node = settings
    for part in path:
        node = node[part]
    if value is None:
        node.pop(last, None)
    else:
        node[last] = value
