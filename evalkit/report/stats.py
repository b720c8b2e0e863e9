"""95 % intervals for means, perplexities and their paired differences to dense.

Scores lie in [0, 1] and may be fractions (RULER gives partial credit), where p (1 - p) bounds the variance, so that the
intervals for proportions hold and err on the wide side. A bounded mean always has an interval of positive width; one
that rests on the spread between windows needs two windows and is ``None`` with one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

LEVEL = 0.95
Z = float(stats.norm.ppf(0.5 + LEVEL / 2))

Floats = NDArray[np.float64]
Strata = Sequence[tuple[float, ArrayLike]]
"""Pairs (weight, values); the weights add up to 1."""


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval.

    Attributes:
        value: the estimate.
        n: samples behind it.
        low, high: the interval; ``None`` where it is undefined.
        bootstrap: of a difference, its interval by :mod:`.bootstrap` where that was asked for.
    """

    value: float
    n: int
    low: float | None = None
    high: float | None = None
    bootstrap: tuple[float, float] | None = field(default=None, kw_only=True)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval, or ``None``."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def times(self, factor: float) -> Estimate:
        """The same in another unit."""
        scaled = [None if bound is None else bound * factor for bound in (self.low, self.high)]
        resampled = None if self.bootstrap is None else (self.bootstrap[0] * factor, self.bootstrap[1] * factor)
        return Estimate(self.value * factor, self.n, *scaled, bootstrap=resampled)


def wilson(mean: float, n: float) -> tuple[float, float]:
    """Wilson score interval of a mean of scores in [0, 1].

    Args:
        mean: the mean, in [0, 1].
        n: number of samples; may be an effective number, above 0.
    """
    if not (0 <= mean <= 1 and n > 0):
        raise ValueError(f"mean {mean} of {n} scores: scores lie in [0, 1] and n is positive")
    shrink = 1 + Z * Z / n
    centre = (mean + Z * Z / (2 * n)) / shrink
    half = Z / shrink * math.sqrt(mean * (1 - mean) / n + Z * Z / (4 * n * n))
    # At 0 and 1 the bound is exactly there; rounding must not move it.
    low = 0.0 if mean == 0 else max(0.0, centre - half)
    high = 1.0 if mean == 1 else min(1.0, centre + half)
    return low, high


def mean_score(strata: Strata) -> Estimate:
    """Weighted mean of strata of scores in [0, 1], each stratum by its own mean.

    The interval is Wilson's for an effective number of samples. With weights w_k and n_k samples, equal strata give
    1 / sum(w_k^2 / n_k); strata that differ give more, as sampling within strata varies less. The variance in a stratum
    is p_k (1 - p_k) + p (1 - p) / n_k: its second part stands for the degree of freedom that p_k took, and gives a
    stratum of one sample the pooled variance.

    Args:
        strata: (weight, scores); weights add up to 1.
    """
    parts = [(weight, _scores(values)) for weight, values in strata]
    _check_weights([weight for weight, _ in parts])
    mean = min(1.0, max(0.0, math.fsum(weight * float(scores.mean()) for weight, scores in parts)))
    n = sum(len(scores) for _, scores in parts)
    effective = 1 / math.fsum(weight**2 / len(scores) for weight, scores in parts)
    pooled = mean * (1 - mean)
    if len(parts) > 1 and pooled > 0:
        spread = math.fsum(
            weight**2 / len(scores) * (float(scores.mean() * (1 - scores.mean())) + pooled / len(scores))
            for weight, scores in parts
        )
        effective = pooled / spread
    return Estimate(mean, n, *wilson(mean, effective))


def score_difference(strata: Strata) -> Estimate:
    """Weighted mean of paired differences of scores, sparse - dense.

    Agresti and Min's interval, generalised from 0/1 to fractions: one half is added to each cell of the paired 2 x 2
    table, which makes two pseudo pairs: differences +1 and -1 at weight 1/2 each, and 0 at weight 1. It always has a
    positive width.

    Args:
        strata: (weight, differences in [-1, 1]); weights add up to 1.
    """
    parts = [(weight, np.asarray(values, dtype=np.float64)) for weight, values in strata]
    _check_weights([weight for weight, _ in parts])
    mean = math.fsum(weight * float(d.mean()) for weight, d in parts)
    square = math.fsum(weight * float((d**2).mean()) for weight, d in parts)
    effective = 1 / math.fsum(weight**2 / len(d) for weight, d in parts)
    total = effective + 2
    centre = effective * mean / total
    variance = (effective * square + 1) / total - centre**2
    half = Z * math.sqrt(variance / total)
    low, high = max(-1.0, centre - half), min(1.0, centre + half)
    return Estimate(mean, sum(len(d) for _, d in parts), min(low, mean), max(high, mean))


def ratio_mean(sums: ArrayLike, weights: ArrayLike) -> Estimate:
    """Mean ``sum(sums) / sum(weights)`` over windows, with a t interval over windows.

    The interval is the linearised one of a ratio: with equal weights it is the t interval of the mean of the windows.

    Args:
        sums: total of each window, for instance nats.
        weights: what it is a total over, for instance tokens.
    """
    x, w = np.asarray(sums, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    if x.shape != w.shape or x.ndim != 1 or not len(x) or not bool((w > 0).all()):
        raise ValueError(f"sums {x.shape} over weights {w.shape}: same length, weights positive")
    n, total = len(x), float(w.sum())
    mean = float(x.sum()) / total
    if n == 1:
        return Estimate(mean, n)
    half = _t(n) * math.sqrt(_ratio_variance(x, w, mean))
    return Estimate(mean, n, mean - half, mean + half)


def perplexity(nll: ArrayLike, tokens: ArrayLike) -> Estimate:
    """Exponential of the token-weighted mean loss.

    Args:
        nll: nats of each window, summed over its scored tokens.
        tokens: scored tokens of each window.
    """
    loss = ratio_mean(nll, tokens)
    bounds = [None if bound is None else _exp(bound) for bound in (loss.low, loss.high)]
    return Estimate(_exp(loss.value), loss.n, *bounds)


def perplexity_difference(sparse: ArrayLike, dense: ArrayLike, tokens: ArrayLike) -> Estimate:
    """Perplexity of sparse minus that of dense on the same windows.

    Both perplexities come from these windows and vary with them: the t interval over windows is that of the difference
    linearised in both losses (paired delta method). To hold the perplexity of dense fixed would be too narrow, as a
    harder text makes the same loss in nats dearer.

    Args:
        sparse, dense: nats of each window.
        tokens: scored tokens of each window.
    """
    x, y, w = (np.asarray(values, dtype=np.float64) for values in (sparse, dense, tokens))
    change, base = ratio_mean(x - y, w), perplexity(y, w)
    value, above = base.value * _expm1(change.value), perplexity(x, w).value
    if change.n == 1 or math.isinf(above) or math.isinf(base.value):
        return Estimate(value, change.n)
    total = float(w.sum())
    influence = above * (x - w * (x.sum() / total)) - base.value * (y - w * (y.sum() / total))
    half = _t(change.n) * math.sqrt(_ratio_variance(influence, w, 0.0))
    return Estimate(value, change.n, value - half, value + half)


def perplexity_ratio(sparse: ArrayLike, dense: ArrayLike, tokens: ArrayLike) -> Estimate:
    """Perplexity of sparse over that of dense on the same windows: the exponential of the paired loss difference.

    Args:
        sparse, dense: nats of each window.
        tokens: scored tokens of each window.
    """
    return perplexity(np.asarray(sparse, dtype=np.float64) - np.asarray(dense, dtype=np.float64), tokens)


def divergence(kl: ArrayLike, tokens: ArrayLike) -> Estimate:
    """Token-weighted mean KL in nats, with a t interval over windows that ends at 0.

    Args:
        kl: mean nats of each window.
        tokens: scored tokens of each window.
    """
    weights = np.asarray(tokens, dtype=np.float64)
    found = ratio_mean(np.asarray(kl, dtype=np.float64) * weights, weights)
    return Estimate(found.value, found.n, None if found.low is None else max(0.0, found.low), found.high)


def agreement(fractions: ArrayLike, tokens: ArrayLike) -> Estimate:
    """Token-weighted share of agreeing tokens, with Wilson's interval.

    Tokens of a window are no independent samples, so n is the effective number that the spread between windows leaves
    (with the t quantile's correction for few windows): at least the number of windows, at most that of tokens.

    Args:
        fractions: share of each window, in [0, 1].
        tokens: scored tokens of each window.
    """
    a, w = _scores(fractions), np.asarray(tokens, dtype=np.float64)
    n = len(a)
    mean = min(1.0, max(0.0, float(a @ w) / float(w.sum())))
    effective = float(n)
    if n > 1:
        variance = _ratio_variance(a * w, w, mean)
        most = float(w.sum())
        found = most if variance == 0 else mean * (1 - mean) / variance * (Z / _t(n)) ** 2
        effective = min(max(found, n), most)
    return Estimate(mean, n, *wilson(mean, effective))


def two_sided_p(difference: Estimate, *, freedom: int | None = None) -> float:
    """Two-sided p-value of "there is no difference", from the difference's own interval.

    The half-width is a quantile times the standard error, so that p is below 0.05 exactly where the interval leaves out
    zero. 1 where there is no interval.

    Args:
        difference: paired difference.
        freedom: degrees of freedom of a t interval; None = a normal one.
    """
    if difference.low is None or difference.high is None or freedom == 0:
        return 1.0
    centre, half = (difference.low + difference.high) / 2, (difference.high - difference.low) / 2
    if half == 0:
        return 1.0 if centre == 0 else 0.0
    if freedom is None:
        return float(2 * stats.norm.sf(abs(centre) / half * Z))
    return float(2 * stats.t.sf(abs(centre) / half * _t(freedom + 1), freedom))


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Holm's step-down: which hypotheses are rejected, with the chance of any false one at most ``alpha``."""
    return [p <= alpha for p in holm_adjusted(p_values)]


def holm_adjusted(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: those that a hypothesis is rejected at, whatever the level.

    The k-th smallest of m (from 0) times m - k, never below an earlier one, at most 1.
    """
    adjusted = [1.0] * len(p_values)
    highest = 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[at]))
        adjusted[at] = highest
    return adjusted


def _scores(values: ArrayLike) -> Floats:
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or not len(scores) or not bool(((scores >= 0) & (scores <= 1)).all()):
        raise ValueError(f"scores must be a list of numbers in [0, 1], got {values!r}")
    return scores


def _check_weights(weights: Sequence[float]) -> None:
    if not weights or min(weights) <= 0 or not math.isclose(math.fsum(weights), 1.0, rel_tol=1e-9):
        raise ValueError(f"weights {list(weights)} must be positive and add up to 1")


def _ratio_variance(sums: Floats, weights: Floats, mean: float) -> float:
    residual = sums - mean * weights
    n = len(sums)
    return float(residual @ residual) * n / (n - 1) / float(weights.sum()) ** 2


def _t(n: int) -> float:
    return float(stats.t.ppf(0.5 + LEVEL / 2, n - 1))


def _exp(value: float) -> float:
    """Exponential that goes to infinity instead of raising: two windows can make an interval of any width."""
    return math.exp(value) if value < 700 else math.inf


def _expm1(value: float) -> float:
    return math.expm1(value) if value < 700 else math.inf
