"""A small random-weight model on disk and settings of analyses on it."""

from __future__ import annotations

import pytest
import small_tokenizers
import torch
from prefill_kernels import PagedKV
from transformers import LlamaConfig, LlamaForCausalLM

from evalkit.config import ModelConfig
from evalkit.methods.base import PlanContext

LAYERS, HEADS = 2, 4


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    tokenizer = small_tokenizers.llama3_like()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.35,
        eos_token_id=tokenizer.eos_token_id,
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model_config(model_folder):
    return ModelConfig(name="tiny", path=str(model_folder), native_context=2048, dtype="float32")


@pytest.fixture
def settings_for(model_config, tmp_path, monkeypatch):
    """Makes settings of an analysis of needle prompts; samples and files lie in a folder of the test."""
    monkeypatch.chdir(tmp_path)

    def make(cls, **more):
        base = {"tasks": ("niah_single_1",), "length": 640, "samples": 2, "device": "cpu", "out": str(tmp_path / "out")}
        settings = cls(model=model_config, **{**base, **more})
        settings.validate()
        return settings

    return make


@pytest.fixture
def call_inputs():
    """Makes queries, a KV cache and a context: GQA, and a length that no block divides."""

    def make(length=460, heads=4, kv_heads=2, dim=16, seed=0, spread=1.5):
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(1, heads, length, dim, generator=generator) * spread
        k, v = (torch.randn(1, kv_heads, length, dim, generator=generator) for _ in range(2))
        kv = PagedKV.from_dense(k, v, 64, generator=generator)
        return q, kv, PlanContext(0, 0, length, dim**-0.5, "torch")

    return make
