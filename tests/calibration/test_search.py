"""The search for a knob's value, on functions whose answer is known."""

from __future__ import annotations

import math

import pytest

from evalkit.calibration.search import Axis, solve
from evalkit.methods.base import Knob

LINEAR = Knob("budget", 0.001, 1.0)
TAIL = Knob("p", 0.05, 1 - 1e-5, scale="tail")
SKIP = Knob("skip_scale", 1e-3, 1.0, rises=False, scale="log", high_per_token=True)
WINDOW = Knob("window", 1, 1 / 64, high_per_token=True, integer=True)
CURVES = [
    (LINEAR, lambda v: v),
    (LINEAR, lambda v: v**3),
    (LINEAR, lambda v: math.floor(v * 500) / 500),
    (TAIL, lambda v: 0.02 + 0.98 * v**8),
    (TAIL, lambda v: -math.log(1 - v) / 11.6),
    (SKIP, lambda v: 1 / (1 + (v / 100) ** 2)),
    (SKIP, lambda v: 0.03 + 0.97 / (1 + v / 5)),
]


@pytest.mark.parametrize("knob,curve", CURVES)
@pytest.mark.parametrize("target", [0.05, 0.2, 0.5, 0.9])
def test_the_target_is_reached_in_few_steps(knob, curve, target):
    calls = []
    axis = Axis(knob, 8192)

    def measure(value):
        calls.append(value)
        return curve(value)

    found = solve(measure, axis, target, 0.0025, 14)
    assert abs(found.reached - target) <= 0.0025 and found.reached == curve(found.value)
    assert len(calls) == len(set(calls)) == len(found.tried) <= 12, "no value is measured twice"
    assert all(knob.low <= value <= knob.high * (8192 if knob.high_per_token else 1) for value in calls)


@pytest.mark.parametrize("knob,low,high", [(LINEAR, 0.001, 1.0), (TAIL, 0.05, 1 - 1e-5), (WINDOW, 1, 32)])
def test_an_axis_runs_from_the_smallest_budget_to_the_largest(knob, low, high):
    axis = Axis(knob, 2048)
    assert axis.value(0.0) == pytest.approx(low) and axis.value(1.0) == pytest.approx(high)
    values = [axis.value(i / 50) for i in range(51)]
    assert values == sorted(values)


def test_a_falling_knob_is_turned_round():
    axis = Axis(SKIP, 2048)
    assert axis.value(0.0) == pytest.approx(2048) and axis.value(1.0) == pytest.approx(1e-3)
    values = [axis.value(i / 50) for i in range(51)]
    assert values == sorted(values, reverse=True)
    assert axis.value(0.5) == pytest.approx(math.sqrt(2048 * 1e-3)), "divided by its logarithm"


def test_the_tail_is_divided_by_what_is_missing_to_one():
    axis = Axis(TAIL, 1)
    assert 1 - axis.value(0.5) == pytest.approx(math.sqrt(0.95 * 1e-5))


@pytest.mark.parametrize("target,window", [(0.1, 1), (0.22, 1), (0.45, 3), (0.68, 5), (0.99, 8)])
def test_an_integer_knob_gives_the_nearest_step(target, window):
    found = solve(lambda v: min(1.0, (v + 0.3) / 8), Axis(WINDOW, 512), target, 0.0025, 12)
    assert found.value == window and isinstance(found.value, float) and found.value.is_integer()
    assert all(value.is_integer() for value in found.tried)


@pytest.mark.parametrize("target,end", [(0.01, 0.0), (0.995, 1.0)])
def test_a_target_out_of_reach_ends_at_the_end_of_the_range(target, end):
    axis = Axis(TAIL, 1)
    found = solve(lambda v: 0.1 + 0.8 * v, axis, target, 0.0025, 12)
    assert found.value == axis.value(end) and len(found.tried) <= 5


def test_a_jump_over_the_target_gives_the_nearer_side():
    found = solve(lambda v: 0.1 if v < 0.3 else 0.6, Axis(LINEAR, 1), 0.25, 0.0025, 60)
    assert found.reached == 0.1 and found.value < 0.3
    assert len(found.tried) < 30, "the bracket closes on the jump"


def test_the_steps_are_a_limit():
    found = solve(lambda v: v**9, Axis(LINEAR, 1), 0.123456, 1e-12, 5)
    assert len(found.tried) == 5
    assert abs(found.reached - 0.123456) == min(abs(r - 0.123456) for r in found.tried.values())
