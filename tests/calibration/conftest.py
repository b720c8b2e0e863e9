"""A small random-weight model on disk, a text, and the request that calibrates on them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from evalkit.calibration.measure import Workbench
from evalkit.calibration.run import Request
from evalkit.calibration.settings import CalibrateConfig
from evalkit.config import Cell, ExecutionConfig, ModelConfig, PerplexityConfig
from evalkit.methods.cosa import CoSA

LAYERS, HEADS = 2, 4
COSA = CoSA(block_size=64)


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


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Random words, so that no two windows share a run of tokens."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(400)]
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(" ".join(rng.choices(words, k=2400)))
    return path


@pytest.fixture
def model_config(model_folder):
    return ModelConfig(name="tiny", path=str(model_folder), native_context=2048, dtype="float32")


@pytest.fixture
def request_for(model_config, corpus, tmp_path, monkeypatch):
    """Makes requests whose files lie in a folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))

    def make(method=COSA, **settings) -> Request:
        base = {"lengths": (256,), "budgets": (0.5,), "text": str(corpus), "windows": 3, "tolerance": 0.01}
        if "budget_at" in settings or "recalls" in settings:
            base.pop("budgets")
        if "budget_at" in settings:
            base.pop("lengths")
        return Request(model_config, method, CalibrateConfig(**{**base, **settings}), ExecutionConfig())

    return make


class FakeRuns:
    """Stands in for the model: the budget is a function of the knob, a little different in each window."""

    def __init__(self) -> None:
        self.count, self.allowed, self.scatter = 0, 10**9, 1e-3

    def __call__(self, bench, method, ids, recall):
        if self.count == self.allowed:
            raise KeyboardInterrupt
        self.count += 1
        value: Any = method
        for part in method.knob.field.split("."):
            value = getattr(value, part)
        low, high = method.knob.low, method.knob.high * (len(ids) if method.knob.high_per_token else 1)
        share = (value - low) / (high - low)
        budget = (share if method.knob.rises else 1 - share**0.2) ** 1.3 + (sum(ids) % 7 - 3) * self.scatter
        names = ("B", "B_block", "B_stage1", "B_stage1_block", "B_cost")
        return {name: budget + 0.02 * i for i, name in enumerate(names)} | ({"recall": budget + 0.1} if recall else {})


@pytest.fixture
def fake_runs(monkeypatch):
    """No model is run; :class:`FakeRuns` counts the windows instead."""
    runs = FakeRuns()
    monkeypatch.setattr(Workbench, "_run", lambda bench, method, ids, recall: runs(bench, method, ids, recall))
    return runs


@pytest.fixture
def cell_for(model_config, corpus, tmp_path):
    """Makes perplexity cells on the first half of the text."""

    def make(method=COSA, *, length=256, limit=3, **task) -> Cell:
        settings = {"corpus": str(corpus), "length": length, "limit": limit, "fidelity": False, **task}
        return Cell(model_config, method, PerplexityConfig(**settings), ExecutionConfig(), Path(tmp_path / "runs"))

    return make


@pytest.fixture
def with_target():
    return lambda target, method=COSA, **changes: replace(method, budget_target=target, **changes)
