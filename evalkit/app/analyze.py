"""The Hydra application behind ``evalkit analyze``: composes and checks settings, then calls what measures."""

from __future__ import annotations

import dataclasses
import importlib
import shlex
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from ..config import build
from ..errors import InputError, near_matches
from . import schema
from .single import require_given, run_single

SETTINGS = "evalkit.analysis.settings"
ANALYSES = {
    "iou": (f"{SETTINGS}:IouAnalysis", "evalkit.analysis.iou:run"),
    "rowmax": (f"{SETTINGS}:RowmaxAnalysis", "evalkit.analysis.rowmax:run"),
    "remap": (f"{SETTINGS}:RemapAnalysis", "evalkit.analysis.remap:run"),
    "frontier": (f"{SETTINGS}:FrontierAnalysis", "evalkit.analysis.frontier:run"),
    "heads": (f"{SETTINGS}:HeadsAnalysis", "evalkit.analysis.heads:run"),
    "figures_smollm2": (f"{SETTINGS}:FiguresAnalysis", "evalkit.analysis.sequence:run"),
}
"""Settings class and what runs it, by the name in ``schema/analyze``."""
_TASK_SCHEMA = "/schema/task/"

HELP = """usage: evalkit analyze <name> [key=value ...]

Measure, or read what was measured, and write data (CSV, Parquet) beside a picture (PNG, SVG, PDF) into out= (default
results/analysis). What was measured before a kill is not measured again. A list is written [a,b]; methods are presets
with settings behind them: 'methods=[cosa,"xattention:threshold=0.95"]'.

{analyses}

  model=<name>          another model (default smollm2), for iou, rowmax, heads and remap
  --cfg job             print the settings and run nothing
  --config-dir DIR      add a directory with analyze/<name>.yaml files of your own

Exit code: 0 done, 1 something failed, 2 bad input (nothing was run), 130 interrupted."""


def run(argv: Sequence[str]) -> int:
    """Run the application.

    Args:
        argv: arguments after ``evalkit analyze``.

    Returns:
        Exit code.
    """
    if not argv or {"-h", "--help"} & set(argv):
        print(HELP.format(analyses=_analyses()))
        return 0 if argv else 2
    name, rest = argv[0], list(argv[1:])
    if name.startswith("-") or "=" in name:
        raise InputError("analyze", name, f"its name comes first; {near_matches(name, ANALYSES)}")
    register()
    if name == "remap":
        _check_task(rest)
    command = shlex.join(["evalkit", "analyze", name, *rest])
    fields = _fields(name)
    return run_single(
        "evalkit analyze", "analyze", fields, [f"analyze={name}", *rest], lambda cfg: launch(cfg, command, rest)
    )


def launch(cfg: DictConfig, command: str, overrides: Sequence[str] = ()) -> int:
    """Run one composed config.

    Args:
        cfg: the composed config.
        command: the command that reproduces it.
        overrides: those of the command line.

    Returns:
        Exit code.

    Raises:
        InputError: a value that cannot be used.
    """
    require_given(cfg)
    container = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(container, dict)
    plain: dict[str, Any] = {str(key): value for key, value in container.items()}
    name = str(plain.pop("name"))
    settings_class, runner = ANALYSES[name]
    settings = build_top(_load(settings_class), plain)
    settings.validate()
    more = {"overrides": list(overrides)} if name == "remap" else {}
    return int(_load(runner)(settings, command, **more))


def build_top(cls: Any, values: dict[str, Any]) -> Any:
    """A settings class out of plain values; errors name a setting as the command line does, without a prefix."""
    try:
        return build(cls, values, "analyze")
    except InputError as error:
        raise InputError(error.field.removeprefix("analyze."), error.value, error.allowed) from None


def register() -> None:
    """Store the schemas of the analyses in Hydra's ConfigStore; may be called again."""
    schema.register()
    store = ConfigStore.instance()
    for name, (settings_class, _) in ANALYSES.items():
        node = schema.schema_for(_load(settings_class), name=name)
        store.store(group="schema/analyze", name=name, node=node, provider=schema.PROVIDER)


def _fields(name: str) -> list[str]:
    """Names that an override may begin with; of an analysis of the user's own, those of all."""
    classes = [_load(ANALYSES[name][0])] if name in ANALYSES else [_load(cls) for cls, _ in ANALYSES.values()]
    return sorted({"analyze", *(item.name for cls in classes for item in dataclasses.fields(cls))})


def _check_task(overrides: Sequence[str]) -> None:
    """Refuse a task that is no perplexity before OmegaConf says so of two schemas. A user's own are left to it."""
    known = [item.name.removesuffix(".yaml") for item in (files("evalkit.conf") / "task").iterdir()]
    for item in overrides:
        key, _, value = item.partition("=")
        if key == "task" and value in known and _task_kind(value) != "perplexity":
            allowed = sorted(task for task in known if _task_kind(task) == "perplexity")
            raise InputError("task", value, f"the analysis needs a loss; known: {', '.join(allowed)}")


def _task_kind(name: str) -> str:
    """Schema of a file of ``conf/task``."""
    content = yaml.safe_load((files("evalkit.conf") / "task" / f"{name}.yaml").read_text(encoding="utf-8"))
    base: str = content["defaults"][0].removesuffix("@_here_")
    return base.removeprefix(_TASK_SCHEMA) if base.startswith(_TASK_SCHEMA) else _task_kind(base)


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _analyses() -> str:
    lines = []
    for item in sorted((files("evalkit.conf") / "analyze").iterdir(), key=lambda item: item.name):
        first = next(line for line in item.read_text().splitlines() if line.startswith("# ") and "@" not in line)
        lines.append(f"  {item.name.removesuffix('.yaml'):<17}{first.removeprefix('# ')}")
    return "\n".join(lines)
