"""Quality against the budget really spent, with the frontier of what was measured."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .palette import DENSE, FRONTIER, Style, styles
from .rows import METRICS, Row, Rows

PLOTTED = ("accuracy", "first_token", "perplexity", "kl")

TITLE_WIDTH = 54
BOUNDS = ("oracle_topk", "random")
"""Methods that bound what a selection can reach: plotted, but on no frontier."""
AXES = {
    "B": "realized budget B (% of dense)",
    "B_cost": "B_cost: QK, PV and selection (% of dense)",
}
"""Budgets that a figure can have as its x axis. An in-kernel skip lowers B alone: QK was computed for what it skips."""
BARS = "bars: 95 % interval of the paired difference to dense; for KL, of the value"

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "svg.hashsalt": "evalkit",
    "pdf.fonttype": 42,  # embedded as outlines that publishers accept, not as bitmaps
}


@dataclass(frozen=True)
class Panel:
    """Points that may be compared: one group and one metric.

    Attributes:
        metric: key of ``METRICS``.
        rows: sparse and dense rows.
    """

    metric: str
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """What was measured on what."""
        first = self.rows[0]
        n = f"n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{max(row.n for row in self.rows)}"
        lines = [first.task, f"{first.model}, {first.length} tokens, {n}"]
        return "\n".join(part for line in lines for part in textwrap.wrap(line, TITLE_WIDTH))


def panels(rows: Rows) -> list[Panel]:
    """Panels of a report: each group that holds a sparse row; where averages over lengths exist they stand for them."""
    averaged = {row.family for row in rows.level("average") if not row.dense}
    shown = [row for row in rows.level("cell", "average") if (row.level == "average") == (row.family in averaged)]
    found = []
    for (_, metric), members in groupby(shown, key=lambda row: (row.group, row.metric)):
        panel = Panel(metric, tuple(members))
        if metric in PLOTTED and any(not row.dense for row in panel.rows):
            found.append(panel)
    return found


def is_bound(series: str) -> bool:
    """Whether a series belongs to one of :data:`BOUNDS`."""
    return series.partition(",")[0] in BOUNDS


def frontier(points: Sequence[tuple[float, float]], *, higher_is_better: bool) -> list[tuple[float, float]]:
    """Points that no other beats: none has a budget as low and a value as good, and one of the two better.

    Args:
        points: (budget, value).
        higher_is_better: direction of the value.

    Returns:
        The points by rising budget, equal ones once.
    """
    sign = 1.0 if higher_is_better else -1.0
    best, kept = -math.inf, []
    for x, y in sorted(set(points), key=lambda point: (point[0], -sign * point[1])):
        if sign * y > best:
            kept.append((x, y))
            best = sign * y
    return kept


def draw(rows: Rows, budget: str = "B") -> Figure | None:
    """Draw every panel; ``None`` where there is no sparse result to compare.

    Args:
        rows: of a report.
        budget: the x axis, of ``AXES``.
    """
    found = panels(rows)
    if not found:
        return None
    drawn = styles(row.series for panel in found for row in panel.rows if not row.dense)
    columns = 2 if len(found) == 4 else min(len(found), 3)
    lines = math.ceil(len(found) / columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(max(4.3 * columns, 5.6), 3.5 * lines + 0.75), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(lines, columns, squeeze=False).flatten()
        for axis, panel in zip(axes, found, strict=False):
            _draw_panel(axis, panel, drawn, budget)
        for axis in axes[len(found) :]:
            axis.set_visible(False)
        handles: dict[str, Any] = {}
        for axis in axes[: len(found)]:
            handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        bars: Any = {"title": BARS, "title_fontproperties": {"size": 8}}
        ordered = sorted(handles, key=lambda label: (label != "dense", label == "frontier", label))
        figure.legend(
            [handles[label] for label in ordered],
            ordered,
            loc="outside lower center",
            ncols=min(len(ordered), 2 * columns if columns > 1 else 3),
            **bars,
        )
    return figure


def _draw_panel(axis: Axes, panel: Panel, drawn: Mapping[str, Style], budget: str) -> None:
    metric = METRICS[panel.metric]
    dense = [row for row in panel.rows if row.dense]
    sparse = [row for row in panel.rows if not row.dense]
    points = [(getattr(row, budget), row.value) for row in panel.rows]
    if not dense:  # KL is not stored for dense; it is zero by definition
        points.append((100.0, 0.0))
    reached = [point for point, row in zip(points, panel.rows, strict=False) if not is_bound(row.series)]
    reached += points[len(panel.rows) :]
    line = frontier(reached, higher_is_better=metric.higher_is_better)
    axis.plot(
        *zip(*line, strict=True), color=FRONTIER, linewidth=1.3, zorder=2, label="frontier", drawstyle="steps-post"
    )
    level = dense[0].value if dense else 0.0
    axis.axhline(level, color=DENSE, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    star: Any = {"marker": "*", "markersize": 12, "linestyle": "none", "clip_on": False}
    axis.plot([100.0], [level], color=DENSE, zorder=5, label="dense", **star)
    for name, style in drawn.items():
        chosen = [row for row in sparse if row.series == name]
        if chosen:
            _draw_series(axis, chosen, name, style, budget)
    _limits(axis, points, panel.metric)
    axis.set_title(panel.title, loc="left")
    axis.set_xlabel(AXES[budget])
    better = "higher" if metric.higher_is_better else "lower"
    unit = f"{metric.unit}, " if metric.unit else ""
    axis.set_ylabel(f"{metric.name} ({unit}{better} is better)")


def _draw_series(axis: Axes, rows: Sequence[Row], name: str, style: Style, budget: str) -> None:
    below, above = zip(*(_reach(row) for row in rows), strict=True)
    axis.errorbar(
        [getattr(row, budget) for row in rows],
        [row.value for row in rows],
        yerr=[below, above],
        fmt=style.marker,
        color=style.colour,
        markersize=6 if style.filled else 5.5,
        markerfacecolor=style.colour if style.filled else "white",
        markeredgecolor="white" if style.filled else style.colour,
        markeredgewidth=0.5 if style.filled else 1.4,
        elinewidth=1.0,
        capsize=2,
        ecolor=(style.colour, 0.45),
        zorder=4,
        label=name,
    )


def _reach(row: Row) -> tuple[float, float]:
    """Length of the error bar below and above: the paired difference's interval, or the value's own."""
    if row.difference is not None and row.difference_low is not None and row.difference_high is not None:
        return max(0.0, row.difference - row.difference_low), max(0.0, row.difference_high - row.difference)
    if row.low is None or row.high is None:
        return 0.0, 0.0
    return max(0.0, row.value - row.low), max(0.0, row.high - row.value)


def _limits(axis: Axes, points: Sequence[tuple[float, float]], metric: str) -> None:
    """Show the points with room around; a long error bar may leave the panel, a point may not."""
    values = [y for _, y in points]
    low, high = min(values), max(values)
    left = min(x for x, _ in points)
    axis.set_xlim(max(0.0, left - 6.0) if left > 15 else 0.0, 103.0)
    above = [y for y in values if y > 0]
    if metric == "kl" and above and high > 20 * min(above):
        # Spread over orders of magnitude, with dense at its zero.
        axis.set_yscale("symlog", linthresh=min(above))
        axis.set_ylim(-0.1 * min(above), 1.6 * high)
        return
    span = (high - low) or abs(high) * 0.1 or 1.0
    bottom, top = axis.get_ylim()
    if METRICS[metric].unit == "%":
        bottom, top = max(bottom, -2.0), min(top, 102.0)
    else:
        bottom, top = max(bottom, low - 0.6 * span), min(top, high + 0.6 * span)
    axis.set_ylim(min(bottom, low - 0.06 * span), max(top, high + 0.06 * span))


def render(figure: Figure, kind: str) -> bytes:
    """The figure as a file's content.

    Args:
        figure: from :func:`draw`.
        kind: ``png``, ``svg`` or ``pdf``.
    """
    # Without a date the same numbers give the same file.
    dateless: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    buffer = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(buffer, format=kind, dpi=160, metadata=dateless.get(kind))
    return buffer.getvalue()
