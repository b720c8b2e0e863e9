"""RoPE scaling: what is asked for, what is applied, and the ways it goes wrong silently."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from evalkit.errors import IntegrityError
from evalkit.models.rope import apply_yarn, check_rope, expected_rope

SMALL: dict[str, Any] = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)


def qwen3(factor: float = 1.0):
    config = Qwen3Config(
        **SMALL,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )
    apply_yarn(config, factor, 32768)
    return Qwen3ForCausalLM(config)


@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0])
def test_yarn_as_asked_is_accepted(factor):
    applied = check_rope(qwen3(factor), factor, 32768)
    assert applied["rope_theta"] == 1000000.0
    assert applied["attention_factor"] == pytest.approx(1.0 if factor == 1 else 0.1 * math.log(factor) + 1)
    assert applied["max_position_embeddings"] == (40960 if factor == 1 else 32768 * factor)


def test_factor_of_one_leaves_the_model_alone():
    model = qwen3(1.0)
    assert model.config.rope_parameters["rope_type"] == "default"


def test_known_values_of_yarn():
    """Published form: frequencies of 32 rotations and more stay, of one rotation and fewer are divided by 4."""
    inv_freq, attention = expected_rope(
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}, 128
    )
    plain, _ = expected_rope({"rope_type": "default", "rope_theta": 1e6}, 128)
    ratio = inv_freq / plain
    rotations = 32768 * plain / (2 * math.pi)
    assert torch.allclose(ratio[rotations > 40], torch.ones(1, dtype=torch.float64))
    assert torch.allclose(ratio[rotations < 0.8], torch.full((1,), 0.25, dtype=torch.float64))
    assert attention == pytest.approx(1.1386294)


def test_scaling_that_was_not_applied_is_found():
    with pytest.raises(IntegrityError, match="asked for"):
        check_rope(qwen3(1.0), 4.0, 32768)
    with pytest.raises(IntegrityError, match="asked for"):
        check_rope(qwen3(2.0), 4.0, 32768)


def test_scaling_set_after_the_model_was_built_is_found():
    model = qwen3(1.0)
    apply_yarn(model.config, 4.0, 32768)  # a no-op for the frequencies in use
    with pytest.raises(IntegrityError, match="inv_freq is off"):
        check_rope(model, 4.0, 32768)


def test_lost_theta_is_found():
    model = qwen3(4.0)
    model.config.rope_parameters["rope_theta"] = 10000.0
    with pytest.raises(IntegrityError, match="inv_freq is off"):
        check_rope(model, 4.0, 32768)


def test_changed_attention_factor_is_found():
    model = qwen3(4.0)
    model.model.rotary_emb.attention_scaling = 1.0
    with pytest.raises(IntegrityError, match="attention factor"):
        check_rope(model, 4.0, 32768)


def test_llama3_scaling_matches_its_formula():
    config = LlamaConfig(
        **SMALL,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    assert check_rope(LlamaForCausalLM(config), 1.0, None)["rope_type"] == "llama3"


def test_unknown_scaling_is_refused():
    with pytest.raises(IntegrityError, match="longrope"):
        expected_rope(
            {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 10}, 64
        )
