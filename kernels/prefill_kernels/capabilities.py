"""What each attention kernel can do with blocks that need not be computed, as data beside the kernel."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

KERNELS: dict[str, Capabilities] = {}
"""Capabilities by the name of the function that runs the kernel; filled where the kernels are defined."""


@dataclass(frozen=True)
class Capabilities:
    """Ways of not computing a block.

    Attributes:
        logical_skip: walks every causal block and tests a mask; a masked block costs a turn of the loop.
        physical_skip: walks a list of the kept blocks; the others are never touched.
        in_kernel_skip: leaves out the value side of a visited block by the exact logits (equation 5 of CoSA).
        page_remap: visits the listed blocks in any order, through the page table.
    """

    logical_skip: bool = False
    physical_skip: bool = False
    in_kernel_skip: bool = False
    page_remap: bool = False

    def __le__(self, other: Capabilities) -> bool:
        """Whether ``other`` can do everything that this asks for."""
        mine, theirs = vars(self), vars(other)
        return all(theirs[name] or not asked for name, asked in mine.items())


def provides(**flags: bool) -> Callable[[F], F]:
    """Declare what the kernel behind a function can do; ``flags`` are fields of :class:`Capabilities`."""

    def declare(function: F) -> F:
        KERNELS[function.__name__] = Capabilities(**flags)
        return function

    return declare


_DEFINED_IN = ("dense", "osk", "page_attention", "triton_osk", "vertical_slash")


def kernels() -> dict[str, Capabilities]:
    """Capabilities of every kernel; those written in a language that is not installed are left out."""
    for module in _DEFINED_IN:
        with contextlib.suppress(ImportError):
            importlib.import_module(f"{__package__}.{module}")
    return dict(KERNELS)
