"""MInference on a whole model on the device: the GPU kernels against the reference, and identity at 100 %."""

from __future__ import annotations

import pytest
import torch
from prefill_kernels import PagedKV
from transformers import Qwen3Config, Qwen3ForCausalLM

from evalkit.attention import Session
from evalkit.methods.base import PlanContext
from evalkit.methods.head_patterns import HeadPattern, table_text
from evalkit.methods.minference import MInference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTH, LAYERS, HEADS = 3001, 4, 16
PATTERNS = [
    HeadPattern("vertical_slash", (200, 300)),
    HeadPattern("a_shape", (64, 500)),
    HeadPattern("block_sparse", (9,)),
]


def kl(p, q):
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.fixture(scope="module", params=[64, 128])
def case(request):
    """A model in bfloat16, a prompt, its dense logits, and the KL that SDPA's rounding alone makes."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=4,
        head_dim=request.param,
        max_position_embeddings=8192,
        initializer_range=0.05,
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config).eval().to("cuda", torch.bfloat16)
    ids = torch.randint(0, 512, (LENGTH,), generator=torch.Generator().manual_seed(2)).cuda()
    with torch.inference_mode():
        eager = model(ids[None]).logits[0].float()
        model.set_attn_implementation("sdpa")
        floor = kl(model(ids[None]).logits[0].float(), eager)
    return model, ids, eager, floor


def run(model, ids, method, backend="auto"):
    with Session(model, method, backend=backend, page_size=32, page_shuffle=3) as session:
        logits = session.logits(session.prefill(ids, keep_from=0))
        return logits, session.account()


@pytest.mark.parametrize(
    "method",
    [MInference(adaptive_budget=1.0), MInference(adaptive_budget=1.0, block_size=128), MInference(execution="block")],
    ids=str,
)
def test_at_100_percent_the_output_is_dense(case, method):
    model, ids, eager, floor = case
    logits, account = run(model, ids, method)
    assert account.budget.record()["B"] == account.budget.record()["B_block"] == 1.0
    assert account.backends == {"proxy:triton": LAYERS, "triton": LAYERS}
    assert kl(eager, logits) <= 3 * floor


@pytest.mark.parametrize("execution", ["token", "block"])
def test_gpu_kernels_equal_the_reference_on_a_whole_model(case, execution):
    """B within 0.2 point and KL within three times that of SDPA against eager."""
    model, ids, eager, floor = case
    method = MInference(vertical_size=200, slash_size=300, execution=execution)
    reference, account = run(model, ids, method, "torch")
    logits, got = run(model, ids, method, "triton")
    assert kl(eager, reference) > 3 * floor, "dense output must fail this check"
    assert abs(got.budget.record()["B"] - account.budget.record()["B"]) <= 2e-3
    assert kl(reference, logits) <= 3 * floor


def test_heads_of_different_patterns(case, tmp_path):
    model, ids, eager, floor = case
    path = tmp_path / "table.yaml"
    path.write_text(table_text([[PATTERNS[h % 3] for h in range(HEADS)]] * LAYERS, {"model": "toy"}))
    method = MInference(table=str(path))
    reference, account = run(model, ids, method, "torch")
    logits, got = run(model, ids, method)
    assert kl(eager, reference) > 3 * floor and kl(reference, logits) <= 3 * floor
    assert abs(got.budget.record()["B"] - account.budget.record()["B"]) <= 2e-3
    # Heads of block_sparse rank pooled blocks, which torch does on every device.
    assert set(got.backends) == {"proxy:triton", "proxy:torch", "triton"}


@pytest.mark.parametrize("mixed", [False, True])
def test_planning_does_not_wait_for_the_device(mixed, tmp_path):
    g = torch.Generator(device="cuda").manual_seed(0)
    q, k = (torch.randn(1, n, 2048, 128, device="cuda", dtype=torch.bfloat16, generator=g) for n in (8, 2))
    kv = PagedKV.from_dense(k, k, 64)
    table = tmp_path / "table.yaml"
    table.write_text(table_text([[PATTERNS[h % 3] for h in range(8)]], {"model": "toy"}))
    method = MInference(table=str(table)) if mixed else MInference(vertical_size=200, slash_size=300)
    context = PlanContext(layer=0, q_offset=0, prompt_len=2048, scale=128**-0.5, backend="auto")
    method.plan(q, kv, context)  # compiles, and makes what is kept on the device
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        method.plan(q, kv, context)
    finally:
        torch.cuda.set_sync_debug_mode("default")
