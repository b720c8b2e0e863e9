"""Sparse-prefill methods. A method plans; it never attends (see :mod:`evalkit.methods.base`)."""

from __future__ import annotations

from ..registry import Registry
from .base import Method, PlanContext

METHODS: Registry[type[Method]] = Registry("method")
METHODS.add_lazy("dense", "evalkit.methods.dense:Dense")
METHODS.add_lazy("cosa", "evalkit.methods.cosa:CoSA")

__all__ = ["METHODS", "Method", "PlanContext"]
