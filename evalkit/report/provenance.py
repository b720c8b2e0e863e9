"""Where the numbers of a report come from: machine, versions, commit, and the command of each cell."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ..store import CellResult


def provenance(cells: Sequence[CellResult]) -> list[str]:
    """One line for each distinct environment, then the command of each cell.

    Args:
        cells: finished cells.
    """
    environments: dict[str, int] = {}
    for cell in cells:
        text = environment(cell)
        environments[text] = environments.get(text, 0) + 1
    lines = [f"{count} {'cell' if count == 1 else 'cells'}: {text}" for text, count in environments.items()]
    commands = {command(cell) for cell in cells if cell.overrides}
    return lines + [f"`{text}`" for text in sorted(commands)]


def command(cell: CellResult) -> str:
    """The command that makes ``cell`` again; empty where its overrides were not stored."""
    # Where results were kept is no part of how they were made.
    settings = [item for item in cell.overrides if not item.startswith("out=")]
    return shlex.join(["evalkit", "run", *settings]) if settings else ""


def environment(cell: CellResult) -> str:
    """Device, machine, number format, versions and commit, in one line."""
    run = cell.config.get("provenance", {})
    device = cell.identity["device"]
    machine = run.get("machine") or device.get("name", "?")
    versions = ", ".join(f"{name} {version}" for name, version in cell.identity["versions"].items())
    commit = run.get("commit")
    where = f"{device.get('type', '?')}, {machine}, {cell.identity['model'].get('dtype', '?')}"
    return f"{where}; {versions}{f'; commit {commit}' if commit else ''}"
