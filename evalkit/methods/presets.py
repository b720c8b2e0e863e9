"""Methods by name where Hydra is not installed: the files of ``conf/method`` as plain YAML, and settings behind a name.

``xattention`` is a preset, ``xattention:stride=16:threshold=0.95`` the same with two settings changed,
``cosa:select.p=0.9`` with a nested one. Without PyYAML or without ``conf`` the presets are the methods' own defaults.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..config import build, method_name, plain, unwrap_optional
from ..errors import InputError, near_matches
from . import METHODS
from .base import Method

_SCHEMA = "/schema/method/"
_OF_A_RUN = ("calibration", "budget_target")


def names() -> list[str]:
    """Every preset, sorted."""
    return sorted({*METHODS, *_preset_files()})


def preset(name: str, field: str = "method") -> Method:
    """The method of a preset, not validated.

    Args:
        name: of a file of ``conf/method``, or of a registered method.
        field: name of the setting, for errors.

    Raises:
        InputError: no such preset.
    """
    known = names()
    if name not in known:
        raise InputError(field, name, near_matches(name, known))
    base, values = _composed(name, _preset_files())
    return build(METHODS.get(base), values, "method")  # type: ignore[type-abstract]


def from_text(text: str, field: str = "method", calibrate: Callable[[Method], Method] | None = None) -> Method:
    """The method that ``preset:setting=value:...`` names, validated.

    Args:
        text: preset and settings.
        field: name of the setting, for errors.
        calibrate: puts the calibrated value into a method that asks for one; None where there is no model and length
            that a calibration could be of.

    Raises:
        InputError: unknown preset or setting, a value that cannot be used, or a calibration that is missing; ``field``
            and ``text`` are in the error.
    """
    name, *settings = text.split(":")
    method = preset(name, field)
    given: set[str] = set()
    try:
        for item in settings:
            dotted, equals, value = item.partition("=")
            if not equals:
                raise InputError("method", item, "setting=value behind the preset, several of them divided by colons")
            if dotted in given:
                raise InputError(f"method.{dotted}", value, "each setting once")
            given.add(dotted)
            if dotted in _OF_A_RUN:
                raise InputError(f"method.{dotted}", value, "a run's own: give the calibrated value itself")
            method = _with(method, dotted, value, f"method.{dotted}")
        method.validate()
        method = calibrated(method, calibrate)
    except InputError as error:
        raise InputError(field, text, f"{error.field}={error.value!r}: {error.allowed}") from None
    return method


def calibrated(method: Method, calibrate: Callable[[Method], Method] | None) -> Method:
    """The method with its calibrated value, never a preset's name over its default knob.

    Args:
        method: validated.
        calibrate: finds the value of a run's model and length; None = there is no run, which is refused.

    Raises:
        InputError: the method asks for a calibration and there is none to take.
    """
    asked = next((name for name in _OF_A_RUN if getattr(method, name) is not None), None)
    if asked is None:
        return method
    if calibrate is None:
        knob = method.knob.field if method.knob else "its value"
        allowed = f"no preset that a model's calibration sets, here: another preset with the value itself ({knob}=...)"
        raise InputError(f"method.{asked}", getattr(method, asked), allowed)
    return calibrate(method)


def described(method: Method) -> str:
    """The settings that act, ``name=value`` each; not those that are off, and not a block of 128."""
    values = dict(_leaves(plain(method)))
    if values.get("select.rule") == "budget":
        values.pop("select.p")
    off = {"block_size": 128}
    shown = [
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
        if value is not None and value is not False and off.get(name) != value
        if not (name == "skip_scale" and value <= 0)
    ]
    return " ".join(shown) or method_name(method)


def _preset_files() -> dict[str, Path]:
    try:
        import yaml  # noqa: F401 - presets are YAML
    except ImportError:
        return {}
    try:
        folder = Path(str(files("evalkit.conf"))) / "method"
    except ModuleNotFoundError:  # a source tree that is not installed
        folder = Path(__file__).parents[2] / "conf" / "method"
    return {path.stem: path for path in folder.glob("*.yaml")}


def _composed(name: str, presets: Mapping[str, Path]) -> tuple[str, dict[str, Any]]:
    """Registered name and values of a preset: those of the presets it is made of, then its own."""
    if name not in presets:
        return name, {}
    import yaml

    content = yaml.safe_load(presets[name].read_text(encoding="utf-8"))
    base = name
    values: dict[str, Any] = {}
    for item in content.pop("defaults", ["_self_"]):
        item = item.removesuffix("@_here_")
        if item == "_self_":
            _merge(values, content)
        elif item.startswith(_SCHEMA):
            base = item.removeprefix(_SCHEMA)
        else:
            base, more = _composed(item, presets)
            _merge(values, more)
    return base, values


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping):
            _merge(into.setdefault(name, {}), value)
        else:
            into[name] = value


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found += _leaves(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def _with(settings: Any, dotted: str, text: str, name: str) -> Any:
    """A dataclass with one (nested) field set to what ``text`` says."""
    first, _, rest = dotted.partition(".")
    fields = [item.name for item in dataclasses.fields(settings) if item.name not in _OF_A_RUN]
    hint = typing.get_type_hints(type(settings)).get(first)
    if first not in fields or bool(rest) != dataclasses.is_dataclass(getattr(settings, first)):
        raise InputError(name, text, f"unknown setting; {near_matches(first, fields)}")
    value = _with(getattr(settings, first), rest, text, name) if rest else _value(hint, text, name)
    return dataclasses.replace(settings, **{first: value})


def _value(hint: Any, text: str, name: str) -> Any:
    inner = unwrap_optional(hint)
    if inner is not hint and text in ("null", "none"):
        return None
    if inner is bool:
        if text not in ("true", "false"):
            raise InputError(name, text, "true or false")
        return text == "true"
    try:
        return inner(text)
    except ValueError:
        raise InputError(name, text, f"a number ({inner.__name__})") from None
