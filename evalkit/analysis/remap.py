"""``evalkit analyze remap``: perplexity and in-kernel skip ratio over the skip scale (the paper's Figures 6 and C).

For each Stage-1 budget (reached through p, block-rounded, with the skip off) the same selection is visited HRM-first
and in both fixed orders, under each skip scale. Every point is an ordinary cell of ``evalkit run`` in ``runs``, with
its dense twin: a killed analysis goes on, a finished cell is not run again, and ``evalkit report`` reads them too.

``skip ratio = 1 - computed / visited`` in whole blocks, over all windows, layers and heads. The gain of remapping is
the perplexity of the better fixed order at the same skip ratio, interpolated, less that of HRM-first: at matched
sparsity, against the better of the two.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from ..app.isolation import CellOutcome, run_isolated
from ..app.session import Session as Progress
from ..calibration.file import with_field
from ..calibration.search import Axis, solve
from ..config import Cell, plain
from ..errors import EvalkitError
from ..methods.base import Method
from ..methods.cosa import CoSA, Select
from ..methods.dense import Dense
from ..report.load import load
from ..report.names import flat
from ..report.provenance import provenance
from ..store import CellResult, read_cell
from . import bootstrap, figures
from .bootstrap import Floats
from .settings import FIXED_ORDERS, RemapAnalysis, plain_settings
from .work import write_facts, write_table

REMAPPED = "hrm_first"
OFF = "off"
"""Order of the point without a skip: it is the same for all."""
SEARCH_STEPS, ROUNDS = 10, 3

Runner = Callable[[Cell], CellOutcome]
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Point:
    """One cell of the grid.

    Attributes:
        budget: wanted Stage-1 budget.
        p: Top-p threshold that reaches it.
        skip_scale: capital delta; -1 without a skip.
        order: visiting order; :data:`OFF` without a skip.
        nll, tokens: nats and scored tokens of each window.
        visited, computed, dense: blocks of each window.
        key: of the cell.
    """

    budget: float
    p: float
    skip_scale: float
    order: str
    nll: Floats
    tokens: Floats
    visited: Floats
    computed: Floats
    dense: Floats
    key: str

    def perplexity(self, counts: Floats) -> Floats:
        """Token-weighted perplexity under each draw of windows, [resamples, windows] -> [resamples]."""
        return np.exp((counts @ self.nll) / (counts @ self.tokens))

    def skip_ratio(self, counts: Floats) -> Floats:
        """Skipped over visited blocks under each draw."""
        return 1.0 - (counts @ self.computed) / (counts @ self.visited)


def run(settings: RemapAnalysis, command: str, overrides: Sequence[str] = (), runner: Runner = run_isolated) -> int:
    """Run the cells that are missing and write ``remap.csv``, ``remap_gain.csv`` and the picture.

    Args:
        settings: validated settings.
        command: kept in ``remap.json``.
        overrides: the command line's, of which those of the model go into the commands of the cells.
        runner: runs a cell.

    Returns:
        Exit code.

    Raises:
        EvalkitError: a cell failed, or a Stage-1 budget cannot be reached; the same command goes on from there.
    """
    few, windows = settings.search_limit, settings.task.limit
    if few > windows and any(budget < 1 for budget in settings.budgets):
        print(f"search_limit={few} is more than task.limit={windows}: p is searched on all of them", flush=True)
    cells = Cells(settings, [item for item in overrides if item.startswith("model")], runner)
    dense = cells.run(Dense(), "dense")
    found_p = cells.each(cells.threshold, settings.budgets)
    thresholds = dict(zip(settings.budgets, found_p, strict=True))
    points = cells.grid(thresholds)
    # The whole path of a report: a cell that cannot be paired with its dense twin is not shown.
    paths = [cells.paths[key] for key in dict.fromkeys([dense.key, *(point.key for point in points)])]
    loaded = load(paths)
    counts = bootstrap.draws([0] * len(points[0].nll), settings.resamples, 0)
    table = point_table(points, dense, settings.task.length)
    gains = gain_table(points, counts)
    out = Path(settings.out).expanduser()
    write_table(table, out / "remap.csv")
    write_table(gains, out / "remap_gain.csv")
    facts = {"analysis": "remap", "command": command, "settings": plain_settings(settings)}
    found = {f"{budget:g}": p for budget, p in thresholds.items()}
    write_facts({**facts, "p": found, "provenance": provenance(loaded.cells)}, out / "remap.json")
    task = settings.task
    title = f"{settings.model.name}, {task.label}, loss on {task.score.replace('_', ' ')} tokens"
    figures.save(figures.draw_remap(table, gains, title), out / "remap")
    for line in report(table, gains):
        print(line, flush=True)
    return 0


# ----------------------------------------------------------------------------------------------------------- cells
class Cells:
    """Runs the cells of one analysis, or finds them finished.

    Args:
        settings: validated settings.
        model_overrides: what the command line said of the model.
        runner: runs a cell.

    Attributes:
        paths: directories of the cells by key.
    """

    def __init__(self, settings: RemapAnalysis, model_overrides: Sequence[str], runner: Runner) -> None:
        self.settings, self._runner = settings, runner
        named = any(item.startswith("model=") for item in model_overrides)
        self._model = [*([] if named else [f"model={settings.model.name}"]), *model_overrides]
        self.paths: dict[str, Path] = {}
        self._progress = Progress()
        # Searches of different budgets meet in a cell: one runs it, the others wait and read it.
        self._locks: defaultdict[str, Lock] = defaultdict(Lock)

    def method(self, p: float, skip_scale: float = -1.0, order: str = REMAPPED) -> CoSA:
        """CoSA at one point of the grid."""
        return CoSA(stride=self.settings.stride, select=Select(p=p), skip_scale=skip_scale, order=order)

    def run(self, method: Method, name: str, *, limit: int | None = None) -> CellResult:
        """Run a cell to its end and read it.

        Args:
            method: validated method.
            name: registry name.
            limit: windows; None = all of the task's.

        Raises:
            EvalkitError: it failed.
        """
        task = self.settings.task if limit is None else dataclasses.replace(self.settings.task, limit=limit)
        overrides = (*self._model, f"method={name}", *_changed("method", method), "task=perplexity")
        overrides += (*_changed("task", task), *_changed("execution", self.settings.execution))
        out = Path(self.settings.runs).expanduser()
        cell = Cell(self.settings.model, method, task, self.settings.execution, out, tuple(overrides))
        cell.validate()
        with self._locks[cell.label]:
            self._progress.starting(cell.label)
            outcome = self._runner(cell)
        if not outcome.ok or outcome.directory is None:
            if outcome.traceback:
                print(outcome.traceback.rstrip(), flush=True)
            raise EvalkitError(f"remap: {cell.label}: {outcome.reason}; the same command goes on from here")
        self._progress.ended(outcome)
        found = read_cell(outcome.directory)
        self.paths[found.key] = found.path
        return found

    def threshold(self, budget: float) -> float:
        """The p whose block-rounded Stage-1 budget over all windows is within the tolerance of ``budget``.

        Searched on a few windows, then checked on all of them; where those differ the target is moved by the
        difference.

        Raises:
            EvalkitError: no p reaches it.
        """
        if budget >= 1:
            return 1.0
        settings = self.settings
        few = min(settings.search_limit, settings.task.limit)
        base = self.method(0.9)
        assert base.knob is not None
        axis = Axis(base.knob, settings.task.length)

        def spent(p: float, limit: int | None) -> float:
            return stage1(self.run(with_field(base, "select.p", p), "cosa", limit=limit))

        target, missed = budget, 0.0
        for _ in range(ROUNDS):
            print(f"Stage-1 budget {budget:.0%}: searching p on {few} of {settings.task.limit} windows", flush=True)
            wanted = min(max(target, 1e-4), 1 - 1e-4)
            found = solve(lambda p: spent(p, few), axis, wanted, settings.tolerance / 2, SEARCH_STEPS)
            reached = spent(found.value, None)
            print(f"Stage-1 budget {budget:.0%}: p = {found.value:g} gives {reached:.2%}", flush=True)
            missed = reached - budget
            if abs(missed) <= settings.tolerance:
                return found.value
            target -= missed
        raise EvalkitError(
            f"budgets={budget:g}: no p brings B_stage1 (in blocks) within {settings.tolerance:g} of it on these "
            f"windows, the nearest is {budget + missed:.3f}; prompts of few blocks have few budgets: raise task.length "
            "or tolerance"
        )

    def grid(self, thresholds: Mapping[float, float]) -> list[Point]:
        """Every point: each budget without a skip, and with each skip scale in each order."""
        scales = self.settings.scales
        wanted = [
            (budget, p, scale, order)
            for budget, p in thresholds.items()
            for scale in scales
            for order in ((OFF,) if scale <= 0 else self.settings.orders)
        ]

        def point(item: tuple[float, float, float, str]) -> Point:
            budget, p, scale, order = item
            method = self.method(p, scale, REMAPPED if order == OFF else order)
            return point_of(self.run(method, "cosa"), budget, p, scale, order)

        self._progress = Progress()
        self._progress.begin(len(wanted))
        return self.each(point, wanted)

    def each(self, work: Callable[[A], B], items: Sequence[A]) -> list[B]:
        """Work on every item, ``workers`` at a time; results in the order of the items. The first error ends it."""
        if self.settings.workers == 1:
            return [work(item) for item in items]
        pool = ThreadPoolExecutor(self.settings.workers)
        try:
            return list(pool.map(work, items))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _changed(prefix: str, settings: Any) -> list[str]:
    """Overrides for the fields of a part that differ from its defaults, and those that a preset may set otherwise."""
    default = dict(flat(plain(type(settings)())))
    always = {"select.p", "score", "length", "limit", "fidelity", "corpus", "windows", "seed"}
    found = []
    for name, value in flat(plain(settings)):
        if name != "name" and (value != default.get(name) or (name in always and prefix != "execution")):
            text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            found.append(f"{prefix}.{name}={text}")
    return found


def stage1(cell: CellResult) -> float:
    """Block-rounded Stage-1 budget of a cell, windows weighted by their blocks: a ratio of sums."""
    parts = [record["budget"] for record in cell.records]
    return sum(part["visited_blocks"] for part in parts) / sum(part["dense_blocks"] for part in parts)


def point_of(cell: CellResult, budget: float, p: float, skip_scale: float, order: str) -> Point:
    """A grid point of a finished cell."""
    records = sorted(cell.records, key=lambda record: record["index"])

    def column(section: str, name: str) -> Floats:
        return np.array([float(record[section][name]) for record in records])

    return Point(
        budget,
        p,
        skip_scale,
        order,
        nll=column("metrics", "nll"),
        tokens=column("metrics", "tokens"),
        visited=column("budget", "visited_blocks"),
        computed=column("budget", "computed_blocks"),
        dense=column("budget", "dense_blocks"),
        key=cell.key,
    )


# ---------------------------------------------------------------------------------------------------------- tables
def point_table(points: Sequence[Point], dense: CellResult, length: int) -> pd.DataFrame:
    """A row a point: realized budgets (shares, in whole blocks), skip ratio and perplexity; the dense run first."""
    base = point_of(dense, 1.0, 1.0, -1.0, "dense")
    rows = []
    for point in [base, *points]:
        whole = np.ones((1, len(point.nll)))
        rows.append(
            {
                "stage1_budget": point.budget if point is not base else math.nan,
                "p": point.p,
                "order": point.order,
                "skip_scale": point.skip_scale,
                "delta_over_N": max(0.0, point.skip_scale) / length,
                "B_stage1": float(point.visited.sum() / point.dense.sum()),
                "B": float(point.computed.sum() / point.dense.sum()),
                "skip_ratio": float(point.skip_ratio(whole)[0]),
                "perplexity": float(point.perplexity(whole)[0]),
                "windows": len(point.nll),
                "key": point.key,
            }
        )
    return pd.DataFrame(rows)


def interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Value at ``x`` on the line through points, linear between neighbours; NaN outside of them.

    Args:
        x: where.
        xs, ys: points in any order; of equal xs the first with the smallest y counts.
    """
    pairs = sorted(zip(xs, ys, strict=True))
    kept = [pair for i, pair in enumerate(pairs) if i == 0 or pair[0] > pairs[i - 1][0]]
    if not kept or not kept[0][0] <= x <= kept[-1][0]:
        return math.nan
    return float(np.interp(x, [a for a, _ in kept], [b for _, b in kept]))


Curve = tuple[list[float], list[float]]
"""Skip ratios and log-perplexities of one order, the point without a skip among them."""


def matched_gain(ratio: float, log_perplexity: float, fixed: Mapping[str, Curve]) -> tuple[float, str]:
    """Perplexity that the better fixed order has at a skip ratio, less that of HRM-first there.

    Args:
        ratio, log_perplexity: a point of HRM-first.
        fixed: curves of the fixed orders; log-perplexity is interpolated linearly over the skip ratio.

    Returns:
        The gain (positive: remapping is better) and the order it is against; NaN where a fixed order does not reach the
        ratio: the better of two is not known from one.
    """
    found = {order: interpolate(ratio, *curve) for order, curve in fixed.items()}
    if not found or any(math.isnan(value) for value in found.values()):
        return math.nan, ""
    better = min(found, key=lambda order: (found[order], order))
    return math.exp(found[better]) - math.exp(log_perplexity), better


def gain_table(points: Sequence[Point], counts: Floats) -> pd.DataFrame:
    """The matched-skip-ratio gain at each HRM-first point, and its mean over each budget's common range.

    Rows are ``point``, against the better fixed order where all of them reach the ratio; ``mean`` of those; and
    ``one``, against each fixed order alone wherever that reaches it.

    The interval is the bootstrap's over windows: in every draw all curves move together and the interpolation, the
    choice of the better order included, is made again.

    Args:
        points: of the grid.
        counts: draws, [resamples, windows].
    """
    rows = []
    whole = np.ones((1, counts.shape[1]))
    counts = np.vstack([whole, counts])
    for budget in dict.fromkeys(point.budget for point in points):
        mine = [point for point in points if point.budget == budget]
        values = {id(p): (p.skip_ratio(counts), np.log(p.perplexity(counts))) for p in mine}
        off = [p for p in mine if p.order == OFF]
        fixed = {o: [*off, *(p for p in mine if p.order == o)] for o in FIXED_ORDERS if any(p.order == o for p in mine)}
        moved = [p for p in mine if p.order == REMAPPED]
        found: dict[int, list[tuple[float, str]]] = {id(p): [] for p in moved}
        alone: dict[tuple[int, str], list[tuple[float, str]]] = {(id(p), order): [] for p in moved for order in fixed}
        for draw in range(len(counts)):
            curves: dict[str, Curve] = {
                order: ([values[id(p)][0][draw] for p in line], [values[id(p)][1][draw] for p in line])
                for order, line in fixed.items()
            }
            for p in moved:
                here = values[id(p)][0][draw], values[id(p)][1][draw]
                found[id(p)].append(matched_gain(*here, curves))
                for order, curve in curves.items():
                    alone[id(p), order].append(matched_gain(*here, {order: curve}))
        for p in moved:
            at = float(values[id(p)][0][0]), math.exp(values[id(p)][1][0])
            rows.append(_gain_row("point", budget, p.skip_scale, *at, found[id(p)]))
            rows += [
                _gain_row("one", budget, p.skip_scale, *at, alone[id(p), order])
                for order in fixed
                if len(fixed) > 1 and not math.isnan(alone[id(p), order][0][0])
            ]
        usable = [p for p in moved if not math.isnan(found[id(p)][0][0])]
        if len(usable) > 1:
            means = [(float(np.mean([found[id(p)][d][0] for p in usable])), "") for d in range(len(counts))]
            ratio = float(np.mean([values[id(p)][0][0] for p in usable]))
            rows.append(_gain_row("mean", budget, math.nan, ratio, math.nan, means))
    return pd.DataFrame(rows)


def _gain_row(
    row: str, budget: float, skip_scale: float, ratio: float, perplexity: float, found: Sequence[tuple[float, str]]
) -> dict[str, object]:
    gain, against = found[0]
    low, high = bootstrap.interval(np.array([value for value, _ in found[1:]]))
    return {
        "stage1_budget": budget, "skip_scale": skip_scale, "skip_ratio": ratio, "perplexity": perplexity,
        "gain": gain, "low": low if not math.isnan(gain) else math.nan,
        "high": high if not math.isnan(gain) else math.nan, "against": against,
        "row": row,
    }  # fmt: skip


def report(table: pd.DataFrame, gains: pd.DataFrame) -> list[str]:
    """Skip ratios and perplexities by budget and skip scale, then the gains, as lines."""
    dense = table[table["order"] == "dense"].iloc[0]
    lines = [f"dense perplexity {dense['perplexity']:.4f}, {int(dense['windows'])} windows"]
    for budget, rows in table[table["order"] != "dense"].groupby("stage1_budget", sort=False):
        first = rows.iloc[0]
        lines.append(f"Stage-1 budget {budget:.0%} (realized {first['B_stage1']:.1%}, p = {first['p']:g})")
        for scale, line in rows.groupby("skip_scale", sort=False):
            shown = "; ".join(
                f"{r['order']} skips {r['skip_ratio']:.1%}, perplexity {r['perplexity']:.4f}"
                for r in line.to_dict("records")
            )
            named = "no skip" if scale <= 0 else f"delta {scale:g} ({line.iloc[0]['delta_over_N']:.4f} N)"  # type: ignore[operator]
            lines.append(f"  {named}: {shown}")
        mine, unknown = gains[gains["stage1_budget"] == budget], set[float]()
        for row in mine.to_dict("records"):
            what = "mean of these" if row["row"] == "mean" else f"delta {row['skip_scale']:g}"
            if row["row"] == "one" and row["skip_scale"] not in unknown:
                continue  # said by the better of them
            if math.isnan(row["gain"]):
                unknown.add(row["skip_scale"])
                lines.append(
                    f"  gain at matched skip ratio {row['skip_ratio']:.1%} ({what}): not all fixed orders reach it"
                )
                continue
            alone = " alone" if row["row"] == "one" else ""
            against = f" against {row['against']}{alone}" if row["against"] else ""
            lines.append(
                f"  gain at matched skip ratio {row['skip_ratio']:.1%} ({what}){against}: "
                f"{row['gain']:+.4f} perplexity [{row['low']:+.4f}, {row['high']:+.4f}]"
            )
    return lines
