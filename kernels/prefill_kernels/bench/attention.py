"""The whole attention call of CoSA against dense kernels, on synthetic and on captured inputs."""

from __future__ import annotations

from collections.abc import Callable

from .config import SYNTHETIC, AttentionBench
from .inputs import Inputs, captured, prefix, synthetic_sets
from .measure import Bench, bisect_scale, dense, whole_call

NORMAL = "normal inputs (flat mass)"
"""Standard normal inputs as rows of other methods name them: the attention mass of their blocks hardly differs, so that
what keeps a share of the mass keeps nearly that share of the blocks."""

More = Callable[[list[Inputs], str], None]
"""Measures something else on inputs that dense kernels were measured on; told what rows call the inputs."""


def run(settings: AttentionBench, bench: Bench, more: More | None = None) -> None:
    """Measure every length, or the length of the captured inputs.

    Args:
        settings: validated settings.
        bench: the bench.
        more: called with the inputs of each length and kind, of captured ones with the first tokens too where
            ``lengths`` holds a shorter length.

    Raises:
        BenchError: the file of captured inputs cannot be used.
        WrongResult: a kernel does not compute what it should.
    """
    if settings.inputs != SYNTHETIC:
        _captured(settings, bench, captured(settings.inputs, bench.device, settings.seed), more)
        return
    for tokens in settings.lengths:
        sets = synthetic_sets(bench.shape, tokens, settings.seed, bench.device, bench.dtype)
        dense(bench, "attention", settings.variants, sets)
        if "cosa" in settings.variants:
            _budgets(settings, bench, sets, "")
        if more is not None:
            more(sets, NORMAL)
        del sets
        for sigma in settings.sigmas if "cosa" in settings.variants or more is not None else ():
            seed = settings.seed + 5
            sets = synthetic_sets(bench.shape, tokens, seed, bench.device, bench.dtype, sigma)
            inputs = f"sigma {sigma:g}"
            # Values decide how much power a product takes, and so the clock: dense kernels run on these inputs too.
            dense(bench, "attention", settings.variants, sets, inputs)
            if "cosa" in settings.variants:
                _operating_point(settings, bench, sets, "", f", {inputs}")
            if more is not None:
                more(sets, inputs)
            del sets


def _captured(settings: AttentionBench, bench: Bench, sets: list[Inputs], more: More | None) -> None:
    """Means over layers, of CoSA and of what ``more`` measures; the latter on the shorter lengths besides."""
    dense(bench, "attention", settings.variants, sets)
    if "cosa" in settings.variants:
        _cosa_captured(settings, bench, sets)
    if more is None:
        return
    more(sets, sets[0].name)
    for tokens in (n for n in settings.lengths if n < sets[0].tokens):
        first = [prefix(one, tokens, settings.seed) for one in sets]
        dense(bench, "attention", settings.variants, first)
        more(first, first[0].name)


def _cosa_captured(settings: AttentionBench, bench: Bench, sets: list[Inputs]) -> None:
    """Stage-1 shares, Top-p without and with the vote, and the operating point."""
    begin, stride = f"{sets[0].name}, ", settings.strides[0]
    _budgets(settings, bench, sets, begin)
    for p in settings.top_p:
        name = f"{begin}Top-p {p:g}"
        whole_call(bench, f"{name}, vote off, stride {stride}", sets, stride=stride, p=p)
        for scale in settings.skip_scales:
            setting = f"{name}, skip scale {scale:g}, stride {stride}"
            whole_call(bench, setting, sets, stride=stride, skip_scale=scale, p=p)
    _operating_point(settings, bench, sets, begin, "")


def _budgets(settings: AttentionBench, bench: Bench, sets: list[Inputs], begin: str) -> None:
    for budget in settings.budgets:
        for stride in settings.strides:
            setting = f"{begin}Stage-1 {_percent(budget)}, vote off, stride {stride}"
            whole_call(bench, setting, sets, stride=stride, budget=budget)


def _operating_point(settings: AttentionBench, bench: Bench, sets: list[Inputs], begin: str, suffix: str) -> None:
    """Stage-1 share, with the vote tuned until the realized budget is the target."""
    stride = settings.strides[0]
    plans = [bench.select(bench.scores(one, stride), one.tokens, budget=settings.stage1) for one in sets]
    scale = bisect_scale(bench, sets, plans, settings.target)
    setting = f"{begin}Stage-1 {_percent(settings.stage1)} to B {_percent(settings.target)}, stride {stride}{suffix}"
    whole_call(bench, setting, sets, stride=stride, skip_scale=scale, budget=settings.stage1)


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
