"""A paged KV cache for one sequence, as a transformers cache."""

from __future__ import annotations

import math
from typing import Any

import torch
from prefill_kernels import PagedKV
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class PagedLayer(CacheLayerMixin):
    """Pages of one layer, allocated once for the whole prompt and its continuation.

    Args:
        page_table: int32 [1, M], shared by all layers.
        page_size: tokens in a physical page.
        pool_pages: physical pages to allocate.
        in_order: the table is 0, 1, 2, ...
    """

    is_sliding = False

    def __init__(self, page_table: Tensor, page_size: int, pool_pages: int, in_order: bool) -> None:
        super().__init__()
        self.page_table, self.page_size, self.in_order = page_table, page_size, in_order
        self.pool_pages = pool_pages
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the pools in the dtype and on the device of the first keys."""
        _, heads, _, dim = key_states.shape
        self.k_pages = key_states.new_zeros(self.pool_pages, self.page_size, heads, dim)
        self.v_pages = torch.zeros_like(self.k_pages)
        self.is_initialized = True

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[PagedKV, PagedKV]:
        """Append keys and values [1, Hkv, n, d]; return the paged view twice, in the places of K and V."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[2]
        stop = self.length + count
        if stop > self.page_table.shape[1] * self.page_size:
            raise ValueError(f"KV cache holds {self.page_table.shape[1] * self.page_size} tokens, {stop} are needed")
        positions = torch.arange(self.length, stop, device=key_states.device)
        pages, slots = self.page_table[0, positions // self.page_size].long(), positions % self.page_size
        self.k_pages[pages, slots] = key_states[0].transpose(0, 1)
        self.v_pages[pages, slots] = value_states[0].transpose(0, 1)
        self.length = stop
        view = PagedKV(self.k_pages, self.v_pages, self.page_table, stop, self.in_order)
        return view, view

    def rewind(self, tokens: int) -> None:
        """Forget the last ``tokens`` tokens."""
        if not 0 <= tokens <= self.length:
            raise ValueError(f"tokens={tokens}: the cache holds {self.length}")
        self.length -= tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """KV length after ``query_length`` more tokens, and the offset of the first."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def get_max_length(self) -> int:
        """Tokens that fit."""
        return self.page_table.shape[1] * self.page_size

    get_max_cache_shape = get_max_length


class PagedCache(Cache):
    """Paged cache of all layers, for one sequence.

    Args:
        layers: number of layers.
        capacity: tokens to hold.
        page_size: tokens in a physical page, independent of the method's logical block.
        device: where the page table lies.
        shuffle: seed that scatters the pages over a larger pool; None lays them in order.
    """

    def __init__(
        self, layers: int, capacity: int, page_size: int, device: torch.device, shuffle: int | None = None
    ) -> None:
        pages = math.ceil(capacity / page_size)
        if shuffle is None:
            pool, table = pages, torch.arange(pages)
        else:
            pool = pages + max(4, pages // 4)
            table = torch.randperm(pool, generator=torch.Generator().manual_seed(shuffle))[:pages]
        table = table.to(device=device, dtype=torch.int32)[None]
        self._paged = [PagedLayer(table, page_size, pool, shuffle is None) for _ in range(layers)]
        super().__init__(layers=list(self._paged))

    def rewind(self, tokens: int) -> None:
        """Forget the last ``tokens`` tokens in every layer."""
        for layer in self._paged:
            layer.rewind(tokens)
