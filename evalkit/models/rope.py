"""RoPE scaling: how it is asked of a model, and a closed-form check of what the model applies.

Setting ``rope_parameters`` replaces the whole dictionary and may lose ``rope_theta``; a scaling set after the model
is built does nothing; a library may derive another factor. None of these raises, so the applied ``inv_freq`` and
attention factor are compared with the formulas here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ..errors import IntegrityError


def apply_yarn(config: PretrainedConfig, factor: float, original: int) -> None:
    """Ask for YaRN in ``config`` before the model is built, keeping its rope_theta.

    A factor of 1 leaves the config as it is: static YaRN changes short prompts too.
    """
    if factor == 1:
        return
    theta = config.rope_parameters["rope_theta"]
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": float(factor),
        "original_max_position_embeddings": int(original),
    }
    config.max_position_embeddings = int(original * factor)


def expected_rope(parameters: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies (float64 [head_dim / 2]) and attention factor of a scaling, from its formula.

    Raises:
        IntegrityError: a scaling this harness has no formula for.
    """
    kind = parameters.get("rope_type", "default")
    theta = float(parameters["rope_theta"])
    index = torch.arange(0, head_dim, 2, dtype=torch.float64)
    base = theta ** (-index / head_dim)
    if kind == "default":
        return base, 1.0
    factor = float(parameters["factor"])
    original = int(parameters["original_max_position_embeddings"])
    if kind == "yarn":

        def dimension(rotations: float) -> float:
            return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(dimension(float(parameters.get("beta_fast") or 32))), 0)
        high = min(math.ceil(dimension(float(parameters.get("beta_slow") or 1))), head_dim - 1)
        ramp = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
        attention = parameters.get("attention_factor")
        return base / factor * ramp + base * (1 - ramp), float(attention or 0.1 * math.log(factor) + 1)
    if kind == "llama3":
        low_factor, high_factor = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
        rotations = original * base / (2 * math.pi)
        smooth = ((rotations - low_factor) / (high_factor - low_factor)).clamp(0, 1)
        return base / factor * (1 - smooth) + base * smooth, 1.0
    raise IntegrityError(f"rope_type={kind!r}: no formula to check it against; known: default, yarn, llama3")


def check_rope(model: PreTrainedModel, factor: float, original: int | None) -> dict[str, Any]:
    """Compare what the model applies with what was asked for.

    Args:
        model: the loaded model.
        factor: requested YaRN factor, 1 for the model's own RoPE.
        original: trained length for YaRN.

    Returns:
        What is applied, for the cell's record.

    Raises:
        IntegrityError: rope type, factor, inv_freq or attention factor differ.
    """
    config = model.config
    parameters = dict(config.rope_parameters)
    if factor != 1:
        asked = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        wrong = {key: parameters.get(key) for key, value in asked.items() if parameters.get(key) != value}
        if wrong:
            raise IntegrityError(f"RoPE: asked for {asked}, the model has {wrong}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inv_freq, attention = expected_rope(parameters, head_dim)
    rotary = model.get_decoder().rotary_emb
    applied = rotary.inv_freq.double().cpu()
    if not torch.allclose(applied, inv_freq, rtol=1e-5, atol=0):
        worst = ((applied - inv_freq).abs() / inv_freq).max().item()
        raise IntegrityError(f"RoPE: applied inv_freq is off by {worst:.2e} (relative) from {parameters}")
    if not math.isclose(rotary.attention_scaling, attention, rel_tol=1e-6):
        raise IntegrityError(f"RoPE: attention factor {rotary.attention_scaling}, expected {attention}")
    return {**parameters, "attention_factor": attention, "max_position_embeddings": config.max_position_embeddings}
