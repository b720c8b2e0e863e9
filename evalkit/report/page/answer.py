"""Which method keeps accuracy at which budget, in one sentence a model and task.

A setting keeps accuracy within a margin if its loss against dense is shown to be smaller than the margin: a test on
the paired difference, corrected for all settings of the panel (Holm). Few samples show little, and the sentence then
says so; that a difference is not significant is never taken as proof that there is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats as distributions

from ..pareto import Panel, is_bound
from ..rows import METRICS, Row
from ..stats import LEVEL, Z, holm
from ..table import difference_text, interval_text, value_text

MARGINS = (1.0, 2.0, 5.0)
"""Largest loss that counts as keeping accuracy: points of accuracy, or percent of dense perplexity."""
DEFAULT_MARGIN = 1
ROUNDING = 1e-9
ANSWERED = ("accuracy", "perplexity")


@dataclass(frozen=True)
class Finding:
    """What is said about one panel under one margin.

    Attributes:
        kept: some setting is shown to stay within the margin.
        text: the sentence.
        row: the setting that it speaks of.
    """

    kept: bool
    text: str
    row: Row | None


def margin_name(margin: float) -> str:
    """A margin in words."""
    return f"{margin:g} {'point' if margin == 1 else 'points'} of accuracy, {margin:g} % of perplexity"


def find(panel: Panel, margin: float) -> Finding:
    """The answer for a panel of accuracy or perplexity.

    Args:
        panel: rows of one group and metric.
        margin: points of accuracy, or percent of dense perplexity.
    """
    dense = next((row for row in panel.rows if row.dense), None)
    rows = [row for row in panel.rows if not row.dense and not is_bound(row.series)]
    if dense is None or not rows:
        return Finding(False, "No sparse method was measured beside dense here.", None)
    limit = _named(panel.metric, margin)
    kept = [row for row, ok in zip(rows, within(rows, margin), strict=True) if ok]
    sound = [row for row in kept if not row.suspect]
    if kept:
        best = min(sound or kept, key=_cheapest)
        text = f"{best.marked_method} keeps {_noun(panel.metric)} within {limit} at a realized budget of {best.B:.1f} %"
        rest = _others(rows, sound, best) if sound else " It is marked as suspect: check it first."
        return Finding(bool(sound), f"{text}: {_numbers(best, dense)}.{rest}{_suspects(kept) if sound else ''}", best)
    unshown = f"No setting is shown to keep {_noun(panel.metric)} within {limit}"
    measured = [row for row in rows if loss(row) <= margin + ROUNDING]
    if measured:
        best = min(measured, key=_cheapest)
        text = (
            f"{unshown}: with n = {best.n} the intervals are too wide. By its measured value alone, "
            f"{best.marked_method} does at a realized budget of {best.B:.1f} %"
        )
    else:
        best = min(rows, key=lambda row: (loss(row), row.B))
        text = (
            f"{unshown}, and none was measured within it. The nearest is {best.marked_method} at a realized budget of "
            f"{best.B:.1f} %"
        )
    suspect = " It is marked as suspect: check it first." if best.suspect else ""
    return Finding(False, f"{text}: {_numbers(best, dense)}.{suspect}", best)


def _noun(metric: str) -> str:
    return METRICS[metric].name


def _named(metric: str, margin: float) -> str:
    if metric == "perplexity":
        return f"{margin:g} % of dense"
    return f"{margin:g} {'point' if margin == 1 else 'points'} of dense"


def _cheapest(row: Row) -> tuple[float, float, str]:
    return row.B, loss(row), row.method


def _numbers(row: Row, dense: Row) -> str:
    return (
        f"{value_text(row)} {interval_text(row)} against {value_text(dense)} of dense, paired difference "
        f"{difference_text(row)}, n = {row.n}"
    )


def _suspects(kept: Sequence[Row]) -> str:
    names = [f"{row.marked_method} at {row.B:.1f} %" for row in sorted(kept, key=_cheapest) if row.suspect]
    return f" Left out as suspect: {'; '.join(names)}." if names else ""


def _others(rows: Sequence[Row], kept: Sequence[Row], best: Row) -> str:
    """Where the other series of the panel stand."""
    lowest: dict[str, Row] = {}
    for row in sorted(kept, key=_cheapest):
        lowest.setdefault(row.series, row)
    reached = [f"{name} at {row.B:.1f} %" for name, row in lowest.items() if name != best.series]
    missed = sorted({row.series for row in rows if not row.suspect} - set(lowest))
    said = f" Next: {'; '.join(reached)}." if reached else ""
    return said + (f" Not shown for: {'; '.join(missed)}." if missed else "")


# ------------------------------------------------------------------------------------------------------------- test
def loss(row: Row) -> float:
    """How much worse than dense: points of accuracy, or percent of dense perplexity. Infinite where it is unknown."""
    if row.difference is None:
        return math.inf
    if METRICS[row.metric].higher_is_better:
        return -row.difference
    return 100 * row.difference / (row.value - row.difference)


def within(rows: Sequence[Row], margin: float) -> list[bool]:
    """Whether each row's loss is shown to be below ``margin``, at 95 % for all rows together (Holm, one-sided)."""
    return holm([_p_value(row, margin) for row in rows], (1 - LEVEL) / 2)


def _p_value(row: Row, margin: float) -> float:
    """One-sided p-value of "the loss is at least the margin", from the row's own interval.

    The interval's half-width on the side of the loss is a quantile times the standard error. A margin of perplexity is
    a share of dense, so that the interval is the ratio's; in nats it is Student's.
    """
    if row.difference is None or row.difference_low is None:
        return 1.0
    if METRICS[row.metric].higher_is_better:
        half, room = row.difference - row.difference_low, margin + row.difference
        return float(distributions.norm.sf(_ratio(room, half / Z)))
    if row.ratio_high is None:
        return 1.0
    nats = math.log1p(row.difference / (row.value - row.difference))
    half = math.log(row.ratio_high) - nats
    freedom = row.n - 1
    error = half / float(distributions.t.ppf(0.5 + LEVEL / 2, freedom))
    return float(distributions.t.sf(_ratio(math.log1p(margin / 100) - nats, error), freedom))


def _ratio(room: float, error: float) -> float:
    if error > 0:
        return room / error
    return math.copysign(math.inf, room) if room else 0.0
