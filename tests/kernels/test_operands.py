"""Operands that do not fit are refused before any kernel reads them, by every operation and on every backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import paged, random_plan, tensors
from prefill_kernels import (
    KapScores,
    VerticalSlashPlan,
    block_attention,
    block_mass,
    block_sparse_lists,
    budget_counts,
    dense_attention,
    flash_scores,
    flex_select,
    kap_scores,
    order_blocks,
    plan_from_mask,
    select_blocks,
    sparge_select,
    top_p_counts,
    vertical_slash_attention,
    vertical_slash_scores,
    xattn_scores,
)

B, D, SCALE, LENGTH, OFFSET, HEADS = 16, 16, 0.25, 80, 32, 4


def backends():
    without = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
    return ["torch", pytest.param("triton", marks=without)]


@pytest.fixture(autouse=True)
def needs_triton(request):
    if "triton" in request.node.name:
        pytest.importorskip("triton")


def lines(q):
    lists = torch.zeros(*q.shape[:2], 1, dtype=torch.int32)
    return VerticalSlashPlan(lists, lists, 64, q.shape[2])


def blocks(q, offset=OFFSET):
    return random_plan(q.shape[2] + offset, q.shape[1], B, offset=offset)


def logical(q, kv, backend, scale=SCALE, **changes):
    from prefill_kernels.triton_osk import block_mask, logical_skip_attention

    plan = blocks(q)
    return logical_skip_attention(q, kv, block_mask(plan), replace(plan, **changes), scale=scale)


def attend(q, kv, backend, scale=SCALE, **changes):
    return block_attention(q, kv, replace(blocks(q), **changes), scale=scale, backend=backend)


CHUNKED: dict[str, Callable[..., Any]] = {  # operation on q at OFFSET, and what it calls its offset
    "kap": lambda q, kv, backend, scale=SCALE, q_offset=OFFSET: kap_scores(
        q, kv, stride=4, scale=scale, block_size=B, q_offset=q_offset, backend=backend
    ),
    "xattn": lambda q, kv, backend, scale=SCALE, q_offset=OFFSET: xattn_scores(
        q, kv, stride=4, scale=scale, block_size=B, q_offset=q_offset, backend=backend
    ),
    "mass": lambda q, kv, backend, scale=SCALE, q_offset=OFFSET: block_mass(
        q, kv, scale=scale, block_size=B, q_offset=q_offset, backend=backend
    ),
    "flash": lambda q, kv, backend, scale=SCALE, q_offset=OFFSET: flash_scores(
        q, kv, scale=scale, block_size=B, q_offset=q_offset, backend=backend
    ),
    "attention": attend,
    "logical": logical,
}
WHOLE: dict[str, Callable[..., Any]] = {
    "vertical_slash": lambda q, kv, backend, scale=SCALE: vertical_slash_attention(
        q, kv, lines(q), scale=scale, backend=backend
    ),
    "vertical_slash_scores": lambda q, kv, backend, scale=SCALE: vertical_slash_scores(
        q, kv, range(q.shape[1]), scale=scale, last_q=8, backend=backend
    ),
    "block_sparse": lambda q, kv, backend, scale=SCALE: block_sparse_lists(
        q, kv, range(q.shape[1]), [1] * q.shape[1], block_size=B, scale=scale
    ),
    "flex": lambda q, kv, backend, scale=SCALE: flex_select(
        q, kv, gamma=0.9, tau=0.1, min_budget=16, scale=scale, block_size=B
    ),
    "sparge": lambda q, kv, backend, scale=SCALE: sparge_select(q, kv, tau=0.9, theta=0.0, scale=scale, block_size=B),
    "dense": lambda q, kv, backend, scale=SCALE: dense_attention(q, *kv.gather(), scale=scale),
}
OPERATIONS = CHUNKED | WHOLE


def case(name, q_heads=HEADS, kv_heads=2, q_dim=D, length=LENGTH):
    offset = OFFSET if name in CHUNKED else 0
    q = tensors(length, q_heads, kv_heads, q_dim, block=B, offset=offset)[0]
    k, v = tensors(length, q_heads, kv_heads, D, block=B)[1:]
    return q, paged(k, v, 16)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_fits_runs(name, backend):
    OPERATIONS[name](*case(name), backend)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("name", OPERATIONS)
def test_operands_that_do_not_fit(name, backend):
    run = OPERATIONS[name]

    def refused(q, kv, message, **arguments):
        with pytest.raises(ValueError, match=message):
            run(q, kv, backend, **arguments)

    refused(*case(name, q_heads=3), "3 query heads: must be a multiple of 2 KV heads")
    refused(*case(name, q_dim=2 * D), "head_dim=32 of q: must be that of the keys, 16")
    q, kv = case(name)
    refused(q[:, :, :0], kv, "q_len=0|kv_len=80|plan is for")
    refused(q[:, :, 1:], kv, "kv_len=80|plan is for")
    refused(q, replace(kv, v_pages=kv.v_pages[..., :8]), "values .*: must have the shape of the keys")
    for scale in (0.0, -1.0, math.nan, math.inf):
        refused(q, kv, f"scale={scale}: must be finite and above 0", scale=scale)
    if name == "dense":
        return
    refused(q, replace(kv, page_table=kv.page_table.repeat(2, 1)), r"page_table \(2, 8\)")
    refused(q, replace(kv, page_table=kv.page_table[:, :4]), "do not hold kv_len=80")
    refused(q, replace(kv, page_table=kv.page_table.long()), "page_table of torch.int64")
    refused(q, replace(kv, page_table=kv.page_table.repeat(1, 2)[:, ::2]), "int32 with contiguous rows")


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("name", CHUNKED)
def test_geometry_that_does_not_fit(name, backend):
    q, kv = case(name)
    for offset in (OFFSET + 1, -B):
        with pytest.raises(ValueError, match=f"q_offset={offset}: must be a multiple of block_size=16"):
            CHUNKED[name](q, kv, backend, q_offset=offset)
    with pytest.raises(ValueError, match="kv_len="):
        CHUNKED[name](q, kv, backend, q_offset=OFFSET + B)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("name", ["attention", "logical"])
def test_plans_that_do_not_fit(name, backend):
    q, kv = case(name)
    with pytest.raises(ValueError, match="prompt_len=79: must be at least kv_len=80"):
        CHUNKED[name](q, kv, backend, prompt_len=79)
    with pytest.raises(ValueError, match="skip_scale=nan"):
        CHUNKED[name](q, kv, backend, skip_scale=math.nan)
    if name == "logical":
        return
    plan = blocks(q)
    for changes, message in (
        ({"order": plan.order.long()}, "order of torch.int64"),
        ({"count": plan.count.long()}, "count of torch.int64"),
        ({"order": plan.order[:, :, 1:], "count": plan.count[:, :, 1:]}, "want 3 tiles"),
        ({"count": plan.count[:, :2]}, "want 3 tiles"),
        ({"block_size": 32, "q_offset": OFFSET}, "want 2 tiles"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(q, kv, backend, **changes)


def test_a_mask_of_fewer_blocks_than_the_causal_range_is_refused():
    pytest.importorskip("triton")
    from prefill_kernels.triton_osk import block_mask, logical_skip_attention

    q, kv = case("logical")
    plan = blocks(q)
    mask = block_mask(plan)
    for wrong in (mask[..., :4], mask[:, :, 1:], mask[:, :2], mask.int()):
        with pytest.raises(ValueError, match="mask "):
            logical_skip_attention(q, kv, wrong, plan, scale=SCALE)


@pytest.mark.parametrize("backend", backends())
def test_masks_of_another_geometry_are_refused(backend):
    mask = torch.ones(1, 2, 3, 5, dtype=torch.bool)
    shape = {"block_size": B, "q_offset": OFFSET, "q_len": 48, "prompt_len": 80, "backend": backend}
    assert plan_from_mask(mask, **shape).count[0, 0].tolist() == [3, 4, 5]
    for wrong in (mask[..., :4], mask[:, :, 1:], mask.to(torch.int8)):
        with pytest.raises(ValueError, match="mask "):
            plan_from_mask(wrong, **shape)
    with pytest.raises(ValueError, match="q_offset=33"):
        plan_from_mask(mask, **shape | {"q_offset": 33})


@pytest.mark.parametrize("backend", backends())
def test_selections_out_of_range_are_refused(backend):
    scores = KapScores(torch.ones(1, 2, 3, 5), torch.zeros(1, 2, 3, 5, dtype=torch.bool))
    shape = {"block_size": B, "q_offset": OFFSET, "q_len": 48, "prompt_len": 80, "backend": backend}
    assert select_blocks(scores, p=0.5, **shape).count[0, 0].tolist() == [2, 2, 3]
    for p in (math.nan, 0.0, -0.5):
        with pytest.raises(ValueError, match=f"p={p}: must be above 0"):
            select_blocks(scores, p=p, **shape)
    with pytest.raises(ValueError, match=r"p \(3,\) on cpu: must be \[Hq\] = \(2,\)"):
        select_blocks(scores, p=torch.full((3,), 0.5), **shape)
    for budget in (math.nan, 0.0, 1.5):
        with pytest.raises(ValueError, match=f"budget={budget}: must be above 0, at most 1"):
            select_blocks(scores, budget=budget, **shape)
    for changes, message in (
        ({"q_offset": 33}, "q_offset=33"),
        ({"q_len": 64}, r"\(NQ, NK\) = \(4, 6\)"),
        ({"q_offset": 48}, "with the blocks of every tile from 3 on"),
        ({"prompt_len": 79}, "prompt_len=79"),
        ({"skip_scale": math.nan}, "skip_scale=nan"),
    ):
        with pytest.raises(ValueError, match=message):
            select_blocks(scores, p=0.5, **shape | changes)
    with pytest.raises(ValueError, match=r"flags \(1, 2, 3, 4\)"):
        order_blocks(KapScores(scores.score, scores.hrm[..., :4]), first_tile=2, backend=backend)
    with pytest.raises(ValueError, match="flags of torch.float32"):
        order_blocks(KapScores(scores.score, scores.score), first_tile=2, backend=backend)
    with pytest.raises(ValueError, match="with the blocks of every tile from 3 on"):
        order_blocks(scores, first_tile=3, backend=backend)


def test_rules_alone_are_checked_too():
    order = torch.arange(5).expand(1, 2, 3, 5)
    with pytest.raises(ValueError, match="p=nan"):
        top_p_counts(torch.ones(1, 2, 3, 5), order, math.nan)
    with pytest.raises(ValueError, match=r"p \(4,\)"):
        top_p_counts(torch.ones(1, 2, 3, 5), order, torch.ones(4))
    with pytest.raises(ValueError, match="budget=nan"):
        budget_counts(order, math.nan)


@pytest.mark.parametrize("backend", backends())
def test_heads_that_do_not_exist_are_refused(backend):
    q, kv = case("vertical_slash_scores")
    for heads in ([], [0, 4], [-1], [1, 0], [1, 1]):
        with pytest.raises(ValueError, match="must be some of 0 .. 3, ascending"):
            vertical_slash_scores(q, kv, heads, scale=SCALE, backend=backend)
        with pytest.raises(ValueError, match="must be some of 0 .. 3, ascending"):
            block_sparse_lists(q, kv, heads, [1] * len(heads), block_size=B, scale=SCALE)
    for top_k in ([1], [1, 0]):
        with pytest.raises(ValueError, match="must be at least 1 for each of 2 heads"):
            block_sparse_lists(q, kv, [0, 1], top_k, block_size=B, scale=SCALE)


@pytest.mark.parametrize("backend", backends())
def test_vertical_slash_lists_that_do_not_fit(backend):
    q, kv = case("vertical_slash")
    plan = lines(q)
    for changes, message in (
        ({"columns": plan.columns[:, :2]}, "plan.columns"),
        ({"slashes": plan.slashes[:, :2]}, "plan.slashes"),
        ({"slashes": plan.slashes.long()}, "plan.slashes of torch.int64"),
        ({"length": 64}, "the plan is for 64"),
    ):
        with pytest.raises(ValueError, match=message):
            vertical_slash_attention(q, kv, replace(plan, **changes), scale=SCALE, backend=backend)


# ------------------------------------------------------------------------------------------------------ NaN and -0.0
@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("name", ["kap", "xattn", "mass", "flash"])
def test_a_nan_key_shows_in_the_scores_of_the_tiles_that_see_it(name, backend):
    q, k, v = tensors(61, 2, 1, D, block=B, seed=1)
    k[0, 0, 20] = math.nan
    got = CHUNKED[name](q, paged(k, v, 16), backend, q_offset=0)
    score = got.score if name == "kap" else got
    broken = torch.zeros(4, 4, dtype=torch.bool)
    if name == "flash":  # of means of whole blocks, each on its own
        broken[1:, 1] = True
    else:
        broken[1:] = torch.ones(3, 4).tril(1).bool()
    assert torch.equal(score[0].isnan(), broken.expand(2, 4, 4))
    if name == "kap":
        want = kap_scores(q, paged(k, v, 16), stride=4, scale=SCALE, block_size=B, backend="torch")
        assert torch.equal(got.hrm, want.hrm) and got.hrm[0, :, 0, 0].all()
        # Rows 16 and on see it only from token 20; what it breaks is a row, not a flag of another one.
        assert got.hrm[0, :, 1].any() and not got.hrm[0, :, 2:].any()


@pytest.mark.parametrize("backend", backends())
def test_nan_among_the_scores_keeps_every_block(backend):
    score = torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(0)).tril()
    for sign in (1.0, -1.0):
        broken = score.clone()
        broken[0, 0, 2, 1] = math.copysign(math.nan, sign)
        s = KapScores(broken, torch.zeros_like(broken, dtype=torch.bool))
        plan = select_blocks(s, block_size=B, q_offset=0, q_len=64, prompt_len=64, p=0.01, backend=backend)
        plan.check()
        assert plan.count[0, 0].tolist() == [1, 1, 3, 1]
        assert plan.order[0, 0, 2, 0] == 1


@pytest.mark.parametrize("backend", backends())
def test_minus_zero_ties_with_zero_and_no_block_is_lost(backend):
    score = torch.tensor([0.5, -0.0, 0.0, -0.0, -1.0, -2.0, 1e-40, -1e-40]).view(1, 1, 1, 8)
    for flags in (0, 1):
        hrm = torch.zeros_like(score, dtype=torch.bool)
        hrm[..., 3] = bool(flags)
        found = order_blocks(KapScores(score, hrm), first_tile=7, backend=backend)[0, 0, 0].tolist()
        rest = [0, 6, 1, 2, 3, 7, 4, 5]
        assert found == ([3] + [j for j in rest if j != 3] if flags else rest)
    zeros = torch.tensor([0.0, -0.0, 1.0, -0.0]).view(1, 1, 1, 4)
    s = KapScores(zeros, torch.zeros_like(zeros, dtype=torch.bool))
    plan = select_blocks(s, block_size=B, q_offset=48, q_len=16, prompt_len=64, p=1.0, backend=backend)
    plan.check()
    assert plan.order[0, 0, 0].tolist() == [2, 0, 1, 3]
