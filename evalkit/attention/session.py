"""One model under one method: prefill in one call or in chunks, dense decode, and the account of both."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

import torch
from prefill_kernels import BACKENDS, resolve_backend
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ..budget import BudgetMeter, SampleBudget
from ..errors import InputError, IntegrityError
from ..methods import Method
from .cache import PagedCache
from .interface import ATTENTION_NAME, CallCounts, CallState, register

SUPPORTED = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Account:
    """What one sample's forward passes did.

    Attributes:
        budget: the prefill's budget.
        calls: ``expected`` attention calls and those made, by kind.
        backends: sparse calls by the kernel backend that executed them, ``auto`` may fall back for a call; and calls of
            what planned them, as ``proxy:<backend>`` and ``select:<backend>``.
        prefill_seconds: wall time of the prefill, synchronised on CUDA.
        warnings: stages that ran on a slower backend than the best of the device, and why.
    """

    budget: SampleBudget
    calls: dict[str, int]
    backends: dict[str, int]
    prefill_seconds: float
    warnings: list[str] = field(default_factory=list)


def check_supported(config: PretrainedConfig) -> None:
    """Raise :class:`InputError` unless the model's type and layers are ones this patch is tested on."""
    if config.model_type not in SUPPORTED:
        raise InputError("model", config.model_type, f"a model of type {', '.join(SUPPORTED)}")
    sliding = [i for i, kind in enumerate(getattr(config, "layer_types", None) or []) if kind != "full_attention"]
    if sliding:
        raise InputError("model", config.model_type, f"full attention in every layer (layer {sliding[0]} is not)")


def slower_backends(refused: Mapping[tuple[str, str], str], best: str) -> list[str]:
    """Say where a backend was passed over that the device can run.

    Args:
        refused: reasons by stage and backend, see :class:`prefill_kernels.Executed`.
        best: what ``auto`` stands for on the device.
    """
    able = BACKENDS[: BACKENDS.index(best) + 1]
    return [
        f"{stage} ran on a slower backend than {name}: {reason}"
        for (stage, name), reason in refused.items()
        if name in able
    ]


class Session:
    """Context manager that runs a model's attention through a method and restores it on exit.

    Args:
        model: a Llama, Qwen2 or Qwen3 causal LM, batch of one.
        method: validated method.
        backend: kernel backend.
        page_size: physical KV page, tokens.
        page_shuffle: seed to scatter the physical pages, None for in order.
        chunk_size: prefill chunk in tokens, a multiple of the method's block; None prefills in one call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        *,
        backend: str = "auto",
        page_size: int = 128,
        page_shuffle: int | None = None,
        chunk_size: int | None = None,
    ) -> None:
        check_supported(model.config)
        method.validate()
        method.check_model(model.config.num_hidden_layers, model.config.num_attention_heads)
        if chunk_size is not None:
            if method.chunk_problem is not None:
                raise InputError("execution.chunk_size", chunk_size, f"null: {method.name} {method.chunk_problem}")
            if chunk_size <= 0 or chunk_size % method.block_size:
                raise InputError("execution.chunk_size", chunk_size, f"a multiple of {method.block_size}, or null")
        self.model, self.method = model, method
        self.backend = resolve_backend(backend)
        self.page_size, self.page_shuffle, self.chunk_size = page_size, page_shuffle, chunk_size
        self.layers: int = model.config.num_hidden_layers
        self._body = model.get_decoder()
        # transformers 5.24 renamed past_key_values to cache; 5.17 knows only the old name.
        names = inspect.signature(inspect.unwrap(type(self._body).forward)).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        self._cache: PagedCache | None = None

    def __enter__(self) -> Session:
        register()
        self._previous = self.model.config._attn_implementation
        self.model.set_attn_implementation(ATTENTION_NAME)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cache = None
        self.model.set_attn_implementation(self._previous)

    @torch.inference_mode()
    def prefill(self, ids: Tensor, *, keep_from: int, reserve: int = 0) -> Tensor:
        """Prefill a prompt from an empty cache.

        Args:
            ids: int64 [N] token ids.
            keep_from: first position whose hidden state is wanted.
            reserve: decode steps to leave room for.

        Returns:
            Hidden states after the final norm, [N - keep_from, D]. No logits of the whole prompt are built.
        """
        length = len(ids)
        device = self.model.device
        self._cache = PagedCache(self.layers, length + reserve, self.page_size, device, self.page_shuffle)
        self._meter = BudgetMeter(
            self.layers,
            self.model.config.num_attention_heads,
            self.method.block_size,
            self.method.work_ratios,
        )
        self._calls = CallCounts(self.layers)
        self._prompt_len, self._position = length, 0
        self._decoded = self._decode_calls = self._forgotten = 0
        chunk = self.chunk_size or length
        self._chunks = -(-length // chunk)
        ids = ids.to(device)
        kept = []
        self._synchronize()
        begin = time.perf_counter()
        for start in range(0, length, chunk):
            hidden = self._forward(ids[start : start + chunk], "prefill")
            if start + len(hidden) > keep_from:
                kept.append(hidden[max(0, keep_from - start) :].clone())
        self._synchronize()
        self._prefill_seconds = time.perf_counter() - begin
        return torch.cat(kept)

    @torch.inference_mode()
    def decode(self, token: int) -> Tensor:
        """Append one token; return its hidden state [1, D]. Decode attention is dense for every method."""
        return self.extend(torch.tensor([token]))

    @torch.inference_mode()
    def extend(self, tokens: Tensor) -> Tensor:
        """Append known tokens int64 [n] in one pass; return their hidden states [n, D]. Dense, as decode is."""
        self._decoded += len(tokens)
        self._decode_calls += 1
        return self._forward(tokens.to(self.model.device), "decode")

    def rewind(self, tokens: int) -> None:
        """Forget the last ``tokens`` decoded tokens; their calls stay in the account."""
        if self._cache is None or not 0 <= tokens <= self._position - self._prompt_len:
            raise ValueError(f"tokens={tokens}: only decoded tokens can be forgotten")
        self._cache.rewind(tokens)
        self._position -= tokens
        self._forgotten += tokens

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """LM head in float32: [n, D] -> [n, V]. Call it on as many rows as fit in memory."""
        return self.model.get_output_embeddings()(hidden).float()

    def account(self) -> Account:
        """Close the sample's books.

        Raises:
            IntegrityError: some layer ran a different number of calls than chunks and decode steps ask for, or a
                sparse method produced no sparse call.
        """
        if self._position != self._prompt_len + self._decoded - self._forgotten:
            raise IntegrityError(f"prefill stopped at {self._position} of {self._prompt_len} tokens")
        calls = self._calls
        for layer in range(self.layers):
            prefill = calls.sparse[layer] + calls.dense[layer] + calls.fallback[layer]
            if prefill != self._chunks or calls.decode[layer] != self._decode_calls:
                raise IntegrityError(
                    f"call accounting, layer {layer}: {prefill} prefill and {calls.decode[layer]} decode calls, "
                    f"expected {self._chunks} and {self._decode_calls}; the patch did not run everywhere"
                )
        totals = calls.totals()
        if self.method.name == "dense" and totals["sparse"] or self.method.name != "dense" and totals["dense"]:
            raise IntegrityError(f"call accounting: {self.method.name} made calls of the wrong kind: {totals}")
        expected = self.layers * (self._chunks + self._decode_calls)
        best = resolve_backend("auto", self.model.device, self.model.dtype)
        return Account(
            self._meter.read(),
            {"expected": expected, **totals},
            dict(calls.backends),
            self._prefill_seconds,
            slower_backends(calls.refused, best),
        )

    def _forward(self, ids: Tensor, phase: str) -> Tensor:
        state = CallState(
            phase=phase,  # type: ignore[arg-type]
            method=self.method,
            prompt_len=self._prompt_len,
            q_offset=self._position,
            backend=self.backend,
            meter=self._meter,
            calls=self._calls,
        )
        output = self._body(input_ids=ids[None], use_cache=True, evalkit=state, **{self._cache_argument: self._cache})
        self._position += len(ids)
        return output.last_hidden_state[0]

    def _synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
