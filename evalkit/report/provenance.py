"""Where the numbers of a report come from: machine, versions, commit, and the command of each cell."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ..store import CellResult


def provenance(cells: Sequence[CellResult]) -> list[str]:
    """One line for each distinct environment, then one command a cell, in the order of the cells.

    Args:
        cells: finished cells.
    """
    environments: dict[str, int] = {}
    for cell in cells:
        text = _environment(cell)
        environments[text] = environments.get(text, 0) + 1
    lines = [f"{count} {'cell' if count == 1 else 'cells'}: {text}" for text, count in environments.items()]
    return lines + [f"`{shlex.join(['evalkit', 'run', *cell.overrides])}`" for cell in cells if cell.overrides]


def _environment(cell: CellResult) -> str:
    run = cell.config.get("provenance", {})
    device = cell.identity["device"]
    machine = run.get("machine") or device.get("name", "?")
    versions = ", ".join(f"{name} {version}" for name, version in cell.identity["versions"].items())
    commit = run.get("commit")
    where = f"{device.get('type', '?')}, {machine}, {cell.identity['model'].get('dtype', '?')}"
    return f"{where}; {versions}{f'; commit {commit}' if commit else ''}"
