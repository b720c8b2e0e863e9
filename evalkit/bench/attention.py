"""The whole attention call of any method against dense kernels: ``method.plan``, then the kernel for its plan.

Every method is measured on the same inputs as the dense kernels, selection included. On standard normal inputs the mass
of a tile is spread evenly over its blocks, so that a method which keeps a share of the mass keeps nearly that share of
the blocks: those rows say what the selection costs, not what it saves, and they are named so. Synthetic inputs with a
``sigma`` have blocks that differ as if by design; what a method selects of a model is seen on captured inputs.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
from prefill_kernels.bench import attention
from prefill_kernels.bench.command import device_bench
from prefill_kernels.bench.inputs import Inputs
from prefill_kernels.bench.measure import Bench
from prefill_kernels.bench.planned import Plan, Planner, planned_call

from ..methods.base import Method, PlanContext
from ..methods.presets import described
from .settings import MethodsBench


def launch(settings: MethodsBench, command: str) -> Path:
    """Run on the CUDA device; returns the file that was appended to.

    Raises:
        BenchError: no CUDA device, no Triton, or a file that cannot be used.
        WrongResult: a kernel does not compute what its plan means; nothing was timed of it.
    """
    bench = device_bench(settings, command)
    run(settings, bench)
    return bench.rows.path


def run(settings: MethodsBench, bench: Bench) -> None:
    """CoSA's own sweep where ``cosa`` is among the variants, and every method on each kind of inputs."""
    methods = settings.methods()

    def measure(sets: list[Inputs], kind: str) -> None:
        tokens = sets[0].tokens
        for variant, method in methods.items():
            for warning in method.warnings(tokens):
                print(f"{variant} at {tokens} tokens: {warning}", file=sys.stderr, flush=True)
            try:
                planned_call(bench, planner(variant, method, bench.backend), sets, kind)
            except torch.OutOfMemoryError:
                told = f"{variant} at {tokens} tokens, {kind}: left out, it does not fit into memory"
                print(told, file=sys.stderr, flush=True)

    attention.run(settings, bench, measure if methods else None)


def planner(variant: str, method: Method, backend: str) -> Planner:
    """A method as the benchmark takes it.

    Args:
        variant: how rows call it.
        method: validated.
        backend: kernel backend of its selection.
    """

    def plan(one: Inputs) -> Plan:
        return method.plan(one.q, one.kv, PlanContext(one.layer, 0, one.tokens, one.scale, backend))

    return Planner(variant, described(method), plan, functools.partial(method.estimator_cells, 0))
