"""The memory arithmetic against peaks measured on a GPU."""

from pathlib import Path

import pandas as pd
import pytest
from transformers import Qwen3Config

from evalkit.report.memory import GIB, Shape, markdown, prefill_parts, reference_parts, scoring_parts, total

RESULTS = Path(__file__).parents[2] / "results" / "h200"


@pytest.fixture(scope="module")
def measured():
    rows = pd.read_csv(RESULTS / "benchmarks.csv", dtype=str).drop_duplicates()
    peaks = rows[(rows.iloc[:, 0] == "ttft") & (rows == "peak_memory").any(axis=1) & (rows == "fa2").any(axis=1)]
    length = peaks.apply(lambda row: next(int(v) for v in row if str(v).isdigit()), axis=1)
    value = peaks.apply(lambda row: float(row.iloc[list(row).index("peak_memory") + 1]), axis=1)
    return dict(zip(length, value, strict=True))


@pytest.mark.parametrize("tokens", [4096, 32768, 131072])
def test_the_sum_is_the_measured_peak(measured, tokens):
    assert total(prefill_parts(Shape(), tokens)) == pytest.approx(measured[tokens], abs=0.01)


def test_parameters_are_those_of_the_built_model():
    import torch
    from transformers import AutoModelForCausalLM

    config = Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert Shape().parameters == sum(p.numel() for p in model.parameters())


def test_128k_with_perplexity_fits_80_gb():
    card = 80e9 / GIB
    for parts in (prefill_parts(Shape(), 131072), scoring_parts(Shape(), 131072), reference_parts(Shape(), 131072)):
        assert total(parts) < card
    assert total(prefill_parts(Shape(), 131072, 8192)) < total(prefill_parts(Shape(), 131072)) - 10


def test_the_page_is_up_to_date(measured):
    assert (RESULTS / "memory.md").read_text() == markdown(measured[131072]) + "\n"
