"""E4M3 keys, values and queries, with float32 scales."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_table
from .paged import PagedKV

E4M3_MAX = 448.0
"""Largest finite E4M3 number."""


@dataclass(frozen=True)
class Fp8KV:
    """Keys and values of one layer in E4M3 pages.

    FP8 matrix instructions of Hopper want both operands contiguous along the summed dimension, which for P V is the
    token: V is stored transposed.

    Slots of ``vt_pages`` that hold no token must hold finite numbers, best zeros, as :func:`quantize_kv` writes them:
    kernels multiply whole pages, and a weight of 0 times NaN is NaN. What such slots of ``k_pages`` hold does not
    matter.

    Attributes:
        k_pages: float8_e4m3fn [Pn, page, Hkv, d].
        vt_pages: float8_e4m3fn [Pn, Hkv, d, page].
        k_scale, v_scale: float32 [Hkv]; a key is its stored number times the scale.
        page_table: int32 [B, M], as in :class:`PagedKV`.
        kv_len: number of valid tokens of the longest sequence.
    """

    k_pages: Tensor
    vt_pages: Tensor
    k_scale: Tensor
    v_scale: Tensor
    page_table: Tensor
    kv_len: int

    @property
    def page_size(self) -> int:
        """Tokens in a physical page."""
        return self.k_pages.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads."""
        return self.k_pages.shape[2]

    @property
    def device(self) -> torch.device:
        """Where the pages lie."""
        return self.k_pages.device

    @property
    def v_pages(self) -> Tensor:
        """Values as [Pn, page, Hkv, d], a view that is not contiguous."""
        return self.vt_pages.permute(0, 3, 1, 2)

    def check_shapes(self) -> None:
        """Raise ValueError naming what does not belong together: shapes, dtypes and devices, not what they hold."""
        if self.k_pages.ndim != 4:
            raise ValueError(f"k_pages {tuple(self.k_pages.shape)}: must be [Pn, page, Hkv, d]")
        pool, page, heads, dim = self.k_pages.shape
        check_table("k_pages", self.k_pages, (pool, page, heads, dim), torch.float8_e4m3fn, self.device)
        check_table("vt_pages", self.vt_pages, (pool, heads, dim, page), torch.float8_e4m3fn, self.device)
        for name in ("k_scale", "v_scale"):
            check_table(name, getattr(self, name), (heads,), torch.float32, self.device, contiguous=True)

    def dequantize(self) -> PagedKV:
        """The numbers that the quantised pages stand for, float32."""
        k = self.k_pages.float() * self.k_scale[:, None]
        v = self.v_pages.float() * self.v_scale[:, None]
        return PagedKV(k, v.contiguous(), self.page_table, self.kv_len)


def quantize_kv(
    kv: PagedKV, k_scale: Tensor | None = None, v_scale: Tensor | None = None, *, kv_lens: Tensor | None = None
) -> Fp8KV:
    """Quantise a cache, one scale a KV head: amax / 448 over the valid tokens, 1 where amax is 0.

    Slots that hold no token become 0, whatever they held and whatever the scale is. Nothing is read back to the host.

    A NaN among the tokens stays one and makes the measured scale of its KV head NaN, and so every token of the head:
    one NaN key or value makes NaN of every output row of that head that selects any page, whichever. (In the model's
    dtype a NaN key reaches only the rows that selected its page.) Under a given scale the other tokens keep theirs.

    Args:
        kv: pages of any floating dtype.
        k_scale, v_scale: float32 [Hkv] to use in place of the measured ones; larger numbers saturate.
        kv_lens: int32 [B], tokens of each sequence; ``kv.kv_len`` for all where it is left out.

    Raises:
        ValueError: a scale of another shape, dtype or device.
    """
    for name, given in (("k_scale", k_scale), ("v_scale", v_scale)):
        if given is not None:
            check_table(name, given, (kv.num_kv_heads,), torch.float32, kv.device, contiguous=True)
    valid = _valid_slots(kv, kv_lens)[:, :, None, None]

    def quantized(pages: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        numbers = torch.where(valid, pages, 0).float()
        if scale is None:
            scale = _scale(numbers.abs().amax((0, 1, 3)))
        return to_e4m3(torch.where(valid, numbers / scale[:, None], 0)), scale

    k, k_scale = quantized(kv.k_pages, k_scale)
    v, v_scale = quantized(kv.v_pages, v_scale)
    return Fp8KV(k, v.permute(0, 2, 3, 1).contiguous(), k_scale, v_scale, kv.page_table, kv.kv_len)


def quantize_rows(q: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as E4M3 and their float32 scales [..., 1], amax / 448 (1 where a row is zero); a row is the last axis."""
    numbers = q.float()
    scale = _scale(numbers.abs().amax(-1, keepdim=True))
    return to_e4m3(numbers / scale), scale


def _scale(amax: Tensor) -> Tensor:
    scale = amax / E4M3_MAX
    return torch.where(scale == 0, 1.0, scale)


def to_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 numbers; what lies beyond 448 becomes 448, as the hardware's conversion does."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _valid_slots(kv: PagedKV, kv_lens: Tensor | None) -> Tensor:
    """Whether each physical slot holds a token of some sequence, bool [Pn, page]."""
    size, total = kv.page_size, kv.k_pages.shape[0]
    used = math.ceil(kv.kv_len / size)
    table = kv.page_table[:, :used].long()
    if kv_lens is None:
        kv_lens = torch.full((len(table),), kv.kv_len, dtype=torch.int32, device=kv.device)
    held = (kv_lens[:, None] - torch.arange(used, device=kv.device) * size).clamp(0, size)
    # Entries of a table after its last page are anything: they count for a page that does not exist.
    place = torch.where(held > 0, table, total)
    filled = torch.zeros(total + 1, dtype=held.dtype, device=kv.device)
    # A page that several sequences share holds what the longest of them sees.
    filled.scatter_reduce_(0, place.flatten(), held.flatten(), "amax")
    return torch.arange(size, device=kv.device) < filled[:total, None]
