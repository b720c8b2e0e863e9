"""The memory arithmetic against peaks measured on a GPU."""

from pathlib import Path

import pandas as pd
import pytest
from transformers import Qwen3Config

from evalkit.report.memory import GIB, Shape, markdown, prefill_parts, reference_parts, scoring_parts, total

RESULTS = Path(__file__).parents[2] / "results" / "h200"


@pytest.fixture(scope="module")
def peaks():
    rows = pd.read_csv(RESULTS / "benchmarks.csv")
    return rows[(rows.bench == "ttft") & (rows.metric == "peak_memory")]


@pytest.fixture(scope="module")
def measured(peaks):
    """GiB of a plain prefill by its tokens."""
    return peaks[peaks.variant == "fa2"].groupby("tokens").value.last()


@pytest.fixture(scope="module")
def scored(peaks):
    """GiB of a sparse prefill with loss and fidelity."""
    return peaks[peaks.setting.str.contains("loss on all tokens, fidelity")].groupby("tokens").value.last()


@pytest.mark.parametrize("tokens", [4096, 32768, 131072])
def test_the_sum_is_the_measured_peak(measured, tokens):
    assert total(prefill_parts(Shape(), tokens)) == pytest.approx(measured[tokens], abs=0.01)


def test_the_sum_with_the_dense_states_is_the_measured_peak(scored):
    assert total(reference_parts(Shape(), 131072)) == pytest.approx(scored[131072], abs=0.01)


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


def test_the_page_is_up_to_date(measured, scored):
    assert (RESULTS / "memory.md").read_text() == markdown(measured[131072], scored[131072]) + "\n"
