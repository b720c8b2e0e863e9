"""The direct KV-page union: each page gathers the queries that chose it, and partial results are reduced.

The design study beside :mod:`.page_attention`: reuse of a page is not bounded by a group, since every query of a chunk
that chose the page is served from one load; in exchange each (query, page) pair writes a partial output to memory,
which a second pass reads back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .backends import choose_backend, triton_problem
from .fp8 import E4M3_MAX, Fp8KV, quantize_kv, quantize_rows, to_e4m3
from .page_attention import check_call
from .paged import PagedKV
from .pages import PagePlan, canonical_rows, query_requests, visible_tokens

PARTIAL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What partial outputs can be kept in."""


@dataclass(frozen=True)
class Inverted:
    """The plan seen from its pages; a *slot* is query * K + place of the page among the query's pages in order.

    Pages are numbered over the requests, request * M + logical page with M = ceil(max L / P).

    Attributes:
        slots: int32 [Hkv, N * K], slots that chose a page, by page and then by query; those of no page come last.
        starts: int32 [Hkv, R * M + 1], first place of each page in ``slots``.
        counts: int32 [Hkv, N], |S_i|; the slots of a query are its first ones.
    """

    slots: Tensor
    starts: Tensor
    counts: Tensor


def invert_plan(plan: PagePlan) -> Inverted:
    """For each page the queries that chose it, sorted on the device without waiting for it."""
    rows = canonical_rows(plan)
    held = rows < torch.iinfo(torch.int32).max
    total = plan.requests * plan.num_pages
    first = query_requests(rows.device, plan.cu_seqlens).long() * plan.num_pages
    number = torch.where(held, rows + first[:, None, None], total)
    # A stable sort keeps queries ascending within a page.
    ranked, slots = number.transpose(0, 1).flatten(1).contiguous().sort(dim=-1, stable=True)
    page = torch.arange(total + 1, device=rows.device).expand(len(ranked), -1).contiguous()
    starts = torch.searchsorted(ranked.contiguous(), page, out_int32=True)
    return Inverted(slots.int(), starts, held.sum(-1, dtype=torch.int32).mT.contiguous())


def partial_bytes(plan: PagePlan, q_heads: int, dim: int, partial_dtype: torch.dtype = torch.float32) -> int:
    """Bytes of the partial results that one call writes, and reads again where |S_i| = K: m, l (float32) and acc."""
    return plan.length * plan.width * q_heads * (dim * partial_dtype.itemsize + 8)


def kv_union_attention(
    q: Tensor,
    kv: PagedKV | Fp8KV,
    plan: PagePlan,
    *,
    scale: float,
    backend: str = "auto",
    partial_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Equations (1)-(2) with a page as the unit of work.

    Each page is loaded once for every 64 of its queries; a (query, page) pair leaves its maximum m, its sum l and its
    unnormalised output acc, and a second pass joins the pairs of each query in ascending order of pages.

    Args:
        q: [1, Hq, N, d]; Hkv divides Hq.
        kv: keys and values; ``page_table`` is [R, M].
        plan: selections; ``regroup`` does not matter here.
        scale: softmax scaling of the model.
        backend: see :func:`prefill_kernels.resolve_backend`.
        partial_dtype: of the partial outputs in memory, one of :data:`PARTIAL_DTYPES`: float32, or bfloat16 or float16
            to halve them. The reference keeps those of float64 queries in float64.

    Returns:
        [1, Hq, N, d] in the dtype of ``q``, zeros for an empty support.

    Raises:
        ValueError: shapes do not belong together, ``scale`` is not above 0, or another ``partial_dtype``.
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    check_call(q, kv, plan, scale)
    if partial_dtype not in PARTIAL_DTYPES:
        raise ValueError(f"partial_dtype={partial_dtype}: must be one of {', '.join(map(str, PARTIAL_DTYPES))}")
    if plan.kv_dtype == "fp8" and isinstance(kv, PagedKV):
        kv = quantize_kv(kv, kv_lens=plan.kv_lens)

    def triton_refusal() -> str | None:
        if problem := triton_problem():
            return problem
        from . import triton_kv_union

        return triton_kv_union.problem(q, kv, plan)

    if plan.length and choose_backend("attention", backend, q.device, {"triton": triton_refusal}) == "triton":
        from .triton_kv_union import kv_union_triton

        return kv_union_triton(q, kv, plan, invert_plan(plan), scale, partial_dtype)
    return _kv_union_torch(q, kv, plan, invert_plan(plan), scale, partial_dtype)


def _kv_union_torch(
    q: Tensor, kv: PagedKV | Fp8KV, plan: PagePlan, inverted: Inverted, scale: float, partial_dtype: torch.dtype
) -> Tensor:
    """One page of one head after another, then the reduction."""
    heads, length, dim = q.shape[1:]
    kv_heads, width, device = kv.num_kv_heads, plan.width, q.device
    ratio = heads // kv_heads
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    partial_dtype = torch.float64 if compute == torch.float64 else partial_dtype
    fp8 = isinstance(kv, Fp8KV)
    query: Tensor = q[0]
    factor: Tensor = torch.full((heads, length, 1), scale, dtype=compute, device=device)
    if isinstance(kv, Fp8KV):
        query, row_scale = quantize_rows(query)
        factor = row_scale.to(compute) * kv.k_scale.repeat_interleave(ratio)[:, None, None] * scale
    query = query.to(compute).view(kv_heads, ratio, length, dim)
    factor = factor.view(kv_heads, ratio, length, 1)
    seen, lengths = visible_tokens(plan), plan.kv_lens.tolist()

    maxima = torch.full((kv_heads, length * width, ratio), float("-inf"), dtype=compute, device=device)
    sums = torch.zeros_like(maxima)
    partial = torch.zeros(kv_heads, length * width, ratio, dim, dtype=partial_dtype, device=device)
    starts = inverted.starts.tolist()
    for head in range(kv_heads):
        key_pool, value_pool = (x[:, :, head].to(compute) for x in (kv.k_pages, kv.v_pages))
        for number in range(plan.requests * plan.num_pages):
            slots = inverted.slots[head, starts[head][number] : starts[head][number + 1]].long()
            if not len(slots):
                continue
            request, page = divmod(number, plan.num_pages)
            first = page * plan.page_size
            token = torch.arange(first, min(first + plan.page_size, lengths[request]), device=device)
            physical = kv.page_table[request, token // kv.page_size].long()
            keys, values = (x[physical, token % kv.page_size] for x in (key_pool, value_pool))
            rows = slots // width
            logits = query[head][:, rows] @ keys.mT * factor[head][:, rows]
            logits = logits.masked_fill(token >= seen[rows, None], float("-inf"))
            top = logits.amax(-1)
            weights = (logits - top[..., None]).exp()
            maxima[head, slots], sums[head, slots] = top.mT, weights.sum(-1).mT
            weights = to_e4m3(weights * E4M3_MAX).to(compute) if fp8 else weights
            partial[head, slots] = (weights @ values).transpose(0, 1).to(partial_dtype)

    maxima, sums = (x.unflatten(1, (length, width)) for x in (maxima, sums))
    top = maxima.amax(2, keepdim=True)
    weights = (maxima - top.masked_fill(top == float("-inf"), 0)).exp()
    total = (weights * sums).sum(2)
    joined = (weights[..., None] * partial.unflatten(1, (length, width))).sum(2)
    out = joined / total.masked_fill(total == 0, 1)[..., None]  # [Hkv, N, ratio, d]
    if isinstance(kv, Fp8KV):
        out = out * (kv.v_scale / E4M3_MAX)[:, None, None, None]
    return out.transpose(1, 2).reshape(1, heads, length, dim).to(q.dtype)
