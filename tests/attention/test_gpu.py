"""The patch on a CUDA device: identity, and the same budget and logits as on the CPU."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from evalkit.attention import Session
from evalkit.methods.cosa import CoSA, Select
from evalkit.methods.dense import Dense

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    config = Qwen3Config(
        vocab_size=89,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.1,
    )
    return Qwen3ForCausalLM(config).eval()


def run(model, device, method, **kw):
    ids = torch.randint(0, 89, (1301,), generator=torch.Generator().manual_seed(1))
    model.to(device)
    with Session(model, method, **kw) as session:
        logits = session.logits(session.prefill(ids, keep_from=0, reserve=2)).cpu()
        decoded = session.logits(session.decode(5)).cpu()
        return logits, decoded, session.account()


@pytest.mark.parametrize("kw", [{}, {"chunk_size": 512, "page_size": 16, "page_shuffle": 3}])
def test_cuda_equals_cpu(model, kw):
    for method in (Dense(), CoSA(select=Select(p=1.0)), CoSA(select=Select(p=0.6), skip_scale=100.0)):
        expected = run(model, "cpu", method)
        got = run(model, "cuda", method, **kw)
        assert (got[0] - expected[0]).abs().max() < 1e-3
        assert (got[1] - expected[1]).abs().max() < 1e-3
        assert got[2].budget.record()["B"] == pytest.approx(expected[2].budget.record()["B"], abs=2e-3)


def test_full_selection_is_dense_on_cuda(model):
    dense, sparse = run(model, "cuda", Dense()), run(model, "cuda", CoSA(select=Select(p=1.0)))
    assert (dense[0] - sparse[0]).abs().max() <= 1e-4
    part = run(model, "cuda", CoSA(select=Select(p=0.5)))
    assert (dense[0] - part[0]).abs().max() > 1e-2
