"""The benchmarks on a CUDA device, small: every kernel they time passes its check."""

from __future__ import annotations

import csv

import pytest
import torch
from prefill_kernels.bench import AttentionBench, KernelBench
from prefill_kernels.bench.command import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_kernel_and_attention(tmp_path):
    out = str(tmp_path / "rows.csv")
    launch(KernelBench(lengths=(1024, 2500), skip_lengths=(2048,), repeats=1, out=out), "kernel")
    launch(AttentionBench(lengths=(2048,), repeats=1, out=out), "attention")
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["variant"] for row in rows} >= {"fa2", "osk", "osk_triton", "logical_triton", "kap", "select", "call"}
    errors = [float(row["value"]) for row in rows if row["metric"] == "rel_err"]
    assert errors and max(errors) < 1e-2
    assert all(float(row["value"]) > 0 for row in rows if row["metric"] in ("ms", "tflops"))
