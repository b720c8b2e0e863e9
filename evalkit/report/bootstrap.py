"""Paired percentile bootstrap of differences to dense, beside the intervals that tables print.

A resample draws samples with replacement and takes both the sparse and the dense number of each one drawn. It assumes
nothing of how numbers are distributed, but is too narrow at small n, and [0, 0] where no sample differs: tables print
the intervals of :mod:`.stats`, which are neither.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .stats import LEVEL, Floats

RESAMPLES = 2000
Interval = tuple[float, float]


def score_difference(strata: Sequence[tuple[float, str, ArrayLike]]) -> Interval | None:
    """Of a weighted mean of paired differences; every stratum is resampled for itself.

    Args:
        strata: (weight, seed, differences), as for :func:`.stats.score_difference`.

    Returns:
        The interval; None where each stratum has one sample, as all resamples are the same then.
    """
    total, most = np.zeros(RESAMPLES), 0
    for weight, seed, values in strata:
        d = np.asarray(values, dtype=np.float64)
        total += weight * (counts(seed, len(d)) @ d) / len(d)
        most = max(most, len(d))
    return _percentiles(total) if most > 1 else None


def perplexity_difference(sparse: ArrayLike, dense: ArrayLike, tokens: ArrayLike, seed: str) -> Interval | None:
    """Of the perplexity of sparse minus that of dense.

    Args:
        sparse, dense: nats of each window.
        tokens: scored tokens of each window.
        seed: of the draws.

    Returns:
        The interval; None for one window, or where a resample's perplexity is infinite.
    """
    windows = np.stack([np.asarray(values, dtype=np.float64) for values in (sparse, dense, tokens)], axis=1)
    if len(windows) == 1:
        return None
    x, y, w = (counts(seed, len(windows)) @ windows).T
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.exp(x / w) - np.exp(y / w)
    return _percentiles(found) if bool(np.isfinite(found).all()) else None


def counts(seed: str, n: int) -> Floats:
    """How often each of ``n`` samples is in each resample [RESAMPLES, n]."""
    return _counts(seed, n).astype(np.float64)


# Cells of one dense twin share their draws, which cost far more than their use; bytes, as thousands of cells of many
# subtasks come by turns.
@lru_cache(maxsize=256)
def _counts(seed: str, n: int) -> NDArray[np.uint8]:
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big"))
    drawn = rng.integers(0, n, (RESAMPLES, n)) + n * np.arange(RESAMPLES)[:, None]
    return np.bincount(drawn.ravel(), minlength=RESAMPLES * n).reshape(RESAMPLES, n).astype(np.uint8)


def _percentiles(values: Floats) -> Interval:
    # Rounded: a product's last digits depend on the machine's BLAS.
    low, high = np.round(np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]), 10)
    return float(low), float(high)
