"""Block selections of the baselines once more, as slow loops in float64 that share no code with the package.

Each is written from its paper: XAttention's Algorithm 1, FlexPrefill's Algorithms 1 to 4, FlashPrefill's block scores
and threshold, SpargeAttn's Algorithm 1. Heads, tiles, rows and blocks are plain Python loops.
"""

from __future__ import annotations

import math

import torch
from literal import rows_of
from torch import Tensor


def _softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    total = sum(weights)
    return [w / total for w in weights]


# ------------------------------------------------------------------------------------------------------- XAttention
def xattn(q: Tensor, k: Tensor, stride: int, block_size: int, scale: float, offset: int = 0) -> Tensor:
    """Mass of each block for each tile, [Hq, NQ, NK], from q [Hq, Lq, d] and k [Hkv, L, d]."""
    heads, length = q.shape[0], k.shape[1]
    share = heads // k.shape[0]
    q, k = q.double(), k.double()
    first, blocks = offset // block_size, math.ceil(length / block_size)
    mass = torch.zeros(heads, blocks - first, blocks, dtype=torch.float64)
    for h in range(heads):
        for r in range(offset // stride, math.ceil(length / stride)):
            logits = []
            for c in range(r + 1):
                total = 0.0
                for i in range(stride):
                    row, column = r * stride + stride - 1 - i, c * stride + i
                    if row < length and column < length:
                        total += float(q[h, row - offset] @ k[h // share, column])
                logits.append(total * scale / stride)
            for c, p in enumerate(_softmax(logits)):
                mass[h, r * stride // block_size - first, c * stride // block_size] += p
    return mass


def sink_diagonal_top_p(mass: Tensor, tile: int, p: float) -> set[int]:
    """First and diagonal block, then blocks by descending mass until the share p of the causal mass is held."""
    if p >= 1:
        return set(range(tile + 1))
    kept = {0, tile}
    total = sum(float(mass[j]) for j in range(tile + 1))
    for j in sorted(range(tile + 1), key=lambda j: (-float(mass[j]), j)):
        if sum(float(mass[i]) for i in kept) >= p * total:
            break
        kept.add(j)
    return kept


# ------------------------------------------------------------------------------------------------------ FlexPrefill
def _prefix(masses: list[float], share: float) -> int:
    """Fewest of the largest masses whose sum reaches the share of all."""
    total, held = sum(masses), 0.0
    for n, mass in enumerate(sorted(masses, reverse=True), 1):
        held += mass
        if held >= share * total:
            return n
    return len(masses)


def _largest(masses: list[float], count: int) -> set[int]:
    return set(sorted(range(len(masses)), key=lambda i: (-masses[i], i))[:count])


def _mean(rows: Tensor) -> Tensor:
    return sum(rows[1:], rows[0].clone()) / len(rows)  # type: ignore[arg-type]


def js_distance(p: list[float], q: list[float]) -> float:
    total = 0.0
    for a, b in zip(p, q, strict=True):
        for x in (a, b):
            if x > 0:
                total += 0.5 * x * math.log(2 * x / (a + b))
    return math.sqrt(max(total, 0.0))


def flex(
    q: Tensor, k: Tensor, gamma: float, tau: float, min_budget: int, block_size: int, scale: float
) -> tuple[list[list[set[int]]], list[bool], list[float]]:
    """Kept blocks of each head and tile, which heads are query-aware, and their divergences."""
    heads, length = q.shape[0], k.shape[1]
    share = heads // k.shape[0]
    q, k = q.double(), k.double()
    blocks = math.ceil(length / block_size)
    least = min(blocks, max(1, math.ceil(min_budget / block_size)))
    kept: list[list[set[int]]] = []
    aware: list[bool] = []
    distances: list[float] = []
    for h in range(heads):
        keys = k[h // share]
        column, diagonal = [0.0] * length, [0.0] * length
        last = range(length - block_size, length)
        for r in last:
            for c, p in enumerate(_softmax([float(q[h, r] @ keys[c]) * scale for c in range(r + 1)])):
                column[c] += p / block_size
                diagonal[r - c] += p / block_size
        column_of_block, diagonal_of_block = [0.0] * blocks, [0.0] * blocks
        for i in range(length):
            column_of_block[i // block_size] += column[i]
            diagonal_of_block[i // block_size] += diagonal[i]

        key_means = [_mean(keys[list(rows_of(j, block_size, length))]) for j in range(blocks)]
        representative = _mean(q[h, list(last)])
        pooled = _softmax([float(representative @ key_means[j]) * scale for j in range(blocks)])
        distances.append(js_distance(pooled, column_of_block))
        aware.append(distances[-1] < tau)

        def lines(tokens: list[float], of_block: list[float], is_aware: bool = aware[-1]) -> set[int]:
            count = least if is_aware else min(blocks, max(least, _prefix(tokens, gamma) // block_size + 1))
            return {0} | _largest(of_block, count)

        columns, diagonals = lines(column, column_of_block), lines(diagonal, diagonal_of_block)
        tiles = [{j for j in range(i + 1) if j in columns or i - j in diagonals} for i in range(blocks)]
        if aware[-1]:
            cells: list[tuple[int, int]] = []
            masses: list[float] = []
            for i in range(blocks):
                mean = _mean(q[h, list(rows_of(i, block_size, length))])
                weights = _softmax([float(mean @ key_means[j]) * scale for j in range(i + 1)])
                cells += [(i, j) for j in range(i + 1)]
                masses += weights
            for n in _largest(masses, _prefix(masses, gamma)):
                tiles[cells[n][0]].add(cells[n][1])
        if gamma >= 1:
            tiles = [set(range(i + 1)) for i in range(blocks)]
        kept.append(tiles)
    return kept, aware, distances


# ----------------------------------------------------------------------------------------------------- FlashPrefill
def flash_mass(q: Tensor, k: Tensor, block_size: int, scale: float, offset: int = 0) -> Tensor:
    """Sum over a tile's queries of exp(logit) of each mean key that they see whole, [Hq, NQ, NK]."""
    heads, length = q.shape[0], k.shape[1]
    share = heads // k.shape[0]
    q, k = q.double(), k.double()
    first, blocks = offset // block_size, math.ceil(length / block_size)
    mass = torch.zeros(heads, blocks - first, blocks, dtype=torch.float64)
    for h in range(heads):
        for j in range(blocks):
            mean = _mean(k[h // share, list(rows_of(j, block_size, length))])
            for r in range(offset, length):
                if r >= (j + 1) * block_size - 1:
                    mass[h, r // block_size - first, j] += math.exp(float(q[h, r - offset] @ mean) * scale)
    return mass


def flash_kept(
    mass: Tensor, tile: int, alpha: float, sink: int, window: int, last_full: int, prompt_tiles: int
) -> set[int]:
    """Threshold against the largest mass, sink, window, and the last tiles whole."""
    if tile >= prompt_tiles - last_full:
        return set(range(tile + 1))
    best = max(float(x) for x in mass)
    return {j for j in range(tile + 1) if float(mass[j]) >= alpha * best or j < sink or j > tile - window}


# ------------------------------------------------------------------------------------------------------- SpargeAttn
def cosine(rows: Tensor) -> float:
    """Mean over all pairs of rows."""
    total = 0.0
    for a in rows:
        for b in rows:
            size = math.sqrt(float(a @ a) * float(b @ b))
            total += float(a @ b) / size if size else 0.0
    return total / len(rows) ** 2


def sparge(
    q: Tensor, k: Tensor, tau: float, theta: float, block_size: int, scale: float, sink: bool = False
) -> list[list[set[int]]]:
    """Kept blocks of each head and tile."""
    heads, length = q.shape[0], k.shape[1]
    share = heads // k.shape[0]
    q, k = q.double(), k.double()
    blocks = math.ceil(length / block_size)
    kept: list[list[set[int]]] = []
    for h in range(heads):
        keys = k[h // share]
        centred = keys - _mean(keys)
        spans = [list(rows_of(j, block_size, length)) for j in range(blocks)]
        alike = [cosine(centred[span]) >= theta for span in spans]
        means = [_mean(keys[span]) for span in spans]
        tiles = []
        for i in range(blocks):
            causal = set(range(i + 1))
            chosen = {0} if sink else set()
            chosen |= {j for j in causal if not alike[j]}
            judged = [j for j in causal if alike[j]]
            if tau >= 1 or cosine(q[h, spans[i]]) < theta:
                chosen = causal
            elif judged:
                mean = _mean(q[h, spans[i]])
                weights = dict(zip(judged, _softmax([float(mean @ means[j]) * scale for j in judged]), strict=True))
                held = 0.0
                for n, j in enumerate(sorted(judged, key=lambda j: (-weights[j], j))):
                    held += weights[j]
                    if held > tau and n > 0:
                        break
                    chosen.add(j)
            tiles.append(chosen)
        kept.append(tiles)
    return kept
