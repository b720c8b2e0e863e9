"""Settings of the benchmarks that run methods or models; nothing heavy is imported to check them."""

from __future__ import annotations

from dataclasses import dataclass

from prefill_kernels.bench.config import (
    BLOCK,
    CAPTURES,
    DENSE,
    NATIVE_PATHS,
    PAGE_BACKENDS,
    SYNTHETIC,
    AttentionBench,
    BenchError,
    BenchSettings,
    require,
    require_captures,
    require_choices,
    require_each,
    require_shares,
    require_variants,
)

from ..config import table_named
from ..errors import InputError, near_matches
from ..methods.base import Method
from ..methods.presets import from_text, names

BASELINES = ("xattention", "flexprefill", "minference", "blasst")
COSA = ("cosa:select.p=0.95", "cosa:select.rule=budget:select.budget=0.2")
TTFT_VARIANTS = ("fa2", "cudnn", "cosa", "cosa_vote", "harness", "harness_dense")


def methods_among(variants: tuple[str, ...], others: tuple[str, ...]) -> dict[str, Method]:
    """Methods of the variants that are none of ``others``, by variant.

    Raises:
        BenchError: an unknown variant, or a setting behind a preset that cannot be used.
    """
    found = {}
    for variant in (item for item in variants if item not in others):
        if variant.partition(":")[0] not in names():
            raise BenchError("variants", variant, near_matches(variant, {*others, *names()}))
        try:
            found[variant] = from_text(variant, "variants")
        except InputError as error:
            raise BenchError(error.field, error.value, error.allowed) from None
    return found


@dataclass(frozen=True)
class MethodsBench(AttentionBench):
    """The whole attention call of sparse methods, selection included, against dense kernels.

    Args:
        inputs: ``synthetic`` (the 8B shape), or a safetensors file of captured Q, K and V. Methods are measured at its
            length and, on its first tokens, at each of ``lengths`` below that.
        variants: dense kernels; ``cosa`` (the sweep that the settings below describe); and methods, by preset, with
            settings behind it: ``xattention``, ``xattention:stride=16:threshold=0.95``, ``cosa:select.p=0.95``.
        budgets: Stage-1 shares of the causal blocks, vote off.
        strides: of the proxy; the first is that of everything but ``budgets``.
        stage1, target: the operating point: Stage-1 share, and the realized block budget that the vote is tuned to.
        sigmas: spread of the synthetic inputs' blocks, in logits, at the operating point and for the methods. Methods
            are measured on standard normal inputs too, where all that keep a share of the mass keep nearly everything.
        top_p: Top-p thresholds on captured inputs.
        skip_scales: skip scales (capital delta) on captured inputs, each with every Top-p threshold.
    """

    variants: tuple[str, ...] = (*DENSE, "cosa", "xattention", "xattention:stride=16", *BASELINES[1:], *COSA)

    def validate_variants(self) -> None:
        """Every method can be made, and no table for one model's layers is asked for on synthetic inputs."""
        found = self.methods()
        require_variants(self.variants, (*DENSE, "cosa", *found))
        for variant, method in found.items() if self.inputs == SYNTHETIC else ():
            field = table_named(method)
            require(field is None, "variants", variant, f"{field} only with inputs=<file>: it is for a model's layers")

    def methods(self) -> dict[str, Method]:
        """The methods by variant."""
        return methods_among(self.variants, (*DENSE, "cosa"))


@dataclass(frozen=True)
class TtftBench(BenchSettings):
    """Time to first token of a model with random weights.

    Args:
        lengths: prompt lengths, multiples of 128.
        repeats: measured forwards, after one that warms up.
        variants: ``fa2``, ``cudnn``; ``cosa`` (fixed Stage-1 budget, no vote); ``cosa_vote`` (``stage1`` and
            ``skip_scale``); ``harness`` and ``harness_dense`` (CoSA as ``cosa``, and SDPA, through a Session); and
            methods, by preset, with settings behind it: ``xattention``, ``xattention:stride=16``. Random weights spread
            attention evenly, so that a method which keeps a share of the mass keeps nearly that share of the blocks.
        budget: Stage-1 share of ``cosa`` and ``harness``.
        stride: of the proxy.
        stage1, skip_scale: of ``cosa_vote``; the realized budget is reported.
        loss: also time the loss on all tokens of the ``harness`` variants, with its fidelity to the dense model, and
            take the peak memory of that; the dense states are made while the run's cache is held, as a perplexity cell
            without its dense twin on disk does.
        profile: directory for one table of kernel times a variant and length; None = none.
        layers, hidden, intermediate, heads, kv_heads, dim, vocab: the model; Qwen3-8B's by default.
    """

    lengths: tuple[int, ...] = (4096, 32768, 131072)
    repeats: int = 3
    variants: tuple[str, ...] = ("fa2", "cudnn", "cosa", "harness", *BASELINES)
    budget: float = 0.2
    stride: int = 8
    stage1: float = 0.29
    skip_scale: float = 2000.0
    loss: bool = False
    profile: str | None = None
    layers: int = 36
    hidden: int = 4096
    intermediate: int = 12288
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    vocab: int = 151936

    def validate(self) -> None:
        """Raise BenchError on the first value that cannot be used."""
        super().validate()
        whole = f"multiples of {BLOCK} tokens"
        require_each("lengths", self.lengths, lambda n: n >= BLOCK and n % BLOCK == 0, whole)
        found = self.methods()
        require_variants(self.variants, (*TTFT_VARIANTS, *found))
        require_shares("budget", [self.budget])
        require_shares("stage1", [self.stage1])
        require(1 <= self.stride <= BLOCK, "stride", self.stride, f"1 to {BLOCK}")
        require(self.skip_scale > 0, "skip_scale", self.skip_scale, "above 0")
        for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "dim", "vocab"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "an integer of at least 1")
        require(self.heads % self.kv_heads == 0, "kv_heads", self.kv_heads, f"a divisor of heads={self.heads}")
        for variant, method in found.items():
            try:
                method.check_model(self.layers, self.heads)
            except InputError as error:
                raise BenchError("variants", variant, f"{error.field}={error.value!r}: {error.allowed}") from None

    def methods(self) -> dict[str, Method]:
        """The methods by variant."""
        return methods_among(self.variants, TTFT_VARIANTS)


PAGE_VARIANTS = ("original", "online_64", "online_128", "flashinfer", "flashinfer_replan")


@dataclass(frozen=True)
class PageModelBench(BenchSettings):
    """Prefill throughput of a model with 16 query heads a KV head under captured page ids.

    Random weights select at random, so that the pages are those of a capture: layer l and KV head h replay the captured
    head number ``l x kv_heads + h``, taken in turn. Every variant reads the same paged cache.

    Args:
        lengths: prompt lengths, each of a capture with the pages of all its queries.
        repeats: measured rounds, in each of which every variant prefills once, after two that warm up. Gains are paired
            by round and have a 95 % interval from 6 rounds on; of 9, one at each end may be an outlier.
        captures: files of ``evalkit capture`` with pages.
        variants: ``original`` (queries in their own order), ``online_64`` and ``online_128`` (regrouped in every call),
            ``flashinfer`` (a request a query, planned beforehand) and ``flashinfer_replan`` (planned in every call).
        kv_dtypes: ``model`` (bfloat16) and ``fp8`` (a cache that quantises as it is written, at a fixed scale).
        chunk: tokens of a prefill chunk; None = the whole prompt in one call.
        backend: of the union kernel.
        native_backend: what ``flashinfer`` runs, one of :data:`prefill_kernels.bench.config.NATIVE_PATHS`: the fastest
            that ``bench pageweaver`` found. The product with the scale of V is part of it.
        layers, hidden, intermediate, heads, kv_heads, dim, vocab: the model; by default Qwen3-1.7B's with its 16 query
            heads on one KV head.
    """

    lengths: tuple[int, ...] = (8192, 32768, 65536)
    repeats: int = 9
    captures: tuple[str, ...] = CAPTURES
    variants: tuple[str, ...] = PAGE_VARIANTS
    kv_dtypes: tuple[str, ...] = ("model", "fp8")
    chunk: int | None = 8192
    backend: str = "auto"
    native_backend: str = "decode:fa2"
    layers: int = 28
    hidden: int = 2048
    intermediate: int = 6144
    heads: int = 16
    kv_heads: int = 1
    dim: int = 128
    vocab: int = 151936

    def validate(self) -> None:
        """Raise BenchError on the first value that cannot be used."""
        super().validate()
        require(bool(self.captures), "captures", list(self.captures), "at least one file")
        require_choices("variants", self.variants, PAGE_VARIANTS)
        require("original" in self.variants, "variants", list(self.variants), "must hold original: gains are over it")
        require_choices("kv_dtypes", self.kv_dtypes, ("model", "fp8"))
        whole = self.chunk is None or (self.chunk >= BLOCK and self.chunk % BLOCK == 0)
        require(whole, "chunk", self.chunk, f"a multiple of {BLOCK} tokens, or null")
        require_choices("backend", [self.backend], ("auto", *PAGE_BACKENDS))
        require_choices("native_backend", [self.native_backend], NATIVE_PATHS)
        for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "dim", "vocab"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "an integer of at least 1")
        require(self.heads % self.kv_heads == 0, "kv_heads", self.kv_heads, f"a divisor of heads={self.heads}")

    def check_files(self) -> None:
        """Raise BenchError on a capture that is not there."""
        require_captures(self.captures)
