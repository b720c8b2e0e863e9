"""Search for the value of a monotone knob at which a measured quantity meets its target."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..methods.base import Knob

NARROW = 1e-4
"""Width of the bracket, as a share of the searched range, below which no further value is tried."""


@dataclass(frozen=True)
class Axis:
    """A knob's range at one prompt length as the interval [0, 1], along which the budget grows.

    Attributes:
        knob: the knob.
        length: prompt length in tokens.
    """

    knob: Knob
    length: int

    def value(self, place: float) -> float:
        """The knob's value at a place: 0 is the smallest budget, 1 the largest."""
        knob = self.knob
        low, high = knob.low, knob.high * (self.length if knob.high_per_token else 1)
        share = place if knob.rises else 1.0 - place
        if knob.scale == "log":
            found = math.exp(_between(math.log(low), math.log(high), share))
        elif knob.scale == "tail":
            found = 1.0 - math.exp(_between(math.log(1.0 - low), math.log(1.0 - high), share))
        else:
            found = _between(low, high, share)
        if knob.integer:
            return float(round(found))
        # Ten digits: the value that is written down is the value that was measured.
        return float(f"{min(max(found, low), high):.10g}")

    def neighbours(self, one: float, other: float) -> bool:
        """Whether no value worth trying lies between two places."""
        if self.knob.integer:
            return abs(self.value(one) - self.value(other)) <= 1
        return abs(one - other) < NARROW


@dataclass(frozen=True)
class Found:
    """How a search ended.

    Attributes:
        value: the value nearest to the target.
        reached: what was measured there.
        tried: measured quantity by value, in the order in which they were tried.
    """

    value: float
    reached: float
    tried: dict[float, float]


def solve(measure: Callable[[float], float], axis: Axis, target: float, tolerance: float, steps: int) -> Found:
    """Find the value at which ``measure`` comes nearest to ``target``.

    False position between two measured places, bisection where it moves one end only. An end of the range is measured
    when the search runs into it. A quantity may move in steps, as integer knobs and ties make it: the nearest value is
    returned then.

    Args:
        measure: quantity at a value; grows along ``axis``.
        axis: where to look.
        target: wanted quantity.
        tolerance: distance at which the search stops.
        steps: values to try, at least 2; the end of the range may come on top.
    """
    tried: dict[float, float] = {}

    def distance(place: float) -> float:
        value = axis.value(place)
        if value not in tried:
            tried[value] = measure(value)
        return tried[value] - target

    low, high = _End(0.0), _End(1.0)
    moved: list[int] = []
    while len(tried) < steps:
        place = _next(low, high, moved)
        here = distance(place)
        if abs(here) <= tolerance:
            break
        moved.append(1 if here > 0 else 0)
        low, high = (low, _End(place, here)) if here > 0 else (_End(place, here), high)
        if axis.neighbours(low.place, high.place):
            for end in (low, high):
                if end.distance is None:
                    distance(end.place)
            break
    value, reached = min(tried.items(), key=lambda item: abs(item[1] - target))
    return Found(value, reached, tried)


@dataclass(frozen=True)
class _End:
    """An end of the bracket; its distance from the target is None until it is measured."""

    place: float
    distance: float | None = None


def _next(low: _End, high: _End, moved: list[int]) -> float:
    middle = (low.place + high.place) / 2
    one_sided = len(moved) >= 2 and moved[-1] == moved[-2]
    if low.distance is None or high.distance is None:
        if not one_sided:
            return middle
        return low.place if low.distance is None else high.place
    if one_sided:
        return middle
    share = low.distance / (low.distance - high.distance)
    return low.place + (high.place - low.place) * min(max(share, 0.05), 0.95)


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share
