"""The embedded model: a calibrated value spends its target on windows that it was not calibrated on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from evalkit.assets import EMBEDDED_MODEL
from evalkit.calibration.file import Calibration
from evalkit.calibration.run import Request, calibrate
from evalkit.calibration.settings import CalibrateConfig
from evalkit.config import Cell, ExecutionConfig, ModelConfig, PackageRef, PerplexityConfig
from evalkit.methods import METHODS
from evalkit.runner import run_cell
from evalkit.store import read_cells

MODEL = ModelConfig(
    name="smollm2",
    native_context=8192,
    package=PackageRef(EMBEDDED_MODEL.name, EMBEDDED_MODEL.version, EMBEDDED_MODEL.sha256, EMBEDDED_MODEL.member),
)


def spent(method, length, target, windows, limit, out):
    """Calibrate in a folder of the test, run a cell on the other end of the text; its B and the file's entry."""
    settings = CalibrateConfig(lengths=(length,), budgets=(target,), windows=windows, tolerance=0.005)
    request = Request(MODEL, method, settings, ExecutionConfig())
    assert calibrate(request) == 0
    asked = type(method)(**{**vars(method), "budget_target": target})
    task = PerplexityConfig(length=length, limit=limit, fidelity=False)
    run_cell(Cell(MODEL, asked, task, ExecutionConfig(), Path(out)))
    (cell,) = read_cells([out])
    assert len(cell.records) == limit
    (entry,) = Calibration.read(request.path).entries
    return [record["budget"]["B"] for record in cell.records], entry


@pytest.mark.slow
def test_few_short_windows_reach_the_target_within_their_scatter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    budgets, entry = spent(METHODS.get("cosa")(block_size=64), 256, 0.7, 4, 4, tmp_path / "runs")
    assert abs(entry.reached - 0.7) <= 0.005 and entry.interval > 0.01
    assert abs(np.mean(budgets) - 0.7) <= 0.01 + entry.interval


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "name,target", [("cosa", 0.2), ("cosa", 0.35), ("xattention", 0.3), ("blasst", 0.5), ("minference", 0.4)]
)
def test_the_target_is_met_within_a_point_on_other_windows(tmp_path, monkeypatch, name, target):
    monkeypatch.chdir(tmp_path)
    budgets, entry = spent(METHODS.get(name)(), 4096, target, 30, 30, tmp_path / "runs")
    assert abs(np.mean(budgets) - target) <= 0.01, (np.mean(budgets), entry.reached, entry.interval)
