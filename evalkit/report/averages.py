"""How results are averaged: the rules that reproduce the published averages.

Over RULER's lengths, accuracy is the plain mean and budget the mean weighted by length in tokens. LongBench-v2 weights
easy and hard by their sample counts and then takes the mean of the two modes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

LONGBENCH_V2_COUNTS = {"easy": 192, "hard": 311}


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Mean of ``values`` under non-negative ``weights``.

    Raises:
        ValueError: lengths differ, or the weights do not add up to more than zero.
    """
    total = math.fsum(weights)
    if len(values) != len(weights) or not total > 0 or min(weights) < 0:
        raise ValueError(f"{len(values)} values under {len(weights)} weights with sum {total}")
    return math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / total


def accuracy_over_lengths(by_length: Mapping[int, float]) -> float:
    """RULER accuracy over several lengths: the plain mean."""
    return weighted_mean(list(by_length.values()), [1.0] * len(by_length))


def budget_over_lengths(by_length: Mapping[int, float]) -> float:
    """Budget over several lengths: weighted by length in tokens."""
    return weighted_mean(list(by_length.values()), list(by_length))


def longbench_v2_mode(easy: float, hard: float) -> float:
    """Accuracy of one LongBench-v2 mode: easy and hard by their sample counts."""
    return weighted_mean([easy, hard], [LONGBENCH_V2_COUNTS["easy"], LONGBENCH_V2_COUNTS["hard"]])


def longbench_v2(no_cot: Mapping[str, float], cot: Mapping[str, float]) -> float:
    """LongBench-v2 average: mean of the two modes.

    Args:
        no_cot, cot: accuracy by difficulty, ``easy`` and ``hard``.
    """
    modes = [longbench_v2_mode(mode["easy"], mode["hard"]) for mode in (no_cot, cot)]
    return weighted_mean(modes, [1.0, 1.0])
