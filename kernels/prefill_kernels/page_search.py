"""The preparation of a call over selected pages, search and unions together (PageWeaver)."""

from __future__ import annotations

from .backends import BackendUnavailable, record_call, record_refusal
from .pages import PagePlan
from .regroup import execution_order, regroups
from .unions import Unions, prepare_unions

SEARCH_BACKENDS = ("torch", "triton", "cuda")
"""Implementations of :func:`search_unions`. ``cuda`` does both steps in one kernel of CUDA C++ for sm_90, built with
nvcc on first use, and the second alone where nothing is searched; the others are the two steps."""


def search_unions(plan: PagePlan, *, backend: str = "auto") -> Unions:
    """:func:`prefill_kernels.regroup_queries`, and :func:`prefill_kernels.prepare_unions` in the order it found.

    The result is the same in every backend, bit for bit, but for the queue, which ``cuda`` alone makes.

    Args:
        plan: selections; where :func:`prefill_kernels.regroups` does not hold, unions of the original order.
        backend: ``auto`` or one of :data:`SEARCH_BACKENDS`; ``auto`` is the one kernel wherever it can run, otherwise
            what is fastest of each step.

    Raises:
        ValueError: the plan is broken.
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    plan.check_shapes()
    if searches(plan) and (backend == "cuda" or (backend == "auto" and plan.pages.device.type == "cuda")):
        from .cuda_page_search import refusal, search_cuda

        if (reason := refusal(plan)) is None:
            record_call("regroup", "cuda")
            record_call("union", "cuda")
            return search_cuda(plan)
        if backend == "cuda":
            raise BackendUnavailable(f"backend='cuda': {reason}")
        record_refusal("regroup", "cuda", reason)
    return prepare_unions(plan, execution_order(plan, backend=backend), backend=backend)


def searches(plan: PagePlan) -> bool:
    """Whether there is something to search."""
    return regroups(plan) and plan.length > 0


def cuda_problem(plan: PagePlan) -> str | None:
    """Why the one kernel cannot run a call, or None. Builds the kernel where all else allows the call."""
    from .cuda_page_search import refusal

    return refusal(plan)
