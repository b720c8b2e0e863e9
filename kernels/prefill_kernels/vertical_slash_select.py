"""Index estimation of MInference: columns and diagonals from the last queries, blocks from pooled queries and keys."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .backends import choose_backend, record_call, triton_refusal
from .checks import check_head_list, check_operands
from .device_tables import device_table
from .paged import PagedKV
from .pooling import block_means

FORCED_COLUMNS = 30
"""First key positions that are always among the chosen columns."""
FORCED_SLASHES = 100
"""Offsets nearest the diagonal that are always among the chosen slashes, as far as their number reaches."""

_MAX_SCORES = 1 << 25
"""Most float32 scores held at once (128 MiB)."""


def last_rows(length: int, last_q: int) -> int:
    """Number of queries that the estimate looks from."""
    return min(length, last_q)


def vertical_slash_scores(
    q: Tensor, kv: PagedKV, heads: Sequence[int], *, scale: float, last_q: int = 64, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Attention of the last queries summed over columns and over diagonals (MInference, Algorithm 2, lines 1-3).

    Args:
        q: [B, Hq, L, d].
        kv: keys of the same positions.
        heads: query heads to score, ascending.
        scale: softmax scaling of the model.
        last_q: number of last queries; all of them where the prompt is shorter.
        backend: see :func:`prefill_kernels.resolve_backend`.

    Returns:
        float32 [B, len(heads), L] each: mass of each key position, and of each offset query - key.

    Raises:
        ValueError: ``last_q`` below 1, heads that do not exist, keys that do not match the queries, or a scale that is
            not above 0.
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    if last_q < 1:
        raise ValueError(f"last_q={last_q}: must be at least 1")
    check_operands(q, kv, scale=scale)
    check_head_list(heads, q.shape[1])
    refusals = {"triton": triton_refusal("triton_vertical_slash_select", q, kv, last_q)}
    if choose_backend("proxy", backend, q.device, refusals) == "triton":
        from .triton_vertical_slash_select import scores_triton

        return scores_triton(q, kv, constant(q.device, tuple(heads)), scale, last_q)
    return _scores_torch(q, kv, heads, scale, last_q)


def _scores_torch(q: Tensor, kv: PagedKV, heads: Sequence[int], scale: float, last_q: int) -> tuple[Tensor, Tensor]:
    """One KV head at a time; the mass of a diagonal is a column sum of rows that are shifted against each other."""
    batch, _, length, _ = q.shape
    rows, group = last_rows(length, last_q), q.shape[1] // kv.num_kv_heads
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys = kv.gather()[0]
    future = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
    column, diagonal = [], []
    for kv_head in range(kv.num_kv_heads):
        mine = [h for h in heads if h // group == kv_head]
        if not mine:
            continue
        queries = torch.stack([q[:, h, length - rows :] for h in mine], 1).to(compute)
        logits = (queries.flatten(1, 2) @ keys[:, kv_head].to(compute).mT).view(batch, len(mine), rows, length) * scale
        logits[..., length - rows :].masked_fill_(future, float("-inf"))
        mass = logits.softmax(-1)
        column.append(mass.sum(-2))
        # Row r begins rows - 1 - r columns further left than the last one does, so that offsets line up.
        padded = torch.nn.functional.pad(mass, (rows - 1, 0))
        wide = length + rows - 1
        shifted = padded.as_strided(
            (batch, len(mine), rows, length), (len(mine) * rows * wide, rows * wide, wide + 1, 1)
        )
        diagonal.append(shifted.sum(-2).flip(-1))
    return torch.cat(column, 1).float(), torch.cat(diagonal, 1).float()


def ranked_keys(score: Tensor, *, forced: int = 0) -> Tensor:
    """Integers that order as the scores do, equal scores by lowest position; int64 of the shape of ``score``.

    The first ``forced`` positions come before all others, the lowest first. The low 32 bits say which position it is,
    counted from the last.
    """
    bits = score.float().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    place = torch.arange(score.shape[-1], device=score.device)
    keys = (ordered << 32) | (score.shape[-1] - 1 - place)
    keys[..., :forced] = (keys[..., :forced] & 0xFFFFFFFF) | (0x7FFFFFFF << 32)  # above the bits of every number
    return keys


def top_positions(score: Tensor, sizes: Sequence[int], *, forced: int = 0) -> Tensor:
    """Positions of the largest scores, ties to the lowest position, the first ``forced`` positions before all others.

    Args:
        score: [B, H, L].
        sizes: how many to take for each of the H heads, at least 1; all of them where there are fewer.

    Returns:
        int32 [B, H, max size], ascending, then -1.
    """
    length = score.shape[-1]
    sizes = tuple(min(size, length) for size in sizes)
    best = ranked_keys(score, forced=forced).topk(max(sizes), -1).values
    place = length - 1 - (best & 0xFFFFFFFF)
    wanted = torch.arange(max(sizes), device=score.device) < constant(score.device, sizes)[:, None]
    chosen = torch.where(wanted, place, length).sort(-1).values
    return torch.where(chosen < length, chosen, -1).int()


def block_sparse_lists(
    q: Tensor, kv: PagedKV, heads: Sequence[int], top_k: Sequence[int], *, block_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The blocks of each tile with the largest product of mean query and mean key (MInference, Algorithm 3).

    The softmax of line 2 is left out: it orders the blocks of a tile as their products do. Means of an edge block are
    over its real tokens.

    Args:
        q: [B, Hq, L, d].
        kv: keys of the same positions.
        heads: query heads to plan, ascending.
        top_k: blocks of a tile for each listed head, at least 1.
        block_size: tokens in a tile and in a block.
        scale: softmax scaling of the model.

    Returns:
        Block ids int32 [B, len(heads), NQ, max k], ascending, then -1, and counts int32 [B, len(heads), NQ].

    Raises:
        ValueError: heads that do not exist, not one ``top_k`` of at least 1 for each, keys that do not match the
            queries, or a scale that is not above 0.
    """
    check_operands(q, kv, scale=scale, block_size=block_size)
    check_head_list(heads, q.shape[1])
    if len(top_k) != len(heads) or min(top_k) < 1:
        raise ValueError(f"top_k={list(top_k)}: must be at least 1 for each of {len(heads)} heads")
    record_call("proxy", "torch")
    batch, group = q.shape[0], q.shape[1] // kv.num_kv_heads
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys = block_means(kv.gather()[0], block_size, compute)
    blocks = keys.shape[2]
    top_k = tuple(min(k, blocks) for k in top_k)
    widest = max(top_k)
    limit = constant(q.device, top_k)[:, None]
    block = torch.arange(blocks, device=q.device)
    order = torch.empty(batch, len(heads), blocks, widest, dtype=torch.int32, device=q.device)
    count = torch.empty(batch, len(heads), blocks, dtype=torch.int32, device=q.device)
    tiles_at_once = max(1, _MAX_SCORES // (batch * len(heads) * blocks * 4))
    queries = torch.stack([block_means(q[:, h : h + 1], block_size, compute)[:, 0] for h in heads], 1)
    kv_heads = [h // group for h in heads]
    runs = [(kv_head, kv_heads.index(kv_head), kv_heads.count(kv_head)) for kv_head in sorted(set(kv_heads))]
    for start in range(0, blocks, tiles_at_once):
        tile = block[start : start + tiles_at_once]
        stop = start + len(tile)
        products = [
            (queries[:, i : i + n, start:stop].flatten(1, 2) @ keys[:, kv_head].mT).view(batch, n, -1, blocks)
            for kv_head, i, n in runs
        ]
        scores = torch.cat(products, 1).mul_(scale).masked_fill_(block > tile[:, None], float("-inf"))
        ranked = ranked_keys(scores)
        place = blocks - 1 - (ranked.topk(widest, -1).values & 0xFFFFFFFF)
        kept = torch.minimum(limit, tile + 1)
        wanted = torch.arange(widest, device=q.device) < kept[..., None]
        chosen = torch.where(wanted, place, blocks).sort(-1).values
        order[:, :, start:stop] = torch.where(chosen < blocks, chosen, -1).int()
        count[:, :, start:stop] = kept.int()
    return order, count


@device_table(kept=1024)
def constant(values: tuple[int, ...]) -> Tensor:
    """A small int64 tensor on a device, copied there once, so that no later call waits for it."""
    return torch.tensor(values, dtype=torch.int64)


def pooled_pairs(length: int, block_size: int) -> int:
    """Products of one head that :func:`block_sparse_lists` computes below and on the diagonal."""
    blocks = math.ceil(length / block_size)
    return blocks * (blocks + 1) // 2
