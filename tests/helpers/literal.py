"""CoSA once more, as slow loops over rows in float64: the check that shares no code with the package.

Written from equations 5 and 8-14 and Algorithm A; heads, tiles, rows and blocks are plain Python loops.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rows_of(tile: int, block_size: int, length: int) -> range:
    return range(tile * block_size, min((tile + 1) * block_size, length))


def samples_of(block: int, block_size: int, length: int, stride: int) -> list[int]:
    """Sampled positions of one block; a block that none hits gives its last row."""
    rows = rows_of(block, block_size, length)
    return [r for r in rows if r % stride == 0] or [rows[-1]]


def kap(
    q: Tensor, k: Tensor, stride: int, block_size: int, scale: float, offset: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, flags and the smallest margin by which a row maximum was won, [Hq, NQ, NK] each."""
    heads, length = q.shape[0], k.shape[1]
    group = heads // k.shape[0]
    q, k = q.double(), k.double()
    first = offset // block_size
    blocks = math.ceil(length / block_size)
    score = torch.zeros(heads, blocks - first, blocks, dtype=torch.float64)
    flag = torch.zeros(heads, blocks - first, blocks, dtype=torch.bool)
    margin = torch.full((heads, blocks - first, blocks), math.inf, dtype=torch.float64)
    for h in range(heads):
        for i in range(first, blocks):
            for r in samples_of(i, block_size, length, stride):
                logits = {}
                for j in range(i + 1):
                    for c in samples_of(j, block_size, length, stride):
                        if c <= r:
                            logits[j, c] = float(q[h, r - offset] @ k[h // group, c]) * scale
                top = max(logits.values())
                total = sum(math.exp(x - top) for x in logits.values())
                pooled: dict[int, float] = {}
                for (j, _), x in logits.items():
                    pooled[j] = max(pooled.get(j, 0.0), math.exp(x - top) / total)
                best: float = max(pooled.values())
                for j, value in pooled.items():
                    score[h, i - first, j] += value / best
                    flag[h, i - first, j] |= value == best
                    gap = abs(value / best - 1)
                    if value != best:
                        margin[h, i - first, j] = min(float(margin[h, i - first, j]), gap)
    return score, flag, margin


def ordered(score: Tensor, flag: Tensor, tile: int) -> list[int]:
    """Equation 13 for one tile: HRM group first, descending score, ties by block id."""
    return sorted(range(tile + 1), key=lambda j: (not flag[j], -float(score[j]), j))


def top_p(score: Tensor, order: list[int], p: float) -> list[int]:
    """Shortest prefix whose mass reaches p; all of it at p >= 1."""
    if p >= 1:
        return order
    total = sum(float(score[j]) for j in order)
    mass = 0.0
    for n, j in enumerate(order, 1):
        mass += float(score[j])
        if mass >= p * total:
            return order[:n]
    return order


def osk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: list[list[list[int]]],
    block_size: int,
    scale: float,
    log_threshold: float | None,
    offset: int = 0,
) -> tuple[Tensor, list[list[list[bool]]]]:
    """Algorithm A, lines 7-22, row by row: output [Hq, Lq, d] and which listed blocks were computed."""
    heads, length = q.shape[0], k.shape[1]
    group = heads // k.shape[0]
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    computed: list[list[list[bool]]] = []
    for h in range(heads):
        computed.append([])
        for t, blocks in enumerate(lists[h]):
            rows = rows_of(offset // block_size + t, block_size, length)
            m = {r: -math.inf for r in rows}
            den = {r: 0.0 for r in rows}
            acc = {r: torch.zeros(q.shape[-1], dtype=torch.float64) for r in rows}
            done = []
            for position, j in enumerate(blocks):
                keys = {r: [c for c in rows_of(j, block_size, length) if c <= r] for r in rows}
                s = {r: [float(q[h, r - offset] @ k[h // group, c]) * scale for c in keys[r]] for r in rows}
                votes = [max(s[r]) - max(m[r], max(s[r])) for r in rows if s[r]]
                skip = log_threshold is not None and position > 0 and max(votes, default=-math.inf) < log_threshold
                done.append(not skip)
                if skip:
                    continue
                for r in rows:
                    if not s[r]:
                        continue
                    new = max(m[r], max(s[r]))
                    decay = math.exp(m[r] - new) if den[r] else 0.0
                    weights = [math.exp(x - new) for x in s[r]]
                    den[r] = decay * den[r] + sum(weights)
                    acc[r] = decay * acc[r] + sum(w * v[h // group, c] for w, c in zip(weights, keys[r], strict=True))
                    m[r] = new
            for r in rows:
                if den[r]:
                    out[h, r - offset] = acc[r] / den[r]
            computed[h].append(done)
    return out, computed
