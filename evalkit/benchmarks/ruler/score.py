"""RULER's scoring: case-insensitive substring match of each reference in the output."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...errors import InputError

_CONTROL = re.compile(r"[\x00-\x1f]")


def score(metric: str, output: str, references: Sequence[str]) -> float:
    """Score one output.

    Args:
        metric: ``"all"`` is the share of references found; ``"any"`` is 1 when at least one is found (QA).
        output: what the model generated; control characters become line breaks before matching, as officially.
        references: the expected strings, at least one.

    Returns:
        A score in [0, 1].

    Raises:
        InputError: unknown metric, or no reference.
    """
    if metric not in ("all", "any"):
        raise InputError("metric", metric, "all or any")
    if not references:
        raise InputError("references", references, "at least one reference")
    text = _CONTROL.sub("\n", output.strip()).strip().lower()
    found = [reference.lower() in text for reference in references]
    return float(any(found)) if metric == "any" else sum(found) / len(found)
