"""Gains over a base that was measured in the same rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A median and its interval.

    Attributes:
        median: of the values.
        interval: 95 % at least, between two of the values; None where there are too few of them (fewer than 6).
    """

    median: float
    interval: tuple[float, float] | None

    def metrics(self, name: str) -> dict[str, float]:
        """As rows hold it: ``name``, and ``name_low`` and ``name_high`` where there is an interval."""
        ends = dict(zip((f"{name}_low", f"{name}_high"), self.interval or (), strict=False))
        return {name: self.median, **ends}


def spread(values: Sequence[float]) -> Spread:
    """Median and the narrowest interval between order statistics that holds the true median in 95 % of the cases.

    It supposes nothing of the distribution: of n values, k - 1 at each end may be outliers.
    """
    ordered, n = sorted(values), len(values)
    cut, missed = 0, 2.0**-n
    while 2 * missed <= 0.05:
        cut += 1
        missed += math.comb(n, cut) * 2.0**-n
    return Spread(statistics.median(ordered), (ordered[cut - 1], ordered[n - cut]) if cut else None)


def saved(base: Sequence[float], other: Sequence[float]) -> Spread:
    """(T_base - T_other) / T_base, round by round."""
    return spread([(a - b) / a for a, b in zip(base, other, strict=True)])


def faster(base: Sequence[float], other: Sequence[float]) -> Spread:
    """T_base / T_other - 1, the gain in throughput, round by round."""
    return spread([a / b - 1 for a, b in zip(base, other, strict=True)])
