"""SpargeAttn's selection of key blocks (Zhang et al. 2025, Algorithm 1): compressed blocks that are alike inside.

A block whose tokens resemble each other is judged by its mean; one whose tokens do not is always computed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .backends import record_call
from .checks import check_operands
from .masks import causal_mask
from .paged import PagedKV
from .pooling import block_means, by_kv_head, head_groups, top_ranked


def self_similarity(x: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """Mean cosine similarity of all pairs of tokens of each block, a token with itself included.

    It is the squared length of the mean of the unit vectors, so that no token meets another; a zero vector resembles
    nothing.

    Args:
        x: [B, H, L, d].
        block_size: tokens of a block; the last block may be shorter.
        dtype: of the computation.

    Returns:
        [B, H, ceil(L / block_size)], between 0 and 1.
    """
    unit = torch.nn.functional.normalize(x.to(dtype), dim=-1)
    return block_means(unit, block_size, dtype).square().sum(-1)


def sparge_select(
    q: Tensor,
    kv: PagedKV,
    *,
    tau: float,
    theta: float,
    scale: float,
    block_size: int = 128,
    sink: bool = False,
) -> Tensor:
    """Choose the blocks of every head, in torch operations on whatever device the tensors lie on.

    A few heads go through at a time, so that memory stays bounded at 128K; nothing waits for the device. Keys are
    centred on their mean over the prompt before their similarity is judged; the scores do not change by it.

    Args:
        q: [B, Hq, L, d] queries of the whole prompt, after RoPE and QK-norm.
        kv: keys of positions ``0 .. L - 1``; never repeated to the query heads.
        tau: share of the compressed attention that is kept, as the longest prefix that does not exceed it; at 1 and
            above every causal block is kept.
        theta: self-similarity below which a block is always computed.
        scale: the model's own softmax scaling.
        block_size: tokens of a tile and of a key block.
        sink: always keep the first block.

    Returns:
        bool [B, Hq, NQ, NK], causal; at least one block of every tile.

    Raises:
        ValueError: keys that do not match the queries, or a scale that is not above 0.
    """
    batch, q_heads, length, _ = q.shape
    check_operands(q, kv, scale=scale, block_size=block_size)
    record_call("proxy", "torch")
    blocks = math.ceil(length / block_size)
    causal = causal_mask(blocks, blocks, 0, q.device)
    if tau >= 1:
        return causal.expand(batch, q_heads, blocks, blocks)
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys = kv.gather()[0]
    mask = torch.empty(batch, q_heads, blocks, blocks, dtype=torch.bool, device=q.device)
    for heads, kv_heads in head_groups(q_heads, kv.num_kv_heads, length):
        rows, k = by_kv_head(q[:, heads], keys[:, kv_heads])
        k = k.to(compute)
        k_alike = self_similarity(k - k.mean(2, keepdim=True), block_size, compute) >= theta
        k_means = block_means(k, block_size, compute)
        q_means = block_means(rows, block_size, compute)
        q_alike = self_similarity(rows, block_size, compute) >= theta
        kept = _top_cdf((q_means @ k_means.mT) * scale, causal & k_alike[:, :, None], tau)
        mask[:, heads] = (kept | ~k_alike[:, :, None] | ~q_alike[..., None]).view_as(mask[:, heads])
    mask &= causal
    if sink:
        mask[..., 0] = True
    return mask


def _top_cdf(logits: Tensor, judged: Tensor, tau: float) -> Tensor:
    """TopCdf of Algorithm 1: the longest prefix of the sorted attention that holds at most tau, at least one block."""
    # A tile with nothing to judge gives NaN, which no comparison keeps: it has no candidates either.
    mass = logits.masked_fill(~judged, float("-inf")).softmax(-1)
    cumulative = mass.sort(-1, descending=True).values.cumsum(-1, dtype=torch.float64)
    count = (cumulative <= tau * cumulative[..., -1:]).sum(-1).clamp(min=1)
    return top_ranked(mass, count) & judged
