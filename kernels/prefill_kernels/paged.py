"""The paged KV layout that every kernel reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedKV:
    """Keys and values of one layer in physical pages.

    Attributes:
        k_pages: [P, page_size, Hkv, d], the pool of physical key pages.
        v_pages: [P, page_size, Hkv, d].
        page_table: int32 [B, M]; token t of sequence b lies in physical page ``page_table[b, t // page_size]``,
            slot ``t % page_size``.
        kv_len: number of valid tokens in each sequence.
        in_order: True promises that the batch is one sequence and that its pages are 0, 1, 2, ... of the pool, which
            lets :meth:`gather` return views without reading the table back.
    """

    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    kv_len: int
    in_order: bool = False

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

    def check(self) -> None:
        """Raise ValueError unless every page that holds a token is one of the pool.

        Kernels do not look: a page outside is memory of something else. Reads the table back to the host: for checking
        a cache of one's own, not for the fast path.
        """
        used = math.ceil(self.kv_len / self.page_size)
        if used > self.page_table.shape[1]:
            raise ValueError(f"page_table: {self.page_table.shape[1]} pages for {self.kv_len} tokens, want {used}")
        held = self.page_table[:, :used]
        if bool(((held < 0) | (held >= self.k_pages.shape[0])).any()):
            raise ValueError(
                f"page_table: entries {int(held.min())} to {int(held.max())}, the pool has pages 0 to "
                f"{self.k_pages.shape[0] - 1}"
            )

    def key_rows(self, positions: Tensor) -> Tensor:
        """Keys at absolute ``positions`` (int64 [R]) as [B, Hkv, R, d]."""
        pages = self.page_table[:, positions // self.page_size].long()
        return self.k_pages[pages, positions % self.page_size].transpose(1, 2)

    def gather(self) -> tuple[Tensor, Tensor]:
        """All keys and values in token order, each [B, Hkv, kv_len, d] (views where the pages lie in order)."""
        return self._dense(self.k_pages), self._dense(self.v_pages)

    def _dense(self, pages: Tensor) -> Tensor:
        used = math.ceil(self.kv_len / self.page_size)
        if self.in_order:
            rows = pages[:used].reshape(1, used * self.page_size, *pages.shape[2:])
        else:
            rows = pages[self.page_table[:, :used].long()].flatten(1, 2)
        return rows[:, : self.kv_len].transpose(1, 2)

    @classmethod
    def from_dense(
        cls, k: Tensor, v: Tensor, page_size: int, *, generator: torch.Generator | None = None, spare: int = 3
    ) -> PagedKV:
        """Lay dense K and V ([B, Hkv, L, d]) out in pages, for tests and stand-alone use.

        With a ``generator`` the physical pages are shuffled; unused slots and ``spare`` pages hold NaN, so that a
        kernel which reads them shows it.
        """
        batch, heads, length, dim = k.shape
        per_sequence = max(1, math.ceil(length / page_size))
        total = batch * per_sequence + spare
        if generator is None:
            ids = torch.arange(batch * per_sequence)
        else:
            ids = torch.randperm(total, generator=generator)[: batch * per_sequence]
        table = ids.view(batch, per_sequence).to(k.device)

        def pages(x: Tensor) -> Tensor:
            pool = x.new_full((total, page_size, heads, dim), float("nan"))
            rows = x.new_full((batch, per_sequence * page_size, heads, dim), float("nan"))
            rows[:, :length] = x.transpose(1, 2)
            pool[table.flatten()] = rows.view(batch * per_sequence, page_size, heads, dim)
            return pool

        return cls(pages(k), pages(v), table.to(torch.int32), length)
