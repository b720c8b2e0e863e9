"""Weights that are not those of their config are refused: transformers would go on with random numbers, or without."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from evalkit.config import ModelConfig
from evalkit.errors import InputError
from evalkit.models.loading import load_model, locate

K = "model.layers.1.self_attn.k_proj.weight"
NORM = "model.norm.weight"
WRONG = {
    "missing": ({K: None}, rf"{K} is missing\)"),
    "shape": ({NORM: torch.ones(5)}, rf"{NORM} is \[5\], not \[96\]\)"),
    "bias": ({"model.layers.0.self_attn.q_proj.bias": torch.ones(96)}, "q_proj.bias has no place in the model"),
    "layer": ({"model.layers.2.mlp.up_proj.weight": torch.ones(64, 96)}, "layers.2.mlp.up_proj.weight has no place"),
    "many": (
        {f"model.layers.{layer}.self_attn.{name}_norm.weight": None for layer in (0, 1) for name in "qk"},
        r"layers.0.self_attn.k_norm.weight is missing; .*, and 1 more\)",
    ),
}


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    config = Qwen3Config(
        vocab_size=89, hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    return ModelConfig(name="toy", native_context=4096, path=str(tmp_path / "model"))


def load(model):
    return load_model(model, locate(model), 512, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("case", WRONG)
def test_weights_that_do_not_fit_are_named(model, case):
    changes, message = WRONG[case]
    file = f"{model.path}/model.safetensors"
    weights = {**load_file(file), **changes}
    save_file({name: x for name, x in weights.items() if x is not None}, file, {"format": "pt"})
    with pytest.raises(InputError, match=rf"model.path='{model.path}': weights that fit config.json \(.*{message}"):
        load(model)


def test_weights_that_cannot_be_read_are_named(model):
    file = f"{model.path}/model.safetensors"
    whole = open(file, "rb").read()
    with open(file, "wb") as cut:
        cut.write(whole[:20000])
    with pytest.raises(InputError, match=rf"model.path='{model.path}': a model that can be loaded \(.+"):
        load(model)


def test_running_out_of_memory_is_not_taken_for_broken_weights(model, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("evalkit.models.loading.AutoModelForCausalLM.from_pretrained", fail)
    with pytest.raises(torch.OutOfMemoryError):
        load(model)
