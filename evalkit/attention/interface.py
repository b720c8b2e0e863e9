"""The attention and mask functions that transformers calls under the name ``evalkit``.

No forward is replaced: projections, QK-norm and RoPE stay the model's own, and K and V come unrepeated. The phase,
the position of a chunk and the prompt length arrive as an explicit :class:`CallState`, never guessed from shapes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from prefill_kernels import DensePlan, Executed, PagedKV, SparsePlan, dense_attention, executed, sparse_attention
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from ..budget import BudgetMeter
from ..errors import IntegrityError
from ..methods import Method, PlanContext

ATTENTION_NAME = "evalkit"


@dataclass
class CallCounts:
    """Attention calls of one sample by what executed them, per layer.

    Attributes:
        layers: number of layers.
        sparse, dense, fallback, decode: calls by layer.
        backends: sparse calls by kernel backend, and before them ``proxy:<backend>`` and ``select:<backend>``, calls of
            the operations that a plan is made with.
        refused: why ``auto`` passed a faster backend over, by stage and that backend.
    """

    layers: int
    sparse: list[int] = field(default_factory=list)
    dense: list[int] = field(default_factory=list)
    fallback: list[int] = field(default_factory=list)
    decode: list[int] = field(default_factory=list)
    backends: Counter[str] = field(default_factory=Counter)
    refused: dict[tuple[str, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind in ("sparse", "dense", "fallback", "decode"):
            setattr(self, kind, [0] * self.layers)

    def add(self, ran: Executed) -> None:
        """Count the operations of a plan. Attention is counted by what its kernel says."""
        for (stage, backend), count in ran.counts.items():
            if stage != "attention":
                self.backends[f"{stage}:{backend}"] += count
        self.refused |= ran.refused

    def totals(self) -> dict[str, int]:
        """Sums over layers."""
        return {kind: sum(getattr(self, kind)) for kind in ("sparse", "dense", "fallback", "decode")}


@dataclass
class CallState:
    """What every attention call of a forward pass needs to know.

    Attributes:
        phase: ``prefill`` runs the method, ``decode`` is dense.
        method: the method under test.
        prompt_len: N, unpadded prompt length.
        q_offset: absolute position of the first query of this pass.
        backend: kernel backend.
        meter, calls: where the pass is accounted.
    """

    phase: Literal["prefill", "decode"]
    method: Method
    prompt_len: int
    q_offset: int
    backend: str
    meter: BudgetMeter
    calls: CallCounts


def evalkit_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: PagedKV,
    value: PagedKV,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    evalkit: CallState | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run one attention call. Query [1, Hq, Lq, d]; returns [1, Lq, Hq, d] and no weights."""
    if evalkit is None or not isinstance(key, PagedKV):
        raise IntegrityError(
            "attention called outside a Session: the model is patched, run it through Session.prefill and .decode"
        )
    if attention_mask is not None or query.shape[0] != 1:
        raise IntegrityError("sparse prefill runs one unpadded sequence a call")
    if kwargs.get("sliding_window") is not None or dropout:
        raise IntegrityError("sliding-window layers and attention dropout are not supported")
    state, layer = evalkit, int(module.layer_idx)  # type: ignore[arg-type]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q_len = query.shape[2]
    if key.kv_len != state.q_offset + q_len:
        raise IntegrityError(f"layer {layer}: KV holds {key.kv_len} tokens, expected {state.q_offset + q_len}")

    if state.phase == "decode":
        state.calls.decode[layer] += 1
        return dense_attention(query, *key.gather(), scale=scale, q_offset=state.q_offset).transpose(1, 2), None

    context = PlanContext(layer, state.q_offset, state.prompt_len, scale, state.backend)
    estimator = state.method.estimator_cells(state.q_offset, q_len)
    with executed() as ran:
        plan = state.method.plan(query, key, context)
        if isinstance(plan, SparsePlan):
            backend = state.method.kernel_backend(state.backend)
            out, stats = sparse_attention(query, key, plan, scale=scale, backend=backend)
    state.calls.add(ran)
    if isinstance(plan, SparsePlan):
        state.calls.sparse[layer] += 1
        state.calls.backends[stats.backend] += 1
        state.meter.add_sparse(layer, state.q_offset, q_len, stats, estimator, state.method.work(stats))
    elif isinstance(plan, DensePlan):
        out = dense_attention(query, *key.gather(), scale=scale, q_offset=state.q_offset)
        fallback = plan.reason == "fallback"
        (state.calls.fallback if fallback else state.calls.dense)[layer] += 1
        state.meter.add_dense(layer, state.q_offset, q_len, fallback=fallback, estimator_cells=estimator)
    else:
        raise TypeError(f"{type(state.method).__name__}.plan returned {type(plan).__name__}, not a plan")
    return out.transpose(1, 2), None


def evalkit_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """Build no mask: causality and offsets are the kernels' work, and a padded batch is refused.

    Without a registered mask function transformers would drop padding masks silently.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise IntegrityError("a padded batch cannot be prefilled: run one unpadded sequence a call")
    return None


def register() -> None:
    """Make ``attn_implementation="evalkit"`` known to transformers. Safe to call again."""
    AttentionInterface.register(ATTENTION_NAME, evalkit_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, evalkit_mask)
