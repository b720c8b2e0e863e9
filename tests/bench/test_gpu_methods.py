"""Every preset on a CUDA device: its plan waits for nothing and fits, and its whole call passes its check."""

from __future__ import annotations

import csv

import pytest
import torch
from prefill_kernels import DensePlan, resolve_backend
from prefill_kernels.bench import Rows
from prefill_kernels.bench.inputs import Shape, synthetic
from prefill_kernels.bench.measure import Bench
from prefill_kernels.bench.planned import attend, peak_memory

from evalkit.bench.attention import launch, planner
from evalkit.bench.settings import COSA, MethodsBench
from evalkit.methods.presets import from_text, names, preset

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")
PRESETS = [name for name in names() if name != "dense" and preset(name).calibration is None]
TABLE = "a table"
PATTERNS = [["vertical_slash", 100, 600], ["block_sparse", 9], ["a_shape", 64, 512], ["block_sparse", 20]]


def method(name, tmp_path):
    if name != TABLE:
        return from_text(name)
    path = tmp_path / "table.yaml"
    path.write_text(f"patterns: [{PATTERNS * 2}]\n")
    return from_text(f"minference:table={path}")


@pytest.mark.parametrize("tokens", [4096, 5003])
@pytest.mark.parametrize("name", [*PRESETS, *COSA, "xattention:stride=16", "cosa:share=kv_head", TABLE])
def test_planning_and_attending_wait_for_nothing(tmp_path, name, tokens):
    one = synthetic(Shape(8, 2, 128), tokens, 3, sigma=2.0, device=DEVICE)
    rows = Rows(tmp_path / "rows.csv", "a command", "abc")
    bench = Bench(rows, DEVICE, lambda calls: [1.0 for _ in calls])
    made = planner(name, method(name, tmp_path), bench.backend)
    attend(bench, one, made.plan(one))  # compiles, and copies constants to the device
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = made.plan(one)
        if not isinstance(plan, DensePlan):
            attend(bench, one, plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["xattention", "flexprefill", "minference", "blasst", "flashprefill", "spargeattn"])
def test_selection_of_128k_tokens_fits(name):
    one = synthetic(Shape(), 131072, 3, sigma=2.0, device=DEVICE)
    made = planner(name, from_text(name), resolve_backend("auto", DEVICE, torch.bfloat16))
    made.plan(one)
    torch.cuda.empty_cache()
    _, gib = peak_memory(lambda: made.plan(one), DEVICE)
    assert gib is not None and gib < 2, f"{gib:.2f} GiB"


def test_the_benchmark_of_every_preset(tmp_path):
    out = str(tmp_path / "rows.csv")
    variants = ("fa2", *PRESETS, *COSA)
    launch(MethodsBench(lengths=(3000,), sigmas=(2.0,), repeats=1, out=out, variants=variants), "attention")
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    stages = {"call", "kap", "osk", "select"}  # a budget of CoSA alone is timed in its parts
    assert {row["variant"] for row in rows} == {"fa2", *PRESETS, *COSA, *stages} - {"cosa"}
    kinds = {row["setting"].partition(", ")[0] for row in rows if row["variant"] == "xattention"}
    assert kinds == {"normal inputs (flat mass)", "sigma 2"}
    errors = [float(row["value"]) for row in rows if row["metric"] == "rel_err"]
    assert max(errors) < 1e-2 and all(float(row["value"]) > 0 for row in rows if row["metric"].endswith("ms"))
