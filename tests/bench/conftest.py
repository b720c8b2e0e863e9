from __future__ import annotations

import pytest
import torch
from prefill_kernels.bench import Rows
from prefill_kernels.bench.inputs import Shape
from prefill_kernels.bench.measure import Bench

SHAPE = Shape(heads=4, kv_heads=2, dim=32)


def pretended(calls):
    """Runs every call once; a number stands for its time, as there is no device clock here."""
    for call in calls:
        call()
    return [2.0 + i for i in range(len(calls))]


@pytest.fixture
def bench(tmp_path):
    """The engine on the CPU with the torch backend, small heads and a pretended clock."""
    rows = Rows(tmp_path / "rows.csv", "a command", "abc", device="cpu")
    return Bench(rows, torch.device("cpu"), pretended, shape=SHAPE)
