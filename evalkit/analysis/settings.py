"""Settings of ``evalkit analyze``, validated before a model is loaded; nothing heavy is imported to check them."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..config import DEVICES, RULER_NAMES, Cell, ExecutionConfig, ModelConfig, PerplexityConfig, RulerConfig
from ..errors import InputError, near_matches
from ..methods.base import Method
from ..methods.cosa import CoSA
from ..methods.presets import from_text

PROXIES = ("kap", "xattention", "flexprefill", "minference", "flashprefill", "spargeattn", "pageweaver", "random")
"""Proxies that rank key blocks; ``random`` is the floor. :mod:`.proxies` has one function for each."""
NEEDLES = "niah_"
FIXED_ORDERS = ("ascending", "descending")
ORDERS = ("hrm_first", *FIXED_ORDERS)
PAPER_SCALES = (-1.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 3000.0, 5000.0)
PAPER_BUDGETS = (1.0, 0.54, 0.42, 0.32, 0.28)
INTERPOLATIONS = ("step", "linear")
GROUPINGS = ("method", "series")
STATES = ("dense", "own")


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise InputError(name, value, allowed)


def _shares(name: str, values: Sequence[float], *, whole: bool = True) -> None:
    fine = all(math.isfinite(x) and 0 < x <= 1 and (whole or x < 1) for x in values)
    once = len(set(values)) == len(values)
    limit = "at most 1" if whole else "below 1"
    _require(bool(values) and fine and once, name, list(values), f"shares above 0, {limit}, each once")


def _each(name: str, values: Sequence[str], known: Sequence[str]) -> None:
    _require(bool(values) and len(set(values)) == len(values), name, list(values), f"of {', '.join(known)}, each once")
    for value in values:
        _require(value in known, name, value, near_matches(value, known))


def _device(device: str, backend: str) -> None:
    _require(device in DEVICES, "device", device, near_matches(device, DEVICES))
    known = ("auto", *importlib.import_module("prefill_kernels.backends").BACKENDS)
    _require(backend in known, "backend", backend, near_matches(backend, known))


def _out(out: str) -> None:
    path = Path(out).expanduser()
    _require(bool(out) and not path.is_file(), "out", out, "a directory")


@dataclass(frozen=True)
class PromptAnalysis:
    """What analyses of a model's attention on needle prompts share.

    Args:
        model: the model.
        tasks: RULER's needle tasks.
        length: of the prompts, in tokens; answer included, as RULER counts.
        samples: prompts of each task.
        seed: of the samples.
        device, backend: where the model runs, and the kernels' backend.
        out: directory of the files; what was measured is kept in ``<out>/<analysis>.work``.
    """

    model: ModelConfig
    tasks: tuple[str, ...] = ("niah_multikey_1",)
    length: int = 8192
    samples: int = 4
    seed: int = 42
    device: str = "auto"
    backend: str = "auto"
    out: str = "results/analysis"

    def validate(self) -> None:
        """Raise InputError on the first value that cannot be used."""
        self.model.validate()
        module, attribute = RULER_NAMES.split(":")
        known = [name for name in getattr(importlib.import_module(module), attribute) if name.startswith(NEEDLES)]
        _each("tasks", self.tasks, known)
        _require(self.samples >= 1, "samples", self.samples, "an integer of at least 1")
        try:
            self.ruler.validate()
            self.model.rope_factor(self.length)
        except InputError as error:  # settings of the task go by shorter names here
            raise InputError(error.field.removeprefix("task."), error.value, error.allowed) from None
        _device(self.device, self.backend)
        _out(self.out)

    @property
    def ruler(self) -> RulerConfig:
        """The prompts as the RULER task takes them."""
        return RulerConfig(tasks=self.tasks, length=self.length, limit=self.samples, seed=self.seed)


@dataclass(frozen=True)
class IouAnalysis(PromptAnalysis):
    """Masks of the proxies against the oracle mask of full attention, at the same number of blocks in every row.

    Args:
        proxies: of :data:`PROXIES`.
        budgets: shares of the causal blocks; row i (from 0) keeps ``K_i = max(1, floor(B (i + 1) + 0.5))`` blocks.
        block_size: of tiles and key blocks.
        stride: of kap and xattention.
        forced: blocks that a method always keeps (sink, diagonal, window) come first, as they do in the method; false
            ranks them by their scores like the others.
    """

    proxies: tuple[str, ...] = PROXIES
    budgets: tuple[float, ...] = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
    block_size: int = 128
    stride: int = 8
    forced: bool = True

    def validate(self) -> None:
        """Raise InputError on the first value that cannot be used."""
        super().validate()
        _each("proxies", self.proxies, PROXIES)
        _shares("budgets", self.budgets)
        _require(self.block_size in (64, 128), "block_size", self.block_size, "64 or 128 tokens")
        _require(self.stride in (4, 8, 16), "stride", self.stride, "4, 8 or 16")


@dataclass(frozen=True)
class RowmaxAnalysis(PromptAnalysis):
    """Where the largest logit of each query row lies.

    Args:
        shown: heads of the picture, ``<layer>:<head>``; none named = those with the largest share of row maxima in the
            sink, on the diagonal and elsewhere.
        block_size: of tiles and key blocks.
    """

    shown: tuple[str, ...] = ()
    block_size: int = 128

    def validate(self) -> None:
        """Raise InputError on the first value that cannot be used."""
        super().validate()
        for item in self.shown:
            fine = re.fullmatch(r"\d+:\d+", str(item)) is not None
            _require(fine, "shown", item, "<layer>:<head>, both from 0, in quotes")
        _require(len(set(self.shown)) == len(self.shown), "shown", list(self.shown), "each head once")
        _require(self.block_size in (64, 128), "block_size", self.block_size, "64 or 128 tokens")

    @property
    def shown_heads(self) -> list[tuple[int, int]]:
        """Layer and head of each head that is named."""
        return [(int(layer), int(head)) for layer, _, head in (item.partition(":") for item in self.shown)]


@dataclass(frozen=True)
class HeadsAnalysis(PromptAnalysis):
    """Budget and output error of methods by layer and head.

    Args:
        methods: presets, with settings behind them: ``cosa``, ``cosa:select.p=0.9:skip_scale=492``. A preset that a
            calibration sets takes the value of ``model`` and ``length``.
        states: ``dense`` compares all methods on the dense model's inputs; ``own`` lets each method's own outputs flow
            on, so that a layer sees what the method left of the layers before it.
    """

    methods: tuple[str, ...] = ("cosa:select.p=0.95", "xattention", "oracle_topk:budget=0.2")
    states: str = "dense"

    def validate(self) -> None:
        """Raise InputError on the first value that cannot be used."""
        super().validate()
        named = bool(self.methods) and len(set(self.methods)) == len(self.methods)
        _require(named, "methods", list(self.methods), "at least one preset, each once")
        _require(self.states in STATES, "states", self.states, near_matches(self.states, STATES))
        self.built()

    def built(self) -> dict[str, Method]:
        """The methods by what they were called, calibrated values put in.

        Raises:
            InputError: one that cannot be used, or whose calibration is missing.
        """
        found = {text: from_text(text, "methods", self._calibrated) for text in self.methods}
        for text, method in found.items():
            _require(method.name != "dense", "methods", text, "a sparse method: dense is what they are compared with")
        return found

    def cell(self, method: Method) -> Cell:
        """The cell of ``evalkit run`` that takes its calibrated value where the analysis does."""
        return Cell(self.model, method, self.ruler)

    def _calibrated(self, method: Method) -> Method:
        calibrated = importlib.import_module("evalkit.calibration.resolve").calibrated
        found: Method = calibrated(self.cell(method)).method
        return found


@dataclass(frozen=True)
class RemapAnalysis:
    """Perplexity and in-kernel skip ratio over the skip scale, HRM-first against both fixed orders.

    Args:
        model: the model.
        task: text and windows; the loss is that of all tokens unless ``task.score`` says otherwise.
        execution: as of ``evalkit run``.
        budgets: Stage-1 budgets, block-rounded, that are reached through p; 1 is p = 1.
        skip_scales: skip scales (capital delta); a value of 0 or less is no skip.
        ratios: delta / N instead of ``skip_scales``, N being ``task.length``. For prompts that are short beside the
            paper's, on which its skip scales would skip nearly everything.
        orders: visiting orders; ``hrm_first`` and at least one fixed order.
        tolerance: distance from a Stage-1 budget that is close enough.
        search_limit: windows on which p is searched, at most all of the task's; the value is then checked on all.
        stride: of the proxy.
        resamples: of the bootstrap over windows.
        workers: cells that run at a time, each in its own process: a small model leaves a GPU idle between its cells.
            An interrupt then waits for the cells in flight.
        runs: results directory of the cells.
        out: directory of the files.
    """

    model: ModelConfig
    task: PerplexityConfig
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    budgets: tuple[float, ...] = PAPER_BUDGETS
    skip_scales: tuple[float, ...] = PAPER_SCALES
    ratios: tuple[float, ...] = ()
    orders: tuple[str, ...] = ORDERS
    tolerance: float = 0.01
    search_limit: int = 4
    stride: int = 8
    resamples: int = 2000
    workers: int = 1
    runs: str = "results/runs/remap"
    out: str = "results/analysis"

    @property
    def scales(self) -> list[float]:
        """Skip scales in rising order; one -1 stands for no skip."""
        given = [r * self.task.length for r in self.ratios if r > 0] if self.ratios else list(self.skip_scales)
        off = [-1.0] if any(x <= 0 for x in (self.ratios or self.skip_scales)) else []
        return off + sorted(x for x in given if x > 0)

    def validate(self) -> None:
        """Raise InputError on the first value that cannot be used."""
        self.model.validate()
        self.task.validate()
        self.execution.validate()
        self.model.rope_factor(self.task.length)
        least = 2 * CoSA.block_size
        allowed = f"at least {least}, two blocks of {CoSA.block_size} tokens: one block is always kept"
        _require(self.task.length >= least, "task.length", self.task.length, allowed)
        _shares("budgets", self.budgets)
        given = not self.ratios or self.skip_scales == PAPER_SCALES
        _require(given, "skip_scales", list(self.skip_scales), "either skip_scales or ratios, not both")
        for name in ("skip_scales", "ratios"):
            values = getattr(self, name)
            once = len(set(values)) == len(values) and all(math.isfinite(x) for x in values)
            _require(once and sum(x <= 0 for x in values) <= 1, name, list(values), "finite numbers, each once")
        used = "ratios" if self.ratios else "skip_scales"
        _require(any(x > 0 for x in self.scales), used, list(getattr(self, used)), "at least one above 0")
        for ratio in self.ratios:
            _require(ratio <= 1, "ratios", ratio, "at most 1: delta / N is clamped there")
        _each("orders", self.orders, ORDERS)
        both = "hrm_first" in self.orders and len(self.orders) > 1
        _require(both, "orders", list(self.orders), "hrm_first and at least one of ascending, descending")
        _require(0 < self.tolerance <= 0.05, "tolerance", self.tolerance, "above 0, at most 0.05")
        _require(self.search_limit >= 1, "search_limit", self.search_limit, "an integer of at least 1")
        _require(1 <= self.stride <= 128, "stride", self.stride, "1 to 128")
        _require(self.resamples >= 100, "resamples", self.resamples, "at least 100")
        _require(1 <= self.workers <= 64, "workers", self.workers, "1 to 64")
        _require(self.task.precision is None, "task.precision", self.task.precision, "null: all windows are needed")
        _out(self.out)
        _out(self.runs)


@dataclass(frozen=True)
class FrontierAnalysis:
    """Pareto frontiers of all cells of a store, the areas between them, and the best method at given budgets.

    Args:
        directories: results directories of ``evalkit run``.
        budgets: realized budgets at which the best method is named.
        slack: how far above a budget a setting may lie and still count as within it.
        by: ``method`` joins all settings of a method in one frontier; ``series`` tells visiting orders apart.
        interpolation: between two settings of a frontier: ``step`` takes the cheaper one's quality, ``linear`` mixes.
        resamples: of the bootstrap over samples.
        seed: of the bootstrap.
        out: directory of the files.
    """

    directories: tuple[str, ...] = ()
    budgets: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5)
    slack: float = 0.005
    by: str = "method"
    interpolation: str = "step"
    resamples: int = 2000
    seed: int = 0
    out: str = "results/analysis"

    def validate(self) -> None:
        """Raise InputError on the first value that cannot be used."""
        shown = list(self.directories)
        _require(bool(shown), "directories", shown, "at least one results directory: 'directories=[results/runs]'")
        for item in self.directories:
            _require(Path(item).expanduser().is_dir(), "directories", item, "a results directory of evalkit run")
        _shares("budgets", self.budgets)
        _require(0 <= self.slack < 0.1, "slack", self.slack, "0 to below 0.1")
        _require(self.by in GROUPINGS, "by", self.by, near_matches(self.by, GROUPINGS))
        fine = self.interpolation in INTERPOLATIONS
        _require(fine, "interpolation", self.interpolation, near_matches(self.interpolation, INTERPOLATIONS))
        _require(self.resamples >= 100, "resamples", self.resamples, "at least 100")
        _require(0 <= self.seed < 2**32, "seed", self.seed, "an integer from 0 to 2^32 - 1")
        _out(self.out)


@dataclass(frozen=True)
class FiguresAnalysis:
    """A list of commands, run one after another: a set of figures in one command.

    Args:
        steps: arguments of ``evalkit``, one command each.
        keep_going: run the other steps after one has failed.
    """

    steps: tuple[str, ...] = ()
    keep_going: bool = False

    def validate(self) -> None:
        """Raise InputError on a step that is no command of an analysis, a run or a report."""
        _require(bool(self.steps), "steps", list(self.steps), "at least one command")
        for step in self.steps:
            try:
                first = shlex.split(step)[:1]
            except ValueError as error:
                raise InputError("steps", step, f"a command line ({error})") from None
            _require(first[0:1] in (["run"], ["analyze"], ["report"]), "steps", step, "run, analyze or report ...")


def plain_settings(settings: object) -> dict[str, object]:
    """Settings as JSON-ready values."""
    from ..config import plain

    assert dataclasses.is_dataclass(settings)
    found: dict[str, object] = plain(settings)
    return found
