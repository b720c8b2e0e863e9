"""The training-free page selector against a literal float64 recomputation, on planted pages, ties and chunks."""

from __future__ import annotations

import math

import pytest
import torch
from prefill_kernels import PagedKV, page_select
from prefill_kernels.page_select import page_summaries, scored_products, select_pages

SCALE = 0.3


def inputs(length, q_heads=6, kv_heads=2, dim=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(1, q_heads, length, dim, generator=g)
    k = torch.randn(1, kv_heads, length, dim, generator=g)
    return q, k


def paged(k, physical=16, seed=3):
    return PagedKV.from_dense(k, k, physical, generator=torch.Generator().manual_seed(seed))


def literal(q, k, page, top_k, summary="mean", offset=0):
    """Selected sets by query and KV head, one number at a time, in float64."""
    q, k = q[0].double(), k[0].double()
    group = q.shape[0] // k.shape[0]
    found = []
    for row in range(q.shape[1]):
        own = (offset + row) // page
        heads = []
        for h in range(k.shape[0]):
            if own + 1 <= top_k:
                heads.append(set(range(own + 1)))
                continue
            score = torch.zeros(own, dtype=torch.float64)
            for g in range(h * group, (h + 1) * group):
                logits = []
                for p in range(own):
                    keys = k[h, p * page : (p + 1) * page]
                    if summary == "mean":
                        logits.append(SCALE * (q[g, row] @ keys.mean(0)))
                    else:
                        bound = torch.maximum(q[g, row] * keys.amax(0), q[g, row] * keys.amin(0))
                        logits.append(SCALE * bound.sum())
                score += torch.stack(logits).softmax(0) / group
            between = sorted(range(1, own), key=lambda p: (-float(score[p]), p))
            heads.append({0, own, *between[: top_k - 2]})
        found.append(heads)
    return found


def sets(pages):
    return [[{x for x in head if x >= 0} for head in row] for row in pages[0].tolist()]


@pytest.mark.parametrize("summary", ["mean", "minmax"])
@pytest.mark.parametrize("length,page,top_k", [(1, 16, 2), (49, 16, 2), (130, 16, 3), (257, 16, 6), (200, 48, 4)])
def test_selection_is_the_literal_one(length, page, top_k, summary):
    q, k = inputs(length, seed=length)
    pages = select_pages(q, paged(k), page_size=page, top_k=top_k, scale=SCALE, summary=summary)
    assert pages.dtype == torch.int32 and pages.shape == (1, length, 2, min(top_k, math.ceil(length / page)))
    assert sets(pages) == literal(q, k, page, top_k, summary)


def test_rows_are_ascending_front_packed_and_hold_sink_and_own_page():
    q, k = inputs(150)
    pages = select_pages(q, paged(k), page_size=16, top_k=4, scale=SCALE)[0]
    listed = pages >= 0
    assert (listed.int().diff(dim=-1) <= 0).all() and (pages.diff(dim=-1)[listed[..., 1:]] > 0).all()
    own = torch.arange(150) // 16
    assert (pages[..., 0] == 0).all() and (pages.amax(-1) == own[:, None]).all()
    assert (listed.sum(-1) == (own + 1).clamp(max=4)[:, None]).all()


@pytest.mark.parametrize("summary", ["mean", "minmax"])
def test_a_planted_page_is_found_by_its_own_queries_alone(summary):
    q, k = inputs(320, q_heads=4)
    q, k = 0.1 * q, 0.1 * k
    direction = torch.zeros(8)
    direction[3] = 6.0
    k[0, 1, 5 * 16 : 6 * 16] += direction  # page 5 of KV head 1
    q[0, 2:, 300:] += direction
    pages = select_pages(q, paged(k), page_size=16, top_k=3, scale=SCALE, summary=summary)
    found = sets(pages)
    assert all(5 in found[row][1] for row in range(300, 320))
    assert not all(5 in found[row][0] for row in range(300, 320)), "the other KV head has no such page"
    assert not all(5 in found[row][1] for row in range(96, 300))


def test_one_query_head_that_is_sure_outweighs_a_mean_of_logits():
    """Heads are averaged after their softmax: a large logit of one head is one vote, not many."""
    q, k = torch.zeros(1, 2, 96, 2), torch.zeros(1, 1, 96, 2)
    k[0, 0, 16:32, 0], k[0, 0, 32:48, 1], k[0, 0, 48:64, 1] = 1.0, 0.9, 0.95
    q[0, 0, -1, 0], q[0, 1, -1, 1] = 50.0, 5.0
    pages = select_pages(q, paged(k), page_size=16, top_k=3, scale=1.0)
    assert sets(pages)[-1] == literal_scores_of_two_heads() == [{0, 1, 5}]


def literal_scores_of_two_heads():
    first = torch.tensor([0.0, 50, 0, 0, 0]).softmax(0)
    second = 5 * torch.tensor([0.0, 0, 0.9, 0.95, 0])
    score = (first + second.softmax(0)) / 2
    return [{0, 5, 1 + int(score[1:].argmax())}]


def test_ties_go_to_the_lowest_page():
    q, k = torch.ones(1, 2, 160, 4), torch.ones(1, 1, 160, 4)
    pages = select_pages(q, paged(k), page_size=16, top_k=5, scale=1.0)
    assert pages[0, -1, 0].tolist() == [0, 1, 2, 3, 9]
    # Scores that underflow to zero tie too.
    k[0, 0, :16] = 1e4
    assert select_pages(q, paged(k), page_size=16, top_k=5, scale=1.0)[0, -1, 0].tolist() == [0, 1, 2, 3, 9]


@pytest.mark.parametrize("rows", [1, 3, 50])
def test_parts_of_the_queries_give_what_all_give(monkeypatch, rows):
    q, k = inputs(300)
    whole = select_pages(q, paged(k), page_size=16, top_k=4, scale=SCALE)
    monkeypatch.setattr(page_select, "SCORE_CELLS", rows * 6 * 18)
    assert torch.equal(select_pages(q, paged(k), page_size=16, top_k=4, scale=SCALE), whole)


@pytest.mark.parametrize("page", [16, 48, 128])
def test_chunks_select_as_the_whole(page):
    q, k = inputs(700)
    whole = select_pages(q, paged(k), page_size=page, top_k=3, scale=SCALE)
    for begin, end in ((0, 256), (256, 640), (640, 700)):
        part = select_pages(
            q[:, :, begin:end], paged(k[:, :, :end]), page_size=page, top_k=3, scale=SCALE, q_offset=begin
        )
        assert sets(part) == sets(whole)[begin:end]


@pytest.mark.parametrize("summary", ["mean", "minmax"])
@pytest.mark.parametrize("offset,length,page,top_k", [(0, 1, 16, 2), (0, 300, 16, 3), (130, 77, 16, 4), (0, 64, 16, 9)])
def test_products_are_counted_exactly(offset, length, page, top_k, summary):
    pairs = 0
    for i in range(offset, offset + length):
        scored = i // page + 1 > top_k and top_k > 2
        pairs += (i // page) * scored * (2 if summary == "minmax" else 1)
    assert scored_products(offset, length, page, top_k, summary) == pairs


def test_the_selector_costs_about_one_in_two_pages():
    length = 1 << 17
    assert scored_products(0, length, 128, 16) / (length * (length + 1)) == pytest.approx(1 / 256, rel=0.02)


def test_summaries_are_float32_of_complete_pages():
    _, k = inputs(70)
    kv = paged(k.bfloat16())
    keys = k.bfloat16()[0, :, :64].view(2, 4, 16, 8)
    mean = page_summaries(kv, 16)
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, keys.float().mean(2), rtol=1e-6, atol=1e-6)
    assert torch.equal(page_summaries(kv, 16, "minmax"), torch.cat([keys.amax(2), keys.amin(2)], -1).float())


@pytest.mark.parametrize(
    "change,message",
    [
        ({"top_k": 1}, "top_k=1: at least 2"),
        ({"summary": "max"}, "summary='max': one of mean, minmax"),
        ({"q_offset": 3}, "kv_len=40: must be q_offset"),
    ],
)
def test_what_cannot_be_selected_is_named(change, message):
    q, k = inputs(40)
    with pytest.raises(ValueError, match=message):
        select_pages(q, paged(k), **{"page_size": 16, "top_k": 3, "scale": 1.0, **change})


def with_broken_logits(q, k, page, top_k, summary):
    """:func:`literal` where a page with a logit that is not finite goes before all others and out of the softmax."""
    q, k = q[0].double(), k[0].double()
    group, found = q.shape[0] // k.shape[0], []
    for row in range(q.shape[1]):
        own, heads = row // page, []
        for h in range(k.shape[0]):
            if own + 1 <= top_k:
                heads.append(list(range(own + 1)))
                continue
            logits = torch.empty(group, own, dtype=torch.float64)
            for g in range(group):
                for p in range(own):
                    keys, query = k[h, p * page : (p + 1) * page], q[h * group + g, row]
                    # Channels of either sign apart: 0 times an infinite extreme is NaN, and the page has no score.
                    bound = (query.clamp(min=0) * keys.amax(0) + query.clamp(max=0) * keys.amin(0)).sum()
                    logits[g, p] = SCALE * (query @ keys.mean(0) if summary == "mean" else bound)
            sound = [p for p in range(own) if bool(logits[:, p].isfinite().all())]
            score = dict(zip(sound, logits[:, sound].softmax(-1).mean(0).tolist(), strict=True))
            between = sorted(range(1, own), key=lambda p: (-score.get(p, math.inf), p))
            heads.append(sorted([0, own, *between[: top_k - 2]]))
        found.append(heads)
    return found


def rows_of(pages):
    return [[[x for x in head if x >= 0] for head in row] for row in pages[0].tolist()]


@pytest.mark.parametrize("summary", ["mean", "minmax"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tokens", [[100], [3], [100, 137], [20, 70, 100, 137], [205]])
def test_a_page_with_a_broken_key_is_selected(tokens, value, summary):
    """Of page 6; of the sink; of two pages; of more than there is room for; of the last, which only its own see."""
    q, k = inputs(208)
    k[0, 1, tokens, 5] = value
    pages = select_pages(q, paged(k), page_size=16, top_k=5, scale=SCALE, summary=summary)
    assert rows_of(pages) == with_broken_logits(q, k, 16, 5, summary)
    for row, heads in enumerate(rows_of(pages)):
        seen = sorted({t // 16 for t in tokens} & set(range(1, row // 16)))
        assert set(seen[:3]) <= set(heads[1]) and heads[1] == sorted(set(heads[1]))
    # The KV head whose keys are sound does not notice.
    sound = select_pages(q, paged(inputs(208)[1]), page_size=16, top_k=5, scale=SCALE, summary=summary)
    assert torch.equal(pages[:, :, 0], sound[:, :, 0])


@pytest.mark.parametrize("summary", ["mean", "minmax"])
def test_a_broken_query_selects_the_lowest_pages_and_only_for_itself(summary):
    q, k = inputs(208)
    sound = select_pages(q, paged(k), page_size=16, top_k=5, scale=SCALE, summary=summary)
    q[0, 1, 200] = float("nan")  # one of the query heads of KV head 0
    pages = select_pages(q, paged(k), page_size=16, top_k=5, scale=SCALE, summary=summary)
    assert pages[0, 200, 0].tolist() == [0, 1, 2, 3, 12]
    pages[0, 200, 0] = sound[0, 200, 0]
    assert torch.equal(pages, sound)


@pytest.mark.parametrize("rows", [1, 50])
def test_parts_of_the_queries_select_broken_pages_as_all_do(monkeypatch, rows):
    q, k = inputs(300)
    k[0, 0, 100] = k[0, 1, 290] = float("nan")
    whole = select_pages(q, paged(k), page_size=16, top_k=4, scale=SCALE)
    monkeypatch.setattr(page_select, "SCORE_CELLS", rows * 6 * 18)
    assert torch.equal(select_pages(q, paged(k), page_size=16, top_k=4, scale=SCALE), whole)
