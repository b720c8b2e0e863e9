"""Which implementation of an operation runs."""

from __future__ import annotations

BACKENDS: tuple[str, ...] = ("torch",)
"""Backends that exist in this build. ``torch`` is the readable reference and runs on any device."""


class BackendUnavailable(ValueError):
    """The named backend does not exist for this operation."""


def resolve_backend(backend: str) -> str:
    """Return the backend that ``auto`` stands for, or ``backend`` itself.

    Raises:
        BackendUnavailable: the name is not in :data:`BACKENDS`.
    """
    if backend == "auto":
        return BACKENDS[0]
    if backend not in BACKENDS:
        raise BackendUnavailable(f"backend={backend!r}: one of {', '.join(('auto', *BACKENDS))}")
    return backend
