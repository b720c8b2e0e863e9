"""Dense attention: the math at an offset, and one query away from cuDNN."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from prefill_kernels import dense, dense_attention


def operands(q_len: int, kv_len: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(kv_len)
    shapes = (1, 9, q_len, 64), (1, 3, kv_len, 64), (1, 3, kv_len, 64)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(("q_len", "q_offset"), [(1, 0), (1, 200), (7, 0), (7, 130)])
def test_each_query_sees_the_keys_up_to_its_own_position(q_len: int, q_offset: int) -> None:
    q, k, v = operands(q_len, q_offset + q_len)
    scores = q @ k.repeat_interleave(3, 1).mT * 0.2
    future = torch.arange(q_offset + q_len) > torch.arange(q_offset, q_offset + q_len)[:, None]
    want = scores.masked_fill(future, -torch.inf).softmax(-1) @ v.repeat_interleave(3, 1)
    torch.testing.assert_close(dense_attention(q, k, v, scale=0.2, q_offset=q_offset), want)


def test_one_query_does_not_run_on_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    flag = torch.backends.cuda.cudnn_sdp_enabled
    with dense.without_cudnn(torch.device("cuda")):
        assert not flag()
    assert flag()
    with pytest.raises(KeyError), dense.without_cudnn(torch.device("cuda")):
        raise KeyError
    assert flag()
    with dense.without_cudnn(torch.device("cpu")):
        assert flag(), "nothing of the process is touched where it does not matter"
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with dense.without_cudnn(torch.device("cuda")):
            assert not flag()
        assert not flag(), "the caller's own choice stays"
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)

    asked = []

    @contextlib.contextmanager
    def watched(device: torch.device) -> Iterator[None]:
        asked.append(device)
        yield

    monkeypatch.setattr(dense, "without_cudnn", watched)
    dense_attention(*operands(1, 64), scale=0.2, q_offset=63)
    dense_attention(*operands(64, 64), scale=0.2)
    assert len(asked) == 1
