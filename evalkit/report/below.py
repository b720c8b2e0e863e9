"""Dense runs far below the published score: something in the set-up is wrong, and every difference to them is too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import InputError
from ..store import CellResult
from . import averages
from .paper.measured import RULER_TASKS, place_of
from .paper.published import MODELS, USUAL, Published, read
from .rows import Rows

DENSE = "Dense"
NOTE = "dense << published: "
"""How the notes begin."""


def mark(rows: Rows, cells: Sequence[CellResult], folder: Path | None = None) -> Rows:
    """Put the published score beside every dense number that the paper prints one for; note those far below it.

    Args:
        rows: of :func:`evalkit.report.rows.build_rows`; rows of dense cells are changed.
        cells: the cells behind them.
        folder: the paper's numbers; None = :data:`.paper.published.USUAL`, and nothing is marked where that is missing.

    Raises:
        InputError: ``folder`` cannot be read.
    """
    try:
        numbers = read(folder or Path(USUAL))
    except InputError:
        if folder is not None:
            raise
        return rows
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


def _published(cell: CellResult, numbers: Published) -> float | None:
    """What the paper prints for a dense cell: of a RULER length over all 13 tasks, of a mode of LongBench-v2."""
    place = place_of(cell)
    if place is None or place[0].data:
        return None
    block, column = place
    model = MODELS.get(block.model, "")
    if block.benchmark == "ruler":
        whole = len({record["task"] for record in cell.records}) == RULER_TASKS
        number = numbers.ruler.get(model, {}).get(DENSE, {}).get(column)
        return number.accuracy if whole and number is not None else None
    found = numbers.longbench.get(model, {}).get(DENSE)
    if found is None:
        return None
    easy, hard = (found[f"{column}_{name}"].accuracy for name in ("easy", "hard"))
    return averages.longbench_v2_mode(easy, hard)
