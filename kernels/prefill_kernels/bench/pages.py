"""PageWeaver's complete call, regroup + union preparation + attention, on page ids of a selector.

Three paths on one backend: the queries in their own order, in an order that was searched beforehand, and in one that
is searched in every call. The same page ids run through FlashInfer's paged decode and through the direct KV-page union.
Q, K and V are synthetic: time does not depend on their values. KV is quantised before the call, as a cache would be.

``ms`` is device time, launches hidden; the online call holds the search, the unions and the attention. Where one kernel
searches and prepares the unions, ``regroup_ms`` of the online call is that kernel's time and its ``union_ms`` 0; the
other paths prepare theirs in the same kernel, without its search, and the setting ends with ``search cuda``.
``host_ms`` is what the host spends to start a call, its small tables (windows, slots) cached as in all but the first
call of a shape; ``graph_ms`` the device time of the call replayed as a CUDA graph. FlashInfer's planning is
``host_plan_ms`` and in no ``ms``; the product with the scale of V, which its wrappers make in a kernel of its own, is
in its ``ms``.
"""

from __future__ import annotations

import functools
import math
import statistics
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
from ..page_search import cuda_problem, search_unions
from ..paged import PagedKV
from ..pages import CAPACITY, GROUP, PagePlan, page_support
from ..regroup import regroup_queries, regroups
from ..unions import Unions, prepare_unions
from . import fp8_error
from .captures import captured_layers
from .config import PageBench, WrongResult
from .fp8_error import distance
from .inputs import Shape
from .measure import Bench, Call, host_ms
from .native import NativePath, flashinfer_problem, left_out
from .page_inputs import PageInputs, Selection, page_inputs, rotation, searched_pages, selections, synthetic_pages
from .paired import saved

NAME = "pageweaver"
TOLERANCE = {"model": 1e-2, "fp8": 5e-2}
"""Relative L2 distance from float32 on the same keys and values; a wrong page gives far more."""
PARTIALS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Precisions of the KV-page union's partial outputs."""
CHECKED = 64
"""Queries that are computed again in float32."""
SHARED = 0.75
"""Probability that a synthetic page is of the cluster's, where capacities are compared."""
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_NAMES_OF_KV = {"model": "bf16", "fp8": "fp8"}
"""Of the speedups over FlashInfer."""


def kv_name(kv_dtype: str, dtype: torch.dtype) -> str:
    """Precision of keys and values, as rows name it."""
    return f"{'fp8' if kv_dtype == 'fp8' else _DTYPES.get(dtype, str(dtype))} KV"


@dataclass
class Case:
    """One selection in one precision, with what is measured of it.

    Attributes:
        bench: the bench.
        selection: the pages.
        inputs: taken in turn.
        caches: of each input, quantised where the precision is FP8.
        kv_dtype: ``model`` or ``fp8``.
        native_ms: milliseconds of FlashInfer's path by KV precision.
        capacity: pages of the search's bitmaps.
    """

    bench: Bench
    selection: Selection
    inputs: list[PageInputs]
    caches: list[PagedKV | Fp8KV]
    kv_dtype: str
    native_ms: dict[str, float] = field(default_factory=dict)
    capacity: int = CAPACITY

    @property
    def first(self) -> PageInputs:
        """Inputs that are checked."""
        return self.inputs[0]

    def plan(self, window: int = 0) -> PagePlan:
        """The plan under a regroup window."""
        plan = self.selection.plan(self.bench.device, regroup=window, kv_dtype=self.kv_dtype)
        return replace(plan, capacity=self.capacity)

    @property
    def kv_name(self) -> str:
        """Precision of keys and values."""
        return kv_name(self.kv_dtype, self.first.kv.k_pages.dtype)

    @property
    def pairs(self) -> list[tuple[PageInputs, PagedKV | Fp8KV]]:
        """Inputs and their caches."""
        return list(zip(self.inputs, self.caches, strict=True))

    @property
    def visit(self) -> float:
        """Products of one query with one page, of all heads, in units of 1e9 operations."""
        return 4.0 * self.first.q.shape[1] * self.selection.page_size * self.first.q.shape[3] / 1e9

    def setting(self, *more: str) -> str:
        """As rows name it."""
        one, chosen = self.first, self.selection
        heads, dim = one.q.shape[1], one.q.shape[3]
        what = [
            f"{chosen.source} {chosen.name}",
            f"last {len(chosen.positions)} queries",
            f"synthetic Q, K, V, {heads} heads on 1 KV head, d {dim}",
            f"page {chosen.page_size}, top {chosen.pages.shape[1]}",
            self.kv_name,
        ]
        if self.capacity != CAPACITY:
            what.append(f"bitmaps of {self.capacity} pages")
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

    Every capture is read and checked before the first of them is measured. One that holds Q, K and V also gets the
    error of FP8 on those, see :mod:`.fp8_error`.

    Raises:
        BenchError: a capture that cannot be used, or has none of the named ones.
        WrongResult: a path does not compute what the page ids mean.
    """
    bench.shape = Shape(settings.heads, 1, settings.dim)
    layers = [layer for path in settings.captures for layer in captured_layers(path)]
    chosen = [one for layer in layers for one in selections(layer, settings.kv_head, settings.queries)]
    if "fp8" in settings.kv_dtypes:
        fp8_error.run(layers, bench.rows, bench.device, settings.queries)
    missing = set(settings.named) - {one.name for one in chosen}
    if chosen and missing:
        print(f"no geometric mean over {', '.join(sorted(missing))}: not captured", file=sys.stderr, flush=True)
    found: dict[tuple[str, str, str], dict[str, dict[str, float]]] = {}
    for selection in chosen:
        for key, metrics in measure(settings, bench, selection).items():
            found.setdefault(key, {})[selection.name] = metrics
    for key, by_name in found.items():
        _geometric_mean(settings, bench, key, by_name)
    for tokens in settings.lengths if settings.shared else ():
        _overlaps(settings, bench, tokens)
    for tokens in settings.capacity_lengths:
        _capacities(settings, bench, tokens)


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
        Metrics by (variant, KV precision, backend as rows name it).
    """
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    native_ms: dict[str, float] = {}
    cases = [case_of(settings, bench, selection, kv_dtype, native_ms) for kv_dtype in settings.kv_dtypes]
    for case in cases if beside and settings.native else ():
        native(settings, case)
    for case in cases:
        for backend in settings.backends or (bench.backend,):
            try:
                paths = measure_paths(settings, case, backend)
            except BackendUnavailable as error:
                left_out(f"{backend}, {case.kv_name}", error)
                continue
            label = ", ".join(_label(backend, _search(settings, case, backend)))
            found |= {(variant, case.kv_dtype, label): metrics for variant, metrics in paths.items()}
        if beside and settings.kv_union:
            kv_union(case, bench.backend)
    return found


def case_of(
    settings: PageBench,
    bench: Bench,
    selection: Selection,
    kv_dtype: str,
    native_ms: dict[str, float],
    capacity: int | None = None,
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
    return Case(bench, selection, inputs, caches, kv_dtype, native_ms, capacity or settings.capacities[0])


# ---------------------------------------------------------------------------------------------------------- three paths
@dataclass(frozen=True)
class Path:
    """One way to run the call.

    Attributes:
        name: variant of its rows.
        order: what the stages alone are measured of; paths of one order share them.
        plan: with the window.
        ids: the order, searched beforehand; None = the call searches.
        calls: the complete call on each input.
        errors: of its check.
    """

    name: str
    order: str
    plan: PagePlan
    ids: Tensor | None
    calls: list[Call]
    errors: dict[str, float]


@dataclass(frozen=True)
class Stages:
    """The stages of one order.

    Attributes:
        attention: the attention alone on each input.
        union_ms: milliseconds of the preparation for an order that is there.
        search_ms: milliseconds of ``regroup_ms`` and ``union_ms`` in a call that searches; no search in the original
            order.
        counts: of its unions.
    """

    attention: list[Call]
    union_ms: float
    search_ms: tuple[float, float]
    counts: Counts


def measure_paths(settings: PageBench, case: Case, backend: str) -> dict[str, dict[str, float]]:
    """Original, precomputed and online order on one backend: checked, timed in turn, written as rows."""
    bench, search = case.bench, _search(settings, case, backend)
    setting = case.setting(*_label(backend, search))
    plan = case.plan()
    # The original order costs nothing: it is there before the call, as the precomputed ones are.
    paths = [_path(case, "original", "original", plan, backend, search, regroup_queries(plan))]
    for window in settings.windows:
        plan = case.plan(window)
        if not regroups(plan):
            print(f"{setting}: {plan.num_pages} pages are beyond the capacity: not regrouped", file=sys.stderr)
            bench.rows.add(NAME, f"online_{window}", case.selection.kv_len, setting, regrouped=0.0)
            continue
        ids = regroup_queries(plan, backend=_preparation(backend))
        paths.append(_path(case, f"precomputed_{window}", str(window), plan, backend, search, ids))
        paths.append(_path(case, f"online_{window}", str(window), plan, backend, search))
    orders = {path.order: path for path in paths}
    stages = {order: _stages(case, path, backend, search) for order, path in orders.items()}
    groups: dict[str, Sequence[Call]] = {path.name: path.calls for path in paths}
    groups |= {f"attention of {order}": stage.attention for order, stage in stages.items()}
    rounds = bench.in_turn(groups, settings.rounds)
    found = {path.name: _metrics(case, path, stages, rounds) for path in paths}
    for path in paths if settings.host else ():
        found[path.name] |= _launches(case, path)
    for variant, metrics in found.items():
        bench.rows.add(NAME, variant, case.selection.kv_len, setting, **metrics)
    return found


def _search(settings: PageBench, case: Case, backend: str) -> str:
    """What searches and prepares the unions of the search beside a backend; built here, outside of every clock."""
    searched = [plan for window in settings.windows if regroups(plan := case.plan(window))]
    if backend not in ("hopper", "cluster") or not searched:
        return backend
    if settings.search != "auto":
        return settings.search
    problems = {problem for plan in searched if (problem := cuda_problem(plan))}
    for problem in problems:
        print(f"search in Triton: {problem}", file=sys.stderr, flush=True)
    return "triton" if problems else "cuda"


def _label(backend: str, search: str) -> list[str]:
    """A backend as rows name it, and the search beside it."""
    return [backend] if search == backend else [backend, f"search {search}"]


def _path(
    case: Case, name: str, order: str, plan: PagePlan, backend: str, search: str, ids: Tensor | None = None
) -> Path:
    """Check a path; ``ids`` in place of a search."""
    scale, unites = case.first.scale, _unites(backend, search)

    def whole(one: PageInputs, kv: PagedKV | Fp8KV) -> Tensor:
        unions = search_unions(plan, backend=search) if ids is None else prepare_unions(plan, ids, backend=unites)
        return union_attention(one.q, kv, plan, unions, scale=scale, backend=backend)

    what = f"{name} at {case.selection.kv_len} tokens, {case.setting(*_label(backend, search))}"
    errors = check_pages(what, case, plan, whole(case.first, case.caches[0]))
    return Path(name, order, plan, ids, [functools.partial(whole, one, kv) for one, kv in case.pairs], errors)


def _stages(case: Case, path: Path, backend: str, search: str) -> Stages:
    plan, preparation, mean_ms = path.plan, _preparation(backend), case.bench.mean_ms
    order = functools.partial(regroup_queries, plan, backend=preparation)
    prepare = functools.partial(prepare_unions, plan, order(), backend=_unites(backend, search))
    unions = prepare()
    attend = functools.partial(union_attention, scale=case.first.scale, backend=backend)
    union_ms = mean_ms([prepare])
    search_ms = (0.0, union_ms)
    if plan.regroup and search == "cuda":
        search_ms = (mean_ms([functools.partial(search_unions, plan, backend=search)]), 0.0)
    elif plan.regroup:
        search_ms = (mean_ms([order]), union_ms)
    return Stages(
        attention=[functools.partial(attend, one.q, kv, plan, unions) for one, kv in case.pairs],
        union_ms=union_ms,
        search_ms=search_ms,
        counts=count(unions),
    )


def _metrics(case: Case, path: Path, stages: dict[str, Stages], rounds: dict[str, list[float]]) -> dict[str, float]:
    """Metrics of one path, from rounds in which all were timed."""
    stage, counts = stages[path.order], stages[path.order].counts
    ms, attention_ms = (statistics.median(rounds[name]) for name in (path.name, f"attention of {path.order}"))
    # A path with an order made beforehand does not search.
    regroup_ms, union_ms = stage.search_ms if path.ids is None else (0.0, stage.union_ms)
    useful = case.visit * counts.members
    metrics = {
        "ms": ms,
        "regroup_ms": regroup_ms,
        "union_ms": union_ms,
        "attention_ms": attention_ms,
        "preparation_share": (regroup_ms + union_ms) / ms,
        **counts.ratios,
        "tflops": case.visit * GROUP * counts.unions / ms,
        "attention_tflops": case.visit * GROUP * counts.unions / attention_ms,
        "useful_tflops": useful / ms,
        **path.errors,
    }
    if path.name != "original":
        base = stages["original"]
        metrics |= saved(rounds["original"], rounds[path.name]).metrics("gain")
        base_ms, base_attention = (statistics.median(rounds[name]) for name in ("original", "attention of original"))
        metrics["break_even_preparation"] = (base_ms - attention_ms) / base_ms
        more = regroup_ms + union_ms - base.union_ms
        if more > 0:
            metrics["break_even_attention_speed"] = max(0.0, base_attention - attention_ms) / more
    for kv_dtype, native_ms in case.native_ms.items():
        metrics[f"speedup_flashinfer_{_NAMES_OF_KV[kv_dtype]}"] = native_ms / ms
    if case.native_ms:
        native_ms = min(case.native_ms.values())
        metrics["speedup_flashinfer"] = native_ms / ms
        metrics["break_even_native_tflops"] = useful / ms
        metrics["break_even_native_preparation"] = (native_ms - attention_ms) / native_ms
    return metrics


def _launches(case: Case, path: Path) -> dict[str, float]:
    """Host time to start a call, and device time of its CUDA graph."""
    found = {"host_ms": host_ms(path.calls)}
    if case.bench.device.type == "cuda":
        try:
            graphs = [_graph(call) for call in path.calls]
            found["graph_ms"] = case.bench.mean_ms([graph.replay for graph in graphs])
        except RuntimeError as error:
            left_out(f"{path.name} at {case.selection.kv_len} tokens as a CUDA graph", error)
    return found


def _graph(call: Call) -> torch.cuda.CUDAGraph:
    """A call that has run before, captured."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


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
        errors["quantization_err"] = distance(expected, exact)
    errors = {"rel_err": distance(out[:, :, rows].float(), expected), **errors}
    if not errors["rel_err"] <= TOLERANCE[case.kv_dtype]:  # written so that NaN is wrong
        raise WrongResult(f"{what}: {errors['rel_err']:.2g} away from float32 (relative L2)")
    return errors


def _parts(queries: int) -> list[slice]:
    third = CHECKED // 3
    middle = max(0, queries // 2 - third // 2)
    return [slice(0, third), slice(middle, middle + third), slice(max(0, queries - third), queries)]


# --------------------------------------------------------------------------------------------------------------- beside
def native(settings: PageBench, case: Case) -> None:
    """FlashInfer's path, the fastest of :attr:`PageBench.native_backends` that pass the check, planned beforehand.

    Each has a row of its own, and the fastest another, ``flashinfer``, whose setting names it.
    """
    if (problem := flashinfer_problem()) is not None:
        print(f"flashinfer: left out ({problem})", file=sys.stderr, flush=True)
        return
    plan, one, bench = case.plan(), case.first, case.bench
    caches = [(kv.k_pages, kv.v_pages.contiguous()) for kv in case.caches]
    useful = case.visit * int(page_support(plan).sum())
    found: dict[str, dict[str, float]] = {}
    for name in settings.native_backends:
        what = f"flashinfer {name}, {case.kv_name}"
        try:
            paths = [
                NativePath(plan, kv, heads=one.q.shape[1], scale=one.scale, dtype=one.q.dtype, path=name)
                for kv in case.caches
            ]
            out = paths[0](one.q, *caches[0])
            errors = check_pages(f"{what}, {case.setting()}", case, plan, out)
            calls = [
                functools.partial(path.run, path.queries(each.q), k, v)
                for path, each, (k, v) in zip(paths, case.inputs, caches, strict=True)
            ]
            ms = bench.mean_ms(calls)
        except Exception as error:  # too old, not for this precision, wrong, or cannot be compiled here
            left_out(what, error)
            continue
        metrics = {"ms": ms, "host_ms": host_ms(calls), "host_plan_ms": _host_ms(paths[0].replan), **errors}
        found[name] = {**metrics, "useful_tflops": useful / ms}
    for name, metrics in found.items():
        bench.rows.add(NAME, f"flashinfer {name}", case.selection.kv_len, case.setting(), **metrics)
    if found:
        name = min(found, key=lambda name: found[name]["ms"])
        case.native_ms[case.kv_dtype] = found[name]["ms"]
        setting = case.setting(f"fastest of {len(found)}: {name}")
        bench.rows.add(NAME, "flashinfer", case.selection.kv_len, setting, **found[name])


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
        except (torch.OutOfMemoryError, BackendUnavailable) as error:
            left_out(f"{what}, {name} partials", error)
            continue
        ms = bench.mean_ms(functools.partial(call, each.q, kv) for each, kv in case.pairs)
        metrics = {"ms": ms, "partials": partial_bytes(plan, heads, dim, dtype) / 2**30, **errors}
        if bench.device.type == "cuda":
            metrics["reduction_ms"] = _kernel_ms(functools.partial(call, one.q, case.caches[0]), "reduce_kernel")
        for kv_dtype, native_ms in case.native_ms.items():
            metrics[f"speedup_flashinfer_{_NAMES_OF_KV[kv_dtype]}"] = native_ms / ms
        if case.native_ms:
            metrics["speedup_flashinfer"] = min(case.native_ms.values()) / ms
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


def _unites(backend: str, search: str) -> str:
    """The backend of unions in an order that is there: the online path's kernel, or its gain would hold that too."""
    return search if search == "cuda" else _preparation(backend)


def _preparation(backend: str) -> str:
    """The backend of what has no Hopper version of its own, the steps apart from one another."""
    return "triton" if backend in ("hopper", "cluster") else backend


# -------------------------------------------------------------------------------------------------------- over captures
def _geometric_mean(
    settings: PageBench, bench: Bench, key: tuple[str, str, str], by_name: dict[str, dict[str, float]]
) -> None:
    """Geometric means over the named captures, where there are such and all of them were measured."""
    if not settings.named or not set(settings.named) <= set(by_name):
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
        setting = f"geometric mean of {len(chosen)} captures, {kv_name(kv_dtype, bench.dtype)}, {backend}"
        bench.rows.add(NAME, variant, 0, setting, **metrics)


def _overlaps(settings: PageBench, bench: Bench, tokens: int) -> None:
    """Gain of the online order against the overlap of synthetic ids, and the overlap at which it begins.

    Even ids drawn at random overlap enough for a gain in a long window. The curve therefore begins with ids of the
    least overlap in an order that leaves a search nothing: there the gain is what searching costs.
    """
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
    points = [make(shared=shared) for shared in settings.shared]
    if settings.windows:
        points.insert(0, searched_pages(make(shared=min(settings.shared)), max(settings.windows)))
    for selection in points:
        found = measure(replace(settings, host=False), bench, selection, beside=False)
        for key, metrics in found.items():
            if "gain" in metrics and key[0].startswith("online"):
                before = found["original", *key[1:]]["mean_union"]
                curves.setdefault(key, []).append((1 - metrics["mean_union"] / before, metrics["gain"]))
    for (variant, kv_dtype, backend), curve in curves.items():
        point = break_even(curve)
        if point is not None:
            setting = f"synthetic ids, {settings.clusters} clusters, {kv_name(kv_dtype, bench.dtype)}, {backend}"
            bench.rows.add(NAME, f"break_even_{variant}", tokens, setting, union_reduction=point)


def _capacities(settings: PageBench, bench: Bench, tokens: int) -> None:
    """The calls of one context under every capacity, on synthetic ids in the first precision; too small ones say so."""
    selection = synthetic_pages(
        tokens,
        settings.queries,
        page_size=settings.page_size,
        top_k=settings.top_k,
        shared=SHARED,
        cluster=settings.clusters,
        seed=settings.seed,
    )
    for capacity in settings.capacities:
        case = case_of(settings, bench, selection, settings.kv_dtypes[0], {}, capacity)
        for backend in settings.backends or (bench.backend,):
            try:
                measure_paths(settings, case, backend)
            except BackendUnavailable as error:
                left_out(f"{backend}, bitmaps of {capacity} pages at {tokens} tokens", error)


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
