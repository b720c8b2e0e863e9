"""Causal attention with a query offset, through torch's own SDPA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from .capabilities import provides
from .checks import check_heads, check_scale


@contextlib.contextmanager
def without_cudnn(device: torch.device) -> Iterator[None]:
    """Keep SDPA's calls inside from cuDNN on a CUDA device, by a flag of the process: not for several threads at once.

    For one query cuDNN adds up its splits in the order they finish: equal calls differ now and then in their last bits.
    """
    if device.type != "cuda" or not torch.backends.cuda.cudnn_sdp_enabled():
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@provides()
def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, q_offset: int = 0) -> Tensor:
    """Attend each query to every key at or before its absolute position.

    Args:
        q: [B, Hq, Lq, d] at absolute positions ``q_offset ...``.
        k, v: [B, Hkv, q_offset + Lq, d]; not repeated to the query heads.
        scale: softmax scaling.

    Returns:
        [B, Hq, Lq, d].

    Raises:
        ValueError: shapes that do not belong together, or ``scale`` is not finite and above 0.
    """
    check_heads(q, k.transpose(1, 2), v.transpose(1, 2))
    check_scale(scale)
    q_len, kv_len = q.shape[2], k.shape[2]
    if kv_len != q_offset + q_len:
        raise ValueError(f"kv_len={kv_len}: must be q_offset + q_len = {q_offset + q_len}")
    if q_len == 1:  # one query sees every key: no mask to build
        with without_cudnn(q.device):
            return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
    if q_offset == 0:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    # SDPA's is_causal is aligned to the upper left; queries at an offset need the lower right.
    mask: Tensor
    if q.is_cuda:
        mask = causal_lower_right(q_len, kv_len)
    else:
        mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device).tril(q_offset)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
