"""Time on a CUDA device: events around each call, medians, inputs that rotate past the L2 cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch


def milliseconds(calls: Sequence[Callable[[], Any]], *, budget_ms: float = 300.0, least: int = 5) -> float:
    """Median device time of one call in milliseconds.

    Args:
        calls: the same work on different inputs, taken in turn, so that a call does not find its inputs in L2.
        budget_ms: how long to measure.
        least: fewest calls, however long they take.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    calls[0]()
    stop.record()
    torch.cuda.synchronize()
    repeats = max(least, min(100, int(budget_ms / max(start.elapsed_time(stop), 1e-3))))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for i, (before, after) in enumerate(events):
        if i % 8 == 0:
            torch.cuda._sleep(4_000_000)  # lets the host run ahead, so that launches are not what is timed
        before.record()
        calls[i % len(calls)]()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in events)
