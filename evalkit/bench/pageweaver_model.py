"""Prefill throughput of a model with 16 query heads a KV head that replays captured page ids.

The real transformers class prefills a prompt in chunks over one paged cache. Attention is PageWeaver's complete call,
regrouped in every call or not, or FlashInfer with a request a query on the same pages of that cache. Weights are
random: what is measured is time, and that all variants compute the same. Variants run in turn, and gains are paired by
round.
"""

from __future__ import annotations

import functools
import inspect
import statistics
from pathlib import Path
from typing import Any

import torch
from prefill_kernels import BackendUnavailable, Fp8KV, PagedKV, PagePlan, page_attention, resolve_backend
from prefill_kernels.bench.command import open_rows
from prefill_kernels.bench.config import PAGE_BACKENDS, BenchError, WrongResult
from prefill_kernels.bench.native import NativePath, flashinfer_problem, left_out
from prefill_kernels.bench.page_inputs import Selection, captured_pages
from prefill_kernels.bench.pages import kv_name
from prefill_kernels.bench.paired import faster
from prefill_kernels.bench.rows import Rows
from prefill_kernels.fp8 import E4M3_MAX, to_e4m3
from prefill_kernels.page_attention import resolve_page_backend
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3ForCausalLM
from transformers.cache_utils import Cache

from ..attention.cache import PagedLayer
from .settings import PageModelBench
from .ttft import build, in_turn

NAME = "pageweaver-model"
FIXED_SCALE = 16 / E4M3_MAX
"""Of a cache that quantises as it is written: it cannot know the largest key to come. Normed keys lie well within."""
TOLERANCE = {"model": 0.1, "fp8": 0.5}
"""Relative L2 distance of the last logits between variants, which round in each layer; FP8 products by 4e-2 a layer.
Logits of other pages are 1.4 away."""


def launch(settings: PageModelBench, command: str) -> Path:
    """Run on the CUDA device; returns the file that was appended to.

    Raises:
        BenchError: no CUDA device, a file that cannot be used, or what :func:`run` refuses.
        WrongResult: two variants do not compute the same.
    """
    rows = open_rows(settings, command)
    run(settings, rows, torch.device("cuda"))
    return rows.path


def run(settings: PageModelBench, rows: Rows, device: torch.device) -> None:
    """Measure every length, precision and variant; ``original`` first, which gains are over.

    Raises:
        BenchError: captures, lengths or a backend that cannot be used; the model is not built.
    """
    replayed = replays(settings)
    check_backend(settings, next(iter(replayed.values()))[0].page_size, device)
    model = build(settings, device)
    names = [name for name in ("original", *settings.variants) if name in settings.variants]
    names = list(dict.fromkeys(names))
    if (problem := flashinfer_problem()) is not None:
        for name in (name for name in names if name.startswith("flashinfer")):
            left_out(name, RuntimeError(problem))
        names = [name for name in names if not name.startswith("flashinfer")]
    for tokens in settings.lengths:
        generator = torch.Generator().manual_seed(settings.seed)
        ids = torch.randint(0, settings.vocab, (1, tokens), generator=generator).to(device)
        for kv_dtype in settings.kv_dtypes:
            _measure(settings, rows, model, ids, replayed[tokens], kv_dtype, names)


def replays(settings: PageModelBench) -> dict[int, list[Selection]]:
    """Captured heads with the pages of all their queries, by length; each of ``settings.lengths`` is there.

    Raises:
        BenchError: a file that cannot be read, files of different page sizes, or a length that no file holds whole.
    """
    found = {path: captured_pages(path) for path in settings.captures}
    sizes = {path: one.page_size for path, heads in found.items() for one in heads}
    if len(set(sizes.values())) > 1:
        each = ", ".join(f"{path} has {size}" for path, size in sizes.items())
        raise BenchError("captures", list(settings.captures), f"files of one page size; {each}")
    whole: dict[int, list[Selection]] = {}
    for one in (one for heads in found.values() for one in heads if len(one.positions) == one.kv_len):
        whole.setdefault(one.kv_len, []).append(one)
    for tokens in settings.lengths:
        if tokens not in whole:
            held = ", ".join(map(str, sorted(whole))) or "none"
            raise BenchError("lengths", tokens, f"a length of which a capture holds the pages of all queries: {held}")
    return whole


def check_backend(settings: PageModelBench, page_size: int, device: torch.device) -> None:
    """Raise BenchError unless the backend runs attention of this model in every precision."""
    backend = resolved(settings, device)
    reasons = {kv_dtype: _problem(settings, backend, kv_dtype, page_size, device) for kv_dtype in settings.kv_dtypes}
    refused = {kv_dtype: reason for kv_dtype, reason in reasons.items() if reason is not None}
    if not refused:
        return
    kv_dtype, reason = next(iter(refused.items()))
    rest = [
        name
        for name in PAGE_BACKENDS
        if all(_problem(settings, name, each, page_size, device) is None for each in settings.kv_dtypes)
    ]
    kept = [each for each in settings.kv_dtypes if each not in refused]
    either = f", or kv_dtypes=[{','.join(kept)}]" if kept else ""
    raise BenchError(
        "backend", settings.backend, f"{backend} cannot run kv_dtypes={kv_dtype} ({reason}); {', '.join(rest)}{either}"
    )


def resolved(settings: PageModelBench, device: torch.device) -> str:
    """The backend that ``auto`` stands for on a device, or the one that was named."""
    return resolve_backend("auto", device, torch.bfloat16) if settings.backend == "auto" else settings.backend


def _problem(settings: PageModelBench, backend: str, kv_dtype: str, page_size: int, device: torch.device) -> str | None:
    """Why a backend cannot run one query of this model on its own cache, or None."""
    cache = PageCache(1, settings.kv_heads, page_size, page_size, device, kv_dtype, turned=True)
    one = torch.zeros(1, settings.kv_heads, 1, settings.dim, dtype=torch.bfloat16, device=device)
    kv: Any = cache.update(one, one, 0)[0]  # Cache itself says Tensor
    q = one.new_zeros(1, 1, settings.heads, settings.dim).transpose(1, 2)
    ids = torch.zeros(1, 1, settings.kv_heads, 1, dtype=torch.int32, device=device)
    try:
        resolve_page_backend(q, kv, PagePlan.for_prompt(ids, page_size, 0, 1, kv_dtype=kv_dtype), backend)
    except BackendUnavailable as error:
        return str(error).partition(": ")[2]
    return None


def _measure(
    settings: PageModelBench,
    rows: Rows,
    model: Qwen3ForCausalLM,
    ids: Tensor,
    selections: list[Selection],
    kv_dtype: str,
    names: list[str],
) -> None:
    tokens = ids.shape[1]
    forwards: dict[str, PageForward] = {}
    values: dict[str, dict[str, float]] = {}
    base: Tensor | None = None
    resident = _allocated(model)
    for name in names:
        held = _allocated(model)
        try:
            forward = PageForward(settings, model, name, kv_dtype, selections, tokens)
            if held is not None:
                torch.cuda.reset_peak_memory_stats()
            logits = forward(ids)
            if not bool(torch.isfinite(logits).all()):
                raise WrongResult(f"{name} at {tokens} tokens: the logits are not finite")
            if base is None:
                base = logits
            distance = float((logits.float() - base.float()).norm() / base.float().norm())
            if not distance <= TOLERANCE[kv_dtype]:
                raise WrongResult(f"{name} at {tokens} tokens: logits are {distance:.2g} from those of {names[0]}")
        except torch.OutOfMemoryError as error:
            left_out(f"{name} at {tokens} tokens", error)
            continue
        except WrongResult:
            raise
        except Exception as error:  # FlashInfer: too old, or it cannot be compiled here
            if not name.startswith("flashinfer"):
                raise
            left_out(f"{name} at {tokens} tokens, {kv_dtype}", error)
            continue
        forwards[name], values[name] = forward, {"logit_distance": distance}
        if held is not None and resident is not None:  # what the variants before it hold is not its own
            values[name]["peak_memory"] = (torch.cuda.max_memory_allocated() - held + resident) / 2**30
    # The second prefill of a variant is the first that compiles nothing and plans nothing.
    in_turn(forwards, ids, 1)
    seconds = in_turn(forwards, ids, settings.repeats)
    for name, rounds in seconds.items():
        spent = statistics.median(rounds)
        measured = {"prefill": spent, "throughput": tokens / spent, **values[name]}
        if name != "original" and "original" in seconds:
            measured |= faster(seconds["original"], rounds).metrics("throughput_gain")
        for other in ("flashinfer", "flashinfer_replan"):
            if other in seconds and not name.startswith("flashinfer"):
                measured |= faster(seconds[other], rounds).metrics(f"throughput_over_{other}")
        what = setting(settings, kv_dtype, selections, model.dtype)
        rows.add(
            NAME, name, tokens, f"{what}, {settings.native_backend}" if name.startswith("flash") else what, **measured
        )


def _allocated(model: Qwen3ForCausalLM) -> int | None:
    return torch.cuda.memory_allocated() if model.device.type == "cuda" else None


def setting(settings: PageModelBench, kv_dtype: str, selections: list[Selection], dtype: torch.dtype) -> str:
    """As rows name it."""
    shape = f"Qwen3 class, {settings.layers} layers, hidden {settings.hidden}, {settings.heads} heads"
    ratio = f"on {settings.kv_heads} KV head{'s' if settings.kv_heads > 1 else ''}"
    chunk = "whole prompt" if settings.chunk is None else f"chunks of {settings.chunk}"
    replayed = f"{len(selections)} captured heads of {selections[0].source}"
    precision = kv_name(kv_dtype, dtype) + (" at a fixed scale" if kv_dtype == "fp8" else "")
    return f"{shape} {ratio}, random weights, {replayed}, {chunk}, {precision}"


class PageForward:
    """One prefill of the model under one variant: token ids [1, L] to logits of the last position.

    Args:
        settings: of the benchmark.
        model: the model.
        variant: one of ``PAGE_VARIANTS``.
        kv_dtype: ``model`` or ``fp8``.
        selections: captured heads with the pages of all L queries.
        tokens: L.
    """

    def __init__(
        self,
        settings: PageModelBench,
        model: Qwen3ForCausalLM,
        variant: str,
        kv_dtype: str,
        selections: list[Selection],
        tokens: int,
    ) -> None:
        self.model, self.variant, self.kv_dtype = model, variant, kv_dtype
        self.page_size, self.chunk = selections[0].page_size, settings.chunk or tokens
        self.window = int(variant.removeprefix("online_")) if variant.startswith("online_") else 0
        self.backend = resolved(settings, model.device)
        self.native, self.native_path = variant.startswith("flashinfer"), settings.native_backend
        self.cache = PageCache(
            settings.layers, settings.kv_heads, tokens, self.page_size, model.device, kv_dtype, turned=not self.native
        )
        heads = settings.kv_heads
        each = [(layer * heads) % len(selections) for layer in range(settings.layers)]
        made: dict[int, Tensor] = {}
        for first in each:
            if first not in made:
                rows = [selections[(first + head) % len(selections)].pages for head in range(heads)]
                width = max(row.shape[1] for row in rows)  # captures may differ in it
                rows = [torch.nn.functional.pad(row, (0, width - row.shape[1]), value=-1) for row in rows]
                made[first] = torch.stack(rows, 1)[None].to(model.device)
        self.which = each
        self.pages = made
        self._paths: dict[tuple[int, int, int], NativePath] = {}
        names = inspect.signature(inspect.unwrap(type(model.model).forward)).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        """Logits [V] of the last position."""
        # transformers takes any name with "flash" in it for a kernel of its own.
        name = f"bench_pages_{self.variant.replace('flashinfer', 'native')}"
        AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(name, _no_mask)
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(name)
        self.cache.clear()
        try:
            for begin in range(0, ids.shape[1], self.chunk):
                part = ids[:, begin : begin + self.chunk]
                out = self.model(part, use_cache=True, logits_to_keep=1, **{self._cache_argument: self.cache})
            return out.logits[0, -1]
        finally:
            self.model.set_attn_implementation(before)

    def _attend(
        self, module: Any, q: Tensor, k: Any, v: Any, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        length, offset = q.shape[2], k.kv_len - q.shape[2]
        which = self.which[module.layer_idx]
        plan = PagePlan.for_prompt(
            self.pages[which][:, offset : offset + length],
            self.page_size,
            offset,
            length,
            regroup=self.window,
            kv_dtype=self.kv_dtype,
        )
        if self.native:
            return self._native(plan, which, offset, q, k, scaling), None
        out, _counts = page_attention(q, k, plan, scale=scaling, backend=self.backend, stats=False)
        return out.transpose(1, 2), None

    def _native(self, plan: PagePlan, which: int, offset: int, q: Tensor, kv: PagedKV | Fp8KV, scale: float) -> Tensor:
        """One call a KV head, whose requests list pages of its own; returns [1, N, Hq, d], contiguous.

        That is the layout in which FlashInfer writes and the model reads: one KV head is not copied, several are once.
        """
        group, outputs = q.shape[1] // kv.num_kv_heads, []
        for head in range(kv.num_kv_heads):
            key = (which, offset, head)
            if key not in self._paths:
                self._paths[key] = NativePath(
                    plan, kv, heads=group, scale=scale, dtype=q.dtype, path=self.native_path, head=head
                )
            elif self.variant == "flashinfer_replan":
                self._paths[key].replan()
            mine = slice(head, head + 1)
            rows = q[:, head * group : (head + 1) * group]
            out = self._paths[key](rows, kv.k_pages[:, :, mine], kv.v_pages[:, :, mine])
            outputs.append(out.transpose(1, 2))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


class Fp8Layer(PagedLayer):
    """Pages of one layer in E4M3 at a fixed scale, written as a chunk comes.

    Args:
        turned: store values as the union kernels read them, [.., d, page]; else as keys are stored.
        rest: of :class:`PagedLayer`.
    """

    def __init__(self, turned: bool, *rest: Any) -> None:
        super().__init__(*rest)
        self.turned = turned

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the pools on the device of the first keys."""
        _, heads, _, dim = key_states.shape
        shape = (self.pool_pages, self.page_size, heads, dim)
        self.k_pages = torch.zeros(shape, dtype=torch.uint8, device=key_states.device)
        turned = (self.pool_pages, heads, dim, self.page_size)
        self.v_pages = torch.zeros(turned if self.turned else shape, dtype=torch.uint8, device=key_states.device)
        self.scale = torch.full((heads,), FIXED_SCALE, device=key_states.device)
        self.is_initialized = True

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Fp8KV, Fp8KV]:
        """Append keys and values [1, Hkv, n, d]; return the paged view twice."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        stop = self.length + key_states.shape[2]
        positions = torch.arange(self.length, stop, device=key_states.device)
        pages, slots = self.page_table[0, positions // self.page_size].long(), positions % self.page_size
        k, v = (to_e4m3(x[0].float() / FIXED_SCALE).view(torch.uint8) for x in (key_states, value_states))
        self.k_pages[pages, slots] = k.transpose(0, 1)
        if self.turned:
            self.v_pages[pages, :, :, slots] = v.transpose(0, 1)
        else:
            self.v_pages[pages, slots] = v.transpose(0, 1)
        self.length = stop
        k8, v8 = (x.view(torch.float8_e4m3fn) for x in (self.k_pages, self.v_pages))
        turned = v8 if self.turned else v8.permute(0, 2, 3, 1)
        view = Fp8KV(k8, turned, self.scale, self.scale, self.page_table, stop)
        return view, view


class PageCache(Cache):
    """A paged cache of all layers that keeps its pools from one prefill to the next."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        tokens: int,
        page_size: int,
        device: torch.device,
        kv_dtype: str,
        *,
        turned: bool,
    ) -> None:
        count = -(-tokens // page_size)
        table = torch.arange(count, dtype=torch.int32, device=device)[None]
        kind = functools.partial(Fp8Layer, turned) if kv_dtype == "fp8" else PagedLayer
        self._paged: list[PagedLayer] = [kind(table, page_size, count, True) for _ in range(layers)]
        super().__init__(layers=list(self._paged))

    def clear(self) -> None:
        """Forget all tokens."""
        for layer in self._paged:
            layer.length = 0


def _no_mask(*_: Any, **__: Any) -> None:
    """Causality is the kernels' own."""
