"""How the Hopper kernel is launched, and what it refuses: the host's side, with the kernel itself left out."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import paged, random_plan, tensors
from prefill_kernels import backends, block_attention

pytest.importorskip("triton")
hopper_osk = pytest.importorskip("prefill_kernels.hopper_osk", exc_type=ImportError)

SCALE = 0.2


class Recorder:
    """Takes the kernel's place; keeps the grid and the arguments by name."""

    def __init__(self):
        self.names = hopper_osk._osk.arg_names
        self.calls = []

    def __getitem__(self, grid):
        def launch(*given, num_warps, **named):
            assert len(given) + len(named) == len(self.names)
            assert num_warps == 4 and not set(named) & set(self.names[: len(given)])
            self.calls.append((grid, dict(zip(self.names, given, strict=False)) | named))
            given[self.names.index("stats")].fill_(len(self.calls))

        return launch


@pytest.fixture
def launched(monkeypatch):
    """The kernel's launches, on a machine that would run it."""
    recorder = Recorder()
    monkeypatch.setattr(hopper_osk, "_osk", recorder)
    monkeypatch.setattr(backends, "half_problem", lambda *_: None)
    monkeypatch.setattr(backends, "hopper_problem", lambda _: None)
    monkeypatch.setattr("prefill_kernels.osk.hopper_problem", lambda _: None)
    return recorder.calls


def case(length=300, heads=4, dim=64, page=64, offset=0, **plan):
    q, k, v = tensors(length, heads, 2, dim, block=128, offset=offset, dtype=torch.bfloat16)
    return q, paged(k, v, page), random_plan(length, heads, 128, offset=offset, **plan)


@pytest.mark.parametrize("share", [-1.0, 0.06, 7.0])
def test_arguments(launched, share):
    q, kv, plan = case(skip_scale=share * 300)
    out, stats = block_attention(q, kv, plan, scale=SCALE, backend="hopper")
    assert out.shape == q.shape and stats.backend == "hopper" and (stats.visited_cells == 1).all()
    [(grid, given)] = launched
    assert grid == (4 * 3,)
    assert given["scale"] == pytest.approx(SCALE / math.log(2))
    # Maxima are compared unscaled.
    assert given["threshold"] == pytest.approx(math.log(min(share, 1.0)) / SCALE if share > 0 else 0.0)
    assert given["SKIP"] == (share > 0) and given["GROUP"] == 2 and given["tail_block"] == 2
    assert given["q_desc"].block_shape == [64, 64] and given["k_main"].block_shape == [64, 64]
    assert given["k_tail"].shape == [128, 128] and (given["k_tail"].base[300 - 256 :] == 0).all()


def test_a_batch_is_a_launch_a_sequence(launched):
    q, kv, plan = case(256)
    two = [torch.cat([x, x]) for x in (q.contiguous(), plan.order, plan.count, kv.page_table)]
    plan = type(plan)(two[1], two[2], 128, 0, 256, 256, 256)
    _, stats = block_attention(
        two[0], type(kv)(kv.k_pages, kv.v_pages, two[3], 256), plan, scale=SCALE, backend="hopper"
    )
    assert stats.visited_blocks[:, 0, 0].tolist() == [1, 2] and launched[0][1]["tail_block"] == -1


def test_refusals(launched):
    q, kv, plan = case()
    assert hopper_osk.refusal(q, kv, plan) is None
    assert "block_size=64" in hopper_osk.refusal(q, kv, random_plan(300, 4, 64))
    assert "head_dim=32" in hopper_osk.refusal(*case(dim=32))
    assert "page_size=8" in hopper_osk.refusal(*case(page=8))


@pytest.mark.parametrize("which", ["q", "k_pages", "v_pages"])
def test_an_address_that_tensor_memory_access_cannot_read_is_refused(launched, which):
    """A slice of a larger tensor, contiguous and yet two bytes off."""
    q, kv, plan = case()

    def shifted(x):
        return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)

    if which == "q":
        q = shifted(q.transpose(1, 2).contiguous()).transpose(1, 2)
    else:
        parts = {"k_pages": kv.k_pages, "v_pages": kv.v_pages}
        kv = type(kv)(**parts | {which: shifted(parts[which])}, page_table=kv.page_table, kv_len=kv.kv_len)
    assert "not a multiple of 16 bytes" in hopper_osk.refusal(q, kv, plan)
