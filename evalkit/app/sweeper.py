"""A Hydra sweeper over several grids that checks every cell before it runs the first.

One Hydra multirun is one Cartesian product, which cannot hold dense (no knobs) beside CoSA (many). ``GridSweeper``
takes ``hydra.sweeper.grids``, a list of override lists, each its own product; what stands on the command line is
multiplied into every grid and wins over the grid's own value for the same key.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig

from ..config import Cell, cell_from_config
from ..errors import EvalkitError, InputError
from .explain import CONFIG_ERRORS, explain
from .isolation import one_line
from .session import SESSION


class InvalidSweep(EvalkitError):
    """At least one cell of a sweep cannot run, so none was started."""

    def __init__(self, refused: Mapping[str, Sequence[tuple[int, Sequence[str]]]], total: int) -> None:
        """Say every reason once.

        Args:
            refused: by reason the cells, each its number and overrides.
            total: number of cells.
        """
        self.lines = tuple(f"{_named(cells, total)}: {reason}" for reason, cells in refused.items())
        self.total = total
        count = sum(len(cells) for cells in refused.values())
        super().__init__(f"nothing was run: {count} of {total} cells cannot run")


def _named(cells: Sequence[tuple[int, Sequence[str]]], total: int) -> str:
    """Some cells of a sweep by their numbers and what they have in common."""
    (first, shared), *others = cells
    if not others:
        return f"cell {first}/{total} [{' '.join(shared)}]"
    shared = [item for item in shared if all(item in overrides for _, overrides in others)]
    return f"cells {', '.join(str(number) for number, _ in cells)} of {total} [{' '.join(shared)}]"


class GridSweeper(Sweeper):
    """Sweep over grids; see the module.

    Args:
        max_batch_size: cells handed to the launcher at a time; ``None`` = all.
        params: Hydra's own form of sweep overrides, added to each grid.
        grids: override lists, each one Cartesian product; empty = one grid made of the command line.
    """

    def __init__(
        self,
        max_batch_size: int | None = None,
        params: dict[str, str] | None = None,
        grids: Sequence[Sequence[str]] = (),
    ) -> None:
        self.max_batch_size = max_batch_size
        self.params = [f"{key}={value}" for key, value in (params or {}).items()]
        self.grids = [[str(item) for item in grid] for grid in grids]
        self.hydra_context: HydraContext | None = None
        self.config: DictConfig | None = None
        self.launcher: Launcher | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra once, before :meth:`sweep`."""
        self.hydra_context = hydra_context
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Compose and validate every cell, drop duplicates, then launch.

        Args:
            arguments: Hydra's task overrides; those of the cells are in the session.

        Raises:
            InvalidSweep: with one line for each reason that cells cannot run.
        """
        assert self.config is not None and self.launcher is not None and self.hydra_context is not None
        self._refuse_values_in_preset(arguments)
        found = self._validated(self._expand([*self.params, *SESSION.cell_overrides]))
        jobs = [overrides for _, overrides in found]
        SESSION.begin(len(jobs))
        if SESSION.dry_run:
            SESSION.listed(found)
        SESSION.estimated(cell for cell, _ in found)
        if SESSION.dry_run:
            return []
        returns = []
        size = self.max_batch_size or len(jobs)
        for first in range(0, len(jobs), size):
            batch = jobs[first : first + size]
            results = self._launch(batch, first)
            SESSION.collect([result.return_value for result in results])
            returns.append(results)
        return returns

    def _launch(self, batch: list[list[str]], first: int) -> Sequence[JobReturn]:
        assert self.config is not None and self.launcher is not None
        try:
            return self.launcher.launch(batch, initial_job_idx=first)
        except Exception as exc:
            target = str(self.config.hydra.launcher._target_)
            if target.startswith("hydra._internal."):
                raise  # cells in this process end as outcomes; what arrives here is a fault of ours
            hint = f"evalkit status {self.config.out} tells what its jobs have done"
            raise EvalkitError(f"launcher {target.rpartition('.')[2]}: {one_line(exc)}; {hint}") from exc

    def _expand(self, command_line: list[str]) -> list[list[str]]:
        """Every grid times the command line, as override lists."""
        assert self.hydra_context is not None
        # Imported here: Hydra runs the modules of its plugins again when it first looks for them.
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        jobs: list[list[str]] = []
        for grid in self.grids or [[]]:
            overrides = parser.parse_overrides([*grid, *command_line])
            jobs += BasicSweeper.split_arguments(overrides, None)[0]
        return jobs

    def _validated(self, jobs: list[list[str]]) -> list[tuple[Cell, list[str]]]:
        kept: dict[str, tuple[Cell, list[str]]] = {}
        refused: dict[str, list[tuple[int, list[str]]]] = {}
        for number, overrides in enumerate(jobs, start=1):
            try:
                cell = self._compose(overrides)
            except (*CONFIG_ERRORS, EvalkitError) as exc:
                refused.setdefault(explain(exc), []).append((number, overrides))
                continue
            settings = {key: value for key, value in cell.as_dict().items() if key != "overrides"}
            kept.setdefault(json.dumps(settings, sort_keys=True), (cell, overrides))
        if refused:
            if SESSION.dry_run:  # what could run, before what could not
                SESSION.listed(kept.values())
            raise InvalidSweep(refused, len(jobs))
        return list(kept.values())

    def _compose(self, overrides: list[str]) -> Cell:
        assert self.config is not None and self.hydra_context is not None
        config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        return cell_from_config(config)

    def _refuse_values_in_preset(self, arguments: list[str]) -> None:
        """A preset's values outside its grids would not reach the cells: refuse them instead of dropping them."""
        assert self.config is not None and self.hydra_context is not None
        presets = [item for item in arguments if item.startswith("sweep=")]
        if not presets:
            return
        bare = self.hydra_context.config_loader.load_configuration(
            config_name=self.config.hydra.job.config_name,
            overrides=[*self.config.hydra.overrides.hydra, *(item for item in arguments if item not in presets)],
            run_mode=RunMode.MULTIRUN,
        )
        keys = {str(key) for key in (*bare, *self.config)} - {"hydra"}
        changed = sorted(key for key in keys if bare._get_node(key) != self.config._get_node(key))
        if changed:
            allowed = f"a sweep preset may set hydra.* only; move {', '.join(changed)} into its grids"
            raise InputError("sweep", presets[-1].partition("=")[2], allowed)


# Hydra instantiates plugins by import path, only below "hydra_plugins", and its discovery finds nothing in an editable
# install. So the class goes by a name there, and the module of that name is made by hand.
PLUGIN_MODULE = "hydra_plugins.evalkit"
GridSweeper.__module__ = PLUGIN_MODULE


def register() -> None:
    """Make the sweeper known to Hydra; may be called again."""
    parent, _, _ = PLUGIN_MODULE.partition(".")
    try:
        importlib.import_module(parent)
    except ImportError:
        sys.modules[parent] = types.ModuleType(parent)
        sys.modules[parent].__path__ = []
    module = types.ModuleType(PLUGIN_MODULE)
    module.GridSweeper = GridSweeper  # type: ignore[attr-defined]
    sys.modules[PLUGIN_MODULE] = module
    Plugins.instance().register(GridSweeper)
