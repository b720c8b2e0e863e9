"""The whole attention call of CoSA against dense kernels, on synthetic and on captured inputs."""

from __future__ import annotations

from .config import SYNTHETIC, AttentionBench
from .inputs import Inputs, captured, synthetic, synthetic_sets
from .measure import Bench, bisect_scale, dense, whole_call


def run(settings: AttentionBench, bench: Bench) -> None:
    """Measure every length, or the length of the captured inputs.

    Raises:
        BenchError: the file of captured inputs cannot be used.
        WrongResult: a kernel does not compute what it should.
    """
    if settings.inputs != SYNTHETIC:
        _captured(settings, bench, captured(settings.inputs, bench.device, settings.seed))
        return
    for tokens in settings.lengths:
        sets = synthetic_sets(bench.shape, tokens, settings.seed, bench.device, bench.dtype)
        dense(bench, "attention", settings.variants, sets)
        if "cosa" not in settings.variants:
            continue
        _budgets(settings, bench, sets, "")
        del sets
        for sigma in settings.sigmas:
            seed = settings.seed + 5
            one = synthetic(bench.shape, tokens, seed, sigma=sigma, device=bench.device, dtype=bench.dtype)
            _operating_point(settings, bench, [one], "", f", sigma {sigma:g}")


def _captured(settings: AttentionBench, bench: Bench, sets: list[Inputs]) -> None:
    """Means over layers: Stage-1 shares, Top-p without and with the vote, and the operating point."""
    dense(bench, "attention", settings.variants, sets)
    if "cosa" not in settings.variants:
        return
    prefix, stride = f"{sets[0].name}, ", settings.strides[0]
    _budgets(settings, bench, sets, prefix)
    for p in settings.top_p:
        name = f"{prefix}Top-p {p:g}"
        whole_call(bench, f"{name}, vote off, stride {stride}", sets, stride=stride, p=p)
        for scale in settings.skip_scales:
            setting = f"{name}, skip scale {scale:g}, stride {stride}"
            whole_call(bench, setting, sets, stride=stride, skip_scale=scale, p=p)
    _operating_point(settings, bench, sets, prefix, "")


def _budgets(settings: AttentionBench, bench: Bench, sets: list[Inputs], prefix: str) -> None:
    for budget in settings.budgets:
        for stride in settings.strides:
            setting = f"{prefix}Stage-1 {_percent(budget)}, vote off, stride {stride}"
            whole_call(bench, setting, sets, stride=stride, budget=budget)


def _operating_point(settings: AttentionBench, bench: Bench, sets: list[Inputs], prefix: str, suffix: str) -> None:
    """Stage-1 share, with the vote tuned until the realized budget is the target."""
    stride = settings.strides[0]
    plans = [bench.select(bench.scores(one, stride), one.tokens, budget=settings.stage1) for one in sets]
    scale = bisect_scale(bench, sets, plans, settings.target)
    setting = f"{prefix}Stage-1 {_percent(settings.stage1)} to B {_percent(settings.target)}, stride {stride}{suffix}"
    whole_call(bench, setting, sets, stride=stride, skip_scale=scale, budget=settings.stage1)


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
