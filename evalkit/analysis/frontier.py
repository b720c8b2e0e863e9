"""``evalkit analyze frontier``: Pareto frontiers of a store's cells, the areas between them, and the best methods.

Two cells are compared on the same samples only, and every interval is a paired one. Which method is best at a budget is
a claim among many: its p-values are corrected for all comparisons of a panel (Holm). A cell that the report marks as
suspect in any metric, such as one better than dense beyond its interval, is shown and wins nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd

from ..errors import EvalkitError
from ..report import stats
from ..report.load import Loaded, by_sample, load
from ..report.names import method_labels, model_label, series_labels, task_label
from ..report.pareto import frontier, is_bound
from ..report.provenance import provenance
from ..report.rows import METRICS, build_rows
from ..report.stats import Estimate
from ..store import CellResult, SampleKey
from . import bootstrap, figures
from .bootstrap import Floats
from .settings import FrontierAnalysis, plain_settings
from .work import write_facts, write_table

ALPHA = 1 - stats.LEVEL
FIELDS = {"accuracy": "score", "first_token": "first_token", "perplexity": "nll", "kl": "kl"}
"""Metrics that have frontiers, and the field of a record that they come from."""
AREA_COLUMNS = (
    "panel", "metric", "method", "against", "from_B", "to_B", "advantage", "low", "high", "n", "resamples",
    "interpolation",
)  # fmt: skip
BEST_COLUMNS = (
    "panel", "metric", "budget", "best", "setting", "B", "value", "n", "against", "against_setting", "against_B",
    "against_value", "difference", "low", "high", "p", "p_holm", "comparisons", "significant", "suspects",
)  # fmt: skip
"""Columns of the files, which have them without a row too."""
SMALLEST = 1e-9
"""An advantage below this is what rounding leaves of none."""


@dataclass(frozen=True)
class Entry:
    """One cell of a panel.

    Attributes:
        group: the method, or the series, whose frontier it belongs to.
        setting: label of the cell.
        key: of the cell.
        sums: what is averaged: scores, nats, or nats of KL times tokens; [samples].
        budget: B of each sample, [samples].
        suspect: the report marks it as something to check before it is believed.
    """

    group: str
    setting: str
    key: str
    sums: Floats
    budget: Floats
    suspect: bool = False


@dataclass(frozen=True)
class Panel:
    """Cells that were measured on the same samples, under one metric.

    Attributes:
        metric: key of :data:`FIELDS`.
        title: model, task and length.
        strata: subtask of each sample, as integers.
        weights: what ``sums`` are over: ones for scores, scored tokens for losses; [samples].
        tokens: prompt tokens of each sample.
        entries: sparse cells.
        dense: the dense cell, where it has the metric.
    """

    metric: str
    title: str
    strata: np.ndarray
    weights: Floats
    tokens: Floats
    entries: tuple[Entry, ...]
    dense: Entry | None

    @property
    def higher_is_better(self) -> bool:
        """Direction of the metric."""
        return METRICS[self.metric].higher_is_better

    def values(self, entry: Entry, counts: Floats) -> Floats:
        """The metric under each draw of samples: [resamples, samples] -> [resamples]; percent, perplexity or nats."""
        if self.metric in ("perplexity", "kl"):
            mean = (counts @ entry.sums) / (counts @ self.weights)
            return np.exp(mean) if self.metric == "perplexity" else mean
        parts = []
        for stratum in np.unique(self.strata):
            at = self.strata == stratum
            parts.append((counts[:, at] @ entry.sums[at]) / counts[:, at].sum(1))
        return 100.0 * np.mean(parts, axis=0)

    def budgets(self, entry: Entry, counts: Floats) -> Floats:
        """The realized budget under each draw, token-weighted, a share: [resamples]."""
        return (counts @ (entry.budget * self.tokens)) / (counts @ self.tokens)

    def difference(self, one: Entry, other: Entry) -> tuple[Estimate, float]:
        """Paired difference ``one - other`` with its interval, in the metric's unit, and its two-sided p-value."""
        if self.metric in ("perplexity", "kl"):
            if self.metric == "kl":
                found = stats.ratio_mean(one.sums - other.sums, self.weights)
            else:
                found = stats.perplexity_difference(one.sums, other.sums, self.weights)
            return found, stats.two_sided_p(found, freedom=found.n - 1)
        names = np.unique(self.strata)
        parts = [(1 / len(names), (one.sums - other.sums)[self.strata == name]) for name in names]
        found = stats.score_difference(parts)
        return found.times(100.0), stats.two_sided_p(found)


def run(settings: FrontierAnalysis, command: str) -> int:
    """Write ``frontier.csv``, ``frontier_areas.csv``, ``frontier_best.csv`` and the picture.

    Args:
        settings: validated settings.
        command: kept in ``frontier.json``.

    Returns:
        Exit code.

    Raises:
        InputError: a directory without finished cells.
        EvalkitError: no sparse cell, or one without its dense twin.
    """
    loaded = load(settings.directories)
    found, notes = panels(loaded, by=settings.by)
    notes = [*loaded.notes, *notes]
    if not found:
        said = "".join(f"; {note}" for note in notes)
        raise EvalkitError(f"frontier: the store holds no finished sparse cell beside its dense twin{said}")
    out = Path(settings.out).expanduser()
    points = pd.concat([point_table(panel) for panel in found], ignore_index=True)
    areas, best = [], []
    for number, panel in enumerate(found, start=1):
        print(f"[{number}/{len(found)}] {panel.title}, {panel.metric}: {len(panel.entries)} cells", flush=True)
        areas += area_rows(panel, settings)
        best += best_rows(panel, settings)
        notes += panel_notes(panel, settings)
    area_table = pd.DataFrame(areas, columns=list(AREA_COLUMNS))
    best_table = pd.DataFrame(best, columns=list(BEST_COLUMNS))
    write_table(points, out / "frontier.csv")
    write_table(area_table, out / "frontier_areas.csv")
    write_table(best_table, out / "frontier_best.csv")
    facts = {"analysis": "frontier", "command": command, "settings": plain_settings(settings)}
    write_facts({**facts, "notes": notes, "provenance": provenance(loaded.cells)}, out / "frontier.json")
    figures.save(figures.draw_frontier(points, settings.interpolation), out / "frontier")
    for line in [*report(area_table, best_table), *(f"note: {note}" for note in notes)]:
        print(line, flush=True)
    return 0


# ---------------------------------------------------------------------------------------------------------- panels
def panels(loaded: Loaded, *, by: str = "method") -> tuple[list[Panel], list[str]]:
    """Panels of the cells that share a dense twin, one for each metric, and a note on each cell that is left out."""
    groups: dict[str, list[CellResult]] = defaultdict(list)
    for cell in loaded.cells:
        groups[cell.twin].append(cell)
    labels, series = method_labels(loaded.cells), series_labels(loaded.cells)
    suspects = {row.key for row in build_rows(loaded).level("cell") if row.suspect}  # whatever the metric
    found: list[Panel] = []
    notes: list[str] = []
    for cells in groups.values():
        sparse = [cell for cell in cells if not cell.is_dense]
        if not sparse:
            continue
        dense = loaded.twins[sparse[0].key]
        # Cells that stopped at a wanted precision may end at different samples; all have the first ones.
        keys = sorted(set.intersection(*(set(by_sample(cell)) for cell in [*sparse, dense])))
        if not keys:
            notes.append(f"left out, no sample in common with the others: {', '.join(cell.label for cell in sparse)}")
            continue
        names = {cell.key: series[cell.key] if by == "series" else cell.method for cell in sparse}
        for metric, field in FIELDS.items():
            lacking = {cell.key: _lacking(cell, keys, field) for cell in sparse}
            if all(count == len(keys) for count in lacking.values()):
                continue  # not measured at all
            having = [cell for cell in sparse if not lacking[cell.key]]
            notes += [
                f"left out of {metric}, {lacking[cell.key]} of {len(keys)} samples lack {field}: {cell.label}"
                for cell in sparse
                if lacking[cell.key]
            ]
            if having:
                found.append(_panel(metric, field, keys, having, dense, names, labels, suspects))
    found.sort(key=lambda panel: (panel.title, list(FIELDS).index(panel.metric)))
    return found, notes


def _lacking(cell: CellResult, keys: Sequence[SampleKey], field: str) -> int:
    """Samples whose record has no such metric."""
    records = by_sample(cell)
    return sum(field not in records[key]["metrics"] for key in keys)


def _panel(
    metric: str,
    field: str,
    keys: Sequence[SampleKey],
    sparse: Sequence[CellResult],
    dense: CellResult,
    groups: dict[str, str],
    labels: dict[str, str],
    suspects: Collection[str],
) -> Panel:
    subtasks = sorted({key[0] for key in keys})
    base = by_sample(dense)
    loss = metric in ("perplexity", "kl")
    weights = np.array([float(base[key]["metrics"]["tokens"]) if loss else 1.0 for key in keys])

    def entry(cell: CellResult) -> Entry:
        records = by_sample(cell)
        values = np.array([float(records[key]["metrics"][field]) for key in keys])
        budget = np.array([float(records[key]["budget"]["B"]) for key in keys])
        sums = values * weights if metric == "kl" else values
        group, label = groups.get(cell.key, "dense"), labels[cell.key]
        return Entry(group, label, cell.key, sums, budget, cell.key in suspects)

    first = sparse[0]
    length = first.config.get("task", {}).get("length") or keys[0][1]
    return Panel(
        metric,
        f"{model_label(first)}, {task_label(first)}, {length} tokens",
        np.array([subtasks.index(key[0]) for key in keys]),
        weights,
        np.array([float(base[key]["prompt"]["tokens"]) for key in keys]),
        tuple(entry(cell) for cell in sparse),
        entry(dense) if not _lacking(dense, keys, field) else None,
    )


def point_table(panel: Panel) -> pd.DataFrame:
    """Every cell of a panel: where it lies, whether it is on its method's frontier, and whether it is suspect."""
    whole = np.ones((1, len(panel.strata)))
    rows = []
    for group, entries in _by_group(panel):
        points = [(float(panel.budgets(e, whole)[0]), float(panel.values(e, whole)[0])) for e in entries]
        sound = [point for entry, point in zip(entries, points, strict=True) if not entry.suspect]
        line = set(frontier(sound, higher_is_better=panel.higher_is_better))
        for entry, point in zip(entries, points, strict=True):
            rows.append(_point(panel, group, entry, point, point in line and not entry.suspect))
    if panel.dense is not None:
        value = float(panel.values(panel.dense, whole)[0])
        rows.append(_point(panel, "dense", panel.dense, (float(panel.budgets(panel.dense, whole)[0]), value), True))
    return pd.DataFrame(rows)


def _point(panel: Panel, group: str, entry: Entry, point: tuple[float, float], kept: bool) -> dict[str, object]:
    return {
        "panel": panel.title, "metric": panel.metric, "method": group, "setting": entry.setting, "B": point[0],
        "value": point[1], "on_frontier": kept, "suspect": entry.suspect, "n": len(panel.strata),
        "key": entry.key,
    }  # fmt: skip


def _by_group(panel: Panel) -> Iterator[tuple[str, list[Entry]]]:
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in panel.entries:
        found[entry.group].append(entry)
    yield from sorted(found.items())


# ----------------------------------------------------------------------------------------------------------- areas
def quality_integral(
    points: Sequence[tuple[float, float]], low: float, high: float, *, interpolation: str = "step"
) -> float:
    """Integral of a frontier's quality over budgets from ``low`` to ``high``.

    Args:
        points: frontier by rising budget, (budget, value); below the first and beyond the last the value stays.
        low, high: the range.
        interpolation: ``step`` keeps a value up to the next point; ``linear`` joins the points.
    """
    budgets = [x for x, _ in points]
    marks = [low, *(x for x in budgets if low < x < high), high]
    total = 0.0
    for left, right in zip(marks, marks[1:], strict=False):
        if interpolation == "linear":
            ends = np.interp([left, right], budgets, [y for _, y in points])
            total += float(ends.mean()) * (right - left)
        else:
            total += _reached(points, left) * (right - left)
    return total


def _reached(points: Sequence[tuple[float, float]], budget: float) -> float:
    """Value of the last point at or below a budget, of the first one where there is none."""
    value = points[0][1]
    for x, y in points:
        if x > budget:
            break
        value = y
    return value


def area_between(
    one: Sequence[tuple[float, float]],
    other: Sequence[tuple[float, float]],
    low: float,
    high: float,
    *,
    higher_is_better: bool,
    interpolation: str = "step",
) -> float:
    """Mean advantage of ``one`` over ``other`` between two budgets: the area between their frontiers over its width.

    Args:
        one, other: points, (budget, value), not only those of the frontier.
        low, high: budgets.
        higher_is_better: direction of the value; the advantage is positive where ``one`` is better.
        interpolation: see :func:`quality_integral`.
    """
    sign = 1.0 if higher_is_better else -1.0
    first, second = (
        quality_integral(frontier(points, higher_is_better=higher_is_better), low, high, interpolation=interpolation)
        for points in (one, other)
    )
    return sign * (first - second) / (high - low)


def area_rows(panel: Panel, settings: FrontierAnalysis) -> list[dict[str, object]]:
    """One row for each pair of methods whose measured budgets overlap; suspects are on no frontier."""
    counts = bootstrap.draws(list(panel.strata), settings.resamples, settings.seed)
    counts = np.vstack([np.ones((1, counts.shape[1])), counts])  # the first "draw" is the sample itself
    points: dict[str, list[list[tuple[float, float]]]] = {}
    for group, members in _by_group(panel):
        entries = [entry for entry in members if not entry.suspect]
        if not entries:
            continue
        xs = np.stack([panel.budgets(e, counts) for e in entries], 1)
        ys = np.stack([panel.values(e, counts) for e in entries], 1)
        points[group] = [list(zip(x, y, strict=True)) for x, y in zip(xs.tolist(), ys.tolist(), strict=True)]
    rows: list[dict[str, object]] = []
    for one, other in combinations(points, 2):
        reach = [[min(x for x, _ in points[g][0]), max(x for x, _ in points[g][0])] for g in (one, other)]
        low, high = max(r[0] for r in reach), min(r[1] for r in reach)
        if not low < high:
            continue
        replicates = np.array(
            [
                area_between(
                    a, b, low, high, higher_is_better=panel.higher_is_better, interpolation=settings.interpolation
                )
                for a, b in zip(points[one], points[other], strict=True)
            ]
        )
        bounds = bootstrap.interval(replicates[1:])
        rows.append(
            {
                "panel": panel.title,
                "metric": panel.metric,
                "method": one,
                "against": other,
                "from_B": low,
                "to_B": high,
                "advantage": _or_zero(float(replicates[0])),
                "low": _or_zero(bounds[0]),
                "high": _or_zero(bounds[1]),
                "n": len(panel.strata),
                "resamples": settings.resamples,
                "interpolation": settings.interpolation,
            }  # fmt: skip
        )
    return rows


def _or_zero(advantage: float) -> float:
    return 0.0 if abs(advantage) < SMALLEST else advantage


# ------------------------------------------------------------------------------------------------------------ best
def best_rows(panel: Panel, settings: FrontierAnalysis) -> list[dict[str, object]]:
    """At each budget the method whose best affordable setting is best, against that of every other method.

    p-values are two-sided and corrected for all comparisons of the panel. The settings were chosen by the same samples
    that they are compared on, which flatters the winner a little; bounds (oracle, random) do not compete, and neither
    do suspects, which are named beside the best.
    """
    sign: Callable[[float], float] = (lambda y: y) if panel.higher_is_better else (lambda y: -y)
    rows: list[dict[str, object]] = []
    tests: dict[tuple[str, str], float] = {}
    for budget in settings.budgets:
        within = [item for item in _competing(panel) if item[1] <= budget + settings.slack]
        suspects = "; ".join(f"{entry.setting} at {b:.1%}" for entry, b, _ in within if entry.suspect)
        chosen: dict[str, tuple[Entry, float, float]] = {}
        for entry, b, value in within:
            group = entry.group
            if not entry.suspect and (group not in chosen or sign(value) > sign(chosen[group][2])):
                chosen[group] = (entry, b, value)
        if not chosen:
            if suspects:
                where = {"panel": panel.title, "metric": panel.metric, "budget": budget, "n": len(panel.strata)}
                rows.append({**where, "best": "", "against": "", "significant": False, "suspects": suspects})
            continue
        ranked = sorted(chosen.items(), key=lambda item: (-sign(item[1][2]), item[1][1], item[0]))
        (best, (entry, b, value)), others = ranked[0], ranked[1:]
        shared = {
            "panel": panel.title, "metric": panel.metric, "budget": budget, "best": best, "setting": entry.setting,
            "B": b, "value": value, "n": len(panel.strata), "suspects": suspects,
        }  # fmt: skip
        if not others:
            rows.append({**shared, "against": "", "significant": False})
        for group, (other, other_b, other_value) in others:
            difference, p = panel.difference(entry, other)
            tests[entry.key, other.key] = p
            rows.append(
                {
                    **shared,
                    "against": group,
                    "against_setting": other.setting,
                    "against_B": other_b,
                    "against_value": other_value,
                    "difference": difference.value,
                    "low": difference.low,
                    "high": difference.high,
                    "p": p,
                    "pair": (entry.key, other.key),
                }  # fmt: skip
            )
    corrected = dict(zip(tests, stats.holm_adjusted(list(tests.values())), strict=True))
    for row in rows:
        pair = row.pop("pair", None)
        if pair is not None:
            row["p_holm"] = corrected[pair]  # type: ignore[index]
            row["comparisons"] = len(tests)
            row["significant"] = bool(corrected[pair] <= ALPHA)  # type: ignore[index]
    return rows


def _competing(panel: Panel) -> list[tuple[Entry, float, float]]:
    """Entries that are no bounds, with budget and value, suspects among them."""
    whole = np.ones((1, len(panel.strata)))
    return [
        (entry, float(panel.budgets(entry, whole)[0]), float(panel.values(entry, whole)[0]))
        for group, entries in _by_group(panel)
        if not is_bound(group)
        for entry in entries
    ]


def panel_notes(panel: Panel, settings: FrontierAnalysis) -> list[str]:
    """What a panel cannot say, and what of it is not to be believed yet, a line each."""
    where = f"{panel.title}, {panel.metric}"
    notes = [
        f"{where}: SUSPECT, wins nothing until it is checked (see evalkit report): {entry.setting}"
        for entry in panel.entries
        if entry.suspect
    ]
    competing = _competing(panel)
    sound = [(b, entry.setting) for entry, b, _ in competing if not entry.suspect]
    if not sound:
        only = "suspect cells" if competing else "bounds (oracle_topk, random)"
        return [*notes, f"{where}: only {only} beside dense: no method to name as best"]
    cheapest, setting = min(sound)
    below = [budget for budget in settings.budgets if cheapest > budget + settings.slack]
    if below:
        asked = ", ".join(f"{budget:.0%}" for budget in below)
        notes.append(f"{where}: no method at or below B = {asked}: the cheapest is {setting} at {cheapest:.1%}")
    return notes


def report(areas: pd.DataFrame, best: pd.DataFrame) -> list[str]:
    """What was found, a line each."""
    lines: list[str] = []
    for (panel, metric, budget), rows in best.groupby(["panel", "metric", "budget"], sort=False):
        first = rows.iloc[0]
        odd = f"; left out as SUSPECT: {first['suspects']}" if first["suspects"] else ""
        if not first["best"]:
            lines.append(f"{panel}, {metric}, B <= {budget:.0%}: no method{odd}")
            continue
        text = f"{panel}, {metric}, B <= {budget:.0%}: {first['setting']} {first['value']:.4g} at {first['B']:.1%}"
        beaten = [str(name) for name in rows.loc[rows["significant"].astype(bool), "against"]]
        level = [str(name) for name in rows.loc[~rows["significant"].astype(bool), "against"] if name]
        parts = [f"better than {' / '.join(beaten)}"] if beaten else []
        parts += [f"not shown to be better than {' / '.join(level)}"] if level else []
        if not parts:
            parts = ["the only method measured there"]
        lines.append(f"{text}: {'; '.join(parts)} (n = {first['n']}, paired, Holm){odd}")
    for row in areas.to_dict("records"):
        clear = "" if math.isnan(row["low"]) else f" [{_signed(row['low'])}, {_signed(row['high'])}]"
        lines.append(
            f"{row['panel']}, {row['metric']}: {row['method']} over {row['against']}, mean advantage "
            f"{_signed(row['advantage'])}{clear} for B from {row['from_B']:.1%} to {row['to_B']:.1%}"
        )
    return lines


def _signed(value: float) -> str:
    return f"{value:+.4g}" if value else "0"
