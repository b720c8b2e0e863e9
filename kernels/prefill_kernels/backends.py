"""Which implementation of an operation runs."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping

import torch

BACKENDS: tuple[str, ...] = ("torch", "triton", "hopper")
"""``torch`` is the readable reference and runs on any device; ``triton`` needs CUDA, or ``TRITON_INTERPRET=1`` on the
CPU; ``hopper`` is Gluon for sm_90. An operation that has no Hopper version of its own runs its Triton version."""

Refusal = Callable[[], str | None]
"""Says why a backend cannot run a call, or None where it can."""


class BackendUnavailable(ValueError):
    """The named backend does not exist, or cannot run this call on this machine."""


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


def choose_backend(backend: str, device: torch.device, refusals: Mapping[str, Refusal]) -> str:
    """Choose among the GPU implementations of one operation for one call.

    Args:
        backend: as the caller gave it.
        device: where the tensors lie.
        refusals: for each GPU implementation, best first, what says whether it can run the call.

    Raises:
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    resolve_backend(backend)
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return "torch"
    if backend == "auto":
        return next((name for name, refusal in refusals.items() if refusal() is None), "torch")
    name = backend if backend in refusals else "triton"
    reason = refusals[name]()
    if reason is not None:
        raise BackendUnavailable(f"backend={backend!r}: {reason}")
    return name


def half_problem(device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Why the Triton kernels cannot run these dtypes on this device, or None."""
    problem = triton_problem()
    if problem is not None:
        return problem
    if len(set(dtypes)) > 1:
        return f"queries, keys and values must share one dtype, not {', '.join(map(str, dtypes))}"
    if device.type == "cuda":
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
