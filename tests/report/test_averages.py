from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import pytest

from evalkit.report import averages

PAPER = Path(__file__).parents[2] / "results" / "paper"
HALF = 0.5 + 1e-9


def published(name: str) -> list[dict[str, str]]:
    with open(PAPER / name, newline="") as handle:
        return list(csv.DictReader(handle))


def ruler_rows() -> dict[tuple[str, str], dict[str, dict[str, str]]]:
    rows: dict[tuple[str, str], dict[str, dict[str, str]]] = defaultdict(dict)
    for row in published("ruler.csv"):
        rows[row["model"], row["method"]][row["length_tokens"]] = row
    return rows


@pytest.mark.parametrize("name", [" ".join(key) for key in ruler_rows()])
def test_every_ruler_average_is_rebuilt(name):
    rows = {" ".join(key): value for key, value in ruler_rows().items()}[name]
    average = rows.pop("avg")
    assert [int(length) for length in rows] == [4096 * 2**i for i in range(6)]
    accuracy = averages.accuracy_over_lengths({int(k): float(row["accuracy_pct"]) for k, row in rows.items()})
    budget = averages.budget_over_lengths({int(k): float(row["budget_pct"]) for k, row in rows.items()})
    assert accuracy == pytest.approx(float(average["accuracy_pct"]), abs=0.01 * HALF)
    assert budget == pytest.approx(float(average["budget_pct"]), abs=HALF)


def test_the_rules_can_be_told_apart_by_the_published_numbers():
    """The plain mean of budgets and the weighted mean of accuracies miss the printed averages by far."""
    rows = ruler_rows()["Qwen3-8B", "CoSA"]
    average = rows.pop("avg")
    budgets = {int(k): float(row["budget_pct"]) for k, row in rows.items()}
    scores = {int(k): float(row["accuracy_pct"]) for k, row in rows.items()}
    assert abs(averages.accuracy_over_lengths(budgets) - float(average["budget_pct"])) > 1
    assert abs(averages.budget_over_lengths(scores) - float(average["accuracy_pct"])) > 1


@pytest.mark.parametrize("row", published("longbench_v2.csv"), ids=lambda row: f"{row['model']} {row['method']}")
def test_every_longbench_average_is_rebuilt(row):
    modes = [{level: float(row[f"{mode}_{level}"]) for level in ("easy", "hard")} for mode in ("no_cot", "cot")]
    assert averages.longbench_v2(*modes) == pytest.approx(float(row["avg"]), abs=0.01 * HALF)


def test_published_tables_are_whole():
    assert len(ruler_rows()) == 12 and all("avg" in rows for rows in ruler_rows().values())
    assert len(published("longbench_v2.csv")) == 10


@pytest.mark.parametrize(("values", "weights"), [([], []), ([1.0], [1.0, 2.0]), ([1.0], [0.0]), ([1.0, 2.0], [2, -1])])
def test_bad_weights(values, weights):
    with pytest.raises(ValueError):
        averages.weighted_mean(values, weights)
