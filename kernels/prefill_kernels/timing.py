"""Time on a CUDA device: events around each call, medians, inputs that rotate past the L2 cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

_SLEEP_CYCLES = 4_000_000
"""About 2 ms: lets the host run ahead, so that launches are not what is timed."""
_BETWEEN_SLEEPS = 4


def medians(calls: Sequence[Callable[[], Any]], *, budget_ms: float = 300.0, least: int = 5) -> list[float]:
    """Median device time of each call in milliseconds.

    Args:
        calls: like work on different inputs, taken in turn, so that a call does not find its inputs in L2.
        budget_ms: how long to measure.
        least: fewest rounds over all calls, however long they take.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for call in calls:
        call()
    stop.record()
    torch.cuda.synchronize()
    rounds = max(least, min(100, int(budget_ms / max(start.elapsed_time(stop), 1e-3))))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds * len(calls))]
    for i, (before, after) in enumerate(events):
        if i % _BETWEEN_SLEEPS == 0:
            torch.cuda._sleep(_SLEEP_CYCLES)
        before.record()
        calls[i % len(calls)]()
        after.record()
    torch.cuda.synchronize()
    times = [before.elapsed_time(after) for before, after in events]
    return [statistics.median(times[i :: len(calls)]) for i in range(len(calls))]
