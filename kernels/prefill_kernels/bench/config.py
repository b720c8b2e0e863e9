"""Settings of the kernel benchmarks: plain frozen dataclasses, for the command line here and for the harness's."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

N = TypeVar("N", int, float, str)

SYNTHETIC = "synthetic"
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
DENSE = ("fa2", "cudnn", "flashinfer")
"""Dense kernels: SDPA's FlashAttention 2 and cuDNN, and FlashInfer's FlashAttention 3 where it can be imported."""
BLOCK = 128


class BenchError(ValueError):
    """A setting that cannot be used, or a machine that cannot run the benchmark.

    Args:
        field: name of the setting.
        value: what was given.
        allowed: what would have been accepted, in words.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"{field}={value!r}: {allowed}")


class WrongResult(RuntimeError):
    """A kernel does not compute what it should."""


@dataclass(frozen=True)
class BenchSettings:
    """What every benchmark is told.

    Args:
        lengths: prompt lengths in tokens.
        repeats: least number of timed rounds; fast calls get more.
        seed: seed of the synthetic inputs.
        out: CSV file to append to; None = results/<device>/benchmarks.csv.
        commit: commit of the measured code; None = that of the checkout this package lies in.
    """

    lengths: tuple[int, ...] = LENGTHS
    repeats: int = 5
    seed: int = 0
    out: str | None = None
    commit: str | None = None

    def validate(self) -> None:
        """Raise BenchError on the first value that cannot be used."""
        require_each("lengths", self.lengths, lambda n: n >= BLOCK, f"token counts of at least {BLOCK}")
        require(self.repeats >= 1, "repeats", self.repeats, "an integer of at least 1")
        require(0 <= self.seed < 2**32, "seed", self.seed, "an integer from 0 to 2^32 - 1")
        if self.out is not None:
            require(self.out.endswith(".csv"), "out", self.out, "a file that ends in .csv, or null")

    def check_files(self) -> None:
        """Raise BenchError on a file to read that is not there; asked once the device is known to be."""


@dataclass(frozen=True)
class KernelBench(BenchSettings):
    """The attention kernels alone, on lists that are made beforehand.

    Args:
        variants: dense kernels; ``osk`` (the best backend), ``osk_triton`` (plain Triton) and ``logical_triton``
            (walks every causal block and tests a mask, in the same language).
        budgets: shares of the causal blocks, for jumping against logical skipping.
        stride: of the proxy that orders the lists.
        skip_lengths: lengths at which the cost of a skipped block is measured.
    """

    variants: tuple[str, ...] = (*DENSE, "osk", "osk_triton", "logical_triton")
    budgets: tuple[float, ...] = (0.25, 0.5, 0.75)
    stride: int = 8
    skip_lengths: tuple[int, ...] = (32768,)

    def validate(self) -> None:
        """Raise BenchError on the first value that cannot be used."""
        super().validate()
        require_variants(self.variants, (*DENSE, "osk", "osk_triton", "logical_triton"))
        require_shares("budgets", self.budgets)
        require(1 <= self.stride <= BLOCK, "stride", self.stride, f"1 to {BLOCK}")
        long_enough = f"token counts of at least {2 * BLOCK}"
        require_each("skip_lengths", self.skip_lengths, lambda n: n >= 2 * BLOCK, long_enough, empty=True)


@dataclass(frozen=True)
class AttentionBench(BenchSettings):
    """The whole attention call of CoSA (proxy, selection, kernel) and its stages apart.

    Args:
        inputs: ``synthetic`` (the 8B shape), or a safetensors file of captured Q, K and V, whose length then counts.
        variants: dense kernels, and ``cosa``.
        budgets: Stage-1 shares of the causal blocks, vote off.
        strides: of the proxy; the first is that of everything but ``budgets``.
        stage1, target: the operating point: Stage-1 share, and the realized block budget that the vote is tuned to.
        sigmas: spread of the synthetic inputs' blocks at the operating point, in logits.
        top_p: Top-p thresholds on captured inputs.
        skip_scales: skip scales (capital delta) on captured inputs, each with every Top-p threshold.
    """

    inputs: str = SYNTHETIC
    variants: tuple[str, ...] = (*DENSE, "cosa")
    budgets: tuple[float, ...] = (0.2, 0.36)
    strides: tuple[int, ...] = (8, 16)
    stage1: float = 0.29
    target: float = 0.2
    sigmas: tuple[float, ...] = (1.0, 2.0)
    top_p: tuple[float, ...] = (0.9, 0.95, 0.98)
    skip_scales: tuple[float, ...] = (500.0, 2000.0)

    def validate(self) -> None:
        """Raise BenchError on the first value that cannot be used; a file of inputs must exist."""
        super().validate()
        self.validate_variants()
        require_shares("budgets", self.budgets)
        require_each("strides", self.strides, lambda s: 1 <= s <= BLOCK, f"strides from 1 to {BLOCK}")
        require(0 < self.stage1 <= 1, "stage1", self.stage1, "above 0, at most 1")
        require(0 < self.target < self.stage1, "target", self.target, f"above 0 and below stage1={self.stage1:g}")
        require_each("sigmas", self.sigmas, _positive, "positive numbers", empty=True)
        require_shares("top_p", self.top_p, empty=True)
        require_each("skip_scales", self.skip_scales, _positive, "positive numbers", empty=True)
        if self.inputs != SYNTHETIC:
            require(Path(self.inputs).is_file(), "inputs", self.inputs, "synthetic, or an existing .safetensors file")

    def validate_variants(self) -> None:
        """Every variant can be measured; apart, as a program around this package may know more of them."""
        require_variants(self.variants, (*DENSE, "cosa"))


CAPTURES = tuple(f"captures/smollm2-yarn-{tokens}.safetensors" for tokens in (8192, 32768, 65536))
"""What ``evalkit capture set=pageweaver`` writes."""
PAGE_BACKENDS = ("torch", "triton", "hopper", "cluster")
NATIVE_PATHS = (
    "decode:fa2",
    "prefill:fa2",
    "decode:fa3",
    "prefill:fa3",
    "decode:xqa",
    "decode:fa3-fp8q",
    "prefill:fa3-fp8q",
)
"""FlashInfer's ways through pages, ``<call>:<backend>``; see :class:`prefill_kernels.bench.native.NativePath`."""


@dataclass(frozen=True)
class PageBench(BenchSettings):
    """PageWeaver's call on page ids of a selector: regroup, union preparation and attention; synthetic Q, K and V.

    Args:
        lengths: contexts of the synthetic page ids.
        captures: files of ``evalkit capture`` with pages; none = synthetic ids alone.
        named: captures, ``<tokens>/<layer>``, that the geometric means are taken over; none = no such mean.
        fp8_error_only: measure nothing but the error of FP8 on captures that hold Q, K and V, on a CPU where there is
            no CUDA device. Otherwise that comes first, of those captures that hold them.
        kv_head: KV head of the captures whose pages are replayed.
        queries: last queries of a context, the chunk that is measured.
        heads, dim: query heads on one KV head, and their size.
        windows: regroup windows; none = the original order alone.
        kv_dtypes: ``model`` (bfloat16) and ``fp8``.
        backends: of the union kernel; none = what ``auto`` stands for.
        search: what searches and prepares unions beside a ``hopper`` or ``cluster`` kernel: ``cuda`` (both in one),
            ``triton``, or ``auto``, the first that can run. Rows name it.
        rounds: how often all paths of a selection are timed in turn; gains are paired by round, with an interval.
        budget_ms: how long one measurement lasts, apart from ``repeats``, the least number of its rounds.
        host: also measure the host's time to start a call, and the device's of its CUDA graph.
        native: measure FlashInfer on the same ids, where it is installed.
        native_backends: of :data:`NATIVE_PATHS`, each compiled on first use in 20 to 100 s for each precision; the two
            calls of one backend share a kernel. The fastest that passes its check is the native path.
        kv_union: measure the direct KV-page union on the same ids.
        capacities: pages that the search's bitmaps hold, multiples of 32; captures are measured under the first.
        capacity_lengths: contexts of synthetic ids that are measured under every capacity; none = none.
        shared: synthetic ids: probability that a page is of the query's cluster.
        clusters: synthetic ids: interleaved clusters; a window of eight times as many queries holds a group of each.
        page_size, top_k: synthetic ids: tokens of a page, and pages a query.
    """

    lengths: tuple[int, ...] = (65536,)
    captures: tuple[str, ...] = CAPTURES
    named: tuple[str, ...] = ("8192/8", "8192/22", "32768/8", "32768/22", "65536/8", "65536/20")
    fp8_error_only: bool = False
    kv_head: int = 0
    queries: int = 8192
    heads: int = 16
    dim: int = 128
    windows: tuple[int, ...] = (64, 128)
    kv_dtypes: tuple[str, ...] = ("model", "fp8")
    backends: tuple[str, ...] = ()
    search: str = "auto"
    rounds: int = 9
    budget_ms: float = 100.0
    host: bool = True
    native: bool = True
    native_backends: tuple[str, ...] = NATIVE_PATHS
    kv_union: bool = True
    capacities: tuple[int, ...] = (512, 2048)
    capacity_lengths: tuple[int, ...] = (65536, 131072, 262144)
    shared: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
    clusters: int = 8
    page_size: int = 128
    top_k: int = 16

    def validate(self) -> None:
        """Raise BenchError on the first value that cannot be used."""
        super().validate()
        is_name = re.compile(r"\d+/\d+").fullmatch
        words = "captures as <tokens>/<layer>, or none for no geometric mean"
        require_each("named", self.named, lambda name: bool(is_name(name)), words, empty=True)
        ok = bool(self.captures) or not self.fp8_error_only
        require(ok, "captures", [], "a file at least, as fp8_error_only=true measures nothing else")
        require(self.kv_head >= 0, "kv_head", self.kv_head, "an integer from 0")
        for name in ("queries", "heads", "dim"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "an integer of at least 1")
        require_each("windows", self.windows, lambda w: w in (64, 128), "64 or 128", empty=True)
        require_choices("kv_dtypes", self.kv_dtypes, ("model", "fp8"))
        require_choices("backends", self.backends, PAGE_BACKENDS, empty=True)
        require_choices("search", (self.search,), ("auto", "cuda", "triton"))
        require(self.rounds >= 1, "rounds", self.rounds, "an integer of at least 1; an interval takes 6")
        require(_positive(self.budget_ms), "budget_ms", self.budget_ms, "a positive number of milliseconds")
        require_choices("native_backends", self.native_backends, NATIVE_PATHS, empty=not self.native)
        words = "positive multiples of 32 pages"
        require_each("capacities", self.capacities, lambda pages: pages >= 32 and pages % 32 == 0, words)
        require_each("shared", self.shared, lambda p: 0 <= p <= 1, "numbers from 0 to 1", empty=True)
        require(self.clusters >= 1, "clusters", self.clusters, "an integer of at least 1")
        require(self.top_k >= 3, "top_k", self.top_k, "an integer of at least 3: sink and own page are always selected")
        ok = self.page_size >= 16 and self.page_size % 16 == 0
        require(ok, "page_size", self.page_size, "a positive multiple of 16 tokens")
        least = self.queries + (self.top_k + 1) * self.page_size
        allowed = f"at least {least}: queries={self.queries} and the pages that they choose from"
        if self.shared:
            require(min(self.lengths) >= least, "lengths", list(self.lengths), allowed)
        require_each("capacity_lengths", self.capacity_lengths, lambda n: n >= least, allowed, empty=True)

    def check_files(self) -> None:
        """Raise BenchError on a capture that is not there."""
        require_captures(self.captures)


BENCHES: dict[str, type[KernelBench] | type[AttentionBench] | type[PageBench]] = {
    "kernel": KernelBench,
    "attention": AttentionBench,
    "pageweaver": PageBench,
}


def require(ok: bool, field: str, value: object, allowed: str) -> None:
    """Raise BenchError unless ``ok``."""
    if not ok:
        raise BenchError(field, value, allowed)


def require_each(
    field: str, values: Iterable[N], good: Callable[[N], bool], allowed: str, *, empty: bool = False
) -> None:
    """Every value passes ``good``, none is given twice, and there is one unless ``empty``."""
    values = list(values)
    fine = (empty or values) and len(set(values)) == len(values) and all(good(value) for value in values)
    require(bool(fine), field, values, f"{allowed}, each once")


def require_captures(paths: Iterable[str]) -> None:
    """Every file exists."""
    for path in paths:
        found = Path(path).expanduser().is_file()
        require(found, "captures", path, "an existing file; evalkit capture set=pageweaver makes the default ones")


def require_choices(field: str, values: Iterable[str], known: tuple[str, ...], *, empty: bool = False) -> None:
    """Every value is known and given once, and there is one unless ``empty``."""
    values = list(values)
    ok = (empty or values) and len(set(values)) == len(values) and all(value in known for value in values)
    require(bool(ok), field, values, f"of {', '.join(known)}, each once")


def _positive(x: float) -> bool:
    return math.isfinite(x) and x > 0


def require_shares(field: str, values: Iterable[float], *, empty: bool = False) -> None:
    """Every value is above 0 and at most 1."""
    require_each(field, values, lambda share: 0 < share <= 1, "numbers above 0, at most 1", empty=empty)


def require_variants(values: Iterable[str], known: tuple[str, ...], base: str = "fa2") -> None:
    """Every variant is known, and the baseline is among them."""
    values = list(values)
    for value in values:
        close = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        require(value in known, "variants", value, f"{hint}known: {', '.join(known)}")
    require(base in values, "variants", values, f"must hold {base}: speedups are measured over it")
    require(len(set(values)) == len(values), "variants", values, "each variant once")
