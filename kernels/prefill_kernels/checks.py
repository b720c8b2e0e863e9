"""Checks of what an operation is called with, on the host alone: shapes and numbers, never what a tensor holds.

Kernels read through raw pointers, so that a shape that does not fit would give numbers instead of an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .paged import PagedKV

if TYPE_CHECKING:
    from .fp8 import Fp8KV


def check_scale(scale: float) -> None:
    """Raise ValueError unless a softmax scaling is finite and above 0."""
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale={scale}: must be finite and above 0")


def check_offset(q_offset: int, block_size: int) -> None:
    """Raise ValueError unless an offset of queries is a multiple of the block."""
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: must be at least 1")
    if q_offset < 0 or q_offset % block_size:
        raise ValueError(f"q_offset={q_offset}: must be a multiple of block_size={block_size}, at least 0")


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q [B, Hq, Lq, d] can attend to k and v [..., Hkv, d], heads next to last."""
    check_shapes(q, k, v)
    if not q.shape[2]:
        raise ValueError("q_len=0: must be at least 1")


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What :func:`check_heads` asks, but for the number of queries, which may be 0."""
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q {tuple(q.shape)}, keys {tuple(k.shape)}: must have 4 dimensions each")
    if v.shape != k.shape:
        raise ValueError(f"values {tuple(v.shape)}: must have the shape of the keys, {tuple(k.shape)}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"head_dim={q.shape[3]} of q: must be that of the keys, {k.shape[3]}")
    if not k.shape[2] or not q.shape[1] or q.shape[1] % k.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads: must be a multiple of {k.shape[2]} KV heads")
    if k.device != q.device or v.device != q.device:
        raise ValueError(f"keys on {k.device}, values on {v.device}: must lie with q on {q.device}")


def check_operands(q: Tensor, kv: PagedKV, *, scale: float, q_offset: int = 0, block_size: int = 1) -> None:
    """What every operation on queries and a paged cache asks of them.

    Args:
        q: [B, Hq, Lq, d] queries at absolute positions ``q_offset ...``.
        kv: keys and values of positions ``0 .. q_offset + Lq - 1``.
        scale: softmax scaling.
        q_offset: a multiple of ``block_size``.
        block_size: tokens of a tile and of a key block.

    Raises:
        ValueError: what does not fit, by name.
    """
    check_offset(q_offset, block_size)
    check_heads(q, kv.k_pages, kv.v_pages)
    table = kv.page_table
    if kv.kv_len != q_offset + q.shape[2]:
        raise ValueError(f"kv_len={kv.kv_len}: must be q_offset + q_len = {q_offset + q.shape[2]}")
    if table.ndim != 2 or table.shape[0] != q.shape[0]:
        raise ValueError(f"page_table {tuple(table.shape)}: must be [B, pages] with the B = {q.shape[0]} of q")
    check_page_table(kv, q.device)
    check_scale(scale)


def check_page_table(kv: PagedKV | Fp8KV, device: torch.device) -> None:
    """Raise ValueError unless a page table of two dimensions holds ``kv_len`` tokens and kernels can read it."""
    table = kv.page_table
    if table.shape[1] * kv.page_size < kv.kv_len:
        raise ValueError(
            f"page_table {tuple(table.shape)}: pages of {kv.page_size} tokens do not hold kv_len={kv.kv_len}"
        )
    if table.dtype != torch.int32 or table.device != device or (table.shape[1] > 1 and table.stride(1) != 1):
        raise ValueError(
            f"page_table of {table.dtype} on {table.device}: must be int32 with contiguous rows, on {device}"
        )


def check_table(
    name: str,
    found: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    contiguous: bool = False,
) -> None:
    """Raise ValueError unless a tensor of a plan, a mask or scores has this shape and dtype and lies there.

    With ``contiguous`` it must be that too: kernels that take no strides of it read it as if it were.
    """
    if tuple(found.shape) != shape:
        raise ValueError(f"{name} {tuple(found.shape)}: must be {shape}")
    if found.dtype != dtype or found.device != device:
        raise ValueError(f"{name} of {found.dtype} on {found.device}: must be {dtype} on {device}")
    if contiguous and not found.is_contiguous():
        raise ValueError(f"{name} with strides {found.stride()}: must be contiguous")


def check_share(name: str, value: float, *, most: float = math.inf) -> None:
    """Raise ValueError unless a share is a number above 0 and at most ``most``."""
    if not 0 < value <= most:
        allowed = "above 0 (1 or more keeps every block)" if most == math.inf else f"above 0, at most {most:g}"
        raise ValueError(f"{name}={value}: must be {allowed}")


def check_head_list(heads: Sequence[int], q_heads: int) -> None:
    """Raise ValueError unless heads are some of 0 .. q_heads - 1, ascending."""
    fine = len(heads) and all(0 <= h < q_heads for h in heads) and list(heads) == sorted(set(heads))
    if not fine:
        raise ValueError(f"heads={list(heads)}: must be some of 0 .. {q_heads - 1}, ascending")
