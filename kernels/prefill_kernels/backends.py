"""Which implementation of an operation runs."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BACKENDS: tuple[str, ...] = ("torch", "triton", "hopper")
"""``torch`` is the readable reference and runs on any device; ``triton`` needs CUDA, or ``TRITON_INTERPRET=1`` on the
CPU; ``hopper`` is Gluon for sm_90. An operation that has no Hopper version of its own runs its Triton version."""

Refusal = Callable[[], str | None]
"""Says why a backend cannot run a call, or None where it can."""


class BackendUnavailable(ValueError):
    """The named backend does not exist, or cannot run this call on this machine."""


@dataclass
class Executed:
    """What executed the operations called inside :func:`executed`.

    Attributes:
        counts: calls by stage (``proxy``, ``select`` or ``attention``) and backend.
        refused: why a faster backend was passed over, by stage and that backend; the last reason of each.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: dict[tuple[str, str], str] = field(default_factory=dict)


_watcher: ContextVar[Executed | None] = ContextVar("_watcher", default=None)


@contextlib.contextmanager
def executed() -> Iterator[Executed]:
    """Record which backend executes each operation called inside; an inner record hides calls from an outer one."""
    found = Executed()
    token = _watcher.set(found)
    try:
        yield found
    finally:
        _watcher.reset(token)


def record_call(stage: str, backend: str) -> None:
    """Tell :func:`executed` of one call."""
    if (found := _watcher.get()) is not None:
        found.counts[stage, backend] += 1


def record_refusal(stage: str, backend: str, reason: str) -> None:
    """Tell :func:`executed` why a backend was passed over."""
    if (found := _watcher.get()) is not None:
        found.refused[stage, backend] = reason


def resolve_backend(backend: str, device: torch.device | None = None, dtype: torch.dtype | None = None) -> str:
    """Return the backend that ``auto`` stands for on a device, or ``backend`` itself.

    Without a ``device`` the name is only checked, and ``auto`` stays ``auto``: each call then chooses by its tensors
    and falls back to a slower backend where the faster one refuses the call.

    Args:
        backend: ``auto`` or one of :data:`BACKENDS`.
        device: where the tensors will lie.
        dtype: of queries, keys and values; the GPU kernels run bfloat16 and float16.

    Raises:
        BackendUnavailable: the name is not in :data:`BACKENDS`.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise BackendUnavailable(f"backend={backend!r}: one of {', '.join(('auto', *BACKENDS))}")
    if backend != "auto" or device is None:
        return backend
    half = dtype in (None, torch.bfloat16, torch.float16)
    if device.type != "cuda" or not half or triton_problem() is not None:
        return "torch"
    return "triton" if hopper_problem(device) else "hopper"


def choose_backend(stage: str, backend: str, device: torch.device, refusals: Mapping[str, Refusal]) -> str:
    """Choose among the GPU implementations of one operation for one call.

    Args:
        stage: what the operation is part of, for :func:`executed`.
        backend: as the caller gave it.
        device: where the tensors lie.
        refusals: for each GPU implementation, best first, what says whether it can run the call.

    Raises:
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    if backend not in refusals:
        resolve_backend(backend)
    chosen = "torch"
    if backend == "auto" and device.type == "cuda":
        for name, refusal in refusals.items():
            if (reason := refusal()) is None:
                chosen = name
                break
            record_refusal(stage, name, reason)
    elif backend not in ("auto", "torch"):
        chosen = backend if backend in refusals else "triton"
        if (reason := refusals[chosen]()) is not None:
            raise BackendUnavailable(f"backend={backend!r}: {reason}")
    record_call(stage, chosen)
    return chosen


def triton_refusal(module: str, *call: Any) -> Refusal:
    """Ask a module's ``refusal`` about a call; the module is imported only where Triton can be.

    Args:
        module: name of the module in this package.
        call: arguments of its ``refusal``.
    """

    def refusal() -> str | None:
        problem = triton_problem()
        if problem is not None:
            return problem
        found: str | None = importlib.import_module(f"{__package__}.{module}").refusal(*call)
        return found

    return refusal


def product_problem(q: Tensor, *pages: Tensor, block_size: int | None = None) -> str | None:
    """Why the Triton kernels cannot multiply queries with keys and values, or None.

    Args:
        q: [..., d].
        pages: [P, page_size, Hkv, d] of keys, and of values where they are read; they are read with one set of strides.
        block_size: of tiles and key blocks where the kernel has any.
    """
    if problem := half_problem(q.device, q.dtype, *(x.dtype for x in pages)):
        return problem
    if q.shape[-1] not in (16, 32, 64, 128):
        return f"head_dim={q.shape[-1]}: must be 16, 32, 64 or 128"
    if block_size not in (None, 16, 32, 64, 128):
        return f"block_size={block_size}: must be 16, 32, 64 or 128"
    if any(x.stride(3) != 1 or x.stride() != pages[0].stride() for x in pages):
        return "key and value pages must share strides and have contiguous rows"
    return None


def half_problem(device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Why the Triton kernels cannot run these dtypes on this device, or None."""
    problem = triton_problem()
    if problem is not None:
        return problem
    if len(set(dtypes)) > 1:
        return f"queries, keys and values must share one dtype, not {', '.join(map(str, dtypes))}"
    if device.type == "cuda":
        # Triton launches on the current device's stream, which nothing on the tensors' own device would wait for.
        if device.index is not None and device.index != (current := torch.cuda.current_device()):
            return f"tensors on {device}, current device cuda:{current}: call under torch.cuda.device('{device}')"
        allowed: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    elif interpreting():
        # The interpreter multiplies raw bits in bfloat16 and rounds float8 wrongly, without an error.
        allowed = (torch.float32, torch.float16)
    else:
        return f"tensors on {device.type}: the Triton kernels need CUDA, or TRITON_INTERPRET=1 set before triton loads"
    if dtypes[0] not in allowed:
        where = "on CUDA" if device.type == "cuda" else "in the Triton interpreter"
        return f"dtype {dtypes[0]}: {where} one of {', '.join(map(str, allowed))}"
    return None


@functools.cache
def triton_problem() -> str | None:
    """Why Triton cannot be used at all, or None."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    return None


def interpreting() -> bool:
    """Whether Triton runs in its CPU interpreter."""
    from triton.language import sum as probe
    from triton.runtime.jit import JITFunction  # type: ignore[import-untyped,unused-ignore]

    return not isinstance(probe, JITFunction)


@functools.cache
def hopper_problem(device: torch.device) -> str | None:
    """Why the Gluon kernels cannot run on a device, or None."""
    if device.type != "cuda":
        return f"tensors on {device.type}: needs a CUDA device of compute capability 9.0"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"needs compute capability 9.0, {torch.cuda.get_device_name(device)} has another"
    if triton_problem() is not None:
        return triton_problem()
    try:
        importlib.import_module(f"{__package__}.hopper_osk")
    except (ImportError, AttributeError) as error:
        return f"this Triton has no usable Gluon ({error})"
    return None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs of one a multiprocessor run at once; 2 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
