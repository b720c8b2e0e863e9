"""Cells for a report: which are finished, which dense twin belongs to which, and whether they saw the same prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import EvalkitError, InputError, StoreError
from ..store import CellResult, SampleKey, read_cells, sample_key
from .names import twin_command, unique


@dataclass(frozen=True)
class Loaded:
    """Finished cells with their dense twins.

    Attributes:
        cells: finished cells.
        twins: dense twin by the key of a sparse cell.
        notes: what was left out, one line each.
        unfinished: cells that failed or were not run to their end.
    """

    cells: list[CellResult]
    twins: dict[str, CellResult]
    notes: list[str]
    unfinished: list[CellResult] = field(default_factory=list)


def load(directories: Iterable[str | Path]) -> Loaded:
    """Read the finished cells of results directories and pair them.

    Raises:
        InputError: a directory is missing, empty or holds no finished cell.
        EvalkitError: a sparse cell has no finished dense twin; the message holds the command that makes it.
        StoreError: a cell is damaged, or a pair did not see the same samples and prompts.
    """
    directories = list(directories)
    found = read_cells(directories)
    notes = [_left_out(cell) for cell in found if not cell.done]
    cells: dict[str, CellResult] = {}
    for cell in found:
        if not cell.done:
            continue
        first = cells.setdefault(cell.key, cell)
        if first is not cell:
            notes.append(f"{cell.label}: stored twice, {first.path} is used and {cell.path} is not")
    if not cells:
        given = ", ".join(str(item) for item in directories)
        raise InputError("directory", given, f"holds no finished cell ({len(notes)} unfinished); see evalkit status")
    finished = list(cells.values())
    twins = find_twins(finished)
    for cell in finished:
        if cell.key in twins:
            check_pair(cell, twins[cell.key])
            notes += _shared_samples(cell, twins[cell.key])
    return Loaded(finished, twins, notes, [cell for cell in found if not cell.done])


def _left_out(cell: CellResult) -> str:
    expected = "?" if cell.expected_samples is None else cell.expected_samples
    what = f"left out, {cell.state} with {len(cell.records)} of {expected} samples: {cell.label}"
    return f"{what} ({cell.error})" if cell.error else what


def find_twins(cells: Sequence[CellResult]) -> dict[str, CellResult]:
    """Dense twin by key of each sparse cell; among several, one executed in the same way comes first.

    Raises:
        EvalkitError: with one command for each twin that is missing.
    """
    dense: dict[str, list[CellResult]] = defaultdict(list)
    for cell in cells:
        if cell.is_dense:
            dense[cell.twin].append(cell)
    twins, alone = {}, []
    for cell in cells:
        if cell.is_dense:
            continue
        if not dense[cell.twin]:
            alone.append(cell)
            continue
        twins[cell.key] = min(dense[cell.twin], key=lambda twin: (_unlike(cell, twin), twin.key))
    if alone:
        commands = unique(twin_command(cell) for cell in alone)
        which = alone[0].label if len(alone) == 1 else f"{len(alone)} sparse cells ({alone[0].label}, ...)"
        raise EvalkitError(f"no finished dense twin of {which}; run it with: {' && '.join(commands)}")
    return twins


def _unlike(cell: CellResult, twin: CellResult) -> int:
    mine, other = cell.identity["execution"], twin.identity["execution"]
    return sum(mine.get(name) != other.get(name) for name in {*mine, *other})


def check_pair(cell: CellResult, twin: CellResult) -> None:
    """A pair is one only on the same samples with the same prompts.

    Two cells that stop at a wanted precision may do so at different numbers: then one has the first samples of the
    other, and the difference is taken over those.

    Raises:
        StoreError: naming both cells and the first sample that differs.
    """
    mine, other = by_sample(cell), by_sample(twin)
    for key in sorted({*mine, *other}):
        name = f"{key[0]}@{key[1]}[{key[2]}]"
        problem = ""
        if key not in mine or key not in other:
            if stops_early(cell):
                continue
            problem = f"is missing from {cell.path if key not in mine else twin.path}"
        elif _prompt(mine[key]) != _prompt(other[key]):
            problem = "has another prompt"
        elif mine[key]["metrics"].get("tokens") != other[key]["metrics"].get("tokens"):
            problem = "is scored on another number of tokens"
        if problem:
            raise StoreError(f"{cell.label} and its dense twin {twin.label} cannot be paired: sample {name} {problem}")


def stops_early(cell: CellResult) -> bool:
    """Whether a cell may end before its limit, at a wanted precision."""
    return cell.config.get("task", {}).get("precision") is not None


def _shared_samples(cell: CellResult, twin: CellResult) -> list[str]:
    shared = len({*by_sample(cell)} & {*by_sample(twin)})
    if shared == len(cell.records) == len(twin.records):
        return []
    return [f"stopped at {len(cell.records)} samples, dense at {len(twin.records)}: paired over {shared}: {cell.label}"]


def by_sample(cell: CellResult) -> dict[SampleKey, dict[str, Any]]:
    """Records by (task, length, index)."""
    return {sample_key(record): record for record in cell.records}


def _prompt(record: dict[str, Any]) -> str:
    digest = (record.get("prompt") or {}).get("sha256")
    if not isinstance(digest, str) or not digest:
        raise StoreError(f"sample {record['task']}@{record['length']}[{record['index']}] has no prompt.sha256")
    return digest
