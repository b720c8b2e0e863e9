"""``evalkit analyze heads``: what a method spends and how far its output is from dense, by layer and head.

The error of a head is ``|| O - O_dense ||_F / || O_dense ||_F`` over all rows, both outputs computed from the same
queries, keys and values.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from prefill_kernels import DensePlan, PagedKV, causal_blocks, causal_cells, dense_attention, sparse_attention
from torch import Tensor

from ..assets import sha256_file
from ..calibration.resolve import check_weights
from ..config import plain
from ..errors import InputError
from ..identity import named_files
from ..methods.base import Method, Plan, PlanContext
from . import figures
from .settings import HeadsAnalysis
from .work import Probe, Prompt, Workbench, layer_line, write_facts, write_table

SUMS = ("dense", "visited", "computed", "dense_blocks", "computed_blocks", "square_error", "square_norm")


def run(settings: HeadsAnalysis, command: str) -> int:
    """Measure, or read what was measured, and write ``heads.csv`` and the picture.

    Args:
        settings: validated settings.
        command: kept in ``heads.json``.

    Returns:
        Exit code.

    Raises:
        InputError: a method that is for another model, or was calibrated with other weights.
    """
    methods = settings.built()
    bench = Workbench(settings, "heads", command, [sys.modules[__name__]], {"methods": identity(methods)})
    for text, method in methods.items():
        method.check_model(*bench.shape)
        try:
            check_weights(settings.cell(method), bench.source.checksum)
        except InputError as error:
            raise InputError("methods", text, f"{error.field}={error.value!r}: {error.allowed}") from None
    with bench.parts.locked():
        parts = bench.each(lambda prompt: measure(bench, settings, methods, prompt))
    table = summarise(parts)
    write_table(table, bench.out / "heads.csv")
    write_facts(bench.facts(), bench.out / "heads.json")
    title = f"{settings.model.name}, {settings.length} tokens, {bench.counted}, {settings.states} states"
    figures.save(figures.draw_heads(table, title), bench.out / "heads")
    for line in report(table):
        print(line, flush=True)
    return 0


def identity(methods: Mapping[str, Method]) -> dict[str, Any]:
    """What the texts of methods stand for: a preset, a calibration or a table may change behind its name."""
    found: dict[str, Any] = {}
    for text, method in methods.items():
        settings = {name: value for name, value in plain(method).items() if name != "calibration"}
        files = {name: sha256_file(Path(file).expanduser()) for name, file in named_files(method).items()}
        # The value that was taken of a calibration is among the settings; the rest of the file changes nothing.
        found[text] = {**settings, "files": {name: digest for name, digest in files.items() if name != "calibration"}}
    return found


def measure(bench: Workbench, settings: HeadsAnalysis, methods: dict[str, Method], prompt: Prompt) -> pd.DataFrame:
    """One prompt: a row for each method, layer and head, with the sums :data:`SUMS`."""
    found: list[pd.DataFrame] = []

    def look(q: Tensor, kv: PagedKV, context: PlanContext) -> None:
        dense = _dense(q, kv, context)
        for name, method in methods.items():
            found.append(_named(head_sums(method.plan(q, kv, context), method, q, kv, context, dense), name, context))
        layer_line(context.layer, bench.shape[0])

    if settings.states == "dense":
        bench.prefill(prompt, Probe(look))
        return pd.concat(found, ignore_index=True)
    for name, method in methods.items():
        bench.prefill(prompt, OwnStates(name, method, found))
    return pd.concat(found, ignore_index=True)


class OwnStates:
    """A method whose own outputs flow on, beside dense on the same inputs.

    Args:
        name: what the method is called.
        method: what is run; everything but :meth:`plan` is its own.
        found: where the rows go.
    """

    def __init__(self, name: str, method: Method, found: list[pd.DataFrame]) -> None:
        self._called, self.method, self._found = name, method, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)

    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> Plan:
        """The method's plan; it is also executed here, to compare."""
        plan = self.method.plan(q, kv, context)
        frame = head_sums(plan, self.method, q, kv, context, _dense(q, kv, context))
        self._found.append(_named(frame, self._called, context))
        return plan


def _dense(q: Tensor, kv: PagedKV, context: PlanContext) -> Tensor:
    return dense_attention(q, *kv.gather(), scale=context.scale, q_offset=context.q_offset)


def _named(frame: pd.DataFrame, name: str, context: PlanContext) -> pd.DataFrame:
    frame.insert(0, "method", name)
    frame.insert(1, "layer", context.layer)
    frame.insert(2, "head", range(len(frame)))
    return frame


def head_sums(plan: Plan, method: Method, q: Tensor, kv: PagedKV, context: PlanContext, dense: Tensor) -> pd.DataFrame:
    """Execute a plan and compare it with dense.

    Args:
        plan: what the method asks for.
        method: gives the block size.
        q: [1, Hq, L, d].
        kv: keys and values.
        context: position in the prompt.
        dense: output of dense attention on the same inputs, [1, Hq, L, d].

    Returns:
        One row a head, columns :data:`SUMS`.
    """
    heads, length = q.shape[1], q.shape[2]
    cells = causal_cells(context.q_offset, length)
    blocks = causal_blocks(context.q_offset, length, method.block_size)
    norm = torch.stack([dense[0, h].double().square().sum() for h in range(heads)])
    if isinstance(plan, DensePlan):
        whole = torch.ones(heads, dtype=torch.int64)
        spent = {"visited": whole * cells, "computed": whole * cells, "computed_blocks": whole * blocks}
        error = torch.zeros_like(norm)
    else:
        out, stats = sparse_attention(q, kv, plan, scale=context.scale, backend=context.backend)
        # A head at a time: a copy of all heads in double precision would not fit at 128K.
        error = torch.stack([(out[0, h].double() - dense[0, h].double()).square().sum() for h in range(heads)])
        sums = {"visited": stats.visited_cells, "computed": stats.computed_cells}
        sums["computed_blocks"] = stats.computed_blocks
        spent = {name: values.sum((0, 2), dtype=torch.int64) for name, values in sums.items()}
    frame = pd.DataFrame({name: values.cpu().numpy() for name, values in spent.items()})
    frame["dense"], frame["dense_blocks"] = cells, blocks
    frame["square_error"], frame["square_norm"] = error.cpu().numpy(), norm.cpu().numpy()
    return frame[list(SUMS)]


def summarise(parts: pd.DataFrame) -> pd.DataFrame:
    """Pool the prompts by method, layer and head: ``B``, ``B_stage1``, ``B_block`` and ``error``."""
    keys = ["method", "layer", "head"]
    sums = parts.groupby(keys, sort=False)[list(SUMS)].sum().reset_index()
    return sums[keys].assign(
        B=sums["computed"] / sums["dense"],
        B_stage1=sums["visited"] / sums["dense"],
        B_block=sums["computed_blocks"] / sums["dense_blocks"],
        error=(sums["square_error"] / sums["square_norm"]) ** 0.5,
    )


def report(table: pd.DataFrame) -> list[str]:
    """Budget, median and worst error of each method, as lines."""
    lines = [f"{'method':44}{'B':>8}{'error, median':>15}{'worst':>8}  where"]
    for name, rows in table.groupby("method", sort=False):
        worst = rows.loc[rows["error"].idxmax()]
        lines.append(
            f"{name!s:44}{rows['B'].mean():8.1%}{rows['error'].median():15.3f}{worst['error']:8.3f}"
            f"  layer {int(worst['layer'])} head {int(worst['head'])}"
        )
    return lines
