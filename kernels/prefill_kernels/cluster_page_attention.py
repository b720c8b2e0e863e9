"""Union attention by a cluster of two CTAs (``cluster_page_attention.cu``), built with nvcc when it is first used.

Triton 3.6 cannot load one page into two CTAs, so this kernel is CUDA C++: see :mod:`prefill_kernels.nvcc`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from . import nvcc
from .backends import BackendUnavailable
from .fp8 import Fp8KV
from .paged import PagedKV
from .pages import PagePlan
from .unions import Unions

PAGE, DIM, HEAD_ROWS = 128, 128, 16
SOURCE = Path(__file__).with_name("cluster_page_attention.cu")

_POINTERS_AND_SIZES = (
    [ctypes.c_void_p] * 2 + [ctypes.c_longlong] + [ctypes.c_void_p] * 12 + [ctypes.c_float] + [ctypes.c_int] * 5
    + [ctypes.c_longlong] * 4 + [ctypes.c_int] * 2 + [ctypes.c_void_p]
)  # fmt: skip


def problem(q: Tensor, kv: PagedKV | Fp8KV, plan: PagePlan) -> str | None:
    """Why this kernel cannot run the call, or None. Builds nothing."""
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device) != (9, 0):
        return "needs a CUDA device of compute capability 9.0"
    if not isinstance(kv, Fp8KV):
        return "runs FP8 pages alone: kv_dtype=fp8"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {q.dtype}: must be torch.bfloat16 or torch.float16"
    if plan.page_size != PAGE or kv.page_size != PAGE:
        return f"page_size={plan.page_size}, physical pages of {kv.page_size}: both must be {PAGE}"
    if q.shape[3] != DIM:
        return f"head_dim={q.shape[3]}: must be {DIM}"
    if q.shape[1] > HEAD_ROWS * kv.num_kv_heads:
        return f"{q.shape[1] // kv.num_kv_heads} query heads a KV head: at most {HEAD_ROWS}"
    if not (kv.k_pages.is_contiguous() and kv.vt_pages.is_contiguous()):
        return "key and value pages must be contiguous"
    if q.data_ptr() % 16 or q.stride(1) % 8 or q.stride(2) % 8:
        return "query rows must begin at multiples of 16 bytes"
    return nvcc.problem(SOURCE)


def union_attention(
    q: Tensor,
    kv: PagedKV | Fp8KV,
    plan: PagePlan,
    unions: Unions,
    scale: float,
    out: Tensor,
    *,
    multicast: bool = True,
) -> None:
    """:func:`prefill_kernels.union_attention` on sm_90 into ``out``, for calls that :func:`problem` accepts.

    Args:
        q: bfloat16 or float16 [1, Hq, N, 128] with ``stride(3) == 1``.
        kv: E4M3 pages of 128 tokens.
        plan: geometry.
        unions: what the groups walk.
        scale: softmax scaling of the model.
        out: as ``q``.
        multicast: False lets each CTA load its pages alone, without a cluster, to measure what the cluster gains.

    Raises:
        BackendUnavailable: nvcc failed, or the driver refused the launch.
    """
    assert isinstance(kv, Fp8KV)
    with torch.cuda.device(q.device):
        run = library()
        code = run.page_attention_launch(
            kv.k_pages.data_ptr(),
            kv.vt_pages.data_ptr(),
            kv.k_pages.shape[0],
            q.data_ptr(),
            out.data_ptr(),
            unions.ids.data_ptr(),
            plan.positions.data_ptr(),
            unions.pages.data_ptr(),
            unions.members.data_ptr(),
            unions.count.data_ptr(),
            unions.requests.data_ptr(),
            plan.kv_lens.data_ptr(),
            kv.page_table.data_ptr(),
            kv.k_scale.data_ptr(),
            kv.v_scale.data_ptr(),
            scale * 1.4426950408889634,
            plan.groups,
            unions.pages.shape[2],
            kv.page_table.stride(0),
            q.shape[1] // kv.num_kv_heads,
            kv.num_kv_heads,
            q.stride(1),
            q.stride(2),
            out.stride(1),
            out.stride(2),
            int(q.dtype == torch.float16),
            int(multicast),
            torch.cuda.current_stream().cuda_stream,
        )
    if code:
        raise BackendUnavailable(f"backend='cluster': {run.page_attention_error(code).decode()} ({code})")


@cache
def library() -> ctypes.CDLL:
    """The built kernel, see :func:`prefill_kernels.nvcc.build`."""
    loaded = nvcc.build(SOURCE, "cluster")
    loaded.page_attention_launch.argtypes = _POINTERS_AND_SIZES
    loaded.page_attention_launch.restype = ctypes.c_int
    loaded.page_attention_error.argtypes = [ctypes.c_int]
    loaded.page_attention_error.restype = ctypes.c_char_p
    return loaded
