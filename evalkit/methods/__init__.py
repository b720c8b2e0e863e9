"""Sparse-prefill methods. A method plans; it never attends (see :mod:`evalkit.methods.base`)."""

from __future__ import annotations

from ..registry import Registry
from .base import Knob, Method, PlanContext

METHODS: Registry[type[Method]] = Registry("method")
METHODS.add_lazy("dense", "evalkit.methods.dense:Dense")
METHODS.add_lazy("cosa", "evalkit.methods.cosa:CoSA")
METHODS.add_lazy("blasst", "evalkit.methods.blasst:BLASST")
METHODS.add_lazy("minference", "evalkit.methods.minference:MInference")
METHODS.add_lazy("oracle_topk", "evalkit.methods.oracle_topk:OracleTopK")
METHODS.add_lazy("random", "evalkit.methods.random:Random")
METHODS.add_lazy("streaming", "evalkit.methods.streaming:Streaming")
METHODS.add_lazy("xattention", "evalkit.methods.xattention:XAttention")
METHODS.add_lazy("flexprefill", "evalkit.methods.flexprefill:FlexPrefill")
METHODS.add_lazy("flashprefill", "evalkit.methods.flashprefill:FlashPrefill")
METHODS.add_lazy("pageweaver", "evalkit.methods.pageweaver:PageWeaver")
METHODS.add_lazy("spargeattn", "evalkit.methods.spargeattn:SpargeAttn")

__all__ = ["METHODS", "Knob", "Method", "PlanContext"]
