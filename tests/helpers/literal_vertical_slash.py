"""MInference once more, as slow loops over heads, queries and keys in float64: shares no code with the package.

Written from Algorithms 2-4 of the paper; selections, attention and counts are plain Python over lists and sets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def keys_of(row: int, columns: Sequence[int], slashes: Sequence[int]) -> set[int]:
    """Keys that one query attends to."""
    return {j for j in columns if j <= row} | {row - s for s in slashes if s <= row}


def windows_of(tile: int, slashes: Sequence[int], size: int, step: int) -> list[int]:
    """Distances from the tile's end at which its windows begin: ranges of merged diagonals, cut from the near end."""
    spans: list[list[int]] = []
    for s in sorted(slashes):  # a diagonal s holds distances s .. s + size - 1
        if spans and s - spans[-1][1] < step:
            spans[-1][1] = s + size
        else:
            spans.append([s, s + size])
    return [at for low, high in spans for at in range(low, high, step) if at <= (tile + 1) * size - 1]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    columns: list[list[int]],
    slashes: list[list[int]],
    scale: float,
    whole: tuple[int, int] | None = None,
) -> tuple[Tensor, list[list[int]]]:
    """Output [Hq, L, d] and, for each head, how many keys each query attended to.

    ``whole`` = (tile, step) adds every causal key of the windows.
    """
    heads, length = q.shape[:2]
    group = heads // k.shape[0]
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    counts: list[list[int]] = []
    for h in range(heads):
        counts.append([])
        for i in range(length):
            found = keys_of(i, columns[h], slashes[h])
            if whole:
                end = (i // whole[0] + 1) * whole[0] - 1
                starts = windows_of(i // whole[0], slashes[h], *whole)
                found |= {end - d for at in starts for d in range(at, at + whole[1]) if 0 <= end - d <= i}
            keys = sorted(found)
            counts[h].append(len(keys))
            if not keys:
                continue
            logits = [float(q[h, i] @ k[h // group, j]) * scale for j in keys]
            top = max(logits)
            weights = [math.exp(x - top) for x in logits]
            out[h, i] = sum(w * v[h // group, j] for w, j in zip(weights, keys, strict=True)) / sum(weights)
    return out, counts


def executed_blocks(columns: list[int], slashes: list[int], size: int, step: int, length: int) -> list[int]:
    """Blocks each tile executes: windows over the merged key ranges of its diagonals, then the other columns."""
    found = []
    for start in range(0, length, size):
        windows = windows_of(start // size, slashes, size, step)
        held = {start + size - 1 - d for at in windows for d in range(at, at + step)}
        others = [j for j in columns if j <= start + size - 1 and j not in held]
        steps = len(windows) + math.ceil(len(others) / step)
        found.append(math.ceil(steps * step / size))
    return found


def last_query_mass(q: Tensor, k: Tensor, scale: float, last_q: int) -> tuple[Tensor, Tensor]:
    """Attention of the last queries summed over columns and diagonals, [Hq, L] each."""
    heads, length = q.shape[:2]
    group = heads // k.shape[0]
    q, k = q.double(), k.double()
    column = torch.zeros(heads, length, dtype=torch.float64)
    diagonal = torch.zeros(heads, length, dtype=torch.float64)
    for h in range(heads):
        for i in range(max(0, length - last_q), length):
            logits = [float(q[h, i] @ k[h // group, j]) * scale for j in range(i + 1)]
            top = max(logits)
            total = sum(math.exp(x - top) for x in logits)
            for j, x in enumerate(logits):
                column[h, j] += math.exp(x - top) / total
                diagonal[h, i - j] += math.exp(x - top) / total
    return column, diagonal


def largest(score: Sequence[float], size: int, forced: int) -> list[int]:
    """Positions of the largest scores, the first ``forced`` positions before all, ties to the lowest; ascending."""
    order = sorted(range(len(score)), key=lambda i: (i >= forced, -score[i] if i >= forced else i, i))
    return sorted(order[:size])


def pooled_blocks(q: Tensor, k: Tensor, size: int, top_k: int, scale: float) -> list[list[list[int]]]:
    """Blocks of each tile by products of mean queries and mean keys, [Hq][tile]."""
    heads, length = q.shape[:2]
    group = heads // k.shape[0]
    blocks = math.ceil(length / size)

    def mean(x: Tensor, block: int) -> Tensor:
        rows = [x[i].double() for i in range(block * size, min((block + 1) * size, length))]
        return sum(rows[1:], rows[0]) / len(rows)

    lists: list[list[list[int]]] = []
    for h in range(heads):
        lists.append([])
        for tile in range(blocks):
            score = [float(mean(q[h], tile) @ mean(k[h // group], j)) * scale for j in range(tile + 1)]
            lists[h].append(sorted(sorted(range(tile + 1), key=lambda j: (-score[j], j))[:top_k]))
    return lists
