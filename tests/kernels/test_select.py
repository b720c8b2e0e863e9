"""Order and selection against hand-made answers and the literal sort."""

from __future__ import annotations

import literal
import pytest
import torch
from prefill_kernels import KapScores, order_blocks, select_blocks, top_p_counts


def scores(rows, flags) -> KapScores:
    return KapScores(torch.tensor(rows, dtype=torch.float32)[None, None], torch.tensor(flags).bool()[None, None])


def random_scores(seed: int, heads: int = 3, blocks: int = 9, ties: bool = False) -> KapScores:
    g = torch.Generator().manual_seed(seed)
    score = torch.rand(1, heads, blocks, blocks, generator=g)
    if ties:
        score = (score * 3).round()
    causal = torch.ones(blocks, blocks).tril()
    return KapScores(score * causal, (torch.rand(score.shape, generator=g) < 0.3) & causal.bool())


def select(s: KapScores, **kw):
    blocks = s.score.shape[-1]
    plan = select_blocks(s, block_size=16, q_offset=0, q_len=blocks * 16, prompt_len=blocks * 16, **kw)
    plan.check()
    return plan


def lists(plan, head: int = 0) -> list[list[int]]:
    return [[j for j in row if j >= 0] for row in plan.order[0, head].tolist()]


def test_hrm_group_first_then_score_then_lowest_id():
    s = scores([[1.0, 0, 0, 0, 0]] * 4 + [[2.0, 5.0, 5.0, 1.0, 3.0]], [[1, 0, 0, 0, 0]] * 4 + [[0, 0, 0, 1, 1]])
    assert order_blocks(s)[0, 0, 4].tolist() == [4, 3, 1, 2, 0]
    assert order_blocks(s)[0, 0, 1].tolist() == [0, 1, -1, -1, -1]


def test_prefix_stops_where_the_mass_is_reached_in_that_order():
    s = scores([[1.0, 0, 0, 0]] * 3 + [[1.0, 6.0, 2.0, 1.0]], [[1, 0, 0, 0]] * 3 + [[0, 0, 1, 0]])
    # Order 2 (HRM), 1, 0, 3 with cumulated mass .2, .8, .9, 1.
    for p, expected in ((0.1, [2]), (0.2, [2]), (0.5, [2, 1]), (0.8, [2, 1]), (0.85, [2, 1, 0]), (1.0, [2, 1, 0, 3])):
        assert lists(select(s, p=p))[3] == expected, p


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.99, 1.0])
def test_matches_the_literal_sort(p, ties):
    s = random_scores(int(p * 100), ties=ties)
    plan = select(s, p=p)
    for h in range(3):
        for i, got in enumerate(lists(plan, h)):
            order = literal.ordered(s.score[0, h, i], s.hrm[0, h, i], i)
            assert got == literal.top_p(s.score[0, h, i].double(), order, p)


def test_p_of_one_keeps_blocks_without_mass():
    s = scores([[1.0, 0, 0], [1.0, 0, 0], [1.0, 0.0, 0.0]], [[1, 0, 0]] * 3)
    assert sorted(lists(select(s, p=1.0))[2]) == [0, 1, 2]
    assert lists(select(s, p=0.999999))[2] == [0]


def test_orders_visit_the_same_set():
    s = random_scores(5)
    base = lists(select(s, p=0.8))
    up, down = lists(select(s, p=0.8, order="ascending")), lists(select(s, p=0.8, order="descending"))
    assert [sorted(x) for x in base] == up
    assert [x[::-1] for x in up] == down
    assert base != up and base != down


def test_fixed_budget_rule_counts_from_absolute_tiles():
    s = random_scores(6, blocks=8)
    counts = [len(x) for x in lists(select(s, budget=0.3))]
    assert counts == [max(1, int(0.3 * (i + 1) + 0.5)) for i in range(8)]
    chunk = KapScores(s.score[:, :, 4:], s.hrm[:, :, 4:])
    part = select_blocks(chunk, block_size=16, q_offset=64, q_len=64, prompt_len=128, budget=0.3)
    assert [len(x) for x in lists(part)] == counts[4:]


def test_forced_blocks_are_kept_and_visited_first():
    s = random_scores(7)
    for i, blocks in enumerate(lists(select(s, p=0.01, force_sink_diagonal=True))):
        assert set(blocks) == {0, i}
    free = lists(select(s, p=0.01))
    assert any(len(x) == 1 for x in free[1:])


def test_sums_do_not_lose_small_mass_in_float32():
    """A float32 running sum would stop growing here and never reach p."""
    blocks = 4000
    score = torch.zeros(1, 1, 1, blocks)
    score[..., 0] = 2.0**24
    score[..., 1:] = 0.5
    order = torch.arange(blocks).view(1, 1, 1, -1)
    total = 2.0**24 + 0.5 * (blocks - 1)
    p = (2.0**24 + 0.5 * 999) / total
    assert top_p_counts(score, order, p).item() == 1000


def test_bad_arguments_are_refused():
    s = random_scores(8)
    with pytest.raises(ValueError, match="exactly one"):
        select(s, p=0.5, budget=0.5)
    with pytest.raises(ValueError, match="exactly one"):
        select(s)
    with pytest.raises(ValueError, match="order='random'"):
        select(s, p=0.5, order="random")
