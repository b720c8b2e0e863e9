from __future__ import annotations

import json
import logging

import pytest
import small_tokenizers
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

logging.getLogger("lm_eval").setLevel(logging.ERROR)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """A random-weight Qwen3 of two layers, on disk."""
    folder = tmp_path_factory.mktemp("qwen3")
    tokenizer = small_tokenizers.qwen3_like()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def text(start: int, lines: int) -> str:
    return " ".join(f"The {i} of {i * 7919 % 1000} is here." for i in range(start, start + lines))


@pytest.fixture(scope="session")
def tasks(tmp_path_factory):
    """A folder of plain lm-eval tasks, one of each kind, over a local JSON file; they know nothing of budgets."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    choices = [" one of them", " none", " here.", " all of it"]
    rows = [{"text": text(10 * i, 25 + 5 * i), "choices": choices, "label": i % 4} for i in range(3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    kinds = {
        "toy_choice": {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{label}}",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
        "toy_generate": {
            "output_type": "generate_until",
            "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 6, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
        "toy_repeats": {
            "output_type": "generate_until",
            "doc_to_target": "{{choices[0]}}",
            "repeats": 4,
            "generation_kwargs": {"until": [], "max_gen_toks": 6, "do_sample": True, "temperature": 2.0},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
        "toy_rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
    }
    for name, kind in kinds.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **kind}))
    return folder
