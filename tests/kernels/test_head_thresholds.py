"""Top-p with one threshold for each head is Top-p of each head alone, on both backends."""

from __future__ import annotations

import literal
import pytest
import torch
from prefill_kernels import KapScores, select_blocks

P = [0.3, 0.9, 1.0, 0.62]


def scores(tiles: int = 9, first: int = 3):
    g = torch.Generator().manual_seed(5)
    blocks = first + tiles
    causal = torch.ones(blocks, blocks).tril()[first:].bool()
    score = torch.rand(1, len(P), tiles, blocks, generator=g) ** 6 * causal
    score[0, 2, :, 1] = 0.0  # a tail without mass, which p = 1 must keep
    hrm = (torch.rand(score.shape, generator=g) < 0.2) & causal
    return KapScores(score, hrm)


def shape(tiles: int = 9, first: int = 3):
    return {"block_size": 16, "q_offset": first * 16, "q_len": tiles * 16, "prompt_len": 500}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("force", [False, True])
def test_each_head_has_its_own_threshold(backend, force):
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    s = scores()
    settings = {"force_sink_diagonal": force, "backend": backend, **shape()}
    together = select_blocks(s, p=torch.tensor(P, dtype=torch.float64), **settings)
    together.check()
    for head, p in enumerate(P):
        one = KapScores(s.score[:, head : head + 1], s.hrm[:, head : head + 1])
        alone = select_blocks(one, p=p, **settings)
        assert torch.equal(together.order[:, head], alone.order[:, 0])
        assert torch.equal(together.count[:, head], alone.count[:, 0])
        if not force:
            for tile in range(9):
                row, flags = s.score[0, head, tile], s.hrm[0, head, tile]
                want = literal.top_p(row, literal.ordered(row, flags, tile + 3), p)
                assert together.order[0, head, tile, : len(want)].tolist() == want
                assert together.count[0, head, tile] == len(want)
