"""Attention over selected pages by unions of eight queries (PageWeaver, equations 1-2)."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Literal, overload

import torch
from torch import Tensor

from .backends import (
    BackendUnavailable,
    choose_backend,
    hopper_problem,
    record_call,
    record_refusal,
    triton_problem,
    triton_refusal,
)
from .capabilities import provides
from .checks import check_page_table, check_scale, check_shapes
from .fp8 import E4M3_MAX, Fp8KV, quantize_kv, quantize_rows, to_e4m3
from .page_search import cuda_problem, search_unions, searches
from .page_stats import PageStats, page_stats
from .paged import PagedKV
from .pages import GROUP, PagePlan, page_support, visible_tokens
from .regroup import execution_order, regroups
from .unions import Unions, prepare_unions

PAGE_BACKENDS = ("torch", "triton", "hopper", "cluster")
"""Implementations of :func:`union_attention`; ``cluster`` is built with nvcc on first use and never chosen by auto."""

_MAX_LOGITS = 1 << 26
"""Most logits of the reference held at once."""


@overload
def page_attention(
    q: Tensor,
    kv: PagedKV | Fp8KV,
    plan: PagePlan,
    *,
    scale: float,
    backend: str = ...,
    stats: Literal[True] = ...,
) -> tuple[Tensor, PageStats]: ...
@overload
def page_attention(
    q: Tensor, kv: PagedKV | Fp8KV, plan: PagePlan, *, scale: float, backend: str = ..., stats: bool
) -> tuple[Tensor, PageStats | None]: ...
@provides(physical_skip=True, page_remap=True)
def page_attention(
    q: Tensor,
    kv: PagedKV | Fp8KV,
    plan: PagePlan,
    *,
    scale: float,
    backend: str = "auto",
    stats: bool = True,
) -> tuple[Tensor, PageStats | None]:
    """The complete call: regroup, prepare unions, attend; on a GPU nothing waits for the device.

    Under ``plan.kv_dtype == "fp8"`` a cache that is not quantised yet is quantised first.

    Args:
        q: [1, Hq, N, d]; Hkv divides Hq.
        kv: keys and values; ``page_table`` is [R, M]. Values must be finite: a page is multiplied for its whole group,
            and zero times NaN or infinity is NaN, also for a query that did not select it.
        plan: selections.
        scale: softmax scaling of the model.
        backend: ``auto`` or one of :data:`PAGE_BACKENDS`, for the attention. Under a named one other than ``torch``
            search, preparation and counts run in Triton, each in torch where Triton refuses the call (many pages, many
            ids a query), of which :func:`prefill_kernels.executed` tells. Under ``hopper`` and ``cluster``, as under
            ``auto``, search and preparation are one kernel of CUDA C++ wherever it can run.
        stats: count too; without it the second result is None.

    Returns:
        Output [1, Hq, N, d] in the dtype of ``q``, zeros for a query without support, and the counts.

    Raises:
        ValueError: shapes do not belong together, or ``scale`` is not above 0.
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    check_call(q, kv, plan, scale)
    if plan.kv_dtype == "fp8" and isinstance(kv, PagedKV):
        kv = quantize_kv(kv, kv_lens=plan.kv_lens)
    chosen = resolve_page_backend(q, kv, plan, backend)
    unions = _search(plan, backend)
    out = _attend(q, kv, plan, unions, scale, chosen)
    if not stats:
        return out, None
    counting = _prepared_by("count", "triton_unions", plan, backend)
    counts = page_stats(plan, unions, q.shape[1], regrouped=regroups(plan), backend=counting)
    return out, replace(counts, backend=chosen)


def _search(plan: PagePlan, backend: str) -> Unions:
    """Search and preparation where the attention was asked of ``backend``."""
    if backend in ("auto", "torch"):
        return search_unions(plan, backend=backend)
    if backend != "triton":
        if (reason := cuda_problem(plan)) is None:
            return search_unions(plan, backend="cuda")
        record_refusal("regroup" if searches(plan) else "union", "cuda", reason)
    search = _prepared_by("regroup", "triton_regroup", plan, backend) if regroups(plan) else "torch"
    ids = execution_order(plan, backend=search)
    return prepare_unions(plan, ids, backend=_prepared_by("union", "triton_unions", plan, backend))


def _prepared_by(stage: str, module: str, plan: PagePlan, backend: str) -> str:
    """What runs a part of the preparation where the attention was asked of ``backend``."""
    if backend in ("auto", "torch"):
        return backend
    if (reason := triton_refusal(module, plan)()) is None:
        return "triton"
    record_refusal(stage, "triton", reason)
    return "torch"


def union_attention(
    q: Tensor, kv: PagedKV | Fp8KV, plan: PagePlan, unions: Unions, *, scale: float, backend: str = "auto"
) -> Tensor:
    """Attend group by group: a group walks its union in ascending order, each query under its own mask.

    A page that a query did not select leaves its running maximum, sum and output as they are, bit for bit, so that a
    query's result does not depend on its group in any backend that computes rows of a product independently.

    FP8: a query row is quantised by its own scale, amax / 448; probabilities times 448 become E4M3 and the sum is of
    the probabilities before that; output = acc / (448 l).

    Args:
        q: [1, Hq, N, d].
        kv: keys and values, E4M3 or as cached.
        plan: geometry; its pages and regroup are not read again.
        unions: what the groups walk.
        scale: softmax scaling of the model.
        backend: ``auto`` or one of :data:`PAGE_BACKENDS`.

    Returns:
        [1, Hq, N, d] in the dtype of ``q``; the reference accumulates in float32, or in float64 when ``q`` is.

    Raises:
        ValueError: shapes do not belong together, or ``scale`` is not above 0.
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    check_call(q, kv, plan, scale)
    unions.check_shapes(plan)
    return _attend(q, kv, plan, unions, scale, resolve_page_backend(q, kv, plan, backend))


def _attend(q: Tensor, kv: PagedKV | Fp8KV, plan: PagePlan, unions: Unions, scale: float, chosen: str) -> Tensor:
    """:func:`union_attention` on the backend that runs it."""
    if chosen == "torch":
        return _union_torch(q, kv, plan, unions, scale)
    q = q if q.stride(3) == 1 else q.contiguous()
    out = torch.empty(1, q.shape[2], q.shape[1], q.shape[3], dtype=q.dtype, device=q.device).transpose(1, 2)
    if plan.length == 0:
        return out
    module = importlib.import_module(f"{__package__}.{chosen}_page_attention")
    module.union_attention(q, kv, plan, unions, scale, out)
    return out


def resolve_page_backend(q: Tensor, kv: PagedKV | Fp8KV, plan: PagePlan, backend: str) -> str:
    """The implementation of :func:`union_attention` that runs a call, one of :data:`PAGE_BACKENDS`.

    Raises:
        BackendUnavailable: a backend asked for by name does not exist or cannot run the call.
    """
    if backend == "cluster":
        try:
            from .cluster_page_attention import problem
        except ImportError as error:
            raise BackendUnavailable(f"backend='cluster': {error}") from error
        if reason := problem(q, kv, plan):
            raise BackendUnavailable(f"backend='cluster': {reason}")
        record_call("attention", backend)
        return backend

    def hopper_refusal() -> str | None:
        if reason := hopper_problem(q.device):
            return reason
        try:
            from . import hopper_page_attention
        except (ImportError, AttributeError) as error:
            return f"this Triton has no usable Gluon ({error})"
        return hopper_page_attention.problem(q, kv, plan)

    def plain_refusal() -> str | None:
        if reason := triton_problem():
            return reason
        from . import triton_page_attention

        return triton_page_attention.problem(q, kv, plan)

    return choose_backend("attention", backend, q.device, {"hopper": hopper_refusal, "triton": plain_refusal})


def page_backend_problem(
    backend: str, device: torch.device, dtype: torch.dtype, *, page_size: int, physical: int, fp8: bool
) -> str | None:
    """Why a named backend of :func:`union_attention` cannot run on a device, whatever the model, or None.

    Args:
        backend: one of :data:`PAGE_BACKENDS`.
        device: where the tensors will lie.
        dtype: of the queries, and of the cache unless ``fp8``.
        page_size: P, tokens of a logical page.
        physical: tokens of a physical page.
        fp8: E4M3 keys and values.
    """
    # One query, of a shape that every kernel takes.
    q = torch.empty(1, 1, 1, 128, dtype=dtype, device=device)
    pool = torch.empty(1, physical, 1, 128, dtype=torch.float8_e4m3fn if fp8 else dtype, device=device)
    table = torch.zeros(1, max(1, page_size // physical), dtype=torch.int32, device=device)
    kv: PagedKV | Fp8KV = PagedKV(pool, pool, table, 1)
    if fp8:
        one = torch.ones(1, device=device)
        kv = Fp8KV(pool, pool.permute(0, 2, 3, 1).contiguous(), one, one, table, 1)
    plan = PagePlan.for_prompt(torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device), page_size, 0, 1)
    try:
        resolve_page_backend(q, kv, plan, backend)
    except BackendUnavailable as error:
        return str(error).partition(": ")[2]
    return None


def attend_pages(q: Tensor, kv: PagedKV | Fp8KV, plan: PagePlan, scale: float) -> Tensor:
    """Equations (1)-(2) straight from the supports, without groups: the oracle.

    Args:
        q: [1, Hq, N, d]; float64 queries are computed in float64, others in float32.
        kv: keys and values; E4M3 ones are taken for the numbers they stand for.
        plan: selections.
        scale: softmax scaling of the model.

    Returns:
        [1, Hq, N, d] in the dtype of ``q``, zeros for an empty support.
    """
    check_call(q, kv, plan, scale)
    if isinstance(kv, Fp8KV):
        kv = kv.dequantize()
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads, dim, kv_heads = q.shape[1], q.shape[3], kv.num_kv_heads
    support, seen = page_support(plan), visible_tokens(plan)
    out = torch.zeros_like(q)
    lengths = plan.kv_lens.tolist()
    for r, (begin, end) in enumerate(zip(plan.cu_seqlens, plan.cu_seqlens[1:], strict=False)):
        token = torch.arange(lengths[r], device=q.device)
        page = kv.page_table[r, token // kv.page_size].long()
        keys, values = (
            x[page, token % kv.page_size].to(compute).transpose(0, 1) for x in (kv.k_pages, kv.v_pages)
        )  # [Hkv, L, d]
        some = max(1, _MAX_LOGITS // max(1, heads * lengths[r]))
        for first in range(begin, end, some):
            rows = slice(first, min(first + some, end))
            allowed = support[rows].transpose(0, 1)[..., token // plan.page_size] & (token < seen[rows, None])
            query = q[0, :, rows].to(compute).view(kv_heads, heads // kv_heads, -1, dim)
            logits = (query @ keys[:, None].mT * scale).masked_fill(~allowed[:, None], float("-inf"))
            # An empty support is 0 / 0 in the softmax, and zero by definition.
            weights = torch.where(allowed.any(-1)[:, None, :, None], logits.softmax(-1), 0)
            out[0, :, rows] = (weights @ values[:, None]).view(heads, -1, dim).to(q.dtype)
    return out


def check_call(q: Tensor, kv: PagedKV | Fp8KV, plan: PagePlan, scale: float) -> None:
    """Raise ValueError unless queries, cache and plan belong together and ``scale`` is above 0.

    From what the host knows: shapes, dtypes, devices and strides, never what a tensor holds.
    """
    plan.check_shapes()
    if isinstance(kv, Fp8KV):
        kv.check_shapes()
    if q.dim() != 4 or q.shape[0] != 1 or q.shape[2] != plan.length:
        raise ValueError(f"q {tuple(q.shape)}: must be [1, Hq, N = {plan.length}, d]")
    if kv.num_kv_heads != plan.num_kv_heads:
        raise ValueError(f"{kv.num_kv_heads} KV heads: the plan is for {plan.num_kv_heads}")
    check_shapes(q, kv.k_pages, kv.v_pages)
    if plan.pages.device != q.device:
        raise ValueError(f"plan on {plan.pages.device}: must lie with q on {q.device}")
    if kv.kv_len != plan.max_kv_len:
        raise ValueError(f"kv_len={kv.kv_len}: the plan is for max_kv_len={plan.max_kv_len}")
    if kv.page_table.ndim != 2 or kv.page_table.shape[0] != plan.requests:
        raise ValueError(f"page_table {tuple(kv.page_table.shape)}: must be [R, pages] with R = {plan.requests}")
    check_page_table(kv, q.device)
    check_scale(scale)


def _union_torch(q: Tensor, kv: PagedKV | Fp8KV, plan: PagePlan, unions: Unions, scale: float) -> Tensor:
    """All groups of all heads at once, one page of each union a step.

    Groups are sorted by union, so that those still active at a step are a prefix.
    """
    heads, dim, kv_heads, size = q.shape[1], q.shape[3], kv.num_kv_heads, plan.page_size
    ratio, device = heads // kv_heads, q.device
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    counts, rank = unions.count.flatten().long().sort(descending=True, stable=True)
    head, request = rank // plan.groups, unions.requests.long()[rank % plan.groups]
    pages, members = (x.flatten(0, 1)[rank].long() for x in (unions.pages, unions.members))
    ids = unions.ids.view(-1, GROUP)[rank].long()
    real = ids >= 0
    seen = torch.where(real, visible_tokens(plan)[ids.clamp(min=0)].long(), 0)
    length = plan.kv_lens.long()[request]

    # Row r of a group is query slot r // ratio, head r % ratio.
    query = q[0].view(kv_heads, ratio, -1, dim)[head[:, None], :, ids.clamp(min=0)].flatten(1, 2)
    factor: float | Tensor = scale
    if isinstance(kv, Fp8KV):
        query, row_scale = quantize_rows(query)
        factor = row_scale.to(compute) * kv.k_scale[head, None, None] * scale
    query = query.to(compute)
    key_pool, value_pool = kv.k_pages, kv.v_pages
    if isinstance(kv, Fp8KV):  # indexing is not defined for E4M3
        key_pool, value_pool = key_pool.view(torch.int8), value_pool.view(torch.int8)

    def tile(pool: Tensor, page: Tensor, slot: Tensor, where: Tensor, exists: Tensor) -> Tensor:
        rows = pool[page, slot, where]
        rows = rows.view(torch.float8_e4m3fn) if isinstance(kv, Fp8KV) else rows
        return torch.where(exists[..., None], rows.to(compute), 0)

    running_max = query.new_full(query.shape[:2], float("-inf"))
    denominator = query.new_zeros(query.shape[:2])
    output = torch.zeros_like(query)
    for step in range(int(counts[0]) if len(counts) else 0):
        active = int((counts > step).sum())
        token = pages[:active, step, None] * size + torch.arange(size, device=device)
        exists = token < length[:active, None]
        known = torch.where(exists, token, 0)
        page = kv.page_table[request[:active, None], known // kv.page_size].long()
        place = page, known % kv.page_size, head[:active, None], exists
        allowed = (members[:active, step, None] >> torch.arange(GROUP, device=device)) & 1 != 0
        mask = (allowed[..., None] & (token[:, None] < seen[:active, :, None])).repeat_interleave(ratio, 1)

        logits = torch.bmm(query[:active], tile(key_pool, *place).mT)
        logits = logits * (factor[:active] if isinstance(factor, Tensor) else factor)
        logits = logits.masked_fill(~mask, float("-inf"))
        new_max = torch.maximum(running_max[:active], logits.amax(-1))
        # Nothing attended to so far: -inf - -inf would poison the row for ever.
        shift = new_max.masked_fill(new_max == float("-inf"), 0)
        weights = (logits - shift[..., None]).exp()
        decay = (running_max[:active] - shift).exp()
        running_max[:active] = new_max
        denominator[:active] = decay * denominator[:active] + weights.sum(-1)
        if isinstance(kv, Fp8KV):
            weights = to_e4m3(weights * E4M3_MAX).to(compute)
        values = tile(value_pool, *place)
        output[:active] = output[:active] * decay[..., None] + torch.bmm(weights, values)
    if isinstance(kv, Fp8KV):
        output *= (kv.v_scale[head] / E4M3_MAX)[:, None, None]
    # An empty support leaves a zero denominator: its output is zero, not 0/0.
    output /= denominator.masked_fill(denominator == 0, 1)[..., None]

    out = torch.zeros(kv_heads, ratio, plan.length, dim, dtype=q.dtype, device=device)
    rows = output.view(-1, GROUP, ratio, dim)[real].to(q.dtype)
    out[head[:, None].expand_as(ids)[real], :, ids[real]] = rows
    return out.view(1, heads, plan.length, dim)
