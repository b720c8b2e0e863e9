"""Where the time of a call goes: totals by kernel name."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import DeviceType
from torch.profiler import ProfilerActivity, profile

COLUMNS = ("kernel", "calls", "total_ms", "mean_ms", "share")
IDLE = "(no kernel running)"


def profile_csv(call: Callable[[], Any], path: Path, device: torch.device) -> None:
    """Run ``call`` once under the profiler and write totals by kernel name, longest first.

    The last row is the time between the first kernel's begin and the last one's end in which none ran: host work that
    the device waited for. Shares are of that span. On a CPU, operators stand for kernels.

    Args:
        call: what to profile; it has run before, so that nothing is compiled.
        path: CSV file to write.
        device: where it runs.
    """
    cuda = device.type == "cuda"
    activity, kind = (ProfilerActivity.CUDA, DeviceType.CUDA) if cuda else (ProfilerActivity.CPU, DeviceType.CPU)
    with profile(activities=[activity]) as profiler:
        call()
        if cuda:
            torch.cuda.synchronize()
    # On a CPU operators nest; the outermost ones do not overlap.
    events = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == kind and event.cpu_parent is None and not getattr(event, "is_user_annotation", False)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(totals(events))


def totals(events: list[tuple[str, float, float]]) -> list[tuple[str, int, str, str, str]]:
    """Rows of the table.

    Args:
        events: name, begin and end in microseconds.
    """
    if not events:
        return []
    spent: dict[str, list[float]] = defaultdict(list)
    for name, begin, end in events:
        spent[name].append(end - begin)
    span = max(end for _, _, end in events) - min(begin for _, begin, _ in events)
    idle, busy_until = 0.0, min(begin for _, begin, _ in events)
    for _, begin, end in sorted(events, key=lambda event: event[1]):
        idle += max(0.0, begin - busy_until)
        busy_until = max(busy_until, end)
    rows = sorted(((name, len(times), sum(times)) for name, times in spent.items()), key=lambda row: -row[2])
    share = 1 / span if span else 0.0
    return [
        (name, count, f"{total / 1e3:.4f}", f"{total / 1e3 / count:.5f}", f"{total * share:.4f}")
        for name, count, total in [*rows, (IDLE, 1, idle)]
    ]
