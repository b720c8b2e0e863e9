"""One kernel, one dense baseline, one whole call: checked, timed, and written as rows."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..backends import resolve_backend
from ..kap import KapScores, kap_scores, sampled_pairs
from ..osk import block_attention
from ..plans import BlockPlan, TileStats, causal_blocks, causal_cells
from ..select import select_blocks
from .check import check_attention, check_dense, check_selection
from .config import BLOCK, WrongResult
from .inputs import Inputs, Shape
from .rows import Rows

Call = Callable[[], Any]
_HOST_CALLS = 8


@dataclass
class Bench:
    """What a measurement needs.

    Attributes:
        rows: where numbers go.
        device: where inputs lie.
        timed: median milliseconds of each of several calls that are taken in turn.
        shape: of synthetic inputs.
        dtype: of synthetic inputs.
        base: milliseconds of the dense kernels on the inputs at hand, by name.
    """

    rows: Rows
    device: torch.device
    timed: Callable[[Sequence[Call]], list[float]]
    shape: Shape = Shape()
    dtype: torch.dtype = torch.bfloat16
    base: dict[str, float] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        """What ``auto`` stands for on the device. It is asked for by name, so that a refused call is an error."""
        return resolve_backend("auto", self.device, self.dtype)

    def scores(self, one: Inputs, stride: int) -> KapScores:
        """The proxy."""
        return kap_scores(one.q, one.kv, stride=stride, scale=one.scale, backend=self.backend)

    def select(self, scores: KapScores, tokens: int, skip_scale: float = -1.0, **rule: Any) -> BlockPlan:
        """Selection over an unchunked prompt; ``rule`` is ``budget`` or ``p``."""
        geometry: dict[str, Any] = {"block_size": BLOCK, "q_offset": 0, "q_len": tokens, "prompt_len": tokens}
        return select_blocks(scores, skip_scale=skip_scale, backend=self.backend, **geometry, **rule)

    def mean_ms(self, calls: Iterable[Call]) -> float:
        """Mean over inputs of the median milliseconds of one call."""
        times = self.timed(list(calls))
        return sum(times) / len(times)

    def in_turn(self, groups: Mapping[str, Sequence[Call]], rounds: int) -> dict[str, list[float]]:
        """Milliseconds of several ways to do the same work, of each the mean over inputs, round by round.

        In a round every way is timed, call after call in turn, so that drift of the device falls on all of them alike.

        Args:
            groups: calls of each way, one for each input, all in the same order of inputs.
            rounds: how often; each is a whole measurement with medians of its own.
        """
        # One way goes through all inputs before the next begins: no call finds its own in L2.
        calls = [call for group in groups.values() for call in group]
        found: dict[str, list[float]] = {name: [] for name in groups}
        for _ in range(rounds):
            times = iter(self.timed(calls))
            for name, group in groups.items():
                found[name].append(sum(next(times) for _ in group) / len(group))
        return found

    def speedups(self, ms: float) -> dict[str, float]:
        """Over FA2 and over the fastest dense kernel on the same inputs."""
        return {"speedup_fa2": self.base["fa2"] / ms, "speedup_dense": min(self.base.values()) / ms}

    def rates(self, flops: float, ms: float, one: Inputs) -> dict[str, float]:
        """Executed TF/s, and their share of those of the fastest dense kernel on the same inputs."""
        rate = flops / ms / 1e9
        peak = dense_flops(one) / min(self.base.values()) / 1e9
        return {"tflops": rate, "share_of_dense": rate / peak}


def dense_flops(one: Inputs) -> float:
    """The causal half of the square, two products."""
    return 2.0 * one.tokens * one.tokens * one.q.shape[3] * one.q.shape[1]


def sparse_flops(visited: int, computed: int, dim: int, block_size: int = BLOCK) -> float:
    """QK products of visited blocks, PV products of computed ones."""
    return 2.0 * block_size * block_size * dim * (visited + computed)


def proxy_flops(one: Inputs, stride: int) -> float:
    """Products of sampled pairs."""
    return 2.0 * one.q.shape[3] * one.q.shape[1] * sampled_pairs(0, one.tokens, stride, BLOCK)


def with_scale(plans: Iterable[BlockPlan], skip_scale: float) -> list[BlockPlan]:
    """The same lists under another skip scale."""
    return [dataclasses.replace(plan, skip_scale=skip_scale) for plan in plans]


# ----------------------------------------------------------------------------------------------------------- dense
def _sdpa(backend: SDPBackend, one: Inputs) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(one.q, one.k, one.v, is_causal=True, scale=one.scale, enable_gqa=True)


def _flashinfer(one: Inputs) -> Tensor:
    prefill = importlib.import_module("flashinfer.prefill")
    q, k, v = (x[0].transpose(0, 1) for x in (one.q, one.k, one.v))
    out = prefill.single_prefill_with_kv_cache(q, k, v, causal=True, sm_scale=one.scale, backend="fa3")
    return out.transpose(0, 1)[None]


DENSE_KERNELS: dict[str, Callable[[Inputs], Tensor]] = {
    "fa2": functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "cudnn": functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "flashinfer": _flashinfer,
}


def dense(bench: Bench, name: str, variants: Iterable[str], sets: list[Inputs], inputs: str = "") -> None:
    """Measure the dense kernels among ``variants`` and make them the baseline; one that cannot run is left out.

    Args:
        bench: the bench; its ``base`` is replaced.
        name: bench of the rows.
        variants: names, of which ``fa2`` must run.
        sets: inputs.
        inputs: what rows call them; none = their own name.
    """
    first = sets[0]
    bench.base = {}
    errors = {}
    for variant in (item for item in DENSE_KERNELS if item in variants):
        kernel = DENSE_KERNELS[variant]
        try:
            errors[variant] = check_dense(f"{variant} at {first.tokens} tokens", first, kernel(first))
        except WrongResult:
            raise
        except Exception as error:  # a library that is absent, too old, or cannot be compiled here
            if variant == "fa2":
                raise
            line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            print(f"{variant}: left out, it cannot run here ({line})", file=sys.stderr, flush=True)
            continue
        bench.base[variant] = bench.mean_ms(functools.partial(kernel, one) for one in sets)
    for variant, ms in bench.base.items():
        rates, speedups = bench.rates(dense_flops(first), ms, first), bench.speedups(ms)
        setting = ", ".join(item for item in (inputs or first.name, "dense") if item)
        bench.rows.add(name, variant, first.tokens, setting, ms=ms, **rates, **speedups, rel_err=errors[variant])


# ---------------------------------------------------------------------------------------------------------- sparse
def budgets(sets: list[Inputs], stats: list[TileStats], block_size: int = BLOCK) -> dict[str, float]:
    """Realized budgets over all inputs: ratios of sums, in whole blocks and in causally valid cells."""
    heads = sum(one.q.shape[1] for one in sets)
    tokens = sets[0].tokens
    blocks, cells = heads * causal_blocks(0, tokens, block_size), heads * causal_cells(0, tokens)

    def total(part: str) -> int:
        return sum(int(getattr(item, part).sum(dtype=torch.int64)) for item in stats)

    return {
        "B_stage1_block": total("visited_blocks") / blocks,
        "B_block": total("computed_blocks") / blocks,
        "B_stage1": total("visited_cells") / cells,
        "B": total("computed_cells") / cells,
    }


def products(sets: list[Inputs], stats: list[TileStats], block_size: int = BLOCK) -> float:
    """Products of one call, mean over inputs."""
    return sum(
        sparse_flops(int(item.visited_blocks.sum()), int(item.computed_blocks.sum()), one.q.shape[3], block_size)
        for one, item in zip(sets, stats, strict=True)
    ) / len(sets)


def block_kernel(
    bench: Bench,
    name: str,
    variant: str,
    setting: str,
    sets: list[Inputs],
    plans: list[BlockPlan],
    *,
    backend: str | None = None,
    more: Mapping[str, Callable[[float], float]] | None = None,
) -> float:
    """Check and time ``block_attention`` on given lists.

    Args:
        bench: the bench.
        name, variant, setting: of the rows.
        sets, plans: one plan for each input.
        backend: kernel backend; None = the bench's.
        more: further metrics, made of the milliseconds.

    Returns:
        Milliseconds.
    """

    def call(one: Inputs, plan: BlockPlan) -> tuple[Tensor, TileStats]:
        return block_attention(one.q, one.kv, plan, scale=one.scale, backend=backend or bench.backend)

    tokens = sets[0].tokens
    out, first = call(sets[0], plans[0])
    error = check_attention(f"{variant} at {tokens} tokens, {setting}", sets[0], plans[0], out, first)
    del out
    stats = [first, *(call(one, plan)[1] for one, plan in zip(sets[1:], plans[1:], strict=True))]
    ms = bench.mean_ms(functools.partial(call, one, plan) for one, plan in zip(sets, plans, strict=True))
    bench.rows.add(
        name, variant, tokens, setting, ms=ms, **bench.rates(products(sets, stats), ms, sets[0]),
        **bench.speedups(ms), **budgets(sets, stats), rel_err=error, **{key: f(ms) for key, f in (more or {}).items()},
    )  # fmt: skip
    return ms


def whole_call(
    bench: Bench, setting: str, sets: list[Inputs], *, stride: int, skip_scale: float = -1.0, **rule: float
) -> None:
    """Proxy, selection and kernel of CoSA: each apart, and as one call.

    Args:
        bench: the bench.
        setting: of the rows.
        sets: inputs.
        stride: of the proxy.
        skip_scale: of the vote; off by default.
        rule: ``budget`` or ``p``.
    """
    tokens = sets[0].tokens

    def whole(one: Inputs) -> tuple[Tensor, TileStats]:
        plan = bench.select(bench.scores(one, stride), tokens, skip_scale, **rule)
        return block_attention(one.q, one.kv, plan, scale=one.scale, backend=bench.backend)

    scores = [bench.scores(one, stride) for one in sets]
    plans = [bench.select(item, tokens, skip_scale, **rule) for item in scores]
    what = f"CoSA at {tokens} tokens, {setting}"
    check_selection(what, sets[0], scores[0], plans[0], stride, rule)
    out, first = whole(sets[0])
    error = check_attention(what, sets[0], plans[0], out, first)
    del out
    stats = [first, *(whole(one)[1] for one in sets[1:])]
    kap_ms = bench.mean_ms(functools.partial(bench.scores, one, stride) for one in sets)
    select_ms = bench.mean_ms(functools.partial(bench.select, item, tokens, skip_scale, **rule) for item in scores)
    proxy_work = proxy_flops(sets[0], stride)
    proxy_rate = bench.rates(proxy_work, kap_ms, sets[0])
    bench.rows.add("attention", "kap", tokens, setting, ms=kap_ms, **proxy_rate)
    bench.rows.add("attention", "select", tokens, setting, ms=select_ms)
    block_kernel(bench, "attention", "osk", setting, sets, plans)
    calls = [functools.partial(whole, one) for one in sets]
    ms = bench.mean_ms(calls)
    work = proxy_work + products(sets, stats)
    bench.rows.add(
        "attention", "call", tokens, setting, ms=ms, host_ms=host_ms(calls), **bench.rates(work, ms, sets[0]),
        **bench.speedups(ms), **budgets(sets, stats), kap_select_share=(kap_ms + select_ms) / ms, rel_err=error,
    )  # fmt: skip


def host_ms(calls: Sequence[Call]) -> float:
    """Milliseconds of host time to start one call; what is beyond the device's time shows where lengths are short."""
    _synchronize()
    begin = time.perf_counter()
    for i in range(_HOST_CALLS):
        calls[i % len(calls)]()
    spent = time.perf_counter() - begin
    _synchronize()
    return 1e3 * spent / _HOST_CALLS


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def bisect_scale(bench: Bench, sets: list[Inputs], plans: list[BlockPlan], target: float) -> float:
    """The skip scale at which the block budget realized over all inputs falls to ``target``.

    Where no threshold reaches it within a point, that is said: the rows hold the budget that was realized.
    """
    tokens = sets[0].tokens

    def realized(ratio: float) -> float:
        stats = [
            block_attention(one.q, one.kv, plan, scale=one.scale, backend=bench.backend)[1]
            for one, plan in zip(sets, with_scale(plans, ratio * tokens), strict=True)
        ]
        return budgets(sets, stats)["B_block"]

    low, high = 1e-6, 1.0
    for _ in range(12):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if realized(middle) > target else (low, middle)
    reached = realized(high)
    if abs(reached - target) > 0.01:
        told = f"the vote reaches B {100 * reached:.1f} %, not the target of {100 * target:g} %"
        print(f"{tokens} tokens: {told}", file=sys.stderr, flush=True)
    return high * tokens
