"""Figures of a benchmark file: speedup, jumping against logical skipping, stages, methods, and time to first token."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .bench import Benchmarks, Point, by_setting, is_method
from .names import unique
from .palette import COLOURS, DENSE, MARKERS
from .pareto import STYLE, render

__all__ = ["figures", "render"]

METHODS = (
    "CoSA, stride 8",
    "CoSA, stride 16",
    "CoSA, operating point, sigma 1",
    "CoSA, operating point, sigma 2",
    "logical skipping, Triton",
    "jumping, Triton",
    "jumping, Hopper",
    "CoSA in the harness",
    "xattention",
    "xattention stride=16",
    "flexprefill",
    "minference",
    "minference-block",
    "blasst",
    "cosa select.p=0.95",
    "cosa select.rule=budget select.budget=0.2",
    "flashprefill",
    "spargeattn",
    "oracle_topk",
    "random",
    "streaming",
)
"""Methods with a colour and marker of their own, the same in every figure; CoSA looks as in the Pareto plots."""
DENSE_LINES = {"FA2": (0, (4, 3)), "cuDNN": "-.", "FlashInfer (FA3)": ":", "dense in the harness": (0, (1, 3))}
"""Dense attention is drawn in black, without markers but where a point stands alone."""
NAMES = {
    "fa2": "FA2",
    "cudnn": "cuDNN",
    "flashinfer": "FlashInfer (FA3)",
    "logical_triton": "logical skipping, Triton",
    "osk_triton": "jumping, Triton",
    "osk": "jumping, Hopper",
    "cosa": "CoSA, stride 8",
    "cosa_vote": "CoSA, operating point, sigma 1",
    "harness": "CoSA in the harness",
    "harness_dense": "dense in the harness",
}
STAGES = {"kap": ("proxy", "#0072B2"), "select": ("selection", "#E69F00"), "osk": ("attention", "#bdbdbd")}
VOTE_OFF = re.compile(r"Stage-1 (\S+) %, vote off, stride (\d+)")
OPERATING = re.compile(r"Stage-1 (\S+) % to B (\S+) %, stride (\d+), sigma (\S+)")
BUDGET = re.compile(r"budget (\d+)%")


def figures(benchmarks: Benchmarks) -> dict[str, Figure]:
    """Figures by name, ``speedup``, ``jumping``, ``stages``, ``ttft``, ``methods``, where the file holds their rows."""
    with rc_context(STYLE):
        made = {
            "speedup": _speedup(benchmarks),
            "jumping": _jumping(benchmarks),
            "stages": _stages(benchmarks),
            "ttft": _ttft(benchmarks),
            "methods": _methods(benchmarks),
        }
    return {name: figure for name, figure in made.items() if figure is not None}


def call_name(setting: str) -> str | None:
    """Method of a whole call on synthetic inputs by its setting; None for other settings."""
    if found := VOTE_OFF.fullmatch(setting):
        return f"CoSA, stride {found[2]}"
    if found := OPERATING.fullmatch(setting):
        return f"CoSA, operating point, sigma {found[4]}"
    return None


def method_name(variant: str) -> str:
    """A variant as figures name it: ``xattention:stride=16`` is "xattention stride=16"."""
    return NAMES.get(variant) or variant.replace(":", " ")


def _style(method: str, others: Sequence[str] = ()) -> dict[str, Any]:
    """Colour and marker; a method that is not in METHODS has the next ones by its place among ``others``."""
    if method in DENSE_LINES:
        return {"color": DENSE, "linestyle": DENSE_LINES[method], "linewidth": 1.0}
    known = [*METHODS, *(name for name in others if name not in METHODS)]
    at = known.index(method) if method in known else len(known)
    colour, marker = COLOURS[at % len(COLOURS)], MARKERS[at % len(MARKERS)]
    return {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.4, "markeredgecolor": "white"}


def _line(
    axis: Axes,
    points: Sequence[tuple[int, float | None]],
    method: str,
    label: str | None = None,
    others: Sequence[str] = (),
) -> None:
    """A curve through the lengths measured; a value of None between two of them breaks it."""
    if any(value is not None for _, value in points):
        tokens, values = zip(*points, strict=True)
        shown = [math.nan if value is None else value for value in values]
        alone = {"marker": "_", "markersize": 9} if method in DENSE_LINES and len(values) == 1 else {}
        axis.plot(tokens, shown, label=label or method, **_style(method, others) | alone)


def _figure(columns: int, lines: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(max(5.6, 4.4 * columns), 3.4 * lines + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(lines, columns, squeeze=False).flatten())


def _lengths(axis: Axes, tokens: Sequence[int]) -> None:
    """A logarithmic axis of the lengths measured."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(sorted(set(tokens))))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _short(int(round(x)))))
    axis.set_xlabel("prompt length (tokens)")


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def _legend(figure: Figure, axes: Sequence[Axes], columns: int) -> None:
    handles: dict[str, Any] = {}
    for axis in axes:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns)


def _speedup(benchmarks: Benchmarks) -> Figure | None:
    """Whole call over FA2 against length: the smallest Stage-1 budget without the vote, and the operating points."""
    calls = by_setting(benchmarks.of("attention", "call"))
    shown = _shown(calls)
    if not shown:
        return None
    figure, (axis,) = _figure(1)
    axis.axhline(1.0, label="FA2", **_style("FA2"))
    for variant in ("cudnn", "flashinfer"):
        # Measured with the whole call; an older file has them beside the kernels.
        points = benchmarks.of("attention", variant) or benchmarks.of("kernel", variant)
        _over_fa2(axis, benchmarks, [point for point in points if point.setting == "dense"], NAMES[variant])
    for setting in shown:
        method = call_name(setting)
        assert method is not None
        _over_fa2(axis, benchmarks, calls[setting], method, _label(method, setting))
    _lengths(axis, [point.tokens for setting in shown for point in calls[setting]])
    axis.set_ylim(bottom=0)
    axis.set_ylabel("speedup over FA2")
    axis.set_title(f"CoSA's whole attention call, {benchmarks.device}", loc="left")
    _legend(figure, [axis], 2)
    return figure


def _shown(settings: Iterable[str]) -> list[str]:
    """Settings that figures show: the smallest Stage-1 share without the vote, and the operating points."""
    found = {setting: float(match[1]) for setting in settings if (match := VOTE_OFF.fullmatch(setting))}
    smallest = [setting for setting, share in found.items() if share == min(found.values())]
    return smallest + [setting for setting in settings if OPERATING.fullmatch(setting)]


def _label(method: str, setting: str) -> str:
    if found := OPERATING.fullmatch(setting):
        return f"{method} ({found[1]} to {found[2]} %)"
    found = VOTE_OFF.fullmatch(setting)
    return f"{method} ({found[1]} %)" if found else method


def _over_fa2(
    axis: Axes,
    benchmarks: Benchmarks,
    points: Sequence[Point],
    method: str,
    label: str | None = None,
    others: Sequence[str] = (),
) -> None:
    ordered = sorted(points, key=lambda point: point.tokens)
    _line(axis, [(point.tokens, benchmarks.ratio(point, "speedup_fa2")) for point in ordered], method, label, others)


def _methods(benchmarks: Benchmarks) -> Figure | None:
    """Whole calls over FA2 against length, one panel a kind of inputs, the realized B of each method at its end."""
    kinds: dict[str, dict[tuple[str, str], list[Point]]] = defaultdict(lambda: defaultdict(list))
    for point in filter(is_method, benchmarks.points):
        kind, _, knobs = point.setting.partition(", ")
        kinds[kind][point.variant, knobs].append(point)
    if not kinds:
        return None
    every = sorted({method_name(variant) for groups in kinds.values() for variant, _ in groups})
    columns = min(2, len(kinds))
    figure, axes = _figure(columns, -(-len(kinds) // columns))
    for axis in axes[len(kinds) :]:
        axis.set_visible(False)
    for axis, (kind, groups) in zip(axes, kinds.items(), strict=False):
        axis.axhline(1.0, label="FA2", **_style("FA2"))
        _dense_beside(axis, benchmarks, kind, {point.tokens for points in groups.values() for point in points})
        variants = [variant for variant, _ in groups]
        ends = []
        for (variant, knobs), points in groups.items():
            method = method_name(variant)
            # One variant measured twice with different knobs (a preset that has changed) is told apart by them.
            label = method if variants.count(variant) == 1 else f"{method} ({knobs})"
            _over_fa2(axis, benchmarks, points, method, label, every)
            last = max(points, key=lambda point: point.tokens)
            speedup, budget = benchmarks.ratio(last, "speedup_fa2"), last.metrics.get("B")
            if speedup is not None and budget is not None:
                ends.append((last.tokens, speedup, f"{100 * budget:.0f} %", _style(method, every)["color"]))
        _lengths(axis, [point.tokens for points in groups.values() for point in points])
        axis.set_ylim(bottom=0)
        _write_ends(axis, ends)
        axis.set_ylabel("speedup over FA2")
        axis.set_title(f"{kind}, {benchmarks.device}; B at the end", loc="left")
    _legend(figure, axes[: len(kinds)], 3)
    return figure


def _dense_beside(axis: Axes, benchmarks: Benchmarks, kind: str, lengths: set[int]) -> None:
    """Dense kernels on captured inputs of that name, else on synthetic ones, at the lengths of the methods."""
    own = f"{kind}, dense"
    setting = own if any(point.setting == own for point in benchmarks.of("attention", "fa2")) else "dense"
    for variant in ("cudnn", "flashinfer"):
        points = [p for p in benchmarks.of("attention", variant) if p.setting == setting and p.tokens in lengths]
        _over_fa2(axis, benchmarks, points, NAMES[variant])


def _write_ends(axis: Axes, ends: Iterable[tuple[int, float, str, str]]) -> None:
    """Texts right of the ends of curves, moved apart where they would lie on each other."""
    ordered = sorted(ends, key=lambda end: end[1])
    top = axis.get_ylim()[1]
    step = top / 22
    places: list[float] = []
    for _, value, _, _ in ordered:
        places.append(max([value, *(place + step for place in places[-1:])]))
    for i in reversed(range(len(places))):
        places[i] = min([places[i], top if i + 1 == len(places) else places[i + 1] - step])
    for (tokens, _, text, colour), place in zip(ordered, places, strict=True):
        axis.annotate(
            text, (tokens, place), xytext=(6, 0), textcoords="offset points", fontsize=7.5, color=colour, va="center"
        )
    left, right = axis.get_xlim()
    axis.set_xlim(left, right * (right / left) ** 0.08)


def _jumping(benchmarks: Benchmarks) -> Figure | None:
    """The same blocks, jumped to or walked past: over FA2 by budget, and one over the other."""
    groups = {
        variant: {int(found[1]): points for setting, points in by_setting(benchmarks.of("kernel", variant)).items()
                  if (found := BUDGET.fullmatch(setting))}
        for variant in ("logical_triton", "osk_triton", "osk")
    }  # fmt: skip
    budgets = sorted(set(groups["logical_triton"]) & set(groups["osk_triton"]))
    if not budgets:
        return None
    panels = len(budgets) + 1
    figure, axes = _figure(min(2, panels), -(-panels // 2))
    for axis in axes[panels:]:
        axis.set_visible(False)
    tokens = [point.tokens for points in groups["logical_triton"].values() for point in points]
    for axis, budget in zip(axes, budgets, strict=False):
        axis.axhline(1.0, label="FA2", **_style("FA2"))
        for variant, by_budget in groups.items():
            _over_fa2(axis, benchmarks, by_budget.get(budget, []), NAMES[variant])
        _lengths(axis, tokens)
        axis.set_ylim(bottom=0)
        axis.set_title(f"{budget} % of the blocks", loc="left")
        axis.set_ylabel("speedup over FA2")
    last = axes[panels - 1]
    for budget, style in zip(budgets, ("-", "--", ":", "-.") * len(budgets), strict=False):
        logical = {point.tokens: point.metrics.get("ms") for point in groups["logical_triton"][budget]}
        gains = [
            (point.tokens, logical[point.tokens] / point.metrics["ms"])  # type: ignore[operator]
            for point in groups["osk_triton"][budget]
            if logical.get(point.tokens) and point.metrics.get("ms")
        ]
        last.plot(*zip(*gains, strict=True), **{**_style(NAMES["osk_triton"]), "linestyle": style})
        last.annotate(f"{budget} %", gains[-1], xytext=(4, 0), textcoords="offset points", fontsize=8)
    last.axhline(1.0, **_style(NAMES["logical_triton"]) | {"marker": ""})
    _lengths(last, tokens)
    last.set_title("jumping over logical skipping, both Triton", loc="left")
    last.set_ylabel("times faster")
    _legend(figure, axes[: panels - 1], 4)
    return figure


def _stages(benchmarks: Benchmarks) -> Figure | None:
    """Shares of proxy, selection and attention in their sum, for the settings that :func:`_speedup` shows."""
    stages = {stage: by_setting(benchmarks.of("attention", stage)) for stage in STAGES}
    settings = [s for s in _shown(stages["kap"]) if all(s in stages[stage] for stage in STAGES)]
    if not settings:
        return None
    columns = min(2, len(settings))
    figure, axes = _figure(columns, -(-len(settings) // columns))
    for axis, setting in zip(axes, settings, strict=False):
        times = {
            stage: {point.tokens: point.metrics["ms"] for point in stages[stage][setting] if "ms" in point.metrics}
            for stage in STAGES
        }
        tokens = sorted(set.intersection(*(set(found) for found in times.values())))
        bottom = [0.0] * len(tokens)
        for stage, (name, colour) in STAGES.items():
            total = [sum(times[other][n] for other in STAGES) for n in tokens]
            share = [100 * times[stage][n] / whole for n, whole in zip(tokens, total, strict=True)]
            axis.bar([_short(n) for n in tokens], share, bottom=bottom, color=colour, label=name, width=0.7)
            bottom = [below + part for below, part in zip(bottom, share, strict=True)]
        axis.set_ylim(0, 100)
        axis.set_title(setting, loc="left")
        axis.set_xlabel("prompt length (tokens)")
        axis.set_ylabel("share of the stages' time (%)")
    for axis in axes[len(settings) :]:
        axis.set_visible(False)
    _legend(figure, axes[: len(settings)], 3)
    return figure


def _ttft(benchmarks: Benchmarks) -> Figure | None:
    """Seconds to the first token, and speedup over FA2."""
    points = [point for point in benchmarks.points if point.bench == "ttft" and "ttft" in point.metrics]
    measured = unique(point.variant for point in points)
    variants = [variant for variant in NAMES if variant in measured]
    variants += [variant for variant in measured if variant not in NAMES]
    others = sorted(method_name(variant) for variant in variants)
    if not variants:
        return None
    figure, (left, right) = _figure(2)
    right.axhline(1.0, **_style("FA2"))
    lengths = sorted({point.tokens for point in points})
    for variant in variants:
        found = {point.tokens: point for point in points if point.variant == variant}
        name = method_name(variant)
        seconds = [(n, found[n].metrics["ttft"] if n in found else None) for n in lengths]
        _line(left, seconds, name, None, others)
        if variant != "fa2":
            speedups = [(n, benchmarks.ttft_speedup(found[n]) if n in found else None) for n in lengths]
            _line(right, speedups, name, None, others)
    for axis in (left, right):
        _lengths(axis, [point.tokens for point in points])
    left.set_yscale("log")
    left.set_ylabel("seconds")
    left.set_title(f"time to first token, 8B shape, {benchmarks.device}", loc="left")
    right.set_ylim(bottom=0)
    right.set_ylabel("speedup over FA2")
    right.set_title("the same over FA2", loc="left")
    _legend(figure, [left], 3)
    return figure
