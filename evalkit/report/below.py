"""Dense runs far below the published score: something in the set-up is wrong, and every difference to them is too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import InputError
from ..store import CellResult
from . import averages
from .paper.measured import RULER_TASKS, Block, Column, place_of
from .paper.published import Published, read, usual_folder
from .rows import Rows

DENSE = "Dense"
NOTE = "dense << published: "
"""How the notes begin."""
MISSING = "dense not compared with published scores"
"""How the note begins where there is nothing to compare with."""


def mark(rows: Rows, cells: Sequence[CellResult], folder: Path | None = None) -> Rows:
    """Put the published score beside every dense number that the paper prints one for; note those far below it.

    Args:
        rows: of :func:`evalkit.report.rows.build_rows`; rows of dense cells are changed.
        cells: the cells behind them.
        folder: the paper's numbers; None = :func:`.paper.published.usual_folder`, and a note where they are not there.

    Raises:
        InputError: ``folder`` cannot be read.
    """
    try:
        numbers = read(folder or usual_folder())
    except InputError as error:
        if folder is not None:
            raise
        count = sum(cell.is_dense and _place(cell) is not None for cell in cells)
        missing = [f"{MISSING}, {count} cell{'' if count == 1 else 's'}: {error}"] if count else []
        return replace(rows, notes=[*rows.notes, *missing])
    printed = {cell.key: score for cell in cells if cell.is_dense and (score := _published(cell, numbers)) is not None}
    notes = list(rows.notes)
    for row in rows.level("cell"):
        if row.dense and row.metric == "accuracy" and row.key in printed:
            row.published = printed[row.key]
            if row.below_published:
                ours = f"{row.value:.2f} [{row.low:.2f}, {row.high:.2f}]"
                where = f"{row.model}, {row.task}, {row.length}"
                notes.append(f"{NOTE}check {where}: {ours}, the paper prints {row.published:.2f}")
    return replace(rows, notes=notes)


def _place(cell: CellResult) -> tuple[Block, Column] | None:
    """Where the paper has a number for a cell: a RULER length over all 13 tasks, or a mode of LongBench-v2."""
    place = place_of(cell)
    if place is None or place[0].data or not place[0].paper:
        return None
    whole = len({record["task"] for record in cell.records}) == RULER_TASKS
    return place if whole or place[0].benchmark != "ruler" else None


def _published(cell: CellResult, numbers: Published) -> float | None:
    """What the paper prints for a dense cell."""
    place = _place(cell)
    if place is None:
        return None
    block, column = place
    if block.benchmark == "ruler":
        number = numbers.ruler.get(block.paper, {}).get(DENSE, {}).get(column)
        return None if number is None else number.accuracy
    found = numbers.longbench.get(block.paper, {}).get(DENSE)
    if found is None:
        return None
    easy, hard = (found[f"{column}_{name}"].accuracy for name in ("easy", "hard"))
    return averages.longbench_v2_mode(easy, hard)
