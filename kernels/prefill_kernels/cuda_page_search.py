"""Algorithm 1 and union preparation in one kernel of CUDA C++ (``cuda_page_search.cu``), built with nvcc on first use.

The search is a chain of dependent picks: its time is the latency of one, which Triton cannot shorten (no ballot, no
choice of what lies in shared memory). Both steps are of one window, so that one launch does them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from . import nvcc
from .backends import BackendUnavailable
from .device_tables import stream_of
from .pages import GROUP, PagePlan, group_requests, windows
from .unions import GroupQueue, Unions

SOURCE = Path(__file__).with_name("cuda_page_search.cu")
MAX_WIDTH = 64
"""Pages a query: one bit each in a row of the table, which for W = 128 is then half of the shared memory."""
MAX_PAGES = 2048
"""Pages whose queries are held as masks in shared memory at once."""


def refusal(plan: PagePlan) -> str | None:
    """Why this kernel cannot run the call, or None. Builds it where everything else allows the call."""
    if reason := _device_problem(plan.pages.device):
        return reason
    if not plan.length:
        return "no queries"
    if plan.width > MAX_WIDTH:
        return f"{plan.width} pages a query: at most {MAX_WIDTH}"
    if rows(plan) > MAX_PAGES:
        return f"{rows(plan)} pages: masks of more than {MAX_PAGES} do not stay in shared memory"
    return _build_problem(plan.pages.device)


def rows(plan: PagePlan) -> int:
    """Pages that the masks hold at once, a multiple of 32; requests of more keep their order."""
    return -(-min(plan.num_pages, plan.capacity) // 32) * 32


@cache
def _device_problem(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "needs a CUDA device of compute capability 9.0"
    return None


@cache
def _build_problem(device: torch.device) -> str | None:
    """Why there is no library that runs on a device, asked for once: a compiler that failed fails again."""
    try:
        if reason := nvcc.problem(SOURCE):
            return reason
        with torch.cuda.device(device):
            code = library().page_search_problem()
    except (BackendUnavailable, OSError, RuntimeError) as error:
        return str(error)
    return library().page_search_error(code).decode() if code else None


@cache
def library() -> ctypes.CDLL:
    """The built kernel, see :func:`prefill_kernels.nvcc.build`."""
    return declared(nvcc.build(SOURCE, "cuda"))


def declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """A build of the source, with the types of its functions."""
    loaded.page_search_launch.argtypes = (
        [ctypes.c_void_p] * 11 + [ctypes.c_longlong] * 2 + [ctypes.c_int] * 9 + [ctypes.c_void_p]
    )
    loaded.page_search_launch.restype = ctypes.c_int
    loaded.page_search_problem.argtypes = []
    loaded.page_search_problem.restype = ctypes.c_int
    loaded.page_search_error.argtypes = [ctypes.c_int]
    loaded.page_search_error.restype = ctypes.c_char_p
    return loaded


def search_cuda(plan: PagePlan, ids: Tensor | None = None) -> Unions:
    """Search and unions for calls that :func:`refusal` accepts; unions alone for an order that is there.

    Args:
        plan: selections; a window to search, where ``ids`` are not given.
        ids: int32 [Hkv, G * 8], contiguous, see :func:`prefill_kernels.prepare_unions`.

    Raises:
        BackendUnavailable: nvcc failed, or the driver refused the launch.
    """
    heads, groups, device = plan.num_kv_heads, plan.groups, plan.pages.device
    selected = plan.pages if plan.pages.stride(3) == 1 else plan.pages.contiguous()
    window = plan.regroup or 64  # of an order that is there any will do: groups never cross one
    table = windows(device, plan.cu_seqlens, window)
    found = torch.empty(heads, groups * GROUP, dtype=torch.int32, device=device) if ids is None else ids
    pages = torch.empty(heads, groups, GROUP * plan.width, dtype=torch.int32, device=device)
    members = torch.empty_like(pages)
    count = torch.empty(heads, groups, dtype=torch.int32, device=device)
    queue = GroupQueue.empty(heads * groups, device)
    stream = stream_of(device)
    with torch.cuda.device(device):
        run = library()
        code = run.page_search_launch(
            selected.data_ptr(),
            plan.positions.data_ptr(),
            plan.kv_lens.data_ptr(),
            table.data_ptr(),
            None if ids is None else ids.data_ptr(),
            found.data_ptr() if ids is None else None,
            pages.data_ptr(),
            members.data_ptr(),
            count.data_ptr(),
            queue.sizes.data_ptr(),
            queue.lines.data_ptr(),
            selected.stride(1),
            selected.stride(2),
            plan.page_size,
            plan.capacity,
            rows(plan),
            plan.width,
            groups,
            GroupQueue.bin_shift(pages.shape[2]),
            window,
            len(table),
            heads,
            None if stream is None else stream[0],
        )
    if code:
        raise BackendUnavailable(f"backend='cuda': {run.page_search_error(code).decode()} ({code})")
    return Unions(found, pages, members, count, group_requests(device, plan.cu_seqlens), queue)
