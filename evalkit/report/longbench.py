"""LongBench-v2 in a report: its categories, its two modes and what counts as the benchmark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..store import CellResult
from ..task_settings import LONGBENCH_HUB, is_path
from .averages import LONGBENCH_V2_COUNTS

NAME = "longbench_v2"
SMALL = f"{NAME}_small_"
PUBLISHED = (LONGBENCH_HUB, "THUDM/LongBench-v2")
"""Hub ids of the published set, the second its former one."""
PUBLISHED_ID = re.compile(r"[0-9a-f]{24}")
"""How the published set calls a question."""
CATEGORIES = {"difficulty": ("easy", "hard"), "length": ("short", "medium", "long")}
Record = Mapping[str, Any]


def is_longbench(cell: CellResult) -> bool:
    """The cell asks LongBench-v2's kind of question, of any data."""
    return cell.config.get("task", {}).get("name") == NAME


def is_small(cell: CellResult) -> bool:
    """The questions are those of the self-made set, whatever its file is called."""
    return any(record["task"].startswith(SMALL) for record in cell.records)


def is_official(cell: CellResult) -> bool:
    """The cell ran as many easy and hard questions as the whole published set has."""
    if not is_longbench(cell) or is_small(cell):
        return False
    counts = {name: len(by_category(cell.records)[name]) for name in LONGBENCH_V2_COUNTS}
    return counts == LONGBENCH_V2_COUNTS


def other_data(cell: CellResult) -> str:
    """What was read where it is not the published set; empty for that, limited or whole.

    A local file or another hub id is the published set only if it ran whole: as many easy and hard questions, all with
    ids of the published form.
    """
    if is_small(cell):
        return "self-made set"
    data = str(cell.config["task"].get("data", LONGBENCH_HUB))
    ids = (str(record["item"].get("id", "")) for record in cell.records)
    if data in PUBLISHED or (is_official(cell) and all(PUBLISHED_ID.fullmatch(name) for name in ids)):
        return ""
    return Path(data).name if is_path(data) else data


def by_category(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by category, in reading order; a category may be empty."""
    return {
        name: [record for record in records if record["item"][kind] == name]
        for kind, names in CATEGORIES.items()
        for name in names
    }


def mode(cell: CellResult) -> str | None:
    """``no_cot`` for direct answers, ``cot`` for the two stages and for direct answers of a model that thinks.

    None for the choices' log-likelihoods, and for cells of other tasks.
    """
    if not is_longbench(cell):
        return None
    config = cell.config
    if config["task"]["mode"] == "direct":
        return "cot" if config["model"].get("thinking") else "no_cot"
    return "cot" if config["task"]["mode"] == "cot" else None


def paper_mode(cell: CellResult) -> str | None:
    """:func:`mode` of a cell whose scores may stand beside published ones, which those of other data may not."""
    return None if is_longbench(cell) and other_data(cell) else mode(cell)


def difficulty_scores(cell: CellResult) -> dict[str, float]:
    """Accuracy in [0, 1] by difficulty; only difficulties that the cell has questions of."""
    groups = by_category(cell.records)
    return {
        name: sum(record["metrics"]["score"] for record in groups[name]) / len(groups[name])
        for name in CATEGORIES["difficulty"]
        if groups[name]
    }


def label(config: Mapping[str, Any], small: bool) -> str:
    """Task without its length: mode, thinking, sampling, and the data where it is not the published set."""
    task = config["task"]
    data = str(task.get("data", ""))
    details = [task["mode"], *how(config)]
    details += ["self-made set"] if small else [Path(data).name] if is_path(data) else []
    return f"{NAME} ({', '.join(details)})"


def how(config: Mapping[str, Any]) -> list[str]:
    """What differs from plain greedy decoding."""
    generation = config.get("task", {}).get("generation") or {}
    parts = []
    if generation.get("thinking_tokens") is not None:
        parts.append(f"thinking {generation['thinking_tokens']}")
    if generation.get("sampling", "greedy") != "greedy":
        parts.append(f"sampled, seed {generation['seed']}")
    return parts


def unparsed_note(cell: CellResult, name: str) -> list[str]:
    """How many answers of ``cell``, called ``name``, hold no choice; nothing where all do or nothing is generated."""
    lost = [record for record in cell.records if record["metrics"].get("unparsed")]
    if not lost:
        return []
    empty = sum(bool(record["item"].get("empty")) for record in lost)
    what = f"{len(lost)} of {len(cell.records)} answers name no choice and count as wrong, {empty} of them empty"
    return [f"{what}: {name}"]
