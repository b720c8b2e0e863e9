"""What a sweep may cost on a GPU, before it starts: GPU hours out of the measured time to first token.

The times are those of a model of Qwen3-8B's shape on one H200, dense, with FlashAttention 2 (``ttft`` rows of
``results/h200/benchmarks.csv``). Every method is counted at the dense time, so sparse cells cost less; outputs are
counted at their longest. Models of other shapes have no measured time and are not counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ..config import Cell, PerplexityConfig, RulerConfig
from ..errors import InputError
from ..task_settings import LONGBENCH_SMALL, is_path

DEVICE = "H200"
TTFT = {4096: 0.14774, 32768: 1.9539, 131072: 19.598}
"""Seconds by prompt length in tokens."""
MODELS = ("qwen3-8b", "qwen3-8b-yarn4", "llama-3.1-8b-instruct")
"""Presets of about that shape."""
DECODE_SECONDS = 0.035
"""Of a decoded token: an assumption, not a measurement."""
LONGBENCH_V2 = {32768: 180, 131072: 323}
"""LongBench-v2's questions by an upper bound of their prompt: its short ones, and its medium and long ones."""


def prefill_seconds(tokens: int) -> float:
    """Time to first token, interpolated between the measured lengths on logarithmic axes and extended beyond them."""
    known = sorted(TTFT)
    right = next((i for i, length in enumerate(known) if length >= tokens), len(known) - 1)
    low, high = (known[max(right, 1) - 1], known[max(right, 1)])
    slope = math.log(TTFT[high] / TTFT[low]) / math.log(high / low)
    return TTFT[low] * (tokens / low) ** slope


def hours(cell: Cell) -> tuple[float, float]:
    """GPU hours of a cell's prefills, and of its decoding at most."""
    prefill = decode = 0.0
    for prompt, output, count in _samples(cell):
        prefill += count * prefill_seconds(prompt)
        decode += count * output * DECODE_SECONDS
    return prefill / 3600, decode / 3600


def _samples(cell: Cell) -> Iterator[tuple[int, int, int]]:
    """(prompt tokens at most, output tokens at most, samples) of a cell."""
    task: Any = cell.task
    if isinstance(task, PerplexityConfig):
        yield task.length, 0, task.limit
        return
    thinking = task.generation.thinking_tokens or 0
    if isinstance(task, RulerConfig):
        from ..benchmarks.ruler import task_spec

        for name in task.tasks:
            answer = task.generation.max_new_tokens or task_spec(name).max_new_tokens
            yield task.length, answer + thinking, task.limit
        return
    from ..benchmarks.longbench_v2.prompts import ANSWER_TOKENS, REASONING_TOKENS

    usual = {"direct": ANSWER_TOKENS, "cot": REASONING_TOKENS + ANSWER_TOKENS}.get(task.mode, 0)
    answer = task.generation.max_new_tokens or usual
    counts = _questions(task.data)
    total = sum(counts.values())
    for bound, count in counts.items():
        share = count if task.limit is None else min(count, math.ceil(task.limit * count / total))
        yield min(bound, task.truncate_at), answer + thinking, share


def _questions(data: str) -> dict[int, int]:
    """Questions by an upper bound of their prompt; those of the published set where a hub set is not at hand."""
    if data != LONGBENCH_SMALL and not is_path(data):
        return LONGBENCH_V2
    try:
        return _counted(data)
    except InputError:  # the cell itself says what is wrong with the file
        return LONGBENCH_V2


@functools.lru_cache
def _counted(data: str) -> dict[int, int]:
    """Questions of a local file, which the cells of a sweep share."""
    from ..benchmarks.longbench_v2 import read_items

    items = read_items(data)
    short = sum(item.length == "short" for item in items)
    return dict(zip(LONGBENCH_V2, (short, len(items) - short), strict=True))


def lines(cells: Sequence[Cell]) -> list[str]:
    """The estimate as lines for the terminal; none where no cell's model has a measured time."""
    known = [cell for cell in cells if cell.model.name in MODELS]
    if not known:
        return []
    parts = [hours(cell) for cell in known]
    prefill, decode = math.fsum(part[0] for part in parts), math.fsum(part[1] for part in parts)
    rest = "" if len(known) == len(cells) else f" ({len(cells) - len(known)} cells of other models not counted)"
    return [
        f"about {prefill:.1f} {DEVICE} hours of prefill at the dense rate, less where it is sparse, and up to "
        f"{decode:.1f} hours of decoding at {1000 * DECODE_SECONDS:.0f} ms a token{rest}; finished cells cost nothing"
    ]
