"""XAttention, FlexPrefill, FlashPrefill and SpargeAttn on the real model classes: sparse, accounted, refused."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from evalkit.attention import Session
from evalkit.errors import InputError
from evalkit.methods.dense import Dense
from evalkit.methods.flashprefill import FlashPrefill
from evalkit.methods.flexprefill import FlexPrefill
from evalkit.methods.spargeattn import SpargeAttn
from evalkit.methods.xattention import XAttention

METHODS = [
    XAttention(block_size=64, stride=8, threshold=0.5),
    FlexPrefill(block_size=64, gamma=0.3, tau=0.3, min_budget=64),
    FlashPrefill(block_size=64, alpha=0.9, sink=1, window=1, last_full=0),
    SpargeAttn(block_size=64, tau=0.3, theta=0.0, pv_threshold=2.0),
]


def build(kind: str):
    config_class, model_class = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[
        kind
    ]
    torch.manual_seed(1)
    config = config_class(
        vocab_size=89,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.2,
    )
    return model_class(config).eval()


def prefill(model, method, length, **kw):
    ids = torch.randint(0, 89, (length,), generator=torch.Generator().manual_seed(0))
    with Session(model, method, page_size=32, page_shuffle=3, **kw) as session:
        return session.prefill(ids, keep_from=0), session.account()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_a_sparse_run_is_sparse_and_accounted(kind, method):
    model = build(kind)
    got, account = prefill(model, method, 301)
    dense, _ = prefill(model, Dense(), 301)
    assert (got - dense).abs().max() > 1e-2
    assert account.calls == {"expected": 2, "sparse": 2, "dense": 0, "fallback": 0, "decode": 0}
    record = account.budget.record()
    assert record["B"] <= record["B_stage1"] < 0.97
    assert record["estimator"] == pytest.approx(12 * method.estimator_cells(0, 301) / (2 * record["dense"]))


@pytest.mark.parametrize("method", [m for m in METHODS if m.chunkable], ids=lambda m: m.name)
def test_chunks_change_nothing(method):
    model = build("qwen3")
    whole, account = prefill(model, method, 301)
    for chunk in (128, 192):
        parts, part_account = prefill(model, method, 301, chunk_size=chunk)
        assert (parts - whole).abs().max() < 1e-4
        assert part_account.budget.record() == pytest.approx(account.budget.record())


@pytest.mark.parametrize("method", [m for m in METHODS if not m.chunkable], ids=lambda m: m.name)
def test_methods_that_need_the_whole_prompt_refuse_chunks(method):
    with pytest.raises(InputError, match="execution.chunk_size=128"):
        Session(build("llama"), method, chunk_size=128)


def test_a_dense_fallback_is_counted_as_dense():
    model = build("llama")
    got, account = prefill(model, METHODS[1], 128)
    dense, _ = prefill(model, Dense(), 128)
    assert torch.equal(got, dense)
    record = account.budget.record()
    assert account.calls["fallback"] == 2 and account.calls["sparse"] == 0
    assert record["B"] == record["B_cost"] == record["B_block"] == record["fallback_share"] == 1.0


def test_a_table_for_another_model_is_refused(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps([[0.9] * 6] * 3))
    with pytest.raises(InputError, match=r"method.threshold_table=.*2 layers x 6 query heads.*3 x 6"):
        Session(build("llama"), XAttention(threshold_table=str(tmp_path / "t.json")))
