"""YaRN by length, from the shipped presets to the model that is built: what each benchmark length really applies."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import small_tokenizers
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from transformers import Qwen3Config, Qwen3ForCausalLM

from evalkit.app import schema, sweeper
from evalkit.config import cell_from_config
from evalkit.errors import InputError
from evalkit.models.loading import load_model, locate

LENGTHS = {4096: 1, 8192: 1, 16384: 1, 32768: 1, 65536: 2, 131072: 4}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Qwen3-8B's RoPE on a model of almost no size."""
    folder = tmp_path_factory.mktemp("qwen3")
    tokenizer = small_tokenizers.qwen3_like()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def preset(weights):
    schema.register()
    sweeper.register()
    GlobalHydra.instance().clear()
    with initialize_config_module("evalkit.conf", version_base="1.3"):

        def get(*overrides):
            cell = cell_from_config(compose("config", overrides=["method=dense", *overrides]))
            return replace(cell, model=replace(cell.model, path=str(weights)))

        yield get


def built(cell):
    loaded = load_model(cell.model, locate(cell.model), cell.task.length, torch.device("cpu"), torch.float32)
    return loaded.rope, loaded.model.get_decoder().rotary_emb


def by_hand(factor):
    """inv_freq of YaRN with the published constants, dimension by dimension."""
    theta, dim, original = 1e6, 128, 32768
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]

    def edge(rotations):
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = math.floor(edge(32)), math.ceil(edge(1))
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dim // 2)]
    return [f / factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", ["ruler", "perplexity"])
def test_the_factor_of_each_length_is_what_the_model_applies(preset, task, length):
    factor = LENGTHS[length]
    rope, rotary = built(preset("model=qwen3-8b", f"task={task}", f"task.length={length}"))
    torch.testing.assert_close(
        rotary.inv_freq.double(), torch.tensor(by_hand(factor), dtype=torch.float64), rtol=1e-5, atol=0
    )
    assert rotary.attention_scaling == pytest.approx(1 if factor == 1 else 0.1 * math.log(factor) + 1)
    assert rope["rope_type"] == ("default" if factor == 1 else "yarn") and rope.get("factor", 1) == factor
    assert rope["max_position_embeddings"] >= length


@pytest.mark.parametrize("task", ["longbench-v2", "longbench-v2-cot", "longbench-v2-loglikelihood"])
def test_longbench_runs_at_four(preset, task):
    rope, _ = built(preset("model=qwen3-8b", f"task={task}"))
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4, 32768)


@pytest.mark.parametrize("length", [4096, 131072])
def test_the_static_preset_scales_every_length(preset, length):
    rope, _ = built(preset("model=qwen3-8b-yarn4", "task=ruler", f"task.length={length}"))
    assert rope["factor"] == 4


def test_a_length_beyond_the_scaling_is_refused(preset):
    with pytest.raises(InputError, match="task.length=131073.*at most 131072 with yarn scaling"):
        preset("model=qwen3-8b", "task=ruler", "task.length=131073")


def test_the_presets_sampling_is_the_model_cards(preset):
    plain = preset("model=qwen3-8b", "task=ruler", "task.generation.sampling=recommended")
    thinking = preset(
        "model=qwen3-8b", "task=longbench-v2", "model.thinking=true", "task.generation.thinking_tokens=8192",
        "task.generation.sampling=recommended",
    )  # fmt: skip
    for cell, expected in ((plain, (0.7, 0.8, 20, 0.0)), (thinking, (0.6, 0.95, 20, 0.0))):
        drawn = cell.task.generation.resolve(cell.model)
        assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.min_p) == expected
