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


def kl(p, q):
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_a_proxy_that_falls_back_is_recorded_and_warned_of():
    """Stride 12 does not divide the block: ``auto`` takes the torch proxy, and says so."""
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
        )
    )
    model = model.eval().to("cuda", torch.bfloat16)
    with Session(model, CoSA(stride=12, select=Select(p=0.9))) as session:
        session.prefill(torch.arange(500).cuda() % 64, keep_from=499)
        account = session.account()
    assert account.backends["proxy:torch"] == 2 and account.backends["select:triton"] == 2
    assert len(account.warnings) == 1
    assert account.warnings[0].startswith("proxy ran on a slower backend than triton: stride=12, block_size=128")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("method", [CoSA(select=Select(p=0.9)), CoSA(select=Select(p=0.95), skip_scale=400.0)])
def test_gpu_kernels_equal_the_reference_on_a_whole_model(method, head_dim):
    """B within 0.2 point and KL within three times that of SDPA against eager, bfloat16, a length no block divides."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=head_dim,
        max_position_embeddings=8192,
        initializer_range=0.05,
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config).eval().to("cuda", torch.bfloat16)
    ids = torch.randint(0, 512, (3001,), generator=torch.Generator().manual_seed(2)).cuda()
    with torch.inference_mode():
        eager = model(ids[None]).logits[0].float()
        model.set_attn_implementation("sdpa")
        floor = kl(model(ids[None]).logits[0].float(), eager)
    outputs = {}
    for backend in ("torch", "auto", "triton"):
        with Session(model, method, backend=backend, page_size=32, page_shuffle=3) as session:
            logits = session.logits(session.prefill(ids, keep_from=0))
            outputs[backend] = logits, session.account()
    reference, account = outputs["torch"]
    assert floor > 0 and kl(eager, reference) > 3 * floor, "dense output must fail this check"
    assert outputs["triton"][1].backends == {"proxy:triton": 4, "select:triton": 4, "triton": 4}
    assert "torch" not in "".join(outputs["auto"][1].backends) and outputs["auto"][1].warnings == []
    for backend in ("auto", "triton"):
        logits, got = outputs[backend]
        assert abs(got.budget.record()["B"] - account.budget.record()["B"]) <= 2e-3
        assert kl(reference, logits) <= 3 * floor, (backend, kl(reference, logits), floor)
