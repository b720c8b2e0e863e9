"""The oracle, the floors and BLASST as plain loops in float64 and Python integers; shares no code with the package."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mass(q: Tensor, k: Tensor, block_size: int, scale: float, offset: int = 0) -> Tensor:
    """Softmax mass of each (tile, block), [Hq, NQ, NK], from q [Hq, Lq, d] and k [Hkv, L, d]."""
    heads, length = q.shape[0], k.shape[1]
    group = heads // k.shape[0]
    q, k = q.double(), k.double()
    first, blocks = offset // block_size, math.ceil(length / block_size)
    out = torch.zeros(heads, blocks - first, blocks, dtype=torch.float64)
    for h in range(heads):
        for r in range(offset, length):
            logits = [float(q[h, r - offset] @ k[h // group, c]) * scale for c in range(r + 1)]
            top = max(logits)
            total = sum(math.exp(x - top) for x in logits)
            for c, x in enumerate(logits):
                out[h, r // block_size - first, c // block_size] += math.exp(x - top) / total
    return out


def kept(tile: int, budget: float, minimum: int) -> int:
    """K_i of the fixed-budget rule."""
    return min(tile + 1, max(minimum, math.floor(budget * (tile + 1) + 0.5)))


def top_k(row: Tensor, tile: int, budget: float) -> list[int]:
    """Blocks of largest mass, ascending; ties go to the lowest id."""
    ranked = sorted(range(tile + 1), key=lambda j: (-float(row[j]), j))
    return sorted(ranked[: kept(tile, budget, 1)])


def sink_window(tile: int, sink: int, window: int) -> list[int]:
    return [j for j in range(tile + 1) if j < sink or tile - j < window]


def splitmix(x: int) -> int:
    """Finaliser of SplitMix64."""
    x &= 2**64 - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def random_score(seed: int, layer: int, head: int, tile: int, block: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = 0
    for part in (seed, layer, head):
        key = splitmix((key + part + 1) * golden)
    place = (tile * 2**24 + block + 1) * golden % 2**64
    return (splitmix(place ^ key) % 2**24 + 1) / 2**24


def lists(plan) -> list[list[list[int]]]:
    """Block lists of a plan by head and tile."""
    return [
        [plan.order[0, h, t, : plan.count[0, h, t]].tolist() for t in range(plan.order.shape[2])]
        for h in range(plan.order.shape[1])
    ]
