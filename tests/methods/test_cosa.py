"""Every knob of the method reaches the plan, and reaches it as it was set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from prefill_kernels import PagedKV, kap_scores, select_blocks

from evalkit.errors import InputError
from evalkit.methods.base import PlanContext
from evalkit.methods.cosa import CoSA, Select, share_over_kv_heads

LENGTH, CONTEXT = 700, PlanContext(layer=0, q_offset=0, prompt_len=900, scale=0.11, backend="torch")
BASE = CoSA(block_size=64, stride=8, select=Select(p=0.8), skip_scale=30.0)


def inputs():
    g = torch.Generator().manual_seed(4)
    q = torch.randn(1, 6, LENGTH, 16, generator=g) * 3
    k = torch.randn(1, 2, LENGTH, 16, generator=g)
    return q, PagedKV.from_dense(k, k, 32)


def expected(method: CoSA, scale: float = 0.11):
    """The plan, put together from the operations with each knob written out."""
    q, kv = inputs()
    scores = kap_scores(q, kv, stride=method.stride, scale=scale, block_size=method.block_size)
    if method.share == "kv_head":
        scores = share_over_kv_heads(scores, 2)
    chosen = {"budget": method.select.budget} if method.select.rule == "budget" else {"p": method.select.p}
    return select_blocks(
        scores,
        block_size=method.block_size,
        q_offset=0,
        q_len=LENGTH,
        prompt_len=900,
        order=method.order,
        skip_scale=method.skip_scale,
        force_sink_diagonal=method.force_sink_diagonal,
        **chosen,
    )


def same(a, b) -> bool:
    keys = ("block_size", "q_offset", "q_len", "kv_len", "prompt_len", "skip_scale")
    return all(getattr(a, key) == getattr(b, key) for key in keys) and torch.equal(a.order, b.order)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"stride": 4},
        {"block_size": 128},
        {"select": Select(p=0.6)},
        {"select": Select(rule="budget", budget=0.3)},
        {"order": "ascending"},
        {"order": "descending"},
        {"skip_scale": -1.0},
        {"share": "kv_head"},
        {"force_sink_diagonal": True},
    ],
    ids=str,
)
def test_each_knob_reaches_the_plan(change):
    method = replace(BASE, **change)
    method.validate()
    plan = method.plan(*inputs(), CONTEXT)
    plan.check()
    assert same(plan, expected(method))
    assert same(plan, expected(BASE)) == (not change), "the knob must make a difference"


def test_the_proxy_uses_the_modules_scaling():
    plan = BASE.plan(*inputs(), CONTEXT)
    assert not same(plan, expected(BASE, scale=0.5))
    assert same(BASE.plan(*inputs(), replace(CONTEXT, scale=0.5)), expected(BASE, scale=0.5))


@pytest.mark.parametrize(
    "change,field",
    [
        ({"block_size": 100}, "method.block_size=100"),
        ({"stride": 0}, "method.stride=0"),
        ({"stride": 65}, "method.stride=65"),
        ({"select": Select(p=0.0)}, "method.select.p=0.0"),
        ({"select": Select(p=1.01)}, "method.select.p=1.01"),
        ({"select": Select(p=float("nan"))}, "method.select.p=nan"),
        ({"select": Select(rule="topp")}, "method.select.rule='topp': did you mean top_p"),
        ({"select": Select(rule="budget")}, "method.select.budget=None"),
        ({"select": Select(rule="budget", budget=1.5)}, "method.select.budget=1.5"),
        ({"select": Select(budget=0.5)}, "method.select.budget=0.5: null unless"),
        (
            {"select": Select(rule="budget", budget=0.5, p=0.8)},
            "method.select.p=0.8: 0.95, its default, with method.select.budget=0.5",
        ),
        ({"order": "hrm"}, "method.order='hrm': did you mean hrm_first"),
        ({"share": "head"}, "method.share='head'"),
        ({"skip_scale": float("inf")}, "method.skip_scale=inf"),
    ],
)
def test_values_out_of_range_are_named(change, field):
    with pytest.raises(InputError, match=field.replace("[", ".").replace("'", ".")):
        replace(BASE, **change).validate()


@pytest.mark.parametrize("skip_scale", [0.0, -1.0, -5.0])
def test_zero_and_less_turn_skipping_off(skip_scale):
    method = replace(BASE, skip_scale=skip_scale)
    method.validate()
    assert method.plan(*inputs(), CONTEXT).log_threshold is None
