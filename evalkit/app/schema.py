"""Typed schemas behind the YAML of ``conf/``, made from the dataclasses of the harness.

Each is stored in Hydra's ConfigStore below ``schema/`` and named in the defaults list of the YAML files, so that a
wrong key or type is an error when the config is composed.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import typing
from typing import Any, Literal

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from ..calibration.pattern_settings import PatternSearchConfig
from ..calibration.settings import CalibrateConfig
from ..capture_settings import CaptureConfig
from ..config import TASK_CONFIGS, ExecutionConfig, ModelConfig, methods_registry, unwrap_optional

PROVIDER = "evalkit"


def schema_for(cls: type, *, name: str | None = None) -> type:
    """Return a mutable twin of a dataclass whose annotations OmegaConf knows.

    OmegaConf makes frozen dataclasses read-only and has no Literal and no variadic tuple; the twin has strings and
    lists there, and the value is checked by the dataclass's own ``validate()``.

    Args:
        cls: dataclass type, possibly nested.
        name: adds a field ``name`` with this default where the class has none.
    """
    # A class that has this name by itself has one twin, whether it is a group of its own or a field of another class.
    own = any(item.name == "name" and item.default == name for item in dataclasses.fields(cls))
    return _twin(cls, None if own else name)


@functools.cache  # one twin a class: OmegaConf merges a node only with its own class
def _twin(cls: Any, name: str | None) -> type:
    hints = typing.get_type_hints(cls)
    members: list[Any] = []
    fields = [f for f in dataclasses.fields(cls) if f.init]
    if name is not None and "name" not in {f.name for f in fields}:
        members.append(("name", str, dataclasses.field(default=name)))
    for item in fields:
        annotation = _annotation(hints[item.name])
        if item.name == "name" and name is not None:
            default: Any = dataclasses.field(default=name)
        else:
            default = _default(item, annotation)
        members.append((item.name, annotation, default))
    return dataclasses.make_dataclass(cls.__name__, members)


def _annotation(hint: Any) -> Any:
    inner = unwrap_optional(hint)
    if inner is not hint:
        return typing.Optional[_annotation(inner)]  # noqa: UP045 - made at run time
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        return str
    if origin in (tuple, list):
        return typing.List[_annotation(args[0])]  # type: ignore[misc] # noqa: UP006 - made at run time
    if origin is dict:
        return typing.Dict[args[0], _annotation(args[1])]  # type: ignore[valid-type, misc] # noqa: UP006
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return schema_for(hint)
    return hint


def _default(item: dataclasses.Field[Any], annotation: Any) -> Any:
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return dataclasses.field(default_factory=annotation)
    if item.default_factory is not dataclasses.MISSING:
        factory = item.default_factory
        return dataclasses.field(default_factory=lambda: _mutable(factory()))
    if item.default is dataclasses.MISSING:
        return dataclasses.field(default=MISSING)
    if isinstance(item.default, tuple):
        values = list(item.default)
        return dataclasses.field(default_factory=lambda: list(values))
    return dataclasses.field(default=_mutable(item.default))


def _mutable(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value


@dataclasses.dataclass
class GridSweeperSchema:
    """Config of :class:`evalkit.app.sweeper.GridSweeper`.

    Args:
        grids: list of override lists; each list is one Cartesian product.
        max_batch_size: cells handed to the launcher at a time; ``None`` = all.
        params: Hydra's own form of sweep overrides.
    """

    _target_: str = "hydra_plugins.evalkit.GridSweeper"
    max_batch_size: int | None = None
    params: dict[str, str] | None = None
    grids: list[list[str]] = dataclasses.field(default_factory=list)


def register() -> None:
    """Store every schema in Hydra's ConfigStore; may be called again."""
    store = ConfigStore.instance()
    store.store(group="schema", name="execution", node=schema_for(ExecutionConfig), provider=PROVIDER)
    store.store(group="schema", name="calibrate", node=schema_for(CalibrateConfig), provider=PROVIDER)
    store.store(group="schema", name="capture", node=schema_for(CaptureConfig), provider=PROVIDER)
    store.store(group="schema", name="search", node=schema_for(PatternSearchConfig), provider=PROVIDER)
    store.store(group="schema/model", name="model", node=schema_for(ModelConfig), provider=PROVIDER)
    for name, config in TASK_CONFIGS.items():
        store.store(group="schema/task", name=name, node=schema_for(config, name=name), provider=PROVIDER)
    registry = methods_registry()
    for name in registry:
        node = schema_for(registry.get(name), name=name)
        store.store(group="schema/method", name=name, node=node, provider=PROVIDER)
    store.store(group="hydra/sweeper", name="grid", node=GridSweeperSchema, provider=PROVIDER)
