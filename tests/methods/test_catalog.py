"""Capabilities: Table A as printed, flags as data, and no preset's plan doing what it does not declare."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from kernel_cases import paged, tensors
from prefill_kernels import BlockPlan, Capabilities, DensePlan, kernels
from prefill_kernels.capabilities import KERNELS, provides

from evalkit import cli
from evalkit.errors import IntegrityError
from evalkit.methods import PlanContext, catalog

PAPER = Path(__file__).parents[2] / "results" / "paper" / "backends.csv"


@pytest.fixture(scope="module")
def methods():
    return catalog.preset_methods()


def test_table_a_is_the_papers():
    pytest.importorskip("triton")
    with open(PAPER) as stream:
        printed = [{k: v == "1" if k != "backend" else v for k, v in row.items()} for row in csv.DictReader(stream)]
    ours = [
        {"backend": row.name, **{flag: getattr(row.can, flag) for flag in catalog.FLAGS}} for row in catalog.table_a()
    ]
    assert ours == printed


def test_flags_lie_beside_the_kernels():
    pytest.importorskip("triton")
    known = kernels()
    assert known["block_attention"] == Capabilities(physical_skip=True, in_kernel_skip=True, page_remap=True)
    assert known["logical_skip_attention"] == Capabilities(logical_skip=True)
    assert known["dense_attention"] == Capabilities()


def test_a_kernel_declares_itself_and_only_known_flags():
    try:
        assert provides(logical_skip=True)(test_table_a_is_the_papers) is test_table_a_is_the_papers
        assert KERNELS["test_table_a_is_the_papers"] == Capabilities(logical_skip=True)
        with pytest.raises(TypeError):
            provides(teleport=True)(test_table_a_is_the_papers)
    finally:
        KERNELS.pop("test_table_a_is_the_papers", None)


def test_asking_for_more_than_the_kernel_declares_is_an_error(monkeypatch):
    small, large = Capabilities(physical_skip=True), Capabilities(physical_skip=True, in_kernel_skip=True)
    assert small <= large and not large <= small and Capabilities() <= small
    monkeypatch.setattr(catalog, "kernels", lambda: {"block_attention": small})
    with pytest.raises(IntegrityError, match="method blasst asks for"):
        catalog.table_a()


def test_every_preset_is_listed_with_what_its_settings_ask(methods):
    rows = {row.name: row for row in catalog.presets()}
    assert set(rows) == set(methods)
    assert rows["cosa"].can == Capabilities(physical_skip=True, page_remap=True)
    assert rows["cosa-iks"].can == Capabilities(physical_skip=True, in_kernel_skip=True)
    assert rows["dense"].can == Capabilities() and rows["dense"].knob == ""
    assert rows["blasst"].knob == "skip_scale" and rows["blasst"].chunks


def test_plans_do_what_the_flags_say(methods):
    """Lists that leave blocks out, a threshold, and an order out of line must each have been declared."""
    q, k, v = tensors(1200, 4, 2, 16, block=128, seed=2)
    kv = paged(k, v, 64)
    for name, method in methods.items():
        plan = method.plan(q, kv, PlanContext(0, 0, 1200, 0.25, "torch"))
        if isinstance(plan, DensePlan):
            continue
        parts = getattr(plan, "parts", (plan,))
        for part in (x for x in parts if isinstance(x, BlockPlan)):
            tiles = part.order.shape[2]
            assert method.features.in_kernel_skip == (part.log_threshold is not None), name
            if (part.count < torch.arange(1, tiles + 1)).any():
                assert method.features.physical_skip, name
            used = part.order[..., 1:] >= 0
            step = (part.order[..., 1:] - part.order[..., :-1])[used]
            if (step > 0).any() and (step < 0).any():
                assert method.features.page_remap, name


@pytest.mark.parametrize("option,first", [([], "method preset"), (["--table-a"], "backend")])
def test_the_command_prints_a_table(capsys, option, first):
    assert cli.main(["methods", *option]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"| {first}") and len(out) > 5
