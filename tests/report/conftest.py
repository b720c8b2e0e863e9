from __future__ import annotations

import io
from pathlib import Path

import pytest
import synthetic
from rich.console import Console

SCORES = {"niah_multikey_1": [1.0, 1.0, 0.0, 1.0], "vt": [0.4, 0.6, 1.0, 0.2]}


class CellFactory:
    """Writes synthetic cells below one results directory."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def perplexity(self, method: str = "cosa", **more) -> Path:
        return synthetic.perplexity_cell(self.out, method, **more)

    def ruler(self, method: str = "cosa", scores=None, **more) -> Path:
        return synthetic.ruler_cell(self.out, method, scores or SCORES, **more)

    def demo(self) -> None:
        """What the demo sweep leaves behind, in small."""
        self.perplexity("dense")
        for p, damage, share in [(0.99, 0.005, 0.62), (0.95, 0.04, 0.37), (0.8, 0.2, 0.17)]:
            self.perplexity(p=p, damage=damage, share=share)
        for order, damage, share in [("hrm_first", 0.03, 0.31), ("ascending", 0.06, 0.345)]:
            self.perplexity(p=0.95, skip_scale=512.0, order=order, damage=damage, share=share)
        self.ruler("dense")
        self.ruler(p=0.8, share=0.3, scores={**SCORES, "vt": [0.2, 0.6, 1.0, 0.0]})


@pytest.fixture
def cells(tmp_path) -> CellFactory:
    return CellFactory(tmp_path / "runs")


@pytest.fixture(scope="session")
def cell_factory() -> type[CellFactory]:
    """For fixtures that live longer than a test."""
    return CellFactory


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=140, highlight=False)
