"""The bootstrap over samples that comparisons of cells share: one draw serves all cells, so that pairs stay pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..report.stats import LEVEL

Floats = NDArray[np.float64]


def draws(strata: Sequence[int], resamples: int, seed: int) -> Floats:
    """How often each sample is drawn, with replacement within its stratum; float64 [resamples, samples].

    Args:
        strata: stratum of each sample, any integers.
        resamples: number of draws.
        seed: of the generator.
    """
    rng = np.random.default_rng(seed)
    of = np.asarray(strata)
    found = np.zeros((resamples, len(of)))
    for stratum in np.unique(of):
        at = np.flatnonzero(of == stratum)
        found[:, at] = rng.multinomial(len(at), np.full(len(at), 1 / len(at)), size=resamples)
    return found


def interval(values: Floats) -> tuple[float, float]:
    """The 95 % percentile interval of a statistic's replicates; NaN where fewer than half of them are defined."""
    defined = values[np.isfinite(values)]
    if len(defined) * 2 < len(values) or not len(defined):
        return float("nan"), float("nan")
    low, high = np.quantile(defined, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
