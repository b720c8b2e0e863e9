"""A ranking's prefix is the mask that the method itself makes with as many blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from prefill_kernels import block_mass, flash_scores, flash_select, flex_select, sparge_select, vertical_slash_scores
from prefill_kernels.page_select import select_pages
from prefill_kernels.vertical_slash_select import FORCED_COLUMNS, FORCED_SLASHES, top_positions

from evalkit.analysis import proxies
from evalkit.analysis.iou import kept_blocks
from evalkit.analysis.proxies import Call, places, rank
from evalkit.analysis.settings import PROXIES
from evalkit.methods.cosa import CoSA, Select
from evalkit.methods.minference import MInference
from evalkit.methods.oracle_topk import OracleTopK
from evalkit.methods.random import Random

SIZE = 64


@pytest.fixture
def call(call_inputs):
    return Call(*call_inputs(), SIZE, 8)


def ranked(name, call):
    found = rank(name, call)
    return places(found.score, found.first, found.forced)


def plan_mask(plan):
    mask = torch.zeros(*plan.order.shape[:3], plan.order.shape[2] + 1, dtype=torch.bool)
    last = plan.order.shape[2]
    return mask.scatter_(-1, torch.where(plan.order >= 0, plan.order, last).long(), True)[..., :last]


def prefix(place, budget):
    return place < kept_blocks(place.shape[2], budget)[:, None]


def is_prefix(mask, place):
    """Every row of the mask is a prefix of the ranking."""
    return bool((mask == (place < mask.sum(-1, keepdim=True))).all())


def test_places_by_hand():
    score = torch.tensor([[[[5.0, 9, 9, 9], [1, 2, 9, 9], [3, 3, 1, 9], [4, 7, 7, 1]]]])
    expected = [[0, 4, 4, 4], [1, 0, 4, 4], [0, 1, 2, 4], [2, 0, 1, 3]]  # ties to the lower block
    assert places(score)[0, 0].tolist() == expected
    first = torch.tensor([False, False, True, False])
    assert places(score, first)[0, 0].tolist() == [[0, 4, 4, 4], [1, 0, 4, 4], [1, 2, 0, 4], [2, 1, 0, 3]]
    forced = torch.eye(4, dtype=torch.bool)
    both = places(score, first, forced)[0, 0].tolist()
    assert both == [[0, 4, 4, 4], [1, 0, 4, 4], [1, 2, 0, 4], [3, 2, 1, 0]]


@pytest.mark.parametrize("budget", [0.05, 0.2, 0.37, 0.8])
def test_ranked_methods_keep_a_prefix(call, budget):
    q, kv, context = call.q, call.kv, call.context
    mass = places(block_mass(q, kv, scale=context.scale, block_size=SIZE))
    assert torch.equal(prefix(mass, budget), plan_mask(OracleTopK(SIZE, budget=budget).plan(q, kv, context)))
    cosa = CoSA(SIZE, select=Select(rule="budget", budget=budget))
    assert torch.equal(prefix(ranked("kap", call), budget), plan_mask(cosa.plan(q, kv, context)))
    forced = replace(cosa, proxy="xattention", order="ascending", force_sink_diagonal=True)
    for name, method in (("xattention", forced), ("random", Random(SIZE, budget=budget))):
        mask = plan_mask(method.plan(q, kv, context))  # at least sink and diagonal: rows of one block are left out
        same = (prefix(ranked(name, call), budget) == mask).all(-1) | (kept_blocks(8, budget) < 2)
        assert bool(same.all()) and is_prefix(mask, ranked(name, call))


@pytest.mark.parametrize("knob", [0.05, 0.3, 0.7])
def test_thresholded_methods_keep_a_prefix(call_inputs, knob):
    call = Call(*call_inputs(length=64 * 14 - 20, spread=20.0), SIZE, 8)
    q, kv, scale = call.q, call.kv, call.context.scale
    found = sparge_select(q, kv, tau=knob, theta=0.0, scale=scale, block_size=SIZE)
    assert is_prefix(found, ranked("spargeattn", call))
    score = flash_scores(q, kv, scale=scale, block_size=SIZE)
    found = flash_select(score, alpha=knob, sink=2, window=4, last_full=0, first_tile=0, prompt_tiles=14)
    assert is_prefix(found, ranked("flashprefill", call))
    assert int(found[0, :, -1].sum(-1).max()) > 6 and int(found[0, :, -1].sum(-1).min()) < 14, (
        "the rows are no trivial ones"
    )


@pytest.mark.parametrize("gamma", [0.2, 0.5, 0.8, 0.95])
def test_flexprefill_lines_enter_with_gamma(call_inputs, gamma, monkeypatch):
    call = Call(*call_inputs(length=64 * 12 - 20, spread=3.0), SIZE, 8)
    monkeypatch.setattr(proxies.FlexPrefill, "tau", 0.0)  # every head is vertical-slash, in the method and here
    chosen = flex_select(call.q, call.kv, gamma=gamma, tau=0.0, min_budget=1, scale=call.context.scale, block_size=SIZE)
    score = rank("flexprefill", call).score
    block = torch.arange(12)
    causal, always = block <= block[:, None], (block == 0) | (block == block[:, None])
    free = causal & ~always
    least_kept = score.masked_fill(~(chosen.mask & free), torch.inf).amin((-1, -2))
    most_left = score.masked_fill(chosen.mask | ~free, -torch.inf).amax((-1, -2))
    assert bool((least_kept > most_left).all())
    assert bool((-least_kept < gamma).logical_or(least_kept == torch.inf).all())
    assert bool((-most_left >= gamma - 1e-5).all())


def test_flexprefill_query_aware_heads_rank_by_pooled_attention(call, monkeypatch):
    monkeypatch.setattr(proxies.FlexPrefill, "tau", 1.0)
    k = call.kv.gather()[0].repeat_interleave(2, 1)
    means = [torch.stack([part.mean(2) for part in x.split(SIZE, 2)], 2) for x in (call.q, k)]
    logits = means[0] @ means[1].mT * call.context.scale
    causal = torch.ones(8, 8).tril().bool()
    expected = logits.masked_fill(~causal, -torch.inf).softmax(-1)
    torch.testing.assert_close(rank("flexprefill", call).score, expected)


@pytest.mark.parametrize("ratio", [0.009, 0.0168, 0.0175, 0.019])
def test_minference_enters_with_its_first_line(call, ratio):
    """A block is in as soon as one of the chosen columns or diagonals crosses it."""
    length = call.q.shape[2]
    column, slash = vertical_slash_scores(call.q, call.kv, range(4), scale=call.context.scale, last_q=64)
    columns = top_positions(column, [int(1000 * ratio)] * 4, forced=FORCED_COLUMNS)[0]
    slashes = top_positions(slash, [min(length, int(6096 * ratio))] * 4, forced=FORCED_SLASHES)[0]
    score = rank("minference", call).score[0]
    for head in range(4):
        touched = torch.zeros(8, 8, dtype=torch.bool)
        wanted = torch.zeros(length, length, dtype=torch.bool)
        wanted[:, columns[head][columns[head] >= 0].long()] = True
        row, key = torch.arange(length)[:, None], torch.arange(length)
        wanted |= torch.isin(row - key, slashes[head])
        wanted &= key <= row
        for i in range(8):
            for j in range(i + 1):
                touched[i, j] = wanted[i * SIZE : (i + 1) * SIZE, j * SIZE : (j + 1) * SIZE].any()
        # The last tile is short, so that a diagonal may miss what it would cross in a whole one.
        assert torch.equal((score[head] >= -ratio)[:7].tril(), touched[:7].tril())
    assert MInference.vertical_size == 1000 and MInference.slash_size == 6096


@pytest.mark.parametrize("top_k", [3, 5])
def test_pageweaver_ranks_pages_as_its_selector_does(call_inputs, top_k):
    """Where all queries of a tile are alike the tile's first K blocks are the K pages of each of them."""
    q, kv, context = call_inputs(length=64 * 9 - 20)
    q = q[:, :, ::SIZE].repeat_interleave(SIZE, 2)[:, :, : q.shape[2]]
    pages = select_pages(q, kv, page_size=SIZE, top_k=top_k, scale=context.scale)[0, ::SIZE].transpose(0, 1)
    place = ranked("pageweaver", Call(q, kv, context, SIZE, 8))[0]
    for head in range(4):
        for tile in range(9):
            mine = pages[head // 2, tile]
            first = (place[head, tile] < len(mine[mine >= 0])).nonzero()[:, 0]
            assert first.tolist() == mine[mine >= 0].tolist()


def test_pageweaver_pools_the_queries_of_a_tile(call):
    """The mean over query heads and queries, of a softmax over the complete pages before the tile."""
    score = rank("pageweaver", call).score
    means = call.kv.gather()[0][0, 0, : 3 * SIZE].unflatten(0, (3, SIZE)).mean(1)
    rows = call.q[0, :2, 3 * SIZE : 4 * SIZE]
    expected = (rows @ means.T * call.context.scale).softmax(-1).mean((0, 1))
    torch.testing.assert_close(score[0, 0, 3, :3], expected)
    assert torch.equal(score[:, 0], score[:, 1]) and not torch.equal(score[:, 1], score[:, 2])


def test_every_proxy_ranks_every_causal_block(call):
    for name in PROXIES:
        place = ranked(name, call)
        for i in range(8):
            assert place[0, :, i, : i + 1].sort(-1).values.tolist() == [list(range(i + 1))] * 4, name


def test_heads_go_through_in_slices():
    assert [(s.start, s.stop) for s in proxies.head_slices(7, 8, most=128)] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert [(s.start, s.stop) for s in proxies.head_slices(3, 1024, most=5)] == [(0, 1), (1, 2), (2, 3)]
    assert 1024 * 1024 * (next(proxies.head_slices(32, 1024)).stop) <= proxies.MAX_RANKED
