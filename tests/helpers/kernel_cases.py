"""Inputs for the kernel tests, shared by the interpreter and the GPU tests."""

from __future__ import annotations

import math
from typing import Any

import torch
from prefill_kernels import BlockPlan, PagedKV
from torch import Tensor


def tensors(
    length: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    *,
    block: int,
    offset: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    uneven: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Q [1, Hq, length - offset, d] and K, V [1, Hkv, length, d].

    With ``uneven`` whole key blocks differ in weight for all rows alike, so that a tile can agree on a skip.
    """
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(1, length - offset, q_heads, dim, generator=g).transpose(1, 2)
    k = torch.randn(1, kv_heads, length, dim, generator=g)
    v = torch.randn(1, kv_heads, length, dim, generator=g)
    if uneven:
        q[..., 0] = 4.0
        lift = torch.randn(1, kv_heads, math.ceil(length / block), generator=g)
        k[..., 0] = (dim**0.5) * lift.repeat_interleave(block, -1)[..., :length]
    return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype)


def paged(k: Tensor, v: Tensor, page_size: int, seed: int = 9) -> PagedKV:
    """Shuffled pages; what they hold beyond the sequence is NaN. The table is longer than the sequence needs."""
    kv = PagedKV.from_dense(k, v, page_size, generator=torch.Generator().manual_seed(seed))
    table = torch.cat([kv.page_table, kv.page_table.new_full((kv.page_table.shape[0], 3), 1 << 20)], 1)
    return PagedKV(kv.k_pages, kv.v_pages, table, kv.kv_len)


def poisoned(*size: int, **options: Any) -> Tensor:
    """In the place of ``torch.empty``: memory that no earlier call can have left right, NaN or -1."""
    made = torch.zeros(*size, **options)
    return made.fill_(float("nan") if made.is_floating_point() else -1)


def random_plan(
    length: int,
    heads: int,
    block: int,
    *,
    offset: int = 0,
    keep: float = 0.6,
    skip_scale: float = -1.0,
    seed: int = 0,
    empty: float = 0.15,
    diagonal: bool = False,
    device: str = "cpu",
) -> BlockPlan:
    """Random subsets of the causal blocks in random order; a share ``empty`` of the lists holds nothing."""
    g = torch.Generator().manual_seed(seed)
    tiles, first = math.ceil((length - offset) / block), offset // block
    blocks = first + tiles
    order = torch.full((1, heads, tiles, blocks + 2), -1, dtype=torch.int32)
    count = torch.zeros(1, heads, tiles, dtype=torch.int32)
    for h in range(heads):
        for t in range(tiles):
            causal = first + t + 1
            chosen = torch.randperm(causal, generator=g)[: max(1, round(keep * causal))].tolist()
            if diagonal and first + t not in chosen:
                chosen.append(first + t)
            if not diagonal and float(torch.rand(1, generator=g)) < empty:
                chosen = []
            order[0, h, t, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
            count[0, h, t] = len(chosen)
    plan = BlockPlan(order, count, block, offset, length - offset, length, length, skip_scale)
    plan.check()
    return on(plan, device)


def on(plan: BlockPlan, device: str) -> BlockPlan:
    """The plan with its lists on a device."""
    geometry = (plan.block_size, plan.q_offset, plan.q_len, plan.kv_len, plan.prompt_len, plan.skip_scale)
    return BlockPlan(plan.order.to(device), plan.count.to(device), *geometry)


def threshold_margin(q: Tensor, k: Tensor, plan: BlockPlan, scale: float, head: int, tile: int) -> float:
    """Smallest distance of a vote of one tile from its threshold, walking its list in float64 as Algorithm A does."""
    threshold, size = plan.log_threshold, plan.block_size
    if threshold is None:
        return math.inf
    group = q.shape[1] // k.shape[1]
    rows = slice(tile * size, min((tile + 1) * size, plan.q_len))
    position = plan.q_offset + torch.arange(plan.q_len, device=q.device)[rows]
    query, keys = q[0, head, rows].double(), k[0, head // group].double()
    running = torch.full((query.shape[0],), -math.inf, dtype=torch.float64, device=q.device)
    margin = math.inf
    for step, j in enumerate(plan.order[0, head, tile, : int(plan.count[0, head, tile])].tolist()):
        token = torch.arange(j * size, min((j + 1) * size, plan.kv_len), device=q.device)
        s = (query @ keys[token].T * scale).masked_fill(token > position[:, None], -math.inf)
        local = s.amax(-1)
        vote = float((local - torch.maximum(running, local)).amax())
        if step:
            margin = min(margin, abs(vote - threshold))
        if step == 0 or not vote < threshold:
            running = torch.maximum(running, local)
    return margin
