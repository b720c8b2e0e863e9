"""Time to first token of a Qwen3-8B-shaped model with random weights, and the peak memory of its prefill.

The real transformers class runs one forward over the prompt and keeps the logits of the last position. Attention is
SDPA's flash or cuDNN kernel, CoSA or another method called directly (K and V laid out in pages inside the call), or the
harness's own path (:class:`evalkit.attention.Session`: paged cache, budget meter, call accounting).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from prefill_kernels import (
    DensePlan,
    PagedKV,
    TileStats,
    block_attention,
    causal_blocks,
    causal_cells,
    dense_attention,
    kap_scores,
    resolve_backend,
    select_blocks,
    sparse_attention,
)
from prefill_kernels.bench.check import check_attention
from prefill_kernels.bench.command import open_rows
from prefill_kernels.bench.config import BLOCK, WrongResult
from prefill_kernels.bench.inputs import Inputs
from prefill_kernels.bench.planned import kernel_for
from prefill_kernels.bench.rows import Rows
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3Config, Qwen3ForCausalLM

from ..methods.base import Method, PlanContext
from ..methods.cosa import CoSA, Select
from ..methods.dense import Dense
from ..methods.presets import described, from_text
from .profiling import profile_csv
from .settings import TTFT_VARIANTS, PageModelBench, TtftBench

if TYPE_CHECKING:
    from ..attention import Session

DENSE = ("fa2", "cudnn")
"""Variants that others are compared with."""
CHECKED_TOKENS = 2048


def launch(settings: TtftBench, command: str) -> Path:
    """Run on the CUDA device; returns the file that was appended to.

    Raises:
        BenchError: no CUDA device, or a file that cannot be used.
        WrongResult: CoSA at 100 % is not dense, a method's attention is not what it planned, or logits are not finite.
    """
    rows = open_rows(settings, command)
    run(settings, rows, torch.device("cuda"))
    return rows.path


def run(settings: TtftBench, rows: Rows, device: torch.device) -> None:
    """Measure every length and variant; the first variant measured is FA2, the base of speedups."""
    names = runnable(settings.variants)
    model = build(settings, device)
    check(settings, model, names)
    for tokens in settings.lengths:
        generator = torch.Generator().manual_seed(settings.seed)
        ids = torch.randint(0, settings.vocab, (1, tokens), generator=generator).to(device)
        dense: dict[str, float] = {}
        for name in names:
            forward = Forward(settings, model, name)
            try:
                seconds, peak = timed(forward, ids, settings.repeats)
            except torch.OutOfMemoryError:
                print(f"{name} at {tokens} tokens: left out, it does not fit into memory", file=sys.stderr, flush=True)
                continue
            if name in DENSE:
                dense[name] = seconds
            spent = forward.budgets(tokens)
            values = {"ttft": seconds, "tflops": forward.flops(tokens, spent) / seconds / 1e12}
            if peak is not None:
                values["peak_memory"] = peak
            if "fa2" in dense and name != "fa2":
                values["speedup_fa2"] = dense["fa2"] / seconds
            if dense and name not in DENSE:  # all of which have run by now
                values["speedup_dense"] = min(dense.values()) / seconds
            rows.add("ttft", name, tokens, forward.setting, **values, **spent)
            if settings.loss and name.startswith("harness"):
                seconds, peak = timed(lambda ids, forward=forward: forward.loss(ids[0]), ids, 1)  # type: ignore[misc]
                values = {"loss": seconds, **({} if peak is None else {"peak_memory": peak})}
                rows.add("ttft", name, tokens, f"{forward.setting}, loss on all tokens, fidelity", **values)
            if settings.profile is not None:
                file = Path(settings.profile).expanduser() / f"ttft-{name}-{tokens}.csv"
                profile_csv(functools.partial(forward, ids), file, device)
                print(f"wrote {file}", flush=True)


def runnable(variants: Iterable[str]) -> list[str]:
    """The variants in a fixed order, methods last; the harness is left out where its packages are not installed."""
    given = list(variants)
    names = [name for name in TTFT_VARIANTS if name in given]
    names += [name for name in given if name not in TTFT_VARIANTS]
    try:
        importlib.import_module("evalkit.attention")
    except ImportError as error:
        for name in (name for name in names if name.startswith("harness")):
            print(f"{name}: left out ({error})", file=sys.stderr, flush=True)
        names = [name for name in names if not name.startswith("harness")]
    return names


def build(settings: TtftBench | PageModelBench, device: torch.device) -> Qwen3ForCausalLM:
    """The model, in bfloat16 with random weights made on the device."""
    config = Qwen3Config(
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.dim,
        vocab_size=settings.vocab,
        max_position_embeddings=max(1 << 18, *settings.lengths),
    )
    torch.manual_seed(settings.seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def timed(forward: Callable[[Tensor], Tensor], ids: Tensor, repeats: int) -> tuple[float, float | None]:
    """Median seconds of a forward, and the peak memory of all of them in GiB (None on a CPU)."""
    cuda = ids.is_cuda
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds, logits = [], ids
    for _ in range(1 + repeats):
        spent, logits = once(forward, ids)
        seconds.append(spent)
    if not bool(torch.isfinite(logits).all()):
        raise WrongResult("the logits are not finite")
    return statistics.median(seconds[1:]), torch.cuda.max_memory_allocated() / 2**30 if cuda else None


def once(forward: Callable[[Tensor], Tensor], ids: Tensor) -> tuple[float, Tensor]:
    """Seconds of one forward from start to end of the device's work, and its logits."""
    synchronize(ids.device)
    begin = time.perf_counter()
    logits = forward(ids)
    synchronize(ids.device)
    return time.perf_counter() - begin, logits


def in_turn(forwards: Mapping[str, Callable[[Tensor], Tensor]], ids: Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of several forwards round by round, each once in a round; every round begins with another one.

    All of them have run before.
    """
    found: dict[str, list[float]] = {name: [] for name in forwards}
    names = list(forwards)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(once(forwards[name], ids)[0])
    return found


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check(settings: TtftBench, model: Qwen3ForCausalLM, variants: Iterable[str]) -> None:
    """CoSA with every block kept must give the logits of dense attention, within what two dense kernels differ by.

    Other methods have no such setting in common; their attention is compared with float32 in every layer.

    Raises:
        WrongResult: it does not.
    """
    wanted = [name for name in ("cosa", "harness") if name in variants]
    generator = torch.Generator().manual_seed(settings.seed)
    tokens = min(CHECKED_TOKENS, max(settings.lengths))
    ids = torch.randint(0, settings.vocab, (1, tokens), generator=generator).to(model.device)
    dense = Forward(settings, model, "fa2")(ids)
    floor = _distance(Forward(settings, model, "math")(ids), dense)
    for name in wanted:
        error = _distance(Forward(settings, model, name, budget=1.0)(ids), dense)
        if not error <= 3 * floor + 1e-3:
            raise WrongResult(f"{name} with every block: logits are {error:.2g} from FA2's, SDPA's math {floor:.2g}")
    for name in (name for name in variants if name not in TTFT_VARIANTS):
        Forward(settings, model, name, checked=True)(ids)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


class Forward:
    """One forward of the model under one variant: token ids [1, L] to logits of the last position.

    Args:
        settings: of the benchmark.
        model: the model.
        variant: of ``TTFT_VARIANTS``, a method's, or ``math`` (SDPA without a fused kernel).
        budget: Stage-1 share, where it is not the settings' own.
        checked: compare a method's attention with float32 as it runs.
    """

    def __init__(
        self,
        settings: TtftBench,
        model: Qwen3ForCausalLM,
        variant: str,
        budget: float | None = None,
        *,
        checked: bool = False,
    ) -> None:
        self.model, self.variant, self.stride, self.checked = model, variant, settings.stride, checked
        self.method = None if variant in (*TTFT_VARIANTS, "math") else from_text(variant, "variants")
        self.block = BLOCK if self.method is None else self.method.block_size
        self.vote = variant == "cosa_vote"
        self.share = budget or (settings.stage1 if self.vote else settings.budget)
        self.skip_scale = settings.skip_scale if self.vote else -1.0
        self.backend = resolve_backend("auto", model.device, torch.bfloat16)
        self._spent: list[Tensor] = []
        self._session: Any = None

    @property
    def setting(self) -> str:
        """As rows name it."""
        if self.variant in ("fa2", "cudnn", "harness_dense"):
            return "dense"
        if self.method is not None:
            return described(self.method)
        vote = f"skip scale {self.skip_scale:g}" if self.vote else "vote off"
        return f"Stage-1 {100 * self.share:g} %, {vote}, stride {self.stride}"

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        """Logits [V] of the last position."""
        if self.variant.startswith("harness"):
            return self._harness(ids)
        self._spent.clear()
        with self._attending():
            return self.model(ids, use_cache=True, logits_to_keep=1).logits[0, -1]

    def budgets(self, tokens: int) -> dict[str, float]:
        """Realized budgets of the last forward, a method's in cells too; empty for dense attention."""
        if self._session is not None:
            record = self._session.account().budget.record()
            return {name: record[name] for name in ("B_stage1_block", "B_block") if self.variant == "harness"}
        if not self._spent:
            return {}
        calls = self.model.config.num_attention_heads * len(self._spent)
        visited, computed, *cells = torch.stack(self._spent).sum(0).tolist()
        blocks = calls * causal_blocks(0, tokens, self.block)
        found = {"B_stage1_block": visited / blocks, "B_block": computed / blocks}
        for name, count in zip(("B_stage1", "B"), cells, strict=False):
            found[name] = count / (calls * causal_cells(0, tokens))
        return found

    def flops(self, tokens: int, found: Mapping[str, float]) -> float:
        """Products that a forward executed: of every token with the layers' weights, and of attention.

        Dense attention counts its causal half; a method its visited blocks (QK) and computed ones (PV), whole.

        Args:
            tokens: of the prompt.
            found: :meth:`budgets` of the forward.
        """
        config = self.model.config
        weights = sum(p.numel() for p in self.model.model.layers.parameters())
        width = config.num_attention_heads * config.head_dim
        if found:
            blocks = causal_blocks(0, tokens, self.block) * self.block**2
            attention = 2.0 * blocks * width * (found["B_stage1_block"] + found["B_block"])
        else:
            attention = 2.0 * tokens**2 * width
        return 2.0 * weights * tokens + config.num_hidden_layers * attention

    def _harness(self, ids: Tensor) -> Tensor:
        with self._opened() as session:
            hidden = session.prefill(ids[0], keep_from=ids.shape[1] - 1)
            logits = session.logits(hidden)[0]
        self._session = session  # its books are read after the clock has stopped
        return logits

    def loss(self, ids: Tensor) -> Tensor:
        """Mean loss of ids [N] and its fidelity to the dense model, as a perplexity cell without a twin on disk."""
        from ..reference import score_window

        with self._opened() as session:
            states = session.prefill(ids, keep_from=0)
            with self._opened(Dense()) as dense:
                reference = dense.prefill(ids, keep_from=0)
            nll, kl, _ = score_window(session, states[:-1], ids[1:], reference[:-1])
        return torch.tensor([nll / (len(ids) - 1), kl])

    def _opened(self, method: Method | None = None) -> Session:
        from ..attention import Session  # needs packages that the other variants do not

        if method is None:
            method = Dense()
            if self.variant == "harness":
                select = Select(rule="budget", budget=self.share)
                method = CoSA(stride=self.stride, select=select, skip_scale=self.skip_scale)
        return Session(self.model, method, backend=self.backend, page_size=BLOCK)

    @contextlib.contextmanager
    def _attending(self) -> Iterator[None]:
        """The model with this variant's attention function."""
        name = f"bench_{self.variant}"
        AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(name, _no_mask)
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(name)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

    def _attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        if self.variant.startswith("cosa"):
            out, stats = self._cosa(q, k, v, scaling)
            self._spent.append(torch.stack([stats.visited_blocks.sum(), stats.computed_blocks.sum()]))
            return out.transpose(1, 2), None
        if self.method is not None:
            return self._planned(self.method, module.layer_idx, q, k, v, scaling).transpose(1, 2), None
        with sdpa_kernel(_SDPA[self.variant]):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    def _planned(self, method: Method, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        length, kv = q.shape[2], _pages(k, v)
        plan = method.plan(q, kv, PlanContext(layer, 0, length, scaling, self.backend))
        if isinstance(plan, DensePlan):
            blocks, cells = (
                count * q.shape[1] for count in (causal_blocks(0, length, self.block), causal_cells(0, length))
            )
            self._spent.append(torch.tensor([blocks, blocks, cells, cells], device=q.device))
            return dense_attention(q, k, v, scale=scaling)
        out, stats = sparse_attention(q, kv, plan, scale=scaling, backend=kernel_for(plan, self.backend))
        parts = (stats.visited_blocks, stats.computed_blocks, stats.visited_cells, stats.computed_cells)
        self._spent.append(torch.stack([x.sum(dtype=torch.int64) for x in parts]))
        if self.checked:
            check_attention(f"{self.variant}, layer {layer}", Inputs(q, kv, k, v, scaling), plan, out, stats)
        return out

    def _cosa(self, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> tuple[Tensor, TileStats]:
        length, kv = q.shape[2], _pages(k, v)
        scores = kap_scores(q, kv, stride=self.stride, scale=scaling, backend=self.backend)
        plan = select_blocks(
            scores,
            block_size=BLOCK,
            q_offset=0,
            q_len=length,
            prompt_len=length,
            budget=self.share,
            skip_scale=self.skip_scale,
            backend=self.backend,
        )
        return block_attention(q, kv, plan, scale=scaling, backend=self.backend)


def _pages(k: Tensor, v: Tensor) -> PagedKV:
    """K and V [1, Hkv, L, d] in pages, in order."""
    # The model's cache holds [Hkv, L, d]: without the copy the pages are strided views, which kernels refuse.
    k_pages, v_pages = (x.transpose(1, 2).contiguous().view(-1, BLOCK, x.shape[1], x.shape[3]) for x in (k, v))
    table = torch.arange(k.shape[2] // BLOCK, dtype=torch.int32, device=k.device)[None]
    return PagedKV(k_pages, v_pages, table, k.shape[2], in_order=True)


_SDPA = {
    "fa2": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def _no_mask(*_: Any, **__: Any) -> None:
    """Causality is the kernels' own."""
