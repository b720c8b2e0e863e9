"""The CoSA paper's printed numbers, and which method preset stands for which of its rows."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import InputError
from .. import averages

USUAL = "results/paper"
CHECKOUT = Path(__file__).parents[3] / USUAL
FILES = {
    "ruler": ("ruler.csv", ("model", "method", "length_tokens", "accuracy_pct", "budget_pct")),
    "longbench_v2": (
        "longbench_v2.csv",
        ("model", "method", "no_cot_easy", "no_cot_hard", "cot_easy", "cot_hard", "avg", "budget_pct"),
    ),
    "ablation": ("ablation_longbench_v2_no_cot.csv", ("model", "variant", "avg_accuracy_pct", "budget_pct")),
}

MODELS = {
    "qwen3-8b": "Qwen3-8B",
    "qwen3-8b-yarn4": "Qwen3-8B",
    "llama-3.1-8b-instruct": "Llama-3.1-8B-Instruct",
}
"""The paper's name of a model preset."""

QWEN, LLAMA = MODELS["qwen3-8b"], MODELS["llama-3.1-8b-instruct"]

METHODS: dict[str, tuple[str, ...]] = {
    "Dense": ("dense",),
    "MInf": ("minference-block", "minference-llama-3.1-8b", "minference"),
    "Flex": ("flexprefill",),
    "XAttn": ("xattention",),
    "CoSA": ("cosa-qwen3-8b", "cosa-llama-3.1-8b", "cosa-rmp"),
    "CoSA-accurate": ("cosa-accurate-qwen3-8b", "cosa-accurate-llama-3.1-8b"),
}
"""Method presets by the paper's row in Tables 1, 2 and B. The last row of the ablation is CoSA itself."""

VARIANTS: dict[str, tuple[str, ...]] = {
    "Base": ("cosa-base",),
    "+KAP": ("cosa-kap",),
    "+IKS": ("cosa-iks",),
    "+IKS descending": ("cosa-iks-descending",),
    "+RMP": ("cosa-rmp", "cosa-qwen3-8b", "cosa-llama-3.1-8b"),
}
"""The same for Table 3. The other fixed order is ours: remapping is compared with the better of the two."""

OF_ONE_MODEL = {
    **dict.fromkeys(("cosa-qwen3-8b", "cosa-accurate-qwen3-8b"), QWEN),
    **dict.fromkeys(("cosa-base", "cosa-kap", "cosa-iks", "cosa-iks-descending", "cosa-rmp"), QWEN),
    **dict.fromkeys(("cosa-llama-3.1-8b", "cosa-accurate-llama-3.1-8b", "minference-llama-3.1-8b"), LLAMA),
}
"""Presets whose values are those of one of the paper's models."""

NOT_AS_PRINTED: dict[str, tuple[str, ...]] = {QWEN: ("minference",), LLAMA: ("minference", "minference-block")}
"""Presets that the paper's row of a model was not made with; they belong to the row's method all the same."""

SETTINGS: dict[tuple[str, str], dict[str, float]] = {
    (LLAMA, "cosa-base"): {"budget_target": 0.35},
    (LLAMA, "cosa-kap"): {"budget_target": 0.39},
    (LLAMA, "cosa-iks"): {"budget_target": 0.24, "skip_scale": 200},
    (LLAMA, "cosa-iks-descending"): {"budget_target": 0.24, "skip_scale": 200},
}
"""What a model's row sets on top of its preset: those of Table 3 for Llama are calibrated to the printed budgets."""

LONG = ("no_cot_easy", "no_cot_hard", "cot_easy", "cot_hard")
RUNS = (1, 2, 4)


@dataclass(frozen=True)
class Number:
    """A printed pair, in percent.

    Attributes:
        accuracy: as printed.
        budget: as printed, in whole blocks; None where a table prints one budget for several numbers.
    """

    accuracy: float
    budget: float | None


@dataclass(frozen=True)
class Published:
    """The printed tables.

    Attributes:
        ruler: by model, method and length in tokens; ``avg`` as printed.
        longbench: by model, method and column of :data:`LONG`, or ``avg``.
        ablation: by model and variant.
    """

    ruler: Mapping[str, Mapping[str, Mapping[int | str, Number]]]
    longbench: Mapping[str, Mapping[str, Mapping[str, Number]]]
    ablation: Mapping[str, Mapping[str, Number]]

    def ruler_average(self, model: str, method: str, lengths: tuple[int, ...]) -> Number | None:
        """Average over some lengths: as printed over all of them, else by the same rule; None if one is not printed."""
        own = self.ruler.get(model, {}).get(method, {})
        printed = {key for key in own if key != "avg"}
        if not lengths or not set(lengths) <= printed:
            return None
        if set(lengths) == printed:
            return own["avg"]
        budgets = {length: own[length].budget or 0.0 for length in lengths}
        accuracy = averages.accuracy_over_lengths({length: own[length].accuracy for length in lengths})
        return Number(accuracy, averages.budget_over_lengths(budgets))


def usual_folder() -> Path:
    """:data:`USUAL` below the working directory, else in the checkout that this package lies in."""
    here = Path(USUAL)
    return CHECKOUT if CHECKOUT.is_dir() and not here.is_dir() else here


def read(folder: Path) -> Published:
    """Read the printed tables.

    Raises:
        InputError: a file is missing, lacks a column or holds what is no number.
    """
    ruler: dict[str, dict[str, dict[int | str, Number]]] = {}
    for row in _rows(folder, "ruler"):
        length: int | str = "avg" if row["length_tokens"] == "avg" else int(row["length_tokens"])
        number = Number(float(row["accuracy_pct"]), float(row["budget_pct"]))
        ruler.setdefault(row["model"], {}).setdefault(row["method"], {})[length] = number
    longbench: dict[str, dict[str, dict[str, Number]]] = {}
    for row in _rows(folder, "longbench_v2"):
        columns = {name: Number(float(row[name]), None) for name in LONG}
        columns["avg"] = Number(float(row["avg"]), float(row["budget_pct"]))
        longbench.setdefault(row["model"], {})[row["method"]] = columns
    ablation: dict[str, dict[str, Number]] = {}
    for row in _rows(folder, "ablation"):
        number = Number(float(row["avg_accuracy_pct"]), float(row["budget_pct"]))
        ablation.setdefault(row["model"], {})[row["variant"]] = number
    return Published(ruler, longbench, ablation)


def _rows(folder: Path, name: str) -> list[dict[str, str]]:
    file, columns = FILES[name]
    path = folder / file
    try:
        with path.open(newline="") as stream:
            reader = csv.DictReader(stream)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            rows = list(reader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(
            "published", str(path), f"a CSV file with the paper's numbers ({reason}); --published names their folder"
        ) from None
    if missing:
        raise InputError("published", str(path), f"columns {', '.join(missing)} too")
    for line, row in enumerate(rows, start=2):
        for column in columns:
            text = row[column]
            if column not in ("model", "method", "variant") and not (column == "length_tokens" and text == "avg"):
                _check_number(f"{path}:{line}", column, text)
    return rows


def _check_number(where: str, column: str, text: str | None) -> None:
    try:
        float(text or "")
    except ValueError:
        raise InputError("published", where, f"{column} must be a number, not {text!r}") from None


def fitting_runs(values: Iterable[tuple[float, int]]) -> int | None:
    """The fewest runs, 1, 2 or 4, whose counts of correct answers give printed percentages; None if none does.

    Args:
        values: (percentage with two decimals, number of questions).
    """
    pairs = list(values)
    return next((runs for runs in RUNS if all(_fits(value, count * runs) for value, count in pairs)), None)


def _fits(percent: float, count: int) -> bool:
    nearest = round(percent * count / 100)
    return abs(100 * nearest / count - percent) <= 0.005 + 1e-9
