"""Pictures of the analyses, in the project's style: a method has the colour and marker that it has everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ..errors import InputError
from ..report.palette import COLOURS, DENSE, MARKERS, STYLES, Style, styles
from ..report.pareto import STYLE, frontier, render
from ..report.rows import METRICS

KINDS = ("png", "svg", "pdf")
MOST_DOTS = 4096
"""Row maxima drawn a head; evenly chosen rows where there are more."""
ORDER_STYLES = {order: STYLES[f"cosa, skip, {order}"] for order in ("hrm_first", "ascending", "descending")}
ORDER_LINES = {"hrm_first": "-", "ascending": ":", "descending": "--"}
PLACES = {
    "sink": ("#33404D", "", "white"),
    "diagonal": ("#56B4E9", "////", "white"),
    "elsewhere": ("#FBDCC0", "....", "#B34700"),
}
"""Colour, hatch and its colour: places differ in lightness and hatch, and so in grey too."""
ORDER_NAMES = {"hrm_first": "HRM first (remapped)", "ascending": "ascending", "descending": "descending"}

F = TypeVar("F", bound=Callable[..., Figure])


def save(figure: Figure, stem: Path) -> None:
    """Write ``<stem>.png``, ``.svg`` and ``.pdf`` and say so."""
    for kind in KINDS:
        file = stem.with_name(f"{stem.name}.{kind}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(render(figure, kind))
        except OSError as error:
            raise InputError("out", str(file.parent), f"a directory to write to ({error.strerror})") from None
        print(f"wrote {file}", flush=True)


def _styled(draw: F) -> F:
    """Draw under the project's settings of matplotlib."""

    def inside(*args: Any, **kwargs: Any) -> Figure:
        with rc_context(STYLE):
            return draw(*args, **kwargs)

    inside.__name__, inside.__doc__ = draw.__name__, draw.__doc__
    return inside  # type: ignore[return-value]


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _line(axis: Axes, x: Any, y: Any, style: Style, **more: Any) -> None:
    shown: dict[str, Any] = {
        "color": style.colour, "marker": style.marker, "markersize": 5, "linewidth": 1.3,
        "markerfacecolor": style.colour if style.filled else "white", "markeredgecolor": style.colour,
    }  # fmt: skip
    axis.plot(x, y, **{**shown, **more})


# ------------------------------------------------------------------------------------------------------------- iou
@_styled
def draw_iou(heads: pd.DataFrame, table: pd.DataFrame, title: str) -> Figure:
    """IoU over the budget, mean and middle 80 % of heads, and its mean by layer at the budget nearest to 20 %."""
    names = list(dict.fromkeys(table["proxy"]))
    methods = {name: "cosa" if name == "kap" else name for name in names}
    of_method = styles(methods.values())
    drawn = {name: of_method[method] for name, method in methods.items()}
    figure = _figure(9.2, 4.0)
    left, right = figure.subplots(1, 2)
    for name in names:
        rows = table[table["proxy"] == name].sort_values("B")
        moved = rows["B"] + 0.003 * (names.index(name) - (len(names) - 1) / 2)  # bars beside each other
        bars = (drawn[name].colour, 0.35)
        left.vlines(moved, rows["iou_p10"], rows["iou_p90"], color=bars, linewidth=1.0)
        _line(left, moved, rows["iou"], drawn[name], label=name)
    budgets = np.array(sorted(set(table["budget"])))
    near = budgets[np.abs(budgets - 0.2).argmin()]
    layers = heads[heads["budget"] == near].groupby(["proxy", "layer"], sort=False)["iou"].mean()
    for name in names:
        mean = layers[name]
        _line(right, mean.index, mean.to_numpy(), drawn[name], markersize=3.5)
    left.set_xlabel("blocks kept in each row (% of causal blocks)")
    left.set_ylabel("IoU with the oracle")
    left.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    left.set_ylim(0, 1.02)
    left.set_title("points: mean over heads; bars: their middle 80 %", loc="left")
    right.set_ylim(0, 1.02)
    right.set_xlabel("layer")
    realized = float(table.loc[table["budget"] == near, "B"].mean())
    right.set_title(f"mean of each layer at B = {realized:.1%} (asked: {near:.0%})", loc="left")
    figure.legend(loc="outside lower center", ncols=4)
    figure.suptitle(title, fontsize=9.5)
    return figure


# ---------------------------------------------------------------------------------------------------------- rowmax
@_styled
def draw_rowmax(
    table: pd.DataFrame, maps: pd.DataFrame, shown: Sequence[tuple[int, int]], block_size: int, title: str
) -> Figure:
    """Attention maps of some heads with their row maxima as dots, and where the maxima of all heads lie by layer."""
    figure = _figure(3.7 * len(shown) + 3.9, 3.9)
    axes = figure.subplots(1, len(shown) + 1, squeeze=False)[0]
    for axis, (layer, head) in zip(axes, shown, strict=False):
        mine = maps[(maps["layer"] == layer) & (maps["head"] == head)]
        mass = mine[mine["kind"] == "mass"]
        blocks = int(mass["row"].max()) + 1
        grid = np.full((blocks, blocks), np.nan)
        grid[mass["row"], mass["key"]] = np.maximum(mass["value"], 1e-6)
        dots = mine[mine["kind"] == "max"].sort_values("row")
        tokens = len(dots)
        extent = (0, blocks * block_size, blocks * block_size, 0)
        image = axis.imshow(grid, cmap="Greys", norm=LogNorm(1e-4, 1), extent=extent, interpolation="nearest")
        dots = dots.iloc[:: max(1, math.ceil(tokens / MOST_DOTS))]
        # All rims under all dots: a rim of its own would hide the neighbours of a dot in a line of them.
        for size, colour in ((4.0, "white"), (2.2, "#C00000")):
            axis.plot(dots["key"], dots["row"], linestyle="none", marker=".", markersize=size, color=colour,
                      markeredgewidth=0, rasterized=True)  # fmt: skip
        axis.set_xlim(-0.01 * tokens, tokens)
        axis.set_ylim(tokens, 0)
        axis.grid(False)
        where = table[(table["layer"] == layer) & (table["head"] == head)].iloc[0]
        shares = f"sink {where['sink']:.0%}, diagonal {where['diagonal']:.0%}, elsewhere {where['elsewhere']:.0%}"
        axis.set_title(f"layer {layer}, head {head}\n{shares}", loc="left")
        axis.set_xlabel("key")
        if axis is axes[0]:
            axis.set_ylabel("query; dots: the row's maximum")
        if axis is axes[len(shown) - 1]:
            figure.colorbar(image, ax=axis, shrink=0.8, label="attention of a row in the block")
    _draw_places(axes[-1], table)
    figure.suptitle(title, fontsize=9.5)
    return figure


def _draw_places(axis: Axes, table: pd.DataFrame) -> None:
    means = table.groupby("layer")[["sink", "diagonal", "elsewhere", "max_blocks"]].mean()
    bottom = np.zeros(len(means))
    for name, (colour, hatch, line) in PLACES.items():
        axis.bar(means.index, means[name], bottom=bottom, color=colour, hatch=hatch, edgecolor=line,
                 linewidth=0.3, width=0.9, label=name)  # fmt: skip
        bottom += means[name].to_numpy()
    over = (means.index, means["max_blocks"], Style("#1a1a1a", "", "o"))
    _line(axis, *over, markersize=4, linewidth=2.6, color="white", markeredgecolor="white", markerfacecolor="white")
    _line(axis, *over, markersize=2.5, linewidth=1.0, label="blocks with a row maximum")
    axis.set_ylim(0, 1.0)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.set_xlabel("layer (mean of its heads)")
    axis.set_title("where row maxima lie", loc="left")
    axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


# ----------------------------------------------------------------------------------------------------------- heads
@_styled
def draw_heads(table: pd.DataFrame, title: str) -> Figure:
    """Two heat maps a method: its budget and its output error, layers down, heads across."""
    names = list(dict.fromkeys(table["method"]))
    heads, layers = table["head"].max() + 1, table["layer"].max() + 1
    figure = _figure(max(2.2 * len(names), 4.5) + 1, min(14.0, 2 * (1.0 + 0.09 * layers) + 1.2))
    axes = figure.subplots(2, len(names), squeeze=False, sharex=True, sharey=True)
    worst = max(1e-9, float(table["error"].quantile(0.99)))
    for line, (column, label, top) in enumerate((("B", "budget B", 1.0), ("error", "relative L2 error", worst))):
        for axis, name in zip(axes[line], names, strict=True):
            rows = table[table["method"] == name]
            grid = np.full((layers, heads), np.nan)
            grid[rows["layer"], rows["head"]] = rows[column]
            image = axis.imshow(grid, aspect="auto", cmap="viridis" if line == 0 else "magma", vmin=0, vmax=top)
            axis.grid(False)
            mean = f"{rows['B'].mean():.1%}" if column == "B" else f"median {rows[column].median():.3f}"
            heading = "\n".join(name.split(":")) + "\n" if line == 0 else ""
            axis.set_title(f"{heading}{mean}", loc="left", fontsize=7.5)
        figure.colorbar(image, ax=axes[line], label=label, shrink=0.9, extend="max" if line else "neither")
        axes[line][0].set_ylabel("layer")
    for axis in axes[1]:
        axis.set_xlabel("head")
    figure.suptitle(title, fontsize=9.5)
    return figure


# ----------------------------------------------------------------------------------------------------------- remap
@_styled
def draw_remap(table: pd.DataFrame, gains: pd.DataFrame, title: str) -> Figure:
    """Figure C by budget (perplexity and skip ratio over delta / N, perplexity over the skip ratio), then all budgets.

    The bottom row is Figure 6's: perplexity over the realized budget, a colour a Stage-1 budget.
    """
    points = table[table["order"] != "dense"]
    budgets = list(dict.fromkeys(points["stage1_budget"]))
    orders = [name for name in ORDER_STYLES if name in set(points["order"])]
    figure = _figure(max(2.6 * len(budgets), 6.0), 10.0)
    grid = figure.add_gridspec(4, len(budgets))
    for column, budget in enumerate(budgets):
        rows = points[points["stage1_budget"] == budget]
        axes = [figure.add_subplot(grid[line, column]) for line in range(3)]
        off = rows[rows["order"] == "off"]
        for order in orders:
            line = pd.concat([off, rows[rows["order"] == order]]).sort_values("skip_scale")
            skipping = line[line["skip_scale"] > 0]
            label = ORDER_NAMES[order] if column == 0 else None
            _line(
                axes[0],
                skipping["delta_over_N"],
                skipping["perplexity"],
                ORDER_STYLES[order],
                label=label,
                linestyle=ORDER_LINES[order],
            )
            _line(
                axes[1],
                skipping["delta_over_N"],
                skipping["skip_ratio"],
                ORDER_STYLES[order],
                linestyle=ORDER_LINES[order],
            )
            _line(axes[2], line["skip_ratio"], line["perplexity"], ORDER_STYLES[order], linestyle=ORDER_LINES[order])
        for axis in axes[:2]:
            axis.set_xscale("log")
            axis.set_xlabel("delta / N")
        if len(off):
            axes[0].axhline(off.iloc[0]["perplexity"], color=DENSE, linewidth=0.8, linestyle=(0, (4, 3)))
        axes[1].yaxis.set_major_formatter(PercentFormatter(1.0))
        axes[2].xaxis.set_major_formatter(PercentFormatter(1.0))
        axes[2].set_xlabel("skip ratio")
        axes[0].set_title(f"Stage-1 budget {budget:.0%}\n({rows.iloc[0]['B_stage1']:.1%} realized)", loc="left")
        mean = gains[(gains["stage1_budget"] == budget) & (gains["row"] == "mean")]
        if len(mean):
            axes[2].set_title(f"mean gain {mean.iloc[0]['gain']:+.3f}", loc="left")
        if column == 0:
            for axis, text in zip(axes, ("perplexity", "in-kernel skip ratio", "perplexity"), strict=True):
                axis.set_ylabel(text)
    _draw_budgets(figure.add_subplot(grid[3, :]), table, budgets, orders)
    figure.legend(loc="outside lower center", ncols=4)
    figure.suptitle(f"{title}; dashed: no skip", fontsize=9.5)
    return figure


def _draw_budgets(axis: Axes, table: pd.DataFrame, budgets: Sequence[float], orders: Sequence[str]) -> None:
    lines = {"hrm_first": "-", "ascending": (0, (1, 1.5)), "descending": (0, (4, 2))}
    for number, budget in enumerate(budgets):
        rows = table[table["stage1_budget"] == budget]
        off = rows[rows["order"] == "off"]
        for order in orders:
            line = pd.concat([off, rows[rows["order"] == order]]).sort_values("skip_scale")
            style = Style(COLOURS[number % len(COLOURS)], "", MARKERS[number % len(MARKERS)], order == "hrm_first")
            label = f"Stage 1 {budget:.0%}" if order == "hrm_first" else None
            _line(axis, line["B"], line["perplexity"], style, linestyle=lines[order], label=label, markersize=4)
    dense = table[table["order"] == "dense"].iloc[0]
    axis.axhline(dense["perplexity"], color=DENSE, linewidth=0.8)
    axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.set_xlabel("realized budget B, in blocks\nsolid: remapped, dotted: ascending, dashed: descending")
    axis.set_ylabel("perplexity")


# -------------------------------------------------------------------------------------------------------- frontier
@_styled
def draw_frontier(points: pd.DataFrame, interpolation: str) -> Figure:
    """The frontier of each method in each panel; settings that are on none are small and pale, suspects crossed out."""
    groups = list(points.groupby(["panel", "metric"], sort=False))
    columns = min(len(groups), 2)
    lines = math.ceil(len(groups) / columns)
    figure = _figure(max(4.8 * columns, 6.0), 3.9 * lines + 0.6)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    drawn = styles(name for name in points["method"] if name != "dense")
    seen: dict[str, Any] = {}
    for axis, ((panel, metric), rows) in zip(axes, groups, strict=False):
        higher = METRICS[metric].higher_is_better
        for name, mine in rows.groupby("method"):
            if name == "dense":
                continue
            style = drawn[str(name)]
            sound, odd = mine[~mine["suspect"]], mine[mine["suspect"]]
            line = frontier(list(zip(sound["B"], sound["value"], strict=True)), higher_is_better=higher)
            axis.plot(mine["B"], mine["value"], linestyle="none", marker=style.marker, markersize=3, alpha=0.35,
                      color=style.colour)  # fmt: skip
            if len(odd):
                axis.plot(odd["B"], odd["value"], linestyle="none", marker="x", markersize=7, color="#1a1a1a",
                          label="suspect: on no frontier")  # fmt: skip
            how = "steps-post" if interpolation == "step" else "default"
            _line(axis, [x for x, _ in line], [y for _, y in line], style, drawstyle=how, label=str(name))
        dense = rows[rows["method"] == "dense"]
        level = float(dense.iloc[0]["value"]) if len(dense) else 0.0
        axis.axhline(level, color=DENSE, linewidth=0.8, linestyle=(0, (4, 3)), label="dense")
        above = rows["value"][rows["value"] > 0]
        if metric == "kl" and len(above):  # dense is at 0, methods are orders of magnitude apart
            axis.set_yscale("symlog", linthresh=float(above.min()))
            axis.set_ylim(-0.1 * float(above.min()), 1.6 * float(above.max()))
        axis.set_title(f"{panel}\nn = {rows.iloc[0]['n']}", loc="left", fontsize=8.5)
        axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axis.set_xlabel("realized budget B")
        axis.set_ylabel(f"{METRICS[metric].name} ({'higher' if higher else 'lower'} is better)")
        seen |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    for axis in axes[len(groups) :]:
        axis.set_visible(False)
    wide = 2 * columns if any(", " in name for name in seen) else 4
    figure.legend(list(seen.values()), list(seen), loc="outside lower center", ncols=wide)
    return figure
