"""The Triton order and selection in the CPU interpreter: equal to the reference, ties and all."""

from __future__ import annotations

import pytest
import torch
from prefill_kernels import BackendUnavailable, KapScores, order_blocks, select_blocks

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")


def random_scores(seed: int, first: int = 0, tiles: int = 9, heads: int = 2, ties: bool = False) -> KapScores:
    g = torch.Generator().manual_seed(seed)
    blocks = first + tiles
    score = torch.rand(1, heads, tiles, blocks, generator=g)
    if ties:
        score = (score * 3).round()
    causal = torch.ones(blocks, blocks).tril()[first:]
    return KapScores(score * causal, (torch.rand(score.shape, generator=g) < 0.3) & causal.bool())


def select(s: KapScores, backend: str, first: int = 0, **kw):
    tiles = s.score.shape[2]
    length = (first + tiles) * 16
    return select_blocks(
        s, block_size=16, q_offset=first * 16, q_len=tiles * 16, prompt_len=length, backend=backend, **kw
    )


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("first", [0, 11])
def test_order_equals_the_reference(ties, forced, first):
    s = random_scores(3, first=first, ties=ties)
    expected = order_blocks(s, first_tile=first, force_sink_diagonal=forced, backend="torch")
    assert torch.equal(order_blocks(s, first_tile=first, force_sink_diagonal=forced, backend="triton"), expected)


@pytest.mark.parametrize("order", ["hrm_first", "ascending", "descending"])
@pytest.mark.parametrize("rule", [{"p": 0.4}, {"p": 0.9}, {"p": 1.0}, {"budget": 0.3}, {"budget": 1.0}])
@pytest.mark.parametrize("ties", [False, True])
def test_selection_equals_the_reference(order, rule, ties):
    s = random_scores(5, first=9, tiles=4, heads=1, ties=ties)
    for forced in (False, True):
        want = select(s, "torch", 9, order=order, force_sink_diagonal=forced, **rule)
        got = select(s, "triton", 9, order=order, force_sink_diagonal=forced, **rule)
        got.check()
        assert torch.equal(got.order, want.order) and torch.equal(got.count, want.count)


def test_too_many_blocks_are_refused():
    s = KapScores(torch.zeros(1, 1, 1, 8193), torch.zeros(1, 1, 1, 8193, dtype=torch.bool))
    with pytest.raises(BackendUnavailable, match="8192"):
        select(s, "triton", 8192, p=0.5)
