"""Time to first token, captures and the profile, on tiny models on the CPU."""

from __future__ import annotations

import csv
import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from prefill_kernels import BlockPlan, block_attention, sparse_attention
from prefill_kernels.bench import AttentionBench, Rows, attention
from prefill_kernels.bench.config import BenchError, WrongResult
from prefill_kernels.bench.inputs import captured
from safetensors import safe_open
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from evalkit.attention import Session
from evalkit.bench import ttft
from evalkit.bench.capture import spread
from evalkit.bench.profiling import COLUMNS, IDLE, profile_csv, totals
from evalkit.bench.settings import TtftBench
from evalkit.capture import Recorder, save
from evalkit.errors import InputError
from evalkit.methods.base import Method
from evalkit.methods.cosa import CoSA, Select
from evalkit.methods.dense import Dense
from evalkit.methods.presets import from_text

CPU = torch.device("cpu")
TINY = TtftBench(
    lengths=(256, 512),
    repeats=1,
    variants=("fa2", "cosa", "cosa_vote", "harness", "harness_dense"),
    layers=2,
    hidden=64,
    intermediate=64,
    heads=4,
    kv_heads=2,
    dim=32,
    vocab=99,
)


def test_ttft_rows(tmp_path, capsys):
    settings = TtftBench(**{**vars(TINY), "profile": str(tmp_path / "profiles")})
    settings.validate()
    rows = Rows(tmp_path / "rows.csv", "a command", "abc", device="cpu")
    ttft.run(settings, rows, CPU)
    with rows.path.open(newline="") as file:
        found = {(r["variant"], int(r["tokens"]), r["metric"]): r for r in csv.DictReader(file)}
    assert {key[:2] for key in found} == {(v, n) for v in settings.variants for n in settings.lengths}
    assert found["fa2", 256, "ttft"]["unit"] == "s" and float(found["cosa", 512, "speedup_fa2"]["value"]) > 0
    assert ("fa2", 256, "speedup_fa2") not in found and ("fa2", 256, "peak_memory") not in found
    # 4 tiles, at least one block each: 4 of 10.
    for variant in ("cosa", "harness"):
        assert float(found[variant, 512, "B_block"]["value"]) == pytest.approx(0.4)
        assert found[variant, 512, "ttft"]["setting"] == "Stage-1 20 %, vote off, stride 8"
    assert found["harness_dense", 512, "ttft"]["setting"] == "dense"

    def value(*key):
        return float(found[key]["value"])

    # Executed products: weights of the layers on every token; the causal half, or whole blocks of QK and of PV.
    model = ttft.build(settings, CPU)
    weights = 2 * sum(p.numel() for p in model.model.layers.parameters()) * 512
    width = settings.layers * settings.heads * settings.dim
    for variant, pairs in (("fa2", 2 * 512**2), ("cosa", 4 * 4 * 128**2)):
        executed = weights + width * pairs
        assert value(variant, 512, "tflops") * value(variant, 512, "ttft") * 1e12 == pytest.approx(executed, rel=1e-3)
    assert ("fa2", 512, "speedup_dense") not in found, "the fastest is not known while dense kernels run"
    fastest = min(value(name, 512, "ttft") for name in ("fa2", "cudnn") if (name, 512, "ttft") in found)
    assert value("cosa", 512, "speedup_dense") == pytest.approx(fastest / value("cosa", 512, "ttft"), rel=1e-3)
    assert len(list((tmp_path / "profiles").iterdir())) == 10


def test_loss_of_the_harness_is_a_row_of_its_own(tmp_path):
    settings = TtftBench(**{**vars(TINY), "loss": True, "lengths": (256,), "variants": ("fa2", "harness")})
    rows = Rows(tmp_path / "rows.csv", "a command", "abc", device="cpu")
    ttft.run(settings, rows, CPU)
    with rows.path.open(newline="") as file:
        (found,) = [row for row in csv.DictReader(file) if row["metric"] == "loss"]
    assert found["variant"] == "harness" and found["unit"] == "s" and float(found["value"]) > 0
    assert found["setting"] == "Stage-1 20 %, vote off, stride 8, loss on all tokens, fidelity"


def test_loss_is_that_of_all_tokens_beside_the_dense_model():
    model = ttft.build(TINY, CPU)
    ids = torch.randint(0, 99, (256,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = model(ids[None]).logits[0, :-1].float()
    expected = torch.nn.functional.cross_entropy(logits, ids[1:])
    dense, sparse = (ttft.Forward(TINY, model, name).loss(ids) for name in ("harness_dense", "harness"))
    assert dense[0] == pytest.approx(float(expected), rel=1e-2) and dense[1] == pytest.approx(0, abs=1e-6)
    assert sparse[1] > 1e-4


def test_ttft_hands_the_kernel_pages_it_takes(tmp_path, monkeypatch):
    seen = []

    def attend(q, kv, plan, **settings):
        seen.append(kv.k_pages.is_contiguous() and kv.v_pages.is_contiguous())
        return block_attention(q, kv, plan, **settings)

    monkeypatch.setattr(ttft, "block_attention", attend)
    settings = TtftBench(**{**vars(TINY), "variants": ("fa2", "cosa")})
    ttft.run(settings, Rows(tmp_path / "rows.csv", "a command", "abc", device="cpu"), CPU)
    assert seen and all(seen)


def test_ttft_stops_when_cosa_is_not_dense_at_100_percent(monkeypatch):
    model = ttft.build(TINY, CPU)
    ttft.check(TINY, model, ["cosa", "harness"])
    broken = ttft.Forward._cosa

    def wrong(self, q, k, v, scaling):
        out, stats = broken(self, q, k, v, 2 * scaling)
        return out, stats

    monkeypatch.setattr(ttft.Forward, "_cosa", wrong)
    with pytest.raises(WrongResult, match="cosa with every block"):
        ttft.check(TINY, model, ["cosa"])


METHODS = (
    "xattention:threshold=0.5",
    "flexprefill:min_budget=128",
    "minference:vertical_size=30:slash_size=60",
    "flexprefill",
)


def test_ttft_of_methods(tmp_path):
    settings = TtftBench(**{**vars(TINY), "variants": ("fa2", *METHODS), "lengths": (512,)})
    settings.validate()
    rows = Rows(tmp_path / "rows.csv", "a command", "abc", device="cpu")
    ttft.run(settings, rows, CPU)
    with rows.path.open(newline="") as file:
        found = {(r["variant"], r["metric"]): r for r in csv.DictReader(file)}
    assert {key[0] for key in found} == {"fa2", *METHODS}
    assert found[METHODS[0], "ttft"]["setting"] == "stride=8 threshold=0.5"
    budgets = {name: float(found[name, "B"]["value"]) for name in METHODS}
    assert 0 < budgets[METHODS[0]] < 0.9 and budgets[METHODS[2]] < 1
    assert budgets["flexprefill"] == float(found["flexprefill", "B_block"]["value"]) == 1, "dense: a short prompt"
    assert all(float(found[name, "B"]["value"]) <= float(found[name, "B_stage1"]["value"]) for name in METHODS)


def test_ttft_stops_when_a_method_attends_to_something_else(monkeypatch):
    model = ttft.build(TINY, CPU)
    ttft.check(TINY, model, METHODS)

    def wrong(q, kv, plan, **settings):
        out, stats = sparse_attention(q, kv, plan, **settings)
        return out.flip(1), stats

    monkeypatch.setattr(ttft, "sparse_attention", wrong)
    with pytest.raises(WrongResult, match="xattention:threshold=0.5, layer 0: tile 0"):
        ttft.check(TINY, model, METHODS[:1])


def test_ttft_refuses_a_table_of_another_model(tmp_path):
    table = tmp_path / "t.yaml"
    table.write_text("[[0.9, 0.8], [0.7, 0.6]]")
    variant = f"xattention:threshold_table={table}"
    with pytest.raises(BenchError, match="a table of 2 layers x 4 query heads"):
        TtftBench(**{**vars(TINY), "variants": ("fa2", variant)}).validate()


def test_ttft_without_the_packages_of_the_harness():
    code = (
        "import sys\n"
        "for name in ('pandas', 'hydra', 'omegaconf', 'lm_eval', 'datasets'): sys.modules[name] = None\n"
        "from evalkit.bench.ttft import runnable\n"
        "print(runnable(['xattention', 'harness', 'cosa', 'fa2']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "['fa2', 'cosa', 'xattention']\n", done.stderr
    assert "harness: left out" in done.stderr


# ------------------------------------------------------------------------------------------------------------- profiles
def test_profile_totals():
    events = [("a", 0.0, 1000.0), ("b", 1500.0, 2000.0), ("a", 2000.0, 4000.0), ("c", 2500.0, 3000.0)]
    assert totals(events) == [
        ("a", 2, "3.0000", "1.50000", "0.7500"),
        ("b", 1, "0.5000", "0.50000", "0.1250"),
        ("c", 1, "0.5000", "0.50000", "0.1250"),
        (IDLE, 1, "0.5000", "0.50000", "0.1250"),
    ]
    assert totals([]) == []


def test_profile_of_a_call(tmp_path):
    a = torch.randn(64, 64)
    profile_csv(lambda: a @ a @ a, tmp_path / "new" / "p.csv", CPU)
    with (tmp_path / "new" / "p.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS and rows[-1]["kernel"] == IDLE
    assert next(row for row in rows if row["kernel"] == "aten::matmul")["calls"] == "2"


# ------------------------------------------------------------------------------------------------------------- captures
def build():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=89,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).eval().bfloat16()


def prompt(length):
    return torch.randint(0, 89, (length,), generator=torch.Generator().manual_seed(1))


def seen_by_the_model(model, ids):
    """Q, K and V that transformers hands to an attention function, by layer."""
    seen = {}

    def attend(module, q, k, v, mask, **kwargs):
        seen[module.layer_idx] = tuple(x[0].transpose(0, 1).clone() for x in (q, k, v))
        return sdpa_attention_forward(module, q, k, v, mask, is_causal=True, **kwargs)

    AttentionInterface.register("probe", attend)
    model.set_attn_implementation("probe")
    with torch.inference_mode():
        model(ids[None])
    model.set_attn_implementation("sdpa")
    return seen


@pytest.mark.parametrize("chunk", [None, 256])
def test_capture_is_what_attention_sees_after_rope(tmp_path, chunk):
    model, ids = build(), prompt(700)
    expected = seen_by_the_model(model, ids)
    recorder = Recorder(Dense(), (1, 3))
    with Session(model, recorder, page_size=64, page_shuffle=3, chunk_size=chunk) as session:
        session.prefill(ids, keep_from=699)
        assert session.account().calls["dense"] == 4 * (1 if chunk is None else 3)
    path = tmp_path / "new" / "c.safetensors"
    save(recorder.captures, path, model="toy", metadata={"tokens": 700, "layers": [1, 3]})
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["model"] == "toy" and json.loads(file.metadata()["layers"]) == [1, 3]
        assert json.loads(file.metadata()["scaling"]) == {"1": 0.25, "3": 0.25}
        assert set(file.keys()) == {f"layer.{n}.{x}" for n in (1, 3) for x in "qkv"}
    sets = captured(path, CPU)
    assert [one.name for one in sets] == ["toy", "toy"] and [one.scale for one in sets] == [0.25, 0.25]
    for one, layer in zip(sets, (1, 3), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in expected[layer])
        # Layers behind others see rounding: chunked and whole attention do not round alike.
        torch.testing.assert_close(one.q, q, rtol=0.05, atol=0.05)
        torch.testing.assert_close(one.k, k, rtol=0.05, atol=0.05)
        torch.testing.assert_close(one.v, v, rtol=0.05, atol=0.05)
        paged = one.kv.gather()
        assert torch.equal(paged[0], one.k) and torch.equal(paged[1], one.v)
        assert not one.kv.in_order and one.kv.page_table.shape == (1, 6)


def test_first_layer_is_captured_to_the_bit():
    model, ids = build(), prompt(300)
    recorder = Recorder(Dense(), (0,))
    with Session(model, recorder) as session:
        session.prefill(ids, keep_from=299)
    expected, kept = seen_by_the_model(model, ids)[0], recorder.captures[0]
    assert all(torch.equal(a, b) for a, b in zip(expected, (kept.q[0], kept.k, kept.v), strict=True))


def test_selections_are_kept_and_change_nothing(tmp_path):
    model, ids = build(), prompt(700)
    method = CoSA(select=Select(p=0.6))
    plans = {}

    class Spy(Recorder):
        def plan(self, q, kv, context):
            plans[context.layer, context.q_offset] = plan = super().plan(q, kv, context)
            return plan

    recorder = Spy(method, (2,), tensors=False, selections=True)
    with Session(model, recorder, chunk_size=512) as session:
        got = session.prefill(ids, keep_from=699)
        account = session.account()
    with Session(model, method, chunk_size=512) as session:
        assert torch.equal(got, session.prefill(ids, keep_from=699))
        assert account.budget.record() == session.account().budget.record()
    save(recorder.captures, tmp_path / "s.safetensors", model="toy", metadata={})
    with safe_open(tmp_path / "s.safetensors", framework="pt") as file:
        order, count = (file.get_tensor(f"layer.2.{name}") for name in ("order", "count"))
        assert set(file.keys()) == {"layer.2.order", "layer.2.count"}
    assert order.shape == (6, 6, 6) and order.dtype == torch.int32
    first, second = plans[2, 0], plans[2, 512]
    assert isinstance(first, BlockPlan)
    assert torch.equal(count, torch.cat([first.count[0], second.count[0]], 1))
    assert torch.equal(order[:, 4:], second.order[0]) and torch.equal(order[:, :4, :4], first.order[0])
    assert (order[:, :4, 4:] == -1).all()


def test_nothing_captured(tmp_path):
    with pytest.raises(InputError, match="none was captured"):
        save({}, tmp_path / "x.safetensors", model="toy", metadata={})


def test_whole_call_on_a_capture(tmp_path, bench):
    model, ids = build(), prompt(900)
    recorder = Recorder(Dense(), (0, 2))
    with Session(model, recorder) as session:
        session.prefill(ids, keep_from=899)
    path = tmp_path / "c.safetensors"
    save(recorder.captures, path, model="toy", metadata={})
    settings = AttentionBench(
        inputs=str(path), variants=("fa2", "cosa"), budgets=(0.3,), strides=(8,), top_p=(0.9,), skip_scales=(200.0,),
        stage1=0.6, target=0.4,
    )  # fmt: skip
    settings.validate()
    attention.run(settings, bench)
    with bench.rows.path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file)]
    calls = {row["setting"]: {} for row in rows if row["variant"] == "call"}
    for row in rows:
        if row["variant"] == "call":
            calls[row["setting"]][row["metric"]] = float(row["value"])
    assert list(calls) == [
        "toy, Stage-1 30 %, vote off, stride 8",
        "toy, Top-p 0.9, vote off, stride 8",
        "toy, Top-p 0.9, skip scale 200, stride 8",
        "toy, Stage-1 60 % to B 40 %, stride 8",
    ]
    assert {row["tokens"] for row in rows} == {"900"}
    assert ("fa2", "toy, dense") in {(row["variant"], row["setting"]) for row in rows}
    # Means over two layers, which the pretended clock gives 2 and 3 ms.
    assert all(metrics["ms"] == 2.5 for metrics in calls.values())
    off, on = calls["toy, Top-p 0.9, vote off, stride 8"], calls["toy, Top-p 0.9, skip scale 200, stride 8"]
    assert on["B_stage1"] == off["B_stage1"] == off["B"] and on["B"] <= off["B"] < 1


def test_a_recorder_stands_for_its_method_in_all_that_is_asked(tmp_path):
    table = tmp_path / "t.yaml"
    table.write_text("[[0.9, 0.8], [0.7, 0.6]]")
    method = CoSA(
        select=Select(p_table=str(table)), skip_scale=100.0, calibration="c.yaml", budget_target=0.2, block_size=64
    )
    recorder = Recorder(method, (0,))
    asked = [
        *(item.name for item in dataclasses.fields(Method)),
        "name",
        "chunkable",
        "chunk_problem",
        "knob",
        "file_fields",
        "features",
    ]
    assert {name: getattr(recorder, name) for name in asked} == {name: getattr(method, name) for name in asked}
    assert recorder.estimator_cells(64, 128) == method.estimator_cells(64, 128)
    assert recorder.warnings(50) == method.warnings(50) != []
    methods = {name for name in vars(Method) if not name.startswith("_") and callable(getattr(Method, name))}
    assert methods <= set(vars(Recorder)), "what the base adds must be passed on"
    recorder.check_model(2, 2)
    with pytest.raises(InputError, match="a table of 4 layers x 6 query heads"):
        Session(build(), recorder)
    with pytest.raises(InputError, match="method.stride"):
        Recorder(CoSA(stride=0), (0,)).validate()


@pytest.mark.parametrize("text", ["minference:vertical_size=40:slash_size=60", "flexprefill:min_budget=128"])
def test_a_recorded_run_is_the_methods(text):
    model, ids, method = build(), prompt(300), from_text(text)
    with Session(model, method) as session:
        expected = session.prefill(ids, keep_from=299)
        budget = session.account().budget.record()
    with Session(model, recorder := Recorder(method, (1,), selections=True)) as session:
        assert torch.equal(session.prefill(ids, keep_from=299), expected)
        assert session.account().budget.record() == budget
    assert recorder.captures[1].k is not None and bool(recorder.captures[1].order) == text.startswith("flex")


@pytest.mark.parametrize(("layers", "expected"), [(30, (5, 14, 24)), (36, (6, 18, 29)), (2, (0, 1))])
def test_layers_are_spread(layers, expected):
    assert spread(layers) == expected
