"""How many samples a wanted interval needs: a fixed schedule of looks that stops on the interval's half-width alone.

``task.precision=h`` runs the first samples of a cell, looks, and goes on until the half-width of the cell's own 95 %
interval is at most h, or ``task.limit`` is reached. What is looked at is one cell's records, never another cell's and
never a difference, so that stopping favours no method. The schedule is fixed in advance by the limit. It belongs to the
cell's identity with the precision, and the looks are stored with the cell.

For scores the half-width is in the unit of scores (0.02 = two points of accuracy), of the mean over subtasks. For
losses it is in nats a token (0.02 = two percent of perplexity).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .report import stats

LEAST_SCORES, LEAST_WINDOWS = 50, 8
"""Samples of each subtask, or windows, at the first look: fewer make an interval that says little of itself."""
STEPS = (1.0, 1.5, 2.0, 3.0)
"""Looks are at the first number times these, then at each of the last two times a power of two."""


@dataclass(frozen=True)
class Look:
    """One look at a cell.

    Attributes:
        n: samples of each subtask, or windows, so far.
        half_width: of the 95 % interval; None where there is none yet.
    """

    n: int
    half_width: float | None

    def record(self) -> dict[str, Any]:
        """For the store."""
        return asdict(self)


def schedule(limit: int, least: int) -> list[int]:
    """Numbers of samples at which a cell is looked at: ``least`` times 1, 1.5, 2, 3, 4, 6, 8, 12, ..., then the limit.

    Args:
        limit: most samples.
        least: samples at the first look; a smaller limit is the only look.
    """
    found: list[int] = []
    steps = list(STEPS)
    while True:
        n = int(least * steps[len(found)])
        if n >= limit:
            return [*found, limit]
        found.append(n)
        if len(found) == len(steps):
            steps += [2 * steps[-2], 2 * steps[-1]]


def half_width(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Half the width of the 95 % interval of a cell's main number.

    Args:
        records: of one cell, all with a score or all with a loss.

    Returns:
        For scores that of their mean over subtasks, for losses that of the token-weighted mean, in nats; None for a
        single window.
    """
    metrics = [record["metrics"] for record in records]
    if "nll" in metrics[0]:
        estimate = stats.ratio_mean([m["nll"] for m in metrics], [m["tokens"] for m in metrics])
    else:
        by_task: dict[str, list[float]] = {}
        for record in records:
            by_task.setdefault(record["task"], []).append(float(record["metrics"]["score"]))
        estimate = stats.mean_score([(1 / len(by_task), values) for values in by_task.values()])
    bounds = estimate.interval
    return None if bounds is None else (bounds[1] - bounds[0]) / 2


def enough(look: Look, precision: float | None) -> bool:
    """Whether a cell may stop at a look."""
    return precision is not None and look.half_width is not None and look.half_width <= precision
