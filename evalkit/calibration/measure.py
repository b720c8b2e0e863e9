"""What a method spends and keeps on calibration windows, run free: each window once, kept on disk at once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prefill_kernels import BlockPlan, DensePlan, PagedKV, block_mass
from scipy.stats import t as student
from torch import Tensor
from transformers import PreTrainedModel

from ..attention import Session
from ..config import ExecutionConfig
from ..errors import InputError
from ..methods.base import Method, Plan, PlanContext
from .file import with_field
from .search import Axis

GRID = 17
"""Values of the knob at which a head's recall is measured for a table."""


@dataclass(frozen=True)
class Spent:
    """Budgets and recall of one method, window by window.

    Windows of one length have equal dense counts, so that the mean of their ratios is the ratio of their sums.
    """

    records: list[dict[str, float]]

    def means(self) -> dict[str, float]:
        """Mean over the windows by name."""
        return {name: float(np.mean([record[name] for record in self.records])) for name in self.records[0]}

    def interval(self, name: str) -> float | None:
        """Half the width of the 95 % interval of a mean, from the scatter between windows; None for a single window."""
        count = len(self.records)
        if count < 2:
            return None
        deviation = float(np.std([record[name] for record in self.records], ddof=1))
        return float(student.ppf(0.975, count - 1)) * deviation / count**0.5


class Workbench:
    """A model, and a folder where every measurement is kept by what was measured.

    Args:
        model: loaded model.
        execution: how prefills run.
        folder: holds the measurements of one calibration; a later run finds them there.
    """

    def __init__(self, model: PreTrainedModel, execution: ExecutionConfig, folder: Path) -> None:
        self.model, self.execution, self.folder = model, execution, folder
        self._journal = folder / "measurements.jsonl"
        self._known: dict[str, dict[str, float]] = {}
        for line in _whole_lines(self._journal):
            self._known[line["key"]] = line["record"]

    def measure(self, method: Method, windows: Sequence[Sequence[int]], *, recall: bool) -> Spent:
        """Every budget, and the recall where it is asked for, over some windows of one length."""
        return Spent([self._window(method, window, recall) for window in windows])

    def _window(self, method: Method, ids: Sequence[int], recall: bool) -> dict[str, float]:
        key = _key([repr(method), list(ids), recall])
        if key not in self._known:
            self._known[key] = self._run(method, ids, recall)
            with open(self._journal, "a", encoding="utf-8") as stream:
                stream.write(json.dumps({"key": key, "record": self._known[key]}) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        return self._known[key]

    def _run(self, method: Method, ids: Sequence[int], recall: bool) -> dict[str, float]:
        probe = RecallProbe(method) if recall else None
        with self._session(probe or method) as session:
            session.prefill(torch.tensor(ids), keep_from=len(ids) - 1)
            record = session.account().budget.record()
        budgets = {name: float(record[name]) for name in ("B", "B_block", "B_stage1", "B_stage1_block", "B_cost")}
        return budgets if probe is None else {**budgets, "recall": probe.recall()}

    def curves(self, method: Method, axis: Axis, windows: Sequence[Sequence[int]]) -> np.ndarray:
        """Recall of each head at places along the knob's axis, on the dense model's states: [layers, heads, GRID]."""
        total: np.ndarray | None = None
        for ids in windows:
            file = self.folder / f"curves-{_key([repr(method), str(axis), list(ids)])}.npy"
            if not file.exists():
                probe = CurveProbe(method, axis, self.model.config.num_hidden_layers)
                with self._session(probe) as session:
                    session.prefill(torch.tensor(ids), keep_from=len(ids) - 1)
                    session.account()
                scratch = file.with_suffix(".part")
                with open(scratch, "wb") as stream:
                    np.save(stream, probe.recalls())
                os.replace(scratch, file)
            found = np.load(file)
            total = found if total is None else total + found
        assert total is not None
        return np.maximum.accumulate(total / len(windows), axis=-1)

    def _session(self, method: Any) -> Session:
        execution = self.execution
        return Session(
            self.model,
            method,
            backend=execution.backend,
            page_size=execution.page_size,
            page_shuffle=execution.page_shuffle,
            chunk_size=execution.chunk_size,
        )


class RecallProbe:
    """A method, with the share of the true attention mass in the blocks that its plans list.

    Args:
        method: what is run; everything but :meth:`plan` is its own.
    """

    def __init__(self, method: Method) -> None:
        self.method = method
        self._kept: list[Tensor] = []
        self._rows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)

    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> Plan:
        """The method's plan; its recall is added up on the device."""
        plan = self.method.plan(q, kv, context)
        self._kept.append(_listed_mass(plan, _mass(q, kv, context, self.method.block_size), self.method.name).sum())
        self._rows += q.shape[1] * q.shape[2]
        return plan

    def recall(self) -> float:
        """Mass in listed blocks over all mass, summed over layers, heads and rows."""
        return float(torch.stack([x.double().cpu() for x in self._kept]).sum()) / self._rows


class CurveProbe:
    """Runs dense, and asks a method at each call what it would list at :data:`GRID` values of its knob.

    Args:
        method: the method whose knob is turned.
        axis: the knob's range.
        layers: decoder layers of the model.
    """

    name = "dense"

    def __init__(self, method: Method, axis: Axis, layers: int) -> None:
        self.method = method
        self._variants = [with_field(method, axis.knob.field, axis.value(place)) for place in places()]
        self._kept: list[list[Tensor]] = [[] for _ in range(layers)]
        self._rows = [0] * layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)

    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> DensePlan:
        """Attend to everything; the recall of each head at each value is added up on the device."""
        mass = _mass(q, kv, context, self.method.block_size)
        recalls = [_listed_mass(m.plan(q, kv, context), mass, m.name) for m in self._variants]
        self._kept[context.layer].append(torch.stack(recalls, -1))
        self._rows[context.layer] += q.shape[2]
        return DensePlan("method")

    def estimator_cells(self, q_offset: int, q_len: int) -> int:
        """Nothing of this is part of a method."""
        return 0

    def recalls(self) -> np.ndarray:
        """Recall by layer, head and place, float64 [layers, heads, GRID]."""
        sums = [torch.stack([x.double().cpu() for x in layer]).sum(0).numpy() for layer in self._kept]
        return np.stack([kept / rows for kept, rows in zip(sums, self._rows, strict=True)])


def places() -> np.ndarray:
    """Places along an axis at which curves are measured."""
    return np.linspace(0.0, 1.0, GRID)


def table_at(curves: np.ndarray, axis: Axis, recall: float) -> list[list[float]]:
    """For each layer and head the value at which its recall first reaches ``recall``, linear between two places.

    Args:
        curves: :meth:`Workbench.curves`.
        axis: the axis they were measured on.
        recall: wanted of every head; a head that never reaches it gets the largest value.
    """
    grid = places()
    table = []
    for layer in curves:
        row = []
        for curve in layer:
            above = int(np.searchsorted(curve, recall))
            if above == 0 or above == len(grid):
                place = grid[min(above, len(grid) - 1)]
            else:
                share = (recall - curve[above - 1]) / (curve[above] - curve[above - 1])
                place = grid[above - 1] + share * (grid[above] - grid[above - 1])
            row.append(axis.value(float(place)))
        table.append(row)
    return table


def _mass(q: Tensor, kv: PagedKV, context: PlanContext, block_size: int) -> Tensor:
    return block_mass(
        q, kv, scale=context.scale, block_size=block_size, q_offset=context.q_offset, backend=context.backend
    )


def _listed_mass(plan: Plan, mass: Tensor, name: str) -> Tensor:
    """Mass of the listed blocks by head, [Hq]."""
    if isinstance(plan, DensePlan):
        return mass.sum((0, 2, 3))
    if not isinstance(plan, BlockPlan):
        raise InputError("calibrate.recalls", name, "a method that lists whole blocks: calibrate this one to a budget")
    listed = mass.gather(-1, plan.order.clamp(min=0).long()) * (plan.order >= 0)
    return listed.sum((0, 2, 3))


def _key(parts: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _whole_lines(file: Path) -> list[Mapping[str, Any]]:
    """Lines of a journal; one that a kill cut short belongs to the window in flight and is run again."""
    if not file.exists():
        return []
    data = file.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        with open(file, "r+b") as stream:
            stream.truncate(whole)
    return [json.loads(line) for line in data[:whole].splitlines()]
