"""FlashInfer's paged decode as the native path of a page selection: one request a query, with the pages it selected."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..fp8 import Fp8KV
from ..paged import PagedKV
from ..pages import PagePlan, canonical_rows, visible_tokens

WORKSPACE = 512 << 20
"""Bytes of FlashInfer's float workspace, shared by all plans."""


@dataclass(frozen=True)
class PageRequests:
    """A selection as decode requests of one KV head.

    Attributes:
        indptr: int32 [N + 1], first entry of each query in ``indices``, and the end.
        indices: int32, physical pages; of a query in the order of its tokens, so that the partial page is its last.
        last_page_len: int32 [N], tokens that the query may see of its last page.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


def page_requests(plan: PagePlan, page_table: Tensor, head: int = 0) -> PageRequests:
    """Make the requests of one KV head; physical and logical pages have one size. Waits for the device.

    Raises:
        ValueError: a query without a page, which a decode request cannot be, or more than one request's queries.
    """
    if plan.requests != 1:
        raise ValueError(f"requests={plan.requests}: one, whose queries become requests")
    rows = canonical_rows(plan)[:, head]
    listed = rows < torch.iinfo(torch.int32).max
    count = listed.sum(-1)
    if bool((count == 0).any()):
        raise ValueError("pages: a query selects none")
    indptr = torch.nn.functional.pad(count.cumsum(0), (1, 0)).int()
    visible = visible_tokens(plan).long()
    last = rows.gather(-1, count[:, None] - 1)[:, 0].long()
    partial = (visible - last * plan.page_size).clamp(max=plan.page_size)
    return PageRequests(indptr, page_table[0, rows[listed].long()].int(), partial.int())


class NativePath:
    """FlashInfer's ``BatchDecodeWithPagedKVCacheWrapper`` with tensor cores on planned requests of one KV head.

    Args:
        plan: the selection.
        kv: cache in the plan's page size, with one KV head.
        heads: query heads.
        scale: softmax scaling.
        dtype: of the queries.
        backend: FlashInfer's: ``auto`` or ``fa2``.
        head: KV head of the plan.
    """

    def __init__(
        self,
        plan: PagePlan,
        kv: PagedKV | Fp8KV,
        *,
        heads: int,
        scale: float,
        dtype: torch.dtype = torch.bfloat16,
        backend: str = "auto",
        head: int = 0,
    ) -> None:
        flashinfer = importlib.import_module("flashinfer")
        self.scales: dict[str, float] = {}
        if isinstance(kv, Fp8KV):
            self.scales = {"k_scale": float(kv.k_scale[head]), "v_scale": float(kv.v_scale[head])}
        requests = page_requests(plan, kv.page_table, head)
        self.wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(kv.device), "NHD", use_tensor_cores=True, backend=backend
        )
        arguments = (requests.indptr, requests.indices, requests.last_page_len, heads, 1)
        self.replan: Callable[[], Any] = functools.partial(
            self.wrapper.plan,
            *arguments,
            kv.k_pages.shape[3],
            plan.page_size,
            q_data_type=dtype,
            kv_data_type=kv.k_pages.dtype,
            sm_scale=scale,
        )
        self.replan()

    def __call__(self, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """Attend: q [1, H, N, d], pages [Pn, page, 1, d] of the planned dtype; returns [1, H, N, d]."""
        rows = q[0].transpose(0, 1).contiguous()
        return self.wrapper.run(rows, (k_pages, v_pages), **self.scales).transpose(0, 1)[None]


def flashinfer_problem() -> str | None:
    """Why FlashInfer cannot be used, or None."""
    try:
        importlib.import_module("flashinfer")
    except Exception as error:  # it raises whatever its own imports raise
        return f"flashinfer cannot be imported ({type(error).__name__}: {error})"
    return None


def left_out(what: str, error: BaseException) -> None:
    """Say that something is not measured, and why."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    print(f"{what}: left out, it cannot run here ({line})", file=sys.stderr, flush=True)


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
