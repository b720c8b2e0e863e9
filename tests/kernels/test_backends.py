"""Which backend a call gets, and the record of it."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import paged, tensors
from prefill_kernels import (
    BackendUnavailable,
    KapScores,
    block_attention,
    block_mass,
    block_sparse_lists,
    causal_plan,
    executed,
    flash_scores,
    flex_select,
    kap_scores,
    order_blocks,
    plan_from_mask,
    select_blocks,
    sparge_select,
    vertical_slash_scores,
    xattn_scores,
)
from prefill_kernels.backends import choose_backend, half_problem

CUDA = torch.device("cuda")
WHY = {"hopper": "block_size=64: must be 128", "triton": "head_dim=96: must be 16, 32, 64 or 128"}


@pytest.mark.parametrize("able,chosen", [("hopper triton", "hopper"), ("triton", "triton"), ("", "torch")])
def test_auto_takes_the_first_that_can_and_keeps_why_not_the_others(able, chosen):
    refusals = {name: (lambda name=name: None if name in able else WHY[name]) for name in WHY}
    with executed() as outer:
        with executed() as ran:
            assert choose_backend("attention", "auto", CUDA, refusals) == chosen
        assert choose_backend("select", "torch", CUDA, refusals) == "torch"
    assert ran.counts == {("attention", chosen): 1}
    assert ran.refused == {("attention", name): WHY[name] for name in WHY if name not in able and chosen != "hopper"}
    assert outer.counts == {("select", "torch"): 1} and outer.refused == {}
    with executed() as ran:
        assert choose_backend("proxy", "auto", torch.device("cpu"), refusals) == "torch"
    assert ran.refused == {}, "there is nothing better on a CPU"


def test_a_name_is_an_error_where_it_cannot_run():
    with executed() as ran, pytest.raises(BackendUnavailable, match="backend='triton': head_dim=96"):
        choose_backend("proxy", "triton", CUDA, {"triton": lambda: WHY["triton"]})
    assert not ran.counts and not ran.refused


@pytest.fixture
def case():
    q, k, v = tensors(64, 2, 1, 16, block=16)
    return q, paged(k, v, 16), {"scale": 0.25, "block_size": 16}


def test_every_operation_is_recorded_once(case):
    q, kv, common = case
    geometry = {"block_size": 16, "q_offset": 0, "q_len": 64, "prompt_len": 64}
    scores = KapScores(torch.rand(1, 2, 4, 4), torch.zeros(1, 2, 4, 4, dtype=torch.bool))
    calls = {
        "proxy": [
            lambda: kap_scores(q, kv, stride=4, **common),
            lambda: xattn_scores(q, kv, stride=4, **common),
            lambda: block_mass(q, kv, **common),
            lambda: flash_scores(q, kv, **common),
            lambda: vertical_slash_scores(q, kv, [0, 1], scale=0.25),
            lambda: flex_select(q, kv, gamma=0.9, tau=0.1, min_budget=16, **common),
            lambda: sparge_select(q, kv, tau=0.9, theta=0.0, **common),
            lambda: block_sparse_lists(q, kv, [0, 1], [1, 1], **common),
        ],
        "select": [
            lambda: order_blocks(scores),
            lambda: select_blocks(scores, p=0.5, **geometry),
            lambda: plan_from_mask(scores.score > 0.5, **geometry),
        ],
        "attention": [lambda: block_attention(q, kv, causal_plan(2, **geometry), scale=0.25)],
    }
    for stage, operations in calls.items():
        for operation in operations:
            with executed() as ran:
                operation()
            assert ran.counts == {(stage, "torch"): 1}
    kap_scores(q, kv, stride=4, **common)  # outside: nobody watches


def test_triton_calls_are_recorded_as_such(case):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    q, kv, common = case
    with executed() as ran:
        kap_scores(q, kv, stride=16, backend="triton", **common)
    assert ran.counts == {("proxy", "triton"): 1}


def test_triton_refuses_tensors_that_are_not_on_the_current_device(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    problem = half_problem(torch.device("cuda", 0), torch.bfloat16)
    assert problem == "tensors on cuda:0, current device cuda:1: call under torch.cuda.device('cuda:0')"
    assert half_problem(torch.device("cuda", 1), torch.bfloat16) is None
    assert half_problem(torch.device("cuda"), torch.bfloat16) is None
