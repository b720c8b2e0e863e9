"""FlashInfer as the native path of a page selection: one request a query, with the pages it selected."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..fp8 import E4M3_MAX, Fp8KV, to_e4m3
from ..paged import PagedKV
from ..pages import PagePlan, canonical_rows, visible_tokens

WORKSPACE = 512 << 20
"""Bytes of FlashInfer's float workspace, shared by all plans of its wrappers."""


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
    """One of FlashInfer's ways through the pages of one KV head, planned beforehand.

    As of 0.6.9 these are

    - ``decode:fa2``, ``decode:fa3``: ``BatchDecodeWithPagedKVCacheWrapper`` with tensor cores; its ``auto`` is fa2.
      Without tensor cores no kernel takes 16 query heads on a KV head.
    - ``prefill:fa2``, ``prefill:fa3``: ``BatchPrefillWithPagedKVCacheWrapper``, causal, one query a request. Both
      wrappers compile the same kernels. Its ``auto`` is fa3 for bf16 KV and fa2 for FP8 KV; ``cudnn`` needs a package
      that FlashInfer does not bring, and ``trtllm-gen`` a Blackwell device.
    - ``decode:fa3-fp8q``, ``prefill:fa3-fp8q``: fa3 takes FP8 keys with FP8 queries alone, here with a scale a head.
      Its kernel (``batch_prefill_fp8_sm90.cu``) is compiled for heads of 64, 128 or 256 and an output of 16 bits.
    - ``decode:xqa``: ``trtllm_batch_decode_with_kv_cache``, whose ``auto`` that is on Hopper.

    The wrappers multiply by the scale of V in a kernel of its own after the attention, which belongs to the call.
    FP8 queries are made by :meth:`queries`, which does not.

    Args:
        plan: the selection.
        kv: cache in the plan's page size, with one KV head.
        heads: query heads.
        scale: softmax scaling.
        dtype: of the queries.
        path: one of :data:`prefill_kernels.bench.config.NATIVE_PATHS`.
        head: KV head of the plan.

    Raises:
        ValueError: the path does not take such keys.
    """

    def __init__(
        self,
        plan: PagePlan,
        kv: PagedKV | Fp8KV,
        *,
        heads: int,
        scale: float,
        dtype: torch.dtype = torch.bfloat16,
        path: str = "decode:fa2",
        head: int = 0,
    ) -> None:
        wrapper, _, backend = path.partition(":")
        self.fp8_queries = backend == "fa3-fp8q"
        if (problem := _refusal(backend, isinstance(kv, Fp8KV))) is not None:
            raise ValueError(problem)
        self.scales: dict[str, float] = {}
        if isinstance(kv, Fp8KV):
            self.scales = {"k_scale": float(kv.k_scale[head]), "v_scale": float(kv.v_scale[head])}
            self._scale_rows = [x[head : head + 1].float().contiguous() for x in (kv.k_scale, kv.v_scale)]
        requests = page_requests(plan, kv.page_table, head)
        self.replan: Callable[[], Any]
        if backend == "xqa":
            self._xqa(plan, requests, scale, kv.device)
            return
        flashinfer = importlib.import_module("flashinfer")
        backend = backend.partition("-")[0]
        listed = (requests.indptr, requests.indices, requests.last_page_len)
        options: dict[str, Any] = {"kv_data_type": kv.k_pages.dtype, "sm_scale": scale}
        options |= (
            {"q_data_type": kv.k_pages.dtype, "o_data_type": dtype} if self.fp8_queries else {"q_data_type": dtype}
        )
        if wrapper == "prefill":
            self.wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                _workspace(kv.device), "NHD", backend=backend
            )
            each = torch.arange(plan.length + 1, dtype=torch.int32, device=kv.device)
            listed = (each, *listed)  # type: ignore[assignment]
            options["causal"] = True
        else:
            self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                _workspace(kv.device), "NHD", use_tensor_cores=True, backend=backend
            )
        shape = (heads, 1, kv.k_pages.shape[3], plan.page_size)
        self.replan = functools.partial(self.wrapper.plan, *listed, *shape, **options)
        self.replan()
        self._run = self.wrapper.run

    def _xqa(self, plan: PagePlan, requests: PageRequests, scale: float, device: torch.device) -> None:
        call = importlib.import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache

        def tables() -> None:
            count = requests.indptr.diff()
            width = int(count.max())
            table = torch.zeros(len(count), width, dtype=torch.int32, device=device)
            table[torch.arange(width, device=device) < count[:, None]] = requests.indices
            self._tables = table, (count - 1) * plan.page_size + requests.last_page_len, width * plan.page_size

        def run(rows: Tensor, kv: tuple[Tensor, Tensor], *, k_scale: float = 1.0, v_scale: float = 1.0) -> Tensor:
            scales = {"bmm1_scale": scale * k_scale, "bmm2_scale": v_scale}
            # Its semaphores begin at zero and are left so: the workspace is its own.
            out: Tensor = call(rows, kv, _workspace(device, "xqa"), *self._tables, **scales, kv_layout="NHD",
                               backend="xqa")  # fmt: skip
            return out

        self.replan, self._run = tables, run
        self.replan()

    def queries(self, q: Tensor) -> tuple[Tensor, ...]:
        """What :meth:`run` takes for q [1, H, N, d]: its rows, and for an FP8 path the scale of each head."""
        rows = q[0].transpose(0, 1).contiguous()
        if not self.fp8_queries:
            return (rows,)
        scale = rows.float().abs().amax((0, 2)).clamp(min=1e-12) / E4M3_MAX
        return to_e4m3(rows.float() / scale[:, None]), scale

    def run(self, queries: tuple[Tensor, ...], k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """Attend to pages [Pn, page, 1, d] of the planned dtype; returns [1, H, N, d]."""
        rows, *scale = queries
        if scale:
            out: Tensor = self._run(rows, (k_pages, v_pages), *scale, *self._scale_rows)
        else:
            out = self._run(rows, (k_pages, v_pages), **self.scales)
        return out.transpose(0, 1)[None]

    def __call__(self, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """:meth:`run` on q [1, H, N, d]."""
        return self.run(self.queries(q), k_pages, v_pages)


def _refusal(backend: str, fp8: bool) -> str | None:
    """Why a backend does not take the keys, where FlashInfer itself would fail late or compile in vain."""
    if backend == "fa3" and fp8:
        return "fa3 takes FP8 keys with FP8 queries alone, which is fa3-fp8q"
    if backend == "fa3-fp8q" and not fp8:
        return "FP8 queries go with FP8 keys alone"
    return None


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
def _workspace(device: torch.device, user: str = "wrappers") -> Tensor:
    """Zeroed memory, one for each user."""
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
