"""Block lists out of masks: both backends against plain loops."""

from __future__ import annotations

import pytest
import torch
from prefill_kernels import plan_from_mask

BACKENDS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter, without a GPU")),
]


def random_mask(heads: int, tiles: int, blocks: int, keep: float, seed: int = 0) -> torch.Tensor:
    return torch.rand(1, heads, tiles, blocks, generator=torch.Generator().manual_seed(seed)) < keep


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tiles,first,rest", [(1, 0, 1), (5, 0, 16), (3, 30, 7)])
@pytest.mark.parametrize("keep", [0.0, 0.4, 1.0])
def test_lists_the_kept_causal_blocks_in_order(backend, tiles, first, rest, keep):
    blocks = first + tiles
    mask = random_mask(3, tiles, blocks, keep)
    length = (blocks - 1) * 16 + rest
    plan = plan_from_mask(
        mask,
        block_size=16,
        q_offset=first * 16,
        q_len=length - first * 16,
        prompt_len=length + 5,
        skip_scale=7.0,
        backend=backend,
    )
    plan.check()
    assert plan.order.dtype == plan.count.dtype == torch.int32
    assert (plan.prompt_len, plan.skip_scale, plan.kv_len) == (length + 5, 7.0, length)
    for h in range(3):
        for t in range(tiles):
            want = [j for j in range(first + t + 1) if mask[0, h, t, j]]
            assert plan.order[0, h, t].tolist() == want + [-1] * (blocks - len(want))
            assert int(plan.count[0, h, t]) == len(want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_that_are_views_are_read_right(backend):
    mask = random_mask(2, 40, 40, 0.5).mT
    shared = mask[:, :1].expand(1, 2, 40, 40)
    for view in (mask, shared):
        settings = {"block_size": 16, "q_offset": 0, "q_len": 640, "prompt_len": 640}
        got = plan_from_mask(view, backend=backend, **settings)
        want = plan_from_mask(view.clone(memory_format=torch.contiguous_format), backend="torch", **settings)
        assert torch.equal(got.order, want.order) and torch.equal(got.count, want.count)
