"""Plans from positions alone, and the random scores."""

from __future__ import annotations

import literal_floors
import pytest
import torch
from prefill_kernels import BlockPlan, causal_plan, random_scores, sink_window_plan
from prefill_kernels import patterns as module

GEOMETRY = [(1, 0), (64, 0), (65, 0), (300, 0), (130, 64), (64, 256)]  # query tokens, offset


def geometry(q_len: int, offset: int) -> dict[str, int]:
    return {"block_size": 64, "q_offset": offset, "q_len": q_len, "prompt_len": 1000}


@pytest.mark.parametrize("q_len,offset", GEOMETRY)
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_every_causal_block_in_a_fixed_order(q_len, offset, order):
    plan = causal_plan(3, order=order, skip_scale=7.0, **geometry(q_len, offset))
    plan.check()
    first, tiles = offset // 64, -(-q_len // 64)
    want = [list(range(first + t + 1)) for t in range(tiles)]
    want = want if order == "ascending" else [row[::-1] for row in want]
    assert literal_floors.lists(plan) == [want] * 3
    assert (plan.skip_scale, plan.prompt_len, plan.kv_len) == (7.0, 1000, offset + q_len)


@pytest.mark.parametrize("q_len,offset", GEOMETRY)
@pytest.mark.parametrize("sink,window", [(0, 1), (1, 1), (1, 2), (2, 3), (3, 1), (0, 100), (100, 1)])
def test_sink_and_window(q_len, offset, sink, window):
    plan = sink_window_plan(2, sink_blocks=sink, window_blocks=window, **geometry(q_len, offset))
    plan.check()
    first, tiles = offset // 64, -(-q_len // 64)
    want = [literal_floors.sink_window(first + t, sink, window) for t in range(tiles)]
    assert literal_floors.lists(plan) == [want] * 2


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="order='hrm_first'"):
        causal_plan(1, order="hrm_first", **geometry(64, 0))
    for sink, window in ((-1, 1), (0, 0)):
        with pytest.raises(ValueError, match=f"sink_blocks={sink}, window_blocks={window}"):
            sink_window_plan(1, sink_blocks=sink, window_blocks=window, **geometry(64, 0))
    with pytest.raises(ValueError, match="q_offset=10"):
        causal_plan(1, **geometry(64, 10))


def scores(heads: int = 3, seed: int = 1, layer: int = 2, q_len: int = 300, offset: int = 0):
    return random_scores(heads, seed=seed, layer=layer, block_size=64, q_offset=offset, q_len=q_len)


def test_random_scores_are_the_written_hash():
    got = scores(q_len=200, offset=64)
    for head in range(3):
        for tile in range(4):
            for block in range(5):
                want = literal_floors.random_score(1, 2, head, tile + 1, block) if block <= tile + 1 else 0.0
                assert float(got[0, head, tile, block]) == want


def test_random_scores_depend_on_every_part_and_on_nothing_else(monkeypatch):
    base = scores()
    assert torch.equal(base, scores()) and (base.tril() > 0).sum() == 3 * 15
    lower = torch.ones(5, 5).tril().bool()
    for other in (scores(seed=2), scores(layer=3)):
        assert not (base == other)[..., lower].any()
    values = base[..., lower].flatten()
    assert len(values.unique()) == len(values), "heads, tiles and blocks differ"
    chunk = scores(q_len=172, offset=128)
    assert torch.equal(chunk[0, :, :, :5], base[0, :, 2:])
    monkeypatch.setattr(module, "_MAX_SCORES", 1)
    assert torch.equal(base, scores())


def test_random_scores_are_even():
    values = random_scores(8, seed=0, layer=0, block_size=64, q_offset=0, q_len=64 * 100)
    lower = torch.ones(100, 100).tril().bool()
    sample = values[..., lower].flatten()
    assert abs(float(sample.mean()) - 0.5) < 0.01
    counts = torch.histc(sample, 16, 0, 1)
    assert float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 45, "chi square, 15 degrees of freedom"


def test_lists_are_stored_once_for_all_heads():
    plan = causal_plan(32, **geometry(640, 0))
    assert isinstance(plan, BlockPlan) and plan.order.stride(1) == 0
