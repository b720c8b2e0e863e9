"""Sample numbers chosen for a wanted interval: the schedule, the rule, whole cells, and pairs of unequal length."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
import small_tokenizers
import synthetic
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from evalkit import lm as lm_module
from evalkit import precision, runner
from evalkit.benchmarks.longbench_v2.samples import choose
from evalkit.config import Cell, ExecutionConfig, ModelConfig, PerplexityConfig, RulerConfig
from evalkit.errors import InputError
from evalkit.methods.cosa import CoSA, Select
from evalkit.methods.dense import Dense
from evalkit.precision import Look, enough, half_width, schedule
from evalkit.report import stats
from evalkit.report.load import load
from evalkit.report.rows import build_rows
from evalkit.runner import run_cell
from evalkit.store import read_cells
from evalkit.task_settings import LongBenchV2Config


def test_the_schedule_is_fixed_by_the_limit():
    assert schedule(1000, 50) == [50, 75, 100, 150, 200, 300, 400, 600, 800, 1000]
    assert schedule(100, 50) == [50, 75, 100]
    assert schedule(50, 50) == [50] and schedule(20, 50) == [20], "a small limit is the only look"
    assert schedule(20, 8) == [8, 12, 16, 20]


@pytest.mark.parametrize(
    ("task", "looks"),
    [
        (RulerConfig(tasks=("vt",), precision=0.02), [50, 75, 100, 120]),
        (LongBenchV2Config(data="small", precision=0.02), [50, 75, 100, 120]),
        (PerplexityConfig(precision=0.02), [8, 12, 16, 24, 32, 48, 64, 96, 120]),
    ],
)
def test_the_first_look_is_at_fifty_samples_or_eight_windows(task, looks):
    """As README says; other numbers would stop other cells, under the same key."""
    specs = [{"metadata": {"docs": list(range(120))}}]
    chosen = Cell(ModelConfig(name="m", native_context=131072), Dense(), task, ExecutionConfig(), Path("out"))
    assert runner._numbers(chosen, runner.Prepared({}, None, specs, {}, 120)) == looks


def test_half_width_of_scores_and_losses():
    records = [{"task": "a", "metrics": {"score": s}} for s in (1, 0, 1, 1)]
    low, high = stats.wilson(0.75, 4)
    assert half_width(records) == pytest.approx((high - low) / 2)
    records += [{"task": "b", "metrics": {"score": 1.0}}] * 4
    estimate = stats.mean_score([(0.5, [1, 0, 1, 1]), (0.5, [1, 1, 1, 1])])
    assert half_width(records) == pytest.approx((estimate.high - estimate.low) / 2), "subtasks weigh the same"
    windows = [{"task": "perplexity", "metrics": {"nll": x, "tokens": 10}} for x in (20, 24, 28)]
    # Mean losses 2.0, 2.4, 2.8: t(2) times 0.4 / sqrt(3).
    assert half_width(windows) == pytest.approx(4.302653 * 0.4 / 3**0.5, rel=1e-6)
    assert half_width(windows[:1]) is None


def test_only_the_half_width_decides():
    assert enough(Look(50, 0.02), 0.02) and not enough(Look(50, 0.0201), 0.02)
    assert not enough(Look(1, None), 0.4) and not enough(Look(50, 0.0), None)
    # What the rule is given: one cell's records. No twin, no difference can reach it.
    assert list(inspect.signature(precision.half_width).parameters) == ["records"]
    assert list(inspect.signature(precision.enough).parameters) == ["look", "precision"]


def test_equal_spread_stops_at_the_same_number_whatever_the_mean():
    """A cell that loses against dense by any amount has the same looks as one that wins, if its spread is the same."""
    rng = np.random.default_rng(0)
    nats = rng.normal(300, 20, 64)

    def stop(shift):
        for n in schedule(64, 8):
            records = [{"task": "p", "metrics": {"nll": x + shift, "tokens": 100}} for x in nats[:n]]
            if enough(Look(n, half_width(records)), 0.06):
                return n
        return 64

    assert stop(0) == stop(50) == stop(-50) and 8 < stop(0) < 64


@pytest.mark.parametrize("config", [RulerConfig(tasks=("vt",)), PerplexityConfig(), LongBenchV2Config(data="small")])
@pytest.mark.parametrize("value", [0.0, -0.1, 0.5, float("nan")])
def test_a_precision_that_no_interval_has(config, value):
    from dataclasses import replace

    with pytest.raises(InputError, match="task.precision"):
        replace(config, precision=value).validate()
    replace(config, precision=0.02).validate()


def test_questions_come_in_a_random_order():
    items = list(range(40))
    drawn = choose(items, LongBenchV2Config(data="small", limit=10, precision=0.1))
    assert sorted(drawn) == choose(items, LongBenchV2Config(data="small", limit=10)) != drawn
    whole = choose(items, LongBenchV2Config(data="small", precision=0.1))
    assert sorted(whole) == items != whole and whole[:10] == drawn


# ------------------------------------------------------------------------------------------------------ whole cells
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = small_tokenizers.llama3_like()
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **shape, **heads)
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghij"), rng.integers(2, 7))) for _ in range(300)]
    (path / "text.txt").write_text(" ".join(rng.choice(words, 3000)))
    return path


def cell(folder, out, method, limit=14, **task):
    settings = {"corpus": str(folder / "text.txt"), "length": 128, "limit": limit, "fidelity": False, **task}
    model = ModelConfig(name="tiny", path=str(folder), native_context=2048, dtype="float32")
    return Cell(model, method, PerplexityConfig(**settings), ExecutionConfig(device="cpu"), out)


@pytest.fixture
def spread(monkeypatch):
    """Sets the half-widths that the looks of each method find, by number of samples."""
    widths = {}

    def found(records):
        return widths[len(records)]

    monkeypatch.setattr(runner, "half_width", found)
    return widths


SPARSE = CoSA(select=Select(p=0.5))


def test_a_cell_stops_at_the_first_look_that_is_narrow_enough(folder, tmp_path, spread):
    spread |= {8: 0.3, 12: 0.1, 14: 0.05}
    run_cell(cell(folder, tmp_path, Dense(), precision=0.1))
    (found,) = read_cells([tmp_path])
    assert found.done and [r["index"] for r in found.records] == list(range(12)) and found.expected_samples == 12
    assert found.summary["looks"] == [{"n": 8, "half_width": 0.3}, {"n": 12, "half_width": 0.1}]
    assert found.identity["task"]["precision"] == 0.1
    run_cell(cell(folder, tmp_path, Dense(), precision=0.1))  # finished: nothing is run again


def test_the_limit_ends_a_cell_that_is_never_narrow_enough(folder, tmp_path, spread):
    spread |= {8: 0.3, 12: 0.2, 14: 0.2}
    run_cell(cell(folder, tmp_path, Dense(), precision=0.1))
    (found,) = read_cells([tmp_path])
    assert len(found.records) == 14 and len(found.summary["looks"]) == 3


def test_no_precision_no_looks_and_another_key(folder, tmp_path):
    run_cell(cell(folder, tmp_path, Dense(), limit=8))
    run_cell(cell(folder, tmp_path, Dense(), limit=8, precision=0.4))
    plain, wanted = sorted(read_cells([tmp_path]), key=lambda c: c.identity["task"]["precision"] or 0)
    assert plain.key != wanted.key and plain.twin != wanted.twin and "looks" not in plain.summary
    real = half_width(wanted.records)
    assert wanted.summary["looks"] == [{"n": 8, "half_width": pytest.approx(real)}]


def test_a_killed_cell_looks_at_the_same_numbers(folder, tmp_path, spread, monkeypatch):
    spread |= {8: 0.3, 12: 0.1, 14: 0.05}
    measured, original = [], lm_module.EvalkitLM._measured

    def dies(self, doc, run):
        if len(measured) == 10:
            raise KeyboardInterrupt
        measured.append(doc["index"])
        return original(self, doc, run)

    monkeypatch.setattr(lm_module.EvalkitLM, "_measured", dies)
    with pytest.raises(KeyboardInterrupt):
        run_cell(cell(folder, tmp_path, Dense(), precision=0.1))
    monkeypatch.setattr(lm_module.EvalkitLM, "_measured", original)
    run_cell(cell(folder, tmp_path, Dense(), precision=0.1))
    (found,) = read_cells([tmp_path])
    assert [look["n"] for look in found.summary["looks"]] == [8, 12] and len(found.records) == 12


@pytest.mark.parametrize("dense_first", [True, False])
def test_pairs_of_unequal_length_are_compared_where_both_are(folder, tmp_path, spread, dense_first):
    dense, sparse = ({8: 0.05, 12: 0, 14: 0}, {8: 0.3, 12: 0.05, 14: 0})
    for method, widths in ((Dense(), dense if dense_first else sparse), (SPARSE, sparse if dense_first else dense)):
        spread |= widths
        run_cell(cell(folder, tmp_path, method, precision=0.1))
    loaded = load([tmp_path])
    cells = {c.is_dense: c for c in loaded.cells}
    assert {len(c.records) for c in cells.values()} == {8, 12}
    row = next(r for r in build_rows(loaded).rows if not r.dense and r.metric == "perplexity")
    assert row.n == (12 if dense_first else 8)

    def nats(c):
        return [r["metrics"]["nll"] for r in c.records[:8]]

    tokens = [r["metrics"]["tokens"] for r in cells[True].records[:8]]
    expected = stats.perplexity_difference(nats(cells[False]), nats(cells[True]), tokens)
    assert row.difference == pytest.approx(expected.value) and row.difference_low == pytest.approx(expected.low)
    assert any("paired over 8" in note for note in loaded.notes)


def test_cells_without_a_precision_must_have_the_same_samples(tmp_path):
    synthetic.perplexity_cell(tmp_path, "dense")
    path = synthetic.perplexity_cell(tmp_path, p=0.5)
    assert len(load([tmp_path]).cells) == 2 and path.exists()
