"""Page attention in loops, straight from equations (1)-(2) and the definitions of unions and counts: float64, slow."""

from __future__ import annotations

import math

import torch
from prefill_kernels import PagePlan
from torch import Tensor


def request_of(plan: PagePlan, query: int) -> int:
    return next(r for r in range(plan.requests) if query < plan.cu_seqlens[r + 1])


def seen(plan: PagePlan, query: int) -> int:
    """Tokens 0 .. n - 1 that causality and length let a query see."""
    return max(0, min(int(plan.positions[query]) + 1, int(plan.kv_lens[request_of(plan, query)])))


def support(plan: PagePlan, query: int, head: int) -> set[int]:
    """S_i without the pages wholly beyond c_i."""
    last = math.ceil(int(plan.kv_lens[request_of(plan, query)]) / plan.page_size)
    valid = {p for p in plan.pages[0, query, head].tolist() if 0 <= p < last}
    return {p for p in valid if p * plan.page_size <= int(plan.positions[query])}


def tokens(plan: PagePlan, query: int, head: int) -> list[int]:
    """A_i of equation (1)."""
    chosen, size = support(plan, query, head), plan.page_size
    return [t for t in range(seen(plan, query)) if t // size in chosen]


def attend(q: Tensor, k: Tensor, v: Tensor, plan: PagePlan, scale: float) -> Tensor:
    """q [1, Hq, N, d]; k, v [R, Hkv, L, d]. Output [1, Hq, N, d] in float64."""
    ratio = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(plan.length):
        request = request_of(plan, i)
        for h in range(k.shape[1]):
            allowed = tokens(plan, i, h)
            if allowed:
                for g in range(h * ratio, (h + 1) * ratio):
                    z = k[request, h, allowed].double() @ q[0, g, i].double() * scale
                    out[0, g, i] = torch.softmax(z, 0) @ v[request, h, allowed].double()
    return out


def walk(plan: PagePlan, ids: Tensor) -> list[list[dict[int, int]]]:
    """For each head and group the pages and their membership bits."""
    groups: list[list[dict[int, int]]] = []
    for h, row in enumerate(ids.tolist()):
        groups.append([])
        for begin in range(0, len(row), 8):
            bits: dict[int, int] = {}
            for slot, query in enumerate(row[begin : begin + 8]):
                for page in support(plan, query, h) if query >= 0 else ():
                    bits[page] = bits.get(page, 0) | 1 << slot
            groups[-1].append(dict(sorted(bits.items())))
    return groups
