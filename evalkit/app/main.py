"""The Hydra application behind ``evalkit run``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files

import hydra
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from ..config import cell_from_config
from ..errors import EvalkitError, InputError, near_matches
from . import schema, sweeper
from .explain import CONFIG_ERRORS, explain
from .isolation import CellOutcome, one_line, run_isolated
from .session import SESSION
from .sweeper import InvalidSweep

GROUPS = ("model", "method", "task")
TOP_LEVEL = (*GROUPS, "sweep", "execution", "out")
DRY_RUN = "--dry-run"

HELP = """usage: evalkit run [-m] method=<name> task=<name> [model=<name>] [key=value ...]
       evalkit run -m sweep=<preset> [key=value ...]

Run cells (model x method x task), each in its own process. With -m a comma makes a sweep: method.select.p=0.9,0.95.
Every cell is validated before the first one runs. A finished cell is not run again; an interrupted one goes on.

{groups}

Common settings: task.length task.limit execution.device execution.backend execution.chunk_size execution.page_size
execution.seed out
  --dry-run             list the cells with what they may cost on a GPU, and run nothing
  --cfg job             print the composed config and run nothing
  --config-dir DIR      add a directory with config groups of your own
  --hydra-help          everything else Hydra offers

Exit code: 0 all cells done, 1 a cell failed, 2 bad input (nothing was run), 130 interrupted."""


def launch_cell(cfg: DictConfig) -> CellOutcome:
    """Run one composed config in its own process. Never raises; Hydra would show only the first of many failures."""
    overrides = reproducing_overrides(HydraConfig.get())
    try:
        cell = cell_from_config(cfg, overrides)
    except EvalkitError as exc:
        outcome = CellOutcome(" ".join(overrides), "invalid", one_line(exc))
        SESSION.outcomes.append(outcome)
        return outcome
    if SESSION.dry_run:
        SESSION.listed([(cell, overrides)])
        SESSION.estimated([cell])
        return CellOutcome(cell.label, "done")
    SESSION.starting(cell.label)
    outcome = run_isolated(cell)
    SESSION.ended(outcome)
    return outcome


def reproducing_overrides(config: HydraConf) -> tuple[str, ...]:
    """Overrides that compose the running cell again, without the preset it came from.

    Args:
        config: Hydra's own config of the job.
    """
    choices = config.runtime.choices
    named = [f"{group}={choices[group]}" for group in GROUPS if choices.get(group)]
    chosen = {*GROUPS, "sweep"}
    rest = [item for item in config.overrides.task if item.partition("=")[0] not in chosen]
    return (*named, *rest)


application = hydra.main(config_path="pkg://evalkit.conf", config_name="config", version_base="1.3")(launch_cell)


def run(argv: Sequence[str]) -> int:
    """Run the application.

    Args:
        argv: arguments after ``evalkit run``.

    Returns:
        Exit code.
    """
    if {"-h", "--help"} & set(argv):
        print(HELP.format(groups=_groups()))
        return 0
    # Waiting OpenMP threads would spin on the cores that other processes need; read when torch loads in the server.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, and this module prints one line
    try:
        schema.register()
        sweeper.register()
        hydra_argv, cell_overrides = split_arguments([item for item in argv if item != DRY_RUN])
        SESSION.reset(cell_overrides)
        SESSION.dry_run = DRY_RUN in argv
        with arguments("evalkit run", hydra_argv):
            application()
    except KeyboardInterrupt:
        return SESSION.interrupted()
    except InvalidSweep as exc:
        return _refuse([*exc.lines, str(exc)])
    except InputError as exc:
        return _refuse([one_line(exc)])
    except CONFIG_ERRORS as exc:
        return _refuse([explain(exc)])
    return SESSION.close()


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate what configures Hydra from what goes to every cell of a multirun.

    Hydra applies plain overrides to the config that the sweep starts from, where a setting of a method that only a grid
    names does not exist yet. So in a multirun they go straight to the cells. A preset (``sweep=``) implies ``-m``.

    Returns:
        Arguments for Hydra, and overrides for the sweeper.
    """
    args = get_args_parser().parse_args(list(argv))
    parsed = OverridesParser.create().parse_overrides(args.overrides)
    _check_names(parsed)
    informs = args.cfg or args.info or args.hydra_help or args.shell_completion or args.resolve
    preset = any(item.key_or_group == "sweep" and item.value() is not None for item in parsed)
    if informs or not (args.multirun or preset):
        return list(argv), []
    to_cells = [
        text
        for text, override in zip(args.overrides, parsed, strict=True)
        if not override.is_hydra_override() and override.get_key_element() != "sweep"
    ]
    shared = {item for item in to_cells if item.startswith("out=")}  # launchers put their own files below it
    rest = [item for item in argv if item not in to_cells or item in shared]
    return (rest if args.multirun else ["--multirun", *rest]), to_cells


def _check_names(overrides: Sequence[Override]) -> None:
    """Refuse a misspelt first name. Hydra would first complain of the group that it was meant to choose."""
    for override in overrides:
        plain = not (override.is_add() or override.is_force_add() or override.is_hydra_override())
        name = override.key_or_group.split(".")[0]
        if plain and name not in TOP_LEVEL:
            raise InputError(override.key_or_group, override.get_value_string(), near_matches(name, TOP_LEVEL))
        if name == "sweep" and override.is_sweep_override():
            raise InputError("sweep", override.get_value_string(), "one preset at a time")


@contextmanager
def arguments(program: str, argv: list[str]) -> Iterator[None]:
    """The process's arguments for as long as Hydra reads them."""
    before = sys.argv
    sys.argv = [program, *argv]
    try:
        yield
    finally:
        sys.argv = before


def _refuse(lines: Sequence[str]) -> int:
    for line in lines:
        print(f"evalkit: {line}", file=sys.stderr, flush=True)
    return 2


def _groups() -> str:
    lines = []
    for group in (*GROUPS, "sweep"):
        names = sorted(item.name.removesuffix(".yaml") for item in (files("evalkit.conf") / group).iterdir())
        lines.append(f"  {group:<8}{', '.join(name for name in names if not name.startswith('_'))}")
    return "\n".join(lines)
