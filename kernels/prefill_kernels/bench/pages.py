"""PageWeaver's complete call, regroup + union preparation + attention, on page ids of a selector.

Three paths on one backend: the queries in their own order, in an order that was searched beforehand, and in one that
is searched in every call. The same page ids run through FlashInfer's paged decode and through the direct KV-page union.
Q, K and V are synthetic: time does not depend on their values. KV is quantised before the call, as a cache would be.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..backends import BackendUnavailable
from ..fp8 import Fp8KV, quantize_kv
from ..kv_union import kv_union_attention, partial_bytes
from ..page_attention import attend_pages, union_attention
from ..paged import PagedKV
from ..pages import GROUP, PagePlan, page_support
from ..regroup import regroup_queries, regroups
from ..unions import Unions, prepare_unions
from .config import PageBench, WrongResult
from .inputs import Shape
from .measure import Bench
from .native import NativePath, flashinfer_problem, left_out
from .page_inputs import PageInputs, Selection, captured_pages, page_inputs, rotation, synthetic_pages

NAME = "pageweaver"
TOLERANCE = {"model": 1e-2, "fp8": 5e-2}
"""Relative L2 distance from float32 on the same keys and values; a wrong page gives far more."""
PARTIALS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Precisions of the KV-page union's partial outputs."""
CHECKED = 64
"""Queries that are computed again in float32."""
KV_NAMES = {"model": "bf16 KV", "fp8": "fp8 KV"}


@dataclass
class Case:
    """One selection in one precision, with what is measured of it.

    Attributes:
        bench: the bench.
        selection: the pages.
        inputs: taken in turn.
        caches: of each input, quantised where the precision is FP8.
        kv_dtype: ``model`` or ``fp8``.
        device: where the call runs.
        native_ms: milliseconds of FlashInfer's path by KV precision.
    """

    bench: Bench
    selection: Selection
    inputs: list[PageInputs]
    caches: list[PagedKV | Fp8KV]
    kv_dtype: str
    native_ms: dict[str, float] = field(default_factory=dict)

    @property
    def first(self) -> PageInputs:
        """Inputs that are checked."""
        return self.inputs[0]

    def plan(self, window: int = 0) -> PagePlan:
        """The plan under a regroup window."""
        return self.selection.plan(self.bench.device, regroup=window, kv_dtype=self.kv_dtype)

    def setting(self, *more: str) -> str:
        """As rows name it."""
        one, chosen = self.first, self.selection
        heads, dim = one.q.shape[1], one.q.shape[3]
        what = [
            f"{chosen.source} {chosen.name}",
            f"last {len(chosen.positions)} queries",
            f"synthetic Q, K, V, {heads} heads on 1 KV head, d {dim}",
            f"page {chosen.page_size}, top {chosen.pages.shape[1]}",
            KV_NAMES[self.kv_dtype],
        ]
        return ", ".join([*what, *more])


@dataclass(frozen=True)
class Counts:
    """Page visits of a call: what queries selected, and what groups went through."""

    members: int
    unions: int
    halves: int
    imbalance: int
    groups: int

    @property
    def ratios(self) -> dict[str, float]:
        """Means over groups, and the useful share of executed rows."""
        return {
            "mean_union": self.unions / self.groups,
            "mean_halves": self.halves / self.groups,
            "mean_imbalance": self.imbalance / self.groups,
            "useful_share": self.members / (GROUP * self.unions),
        }


def count(unions: Unions) -> Counts:
    """Count a call's unions. Waits for the device."""
    bits = (unions.members[..., None] >> torch.arange(GROUP, device=unions.members.device)) & 1
    low, high = ((bits[..., part].sum(-1) > 0).sum(-1) for part in (slice(0, 4), slice(4, 8)))
    return Counts(
        members=int(bits.sum()),
        unions=int(unions.count.sum()),
        halves=int((low + high).sum()),
        imbalance=int((low - high).abs().sum()),
        groups=unions.count.numel(),
    )


def run(settings: PageBench, bench: Bench) -> None:
    """Measure every capture, their geometric means, and the synthetic overlaps.

    Raises:
        BenchError: a capture that cannot be used, or has none of the named ones.
        WrongResult: a path does not compute what the page ids mean.
    """
    bench.shape = Shape(settings.heads, 1, settings.dim)
    selections = [
        one.last(settings.queries) for path in settings.captures for one in captured_pages(path, settings.kv_head)
    ]
    missing = set(settings.named) - {one.name for one in selections}
    if selections and missing:
        print(f"no geometric mean over {', '.join(sorted(missing))}: not captured", file=sys.stderr, flush=True)
    found: dict[tuple[str, str, str], dict[str, dict[str, float]]] = {}
    for selection in selections:
        for key, metrics in measure(settings, bench, selection).items():
            found.setdefault(key, {})[selection.name] = metrics
    for key, by_name in found.items():
        _geometric_mean(settings, bench, key, by_name)
    for tokens in settings.lengths if settings.shared else ():
        _overlaps(settings, bench, tokens)


def measure(
    settings: PageBench, bench: Bench, selection: Selection, *, beside: bool = True
) -> dict[tuple[str, str, str], dict[str, float]]:
    """Measure all paths of a selection.

    Args:
        settings: of the benchmark.
        bench: the bench.
        selection: the pages.
        beside: also FlashInfer and the direct KV-page union, where the settings ask for them.

    Returns:
        Metrics by (variant, KV precision, backend).
    """
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    native_ms: dict[str, float] = {}
    cases = [case_of(settings, bench, selection, kv_dtype, native_ms) for kv_dtype in settings.kv_dtypes]
    for case in cases if beside and settings.native else ():
        native(case)
    for case in cases:
        for backend in settings.backends or (bench.backend,):
            try:
                paths = measure_paths(settings, case, backend)
            except BackendUnavailable as error:
                left_out(f"{backend}, {KV_NAMES[case.kv_dtype]}", error)
                continue
            found |= {(variant, case.kv_dtype, backend): metrics for variant, metrics in paths.items()}
        if beside and settings.kv_union and case.kv_dtype == "model":
            kv_union(case, bench.backend)
    return found


def case_of(
    settings: PageBench, bench: Bench, selection: Selection, kv_dtype: str, native_ms: dict[str, float]
) -> Case:
    """Make the inputs of a selection in one precision."""
    make = functools.partial(
        page_inputs,
        selection,
        heads=settings.heads,
        kv_heads=1,
        dim=settings.dim,
        device=bench.device,
        dtype=bench.dtype,
    )
    inputs = [make(seed=settings.seed)]
    inputs += [make(seed=settings.seed + i) for i in range(1, rotation(inputs[0]))]
    caches: list[PagedKV | Fp8KV] = [quantize_kv(one.kv) if kv_dtype == "fp8" else one.kv for one in inputs]
    return Case(bench, selection, inputs, caches, kv_dtype, native_ms)


# ---------------------------------------------------------------------------------------------------------- three paths
def measure_paths(settings: PageBench, case: Case, backend: str) -> dict[str, dict[str, float]]:
    """Original, precomputed and online order on one backend: checked, timed, stages apart, written as rows."""
    bench, original = case.bench, case.plan()
    found: dict[str, dict[str, float]] = {}
    base = _path(case, "original", original, backend, None)
    found["original"] = base
    for window in settings.windows:
        plan = case.plan(window)
        if not regroups(plan):
            print(f"{case.setting()}: {plan.num_pages} pages are beyond the capacity: not regrouped", file=sys.stderr)
            continue
        ids = regroup_queries(plan, backend=_preparation(backend))
        found[f"precomputed_{window}"] = _path(case, f"precomputed_{window}", plan, backend, ids, base)
        found[f"online_{window}"] = _path(case, f"online_{window}", plan, backend, None, base)
    for variant, metrics in found.items():
        bench.rows.add(NAME, variant, case.selection.kv_len, case.setting(backend), **metrics)
    return found


def _path(
    case: Case, variant: str, plan: PagePlan, backend: str, ids: Tensor | None, base: dict[str, float] | None = None
) -> dict[str, float]:
    """Metrics of one path; ``ids`` in place of a search, ``base`` the metrics of the original order."""
    scale, preparation = case.first.scale, _preparation(backend)

    def whole(one: PageInputs, kv: PagedKV | Fp8KV) -> Tensor:
        order = regroup_queries(plan, backend=preparation) if ids is None else ids
        unions = prepare_unions(plan, order, backend=preparation)
        return union_attention(one.q, kv, plan, unions, scale=scale, backend=backend)

    order = regroup_queries(plan, backend=preparation) if ids is None else ids
    unions = prepare_unions(plan, order, backend=preparation)
    what = f"{variant} at {case.selection.kv_len} tokens, {case.setting(backend)}"
    errors = check_pages(what, case, plan, whole(case.first, case.caches[0]))
    pairs = list(zip(case.inputs, case.caches, strict=True))
    calls = [functools.partial(whole, one, kv) for one, kv in pairs]
    ms = case.bench.mean_ms(calls)
    attention_ms = case.bench.mean_ms(
        functools.partial(union_attention, one.q, kv, plan, unions, scale=scale, backend=backend) for one, kv in pairs
    )
    union_ms = case.bench.mean_ms([functools.partial(prepare_unions, plan, order, backend=preparation)])
    regroup_ms = 0.0
    if ids is None and plan.regroup:
        regroup_ms = case.bench.mean_ms([functools.partial(regroup_queries, plan, backend=preparation)])
    counts = count(unions)
    visit = 4.0 * case.first.q.shape[1] * plan.page_size * case.first.q.shape[3] / 1e9
    metrics = {
        "ms": ms,
        "regroup_ms": regroup_ms,
        "union_ms": union_ms,
        "attention_ms": attention_ms,
        "preparation_share": (regroup_ms + union_ms) / ms,
        **counts.ratios,
        "tflops": visit * GROUP * counts.unions / ms,
        "attention_tflops": visit * GROUP * counts.unions / attention_ms,
        "useful_tflops": visit * counts.members / ms,
        **errors,
    }
    if base is not None:
        metrics["gain"] = (base["ms"] - ms) / base["ms"]
        # The regrouping's own gain is gone where preparing takes this share of the original call.
        metrics["break_even_preparation"] = (base["ms"] - attention_ms) / base["ms"]
    for kv_dtype, native_ms in case.native_ms.items():
        metrics[f"speedup_flashinfer_{'fp8' if kv_dtype == 'fp8' else 'bf16'}"] = native_ms / ms
    if case.native_ms:
        metrics["speedup_flashinfer"] = min(case.native_ms.values()) / ms
    return metrics


# --------------------------------------------------------------------------------------------------------------- checks
def check_pages(what: str, case: Case, plan: PagePlan, out: Tensor) -> dict[str, float]:
    """Compare some queries of an output with attention over their supports in float32.

    Returns:
        ``rel_err``, the relative L2 distance from float32 on the keys and values that the call read; for FP8 also
        ``quantization_err``, that of float32 on the quantised from float32 on the given ones.

    Raises:
        WrongResult: beyond :data:`TOLERANCE`.
    """
    queries = plan.length
    rows = torch.cat([torch.arange(queries)[part] for part in _parts(queries)]).unique().to(out.device)
    few = replace(
        plan,
        pages=plan.pages[:, rows].contiguous(),
        positions=plan.positions[rows].contiguous(),
        cu_seqlens=(0, len(rows)),
        regroup=0,
        kv_dtype="model",
    )
    q, scale = case.first.q[:, :, rows].float(), case.first.scale
    given = replace(case.first.kv, k_pages=case.first.kv.k_pages.float(), v_pages=case.first.kv.v_pages.float())
    expected = exact = attend_pages(q, given, few, scale)
    errors = {}
    if isinstance(case.caches[0], Fp8KV):
        expected = attend_pages(q, case.caches[0].dequantize(), few, scale)
        errors["quantization_err"] = _distance(expected, exact)
    errors = {"rel_err": _distance(out[:, :, rows].float(), expected), **errors}
    if not errors["rel_err"] <= TOLERANCE[case.kv_dtype]:  # written so that NaN is wrong
        raise WrongResult(f"{what}: {errors['rel_err']:.2g} away from float32 (relative L2)")
    return errors


def _parts(queries: int) -> list[slice]:
    third = CHECKED // 3
    middle = max(0, queries // 2 - third // 2)
    return [slice(0, third), slice(middle, middle + third), slice(max(0, queries - third), queries)]


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-20))


# --------------------------------------------------------------------------------------------------------------- beside
def native(case: Case) -> None:
    """FlashInfer's path: the faster of its backends that run, planned beforehand; planning is a metric of its own."""
    if (problem := flashinfer_problem()) is not None:
        print(f"flashinfer: left out ({problem})", file=sys.stderr, flush=True)
        return
    plan, one = case.plan(), case.first
    caches = [(kv.k_pages, kv.v_pages.contiguous()) for kv in case.caches]
    best: dict[str, float] = {}
    for backend in ("auto", "fa2"):
        what = f"flashinfer {backend}, {KV_NAMES[case.kv_dtype]}"
        try:
            paths = [
                NativePath(plan, kv, heads=one.q.shape[1], scale=one.scale, dtype=one.q.dtype, backend=backend)
                for kv in case.caches
            ]
            out = paths[0](one.q, *caches[0])
        except Exception as error:  # too old, not for this precision, or cannot be compiled here
            left_out(what, error)
            continue
        errors = check_pages(f"{what}, {case.setting()}", case, plan, out)
        ms = case.bench.mean_ms(
            functools.partial(path, each.q, k, v) for path, each, (k, v) in zip(paths, case.inputs, caches, strict=True)
        )
        if not best or ms < best["ms"]:
            best = {"ms": ms, "host_plan_ms": _host_ms(paths[0].replan), **errors}
    if best:
        case.native_ms[case.kv_dtype] = best["ms"]
        members = int(page_support(plan).sum())
        visit = 4.0 * one.q.shape[1] * plan.page_size * one.q.shape[3] / 1e9
        best["useful_tflops"] = visit * members / best["ms"]
        case.bench.rows.add(NAME, "flashinfer", case.selection.kv_len, case.setting(), **best)


def _host_ms(call: Callable[[], object], times: int = 3) -> float:
    """Median host milliseconds, the device's work included."""
    spent = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        spent.append(1e3 * (time.perf_counter() - begin))
    return sorted(spent)[times // 2]


def kv_union(case: Case, backend: str) -> None:
    """The direct KV-page union on the same ids: pages gather queries, partial outputs are written and reduced."""
    plan, one, bench = case.plan(), case.first, case.bench
    heads, dim = one.q.shape[1], one.q.shape[3]
    for name, dtype in PARTIALS.items():
        call = functools.partial(
            kv_union_attention, plan=plan, scale=one.scale, backend=_preparation(backend), partial_dtype=dtype
        )
        what = f"kv_union at {case.selection.kv_len} tokens, {case.setting(backend)}"
        try:
            errors = check_pages(what, case, plan, call(one.q, case.caches[0]))
        except torch.OutOfMemoryError as error:
            left_out(f"{what}, {name} partials", error)
            continue
        pairs = list(zip(case.inputs, case.caches, strict=True))
        ms = bench.mean_ms(functools.partial(call, each.q, kv) for each, kv in pairs)
        metrics = {"ms": ms, "partials": partial_bytes(plan, heads, dim, dtype) / 2**30, **errors}
        if bench.device.type == "cuda":
            metrics["reduction_ms"] = _kernel_ms(functools.partial(call, one.q, case.caches[0]), "reduce_kernel")
        for kv_dtype, native_ms in case.native_ms.items():
            metrics[f"speedup_flashinfer_{'fp8' if kv_dtype == 'fp8' else 'bf16'}"] = native_ms / ms
        bench.rows.add(NAME, "kv_union", case.selection.kv_len, case.setting(f"{name} partials"), **metrics)


def _kernel_ms(call: Callable[[], object], kernel: str, times: int = 5) -> float:
    """Milliseconds a call spends in kernels whose names begin so."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    found = [item.device_time_total for item in profile.key_averages() if item.key.startswith(kernel)]
    return sum(found) / 1e3 / times


def _preparation(backend: str) -> str:
    """The backend of what has no Hopper version of its own."""
    return "triton" if backend in ("hopper", "cluster") else backend


# -------------------------------------------------------------------------------------------------------- over captures
def _geometric_mean(
    settings: PageBench, bench: Bench, key: tuple[str, str, str], by_name: dict[str, dict[str, float]]
) -> None:
    """Geometric means over the named captures, where all of them were measured."""
    if not set(settings.named) <= set(by_name):
        return
    variant, kv_dtype, backend = key
    chosen = [by_name[name] for name in settings.named]
    metrics = {}
    for name in ("speedup_flashinfer", "speedup_flashinfer_bf16", "speedup_flashinfer_fp8"):
        if all(name in one for one in chosen):
            metrics[name] = math.exp(sum(math.log(one[name]) for one in chosen) / len(chosen))
    if all("gain" in one for one in chosen):
        metrics["gain"] = 1 - math.exp(sum(math.log(1 - one["gain"]) for one in chosen) / len(chosen))
    if metrics:
        setting = f"geometric mean of {len(chosen)} captures, {KV_NAMES[kv_dtype]}, {backend}"
        bench.rows.add(NAME, variant, 0, setting, **metrics)


def _overlaps(settings: PageBench, bench: Bench, tokens: int) -> None:
    """Gain of the online order against the overlap of synthetic ids, and the overlap at which it begins."""
    make = functools.partial(
        synthetic_pages,
        tokens,
        settings.queries,
        page_size=settings.page_size,
        top_k=settings.top_k,
        cluster=settings.clusters,
        seed=settings.seed,
    )
    curves: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for shared in settings.shared:
        found = measure(settings, bench, make(shared=shared), beside=False)
        for key, metrics in found.items():
            if "gain" in metrics and key[0].startswith("online"):
                before = found["original", *key[1:]]["mean_union"]
                curves.setdefault(key, []).append((1 - metrics["mean_union"] / before, metrics["gain"]))
    for (variant, kv_dtype, backend), curve in curves.items():
        point = break_even(curve)
        if point is not None:
            setting = f"synthetic ids, {settings.clusters} clusters, {KV_NAMES[kv_dtype]}, {backend}"
            bench.rows.add(NAME, f"break_even_{variant}", tokens, setting, union_reduction=point)


def break_even(curve: Sequence[tuple[float, float]]) -> float | None:
    """Reduction of the mean union at which the gain is zero, between measured points; None where it never is.

    Args:
        curve: (reduction of the union as a share, gain).
    """
    ordered = sorted(curve)
    for (x0, y0), (x1, y1) in zip(ordered, ordered[1:], strict=False):
        if y0 <= 0 < y1:
            return x0 + (x1 - x0) * -y0 / (y1 - y0)
    return None
