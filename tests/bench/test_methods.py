"""The whole call of every method on the CPU with the reference backend: everything but the clock."""

from __future__ import annotations

import csv
import dataclasses
import subprocess
import sys

import pytest
import torch
from prefill_kernels import BlockPlan, HeadwisePlan, VerticalSlashPlan, causal_blocks, causal_cells, sparse_attention
from prefill_kernels.bench.check import check_attention
from prefill_kernels.bench.config import BenchError, WrongResult
from prefill_kernels.bench.inputs import from_dense, prefix, synthetic
from prefill_kernels.bench.planned import planned_call
from safetensors.torch import save_file

from evalkit.bench.attention import planner, run
from evalkit.bench.settings import MethodsBench
from evalkit.methods.presets import from_text
from evalkit.methods.random import Random

CPU = torch.device("cpu")


def table(bench):
    found = {}
    with bench.rows.path.open(newline="") as file:
        for row in csv.DictReader(file):
            key = row["bench"], row["variant"], int(row["tokens"]), row["setting"]
            found.setdefault(key, {})[row["metric"]] = float(row["value"])
    return found


def only(rows, variant, kind):
    (metrics,) = (m for key, m in rows.items() if key[1] == variant and key[3].startswith(f"{kind}, "))
    return metrics


# ------------------------------------------------------------------------------ rows
def test_every_default_method_is_measured_on_every_kind_of_inputs(bench, capsys):
    defaults = MethodsBench().variants
    settings = MethodsBench(lengths=(1200,), sigmas=(2.0,), variants=("fa2", *(v for v in defaults[3:] if v != "cosa")))
    settings.validate()
    assert set(defaults) >= {"fa2", "cudnn", "flashinfer", "cosa", "xattention", "flexprefill", "minference", "blasst"}
    run(settings, bench)
    rows = table(bench)
    methods = [key for key in rows if key[1] != "fa2"]
    assert len(methods) == 2 * len(settings.methods()) == 14
    for key in methods:
        metrics = rows[key]
        wanted = {"ms", "plan_ms", "attention_ms", "attention_tflops", "tflops", "share_of_dense", "speedup_fa2"}
        wanted |= {"speedup_dense", "B", "B_stage1", "B_block", "B_stage1_block", "host_ms", "rel_err"}
        assert wanted == set(metrics), "no plan_memory without CUDA"
        assert 0 < metrics["B"] <= metrics["B_stage1"] <= 1 and metrics["rel_err"] < 5e-3
    assert {key[3].partition(", ")[0] for key in methods} == {"normal inputs (flat mass)", "sigma 2"}
    flat, lifted = (only(rows, "xattention", kind) for kind in ("normal inputs (flat mass)", "sigma 2"))
    assert flat["B"] > 0.85 > 0.6 > lifted["B"], "what keeps a share of the mass keeps that share of flat blocks"
    assert only(rows, "cosa:select.rule=budget:select.budget=0.2", "sigma 2")["B"] < 0.35
    assert "minference at 1200 tokens: slash_size x ratio" in capsys.readouterr().err


def test_rates_count_what_the_kernel_and_the_plan_compute(bench):
    tokens = 640
    variants = ("fa2", "xattention:stride=4", "cosa:select.rule=budget:select.budget=0.5")
    run(MethodsBench(lengths=(tokens,), sigmas=(), variants=variants), bench)
    rows = table(bench)
    found = only(rows, variants[1], "normal inputs (flat mass)")
    blocks = found["B_block"] * causal_blocks(0, tokens, 128) * 4
    work = 4 * 128 * 128 * 32 * blocks
    groups = tokens // 4
    scoring = 2 * 32 * 4 * 4 * groups * (groups + 1) / 2
    assert found["attention_tflops"] == pytest.approx(work / 2e-3 / 1e12, 1e-3)
    assert found["tflops"] == pytest.approx((work + scoring) / 2e-3 / 1e12, 1e-3)
    dense = 2 * tokens * tokens * 32 * 4 / 2e-3 / 1e12
    assert found["share_of_dense"] == pytest.approx(found["tflops"] / dense, 1e-3)
    # 1, 1, 2, 2, 3 of 5 tiles' blocks, and half of the even ones rounded up.
    assert only(rows, variants[2], "normal inputs (flat mass)")["B_block"] == pytest.approx(9 / 15)


def test_a_method_of_small_tiles_is_counted_in_its_own_blocks(bench):
    one = synthetic(bench.shape, 500, 1, sigma=1.0, device=CPU)
    bench.base = {"fa2": 2.0}
    method = from_text("minference:vertical_size=30:slash_size=50")
    planned_call(bench, planner("minference", method, "torch"), [one], "sigma 1")
    found = only(table(bench), "minference", "sigma 1")
    plan = planner("minference", method, "torch").plan(one)
    stats = sparse_attention(one.q, one.kv, plan, scale=one.scale)[1]
    assert found["B"] == pytest.approx(int(stats.computed_cells.sum()) / causal_cells(0, 500) / 4, 1e-4)
    assert found["B_block"] == pytest.approx(int(stats.computed_blocks.sum()) / causal_blocks(0, 500, 64) / 4, 1e-4)
    executed = 4 * 64 * 64 * 32 * int(stats.computed_blocks.sum())
    assert found["attention_tflops"] == pytest.approx(executed / 2e-3 / 1e12, 1e-3)


def test_a_dense_answer_counts_every_cell(bench, capsys):
    run(MethodsBench(lengths=(700,), sigmas=(), variants=("fa2", "flexprefill")), bench)
    found = only(table(bench), "flexprefill", "normal inputs (flat mass)")
    assert found["B"] == found["B_block"] == 1 and found["tflops"] == found["attention_tflops"]
    assert "flexprefill at 700 tokens: flexprefill ran densely" in capsys.readouterr().err


def test_a_method_that_does_not_fit_is_left_out_and_said(bench, capsys, monkeypatch):
    def full(self, q, kv, context):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("evalkit.methods.xattention.XAttention.plan", full)
    run(MethodsBench(lengths=(256,), sigmas=(), variants=("fa2", "xattention", "blasst")), bench)
    assert {key[1] for key in table(bench)} == {"fa2", "blasst"}
    assert "xattention at 256 tokens, normal inputs (flat mass): left out" in capsys.readouterr().err


def test_captured_layers_are_measured_whole_and_by_their_first_tokens(bench, tmp_path, monkeypatch):
    g = torch.Generator().manual_seed(0)
    layers = {}
    for layer in (3, 7):
        for name, heads in (("q", 4), ("k", 2), ("v", 2)):
            layers[f"layer.{layer}.{name}"] = torch.randn(900, heads, 32, generator=g).bfloat16()
    path = str(tmp_path / "c.safetensors")
    scaling = '{"3": 0.2, "7": 0.2}'
    save_file(layers, path, {"format": "prefill-capture-1", "model": "toy", "scaling": scaling})
    seen, plan = set(), Random.plan

    def spy(self, q, kv, context):
        seen.add((context.layer, context.prompt_len, context.scale))
        return plan(self, q, kv, context)

    monkeypatch.setattr(Random, "plan", spy)
    settings = MethodsBench(inputs=path, lengths=(384, 4096), variants=("fa2", "random:budget=0.4"))
    settings.validate()
    run(settings, bench)
    assert seen == {(layer, tokens, 0.2) for layer in (3, 7) for tokens in (384, 900)}
    rows = table(bench)
    assert {(key[1], key[2]) for key in rows} == {(v, n) for v in ("fa2", "random:budget=0.4") for n in (900, 384)}
    assert all(key[3] == "toy, dense" for key in rows if key[1] == "fa2")
    assert all(key[3] == "toy, budget=0.4 seed=0" for key in rows if key[1] != "fa2")
    assert {m["ms"] for m in rows.values()} == {2.5}, "mean of two layers, 2 and 3 ms by the pretended clock"


def test_the_first_tokens_of_inputs():
    whole = from_dense(*(torch.randn(1, 300, heads, 16) for heads in (4, 2, 2)), 0.3, 1, "toy", 5)
    first = prefix(whole, 200)
    assert (first.tokens, first.scale, first.name, first.layer) == (200, 0.3, "toy", 5)
    for a, b in ((first.q, whole.q), (first.k, whole.k), (first.v, whole.v)):
        assert torch.equal(a, b[:, :, :200])
    assert torch.equal(first.kv.gather()[0], first.k) and torch.equal(first.kv.gather()[1], first.v)


# ------------------------------------------------------------------------------ what is timed is what is planned
LISTS = {
    "columns and diagonals": "minference:vertical_size=40:slash_size=60",
    "tiles of 128": "minference:vertical_size=40:slash_size=60:block_size=128",
    "whole windows": "minference:vertical_size=40:slash_size=60:execution=block",
    "no mask": "spargeattn:block_size=64",
    "a pattern a head": None,
}
PATTERNS = [["vertical_slash", 40, 60], ["block_sparse", 3], ["a_shape", 16, 100], ["block_sparse", 2]]


@pytest.fixture(params=LISTS)
def case(request, bench, tmp_path):
    text = LISTS[request.param]
    if text is None:
        path = tmp_path / "table.yaml"
        path.write_text(f"patterns: [{PATTERNS}]\n")
        text = f"minference:table={path}"
    one = synthetic(bench.shape, 701, 3, sigma=1.5, device=CPU)
    plan = planner("m", from_text(text), "torch").plan(one)
    kinds = {"a pattern a head": HeadwisePlan, "no mask": BlockPlan}
    assert isinstance(plan, kinds.get(request.param, VerticalSlashPlan))
    out, stats = sparse_attention(one.q, one.kv, plan, scale=one.scale)
    return one, plan, out, stats


def test_right_results_pass(case):
    one, plan, out, stats = case
    assert 0 < check_attention("m", one, plan, out, stats) < 1e-3 + 5e-3 * (out.dtype == torch.bfloat16)


def test_dense_output_fails(case):
    one, plan, _, stats = case
    dense = torch.nn.functional.scaled_dot_product_attention(
        one.q, one.k, one.v, is_causal=True, scale=one.scale, enable_gqa=True
    )
    with pytest.raises(WrongResult, match="m: tile .* away from float32"):
        check_attention("m", one, plan, dense, stats)


@pytest.mark.parametrize("name", ["visited_cells", "computed_cells", "visited_blocks", "computed_blocks"])
def test_other_counts_fail(case, name):
    one, plan, out, stats = case
    changed = getattr(stats, name).clone()
    changed[0, -1, -1] += 3
    with pytest.raises(WrongResult, match="computes other blocks"):
        check_attention("m", one, plan, out, dataclasses.replace(stats, **{name: changed}))


def test_a_missing_diagonal_fails(bench):
    one = synthetic(bench.shape, 701, 3, sigma=1.5, device=CPU)
    plan = planner("m", from_text("minference:vertical_size=40:slash_size=60"), "torch").plan(one)
    fewer = dataclasses.replace(plan, slashes=torch.cat([plan.slashes[..., 1:], plan.slashes[..., :1] * 0 - 1], -1))
    fewer.check()
    with pytest.raises(WrongResult):
        check_attention("m", one, plan, *sparse_attention(one.q, one.kv, fewer, scale=one.scale))


def test_a_wrong_head_of_any_part_fails(bench, tmp_path):
    """The heads looked at are the first, the last, and one of each part."""
    path = tmp_path / "table.yaml"
    patterns = [["block_sparse", 2], ["a_shape", 16, 100], ["vertical_slash", 40, 60], ["block_sparse", 3]]
    path.write_text(f"patterns: [{patterns}]\n")
    one = synthetic(bench.shape, 701, 3, sigma=1.5, device=CPU)
    plan = planner("m", from_text(f"minference:table={path}"), "torch").plan(one)
    out, stats = sparse_attention(one.q, one.kv, plan, scale=one.scale)
    for head in (0, 1, 3):
        wrong = out.clone()
        wrong[:, head] = out[:, 2]
        with pytest.raises(WrongResult):
            check_attention("m", one, plan, wrong, stats)


def test_an_unsound_plan_is_not_timed(bench, monkeypatch):
    plan = Random.plan

    def twice(self, q, kv, context):
        made = plan(self, q, kv, context)
        order = made.order.clone()
        order[..., -1, 1] = order[..., -1, 0]
        return dataclasses.replace(made, order=order)

    monkeypatch.setattr(Random, "plan", twice)
    with pytest.raises(ValueError, match="listed twice"):
        run(MethodsBench(lengths=(512,), sigmas=(), variants=("fa2", "random")), bench)


# ------------------------------------------------------------------------------ settings
WRONG = {
    ("fa2", "xatention"): "variants='xatention': did you mean xattention",
    ("fa2", "xattention:strid=4"): "variants='xattention:strid=4': method.strid='4': unknown setting; did you mean str",
    ("fa2", "xattention:stride=5"): "method.stride=5: one of 4, 8, 16",
    ("xattention",): "must hold fa2",
    ("fa2", "blasst", "blasst"): "each variant once",
}


@pytest.mark.parametrize("variants", WRONG)
def test_bad_variants(variants):
    with pytest.raises(BenchError) as error:
        MethodsBench(variants=variants).validate()
    assert WRONG[variants] in str(error.value)


def test_a_table_is_for_captured_inputs_alone(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text("[[0.9, 0.9]]")
    (tmp_path / "c.safetensors").write_text("")
    settings = MethodsBench(variants=("fa2", f"xattention:threshold_table={path}"))
    with pytest.raises(BenchError, match="threshold_table only with inputs="):
        settings.validate()
    dataclasses.replace(settings, inputs=str(tmp_path / "c.safetensors")).validate()


def test_methods_need_torch_alone():
    code = (
        "import sys\n"
        "for name in ('pandas', 'hydra', 'omegaconf', 'transformers', 'lm_eval', 'datasets', 'yaml', 'safetensors',\n"
        "             'tabulate', 'scipy', 'matplotlib', 'rich'): sys.modules[name] = None\n"
        "from evalkit.bench import attention\n"
        "from evalkit.bench.settings import MethodsBench\n"
        "from evalkit.methods import METHODS\n"
        "settings = MethodsBench(variants=('fa2', *METHODS, 'cosa:select.p=0.5'))\n"
        "settings.validate()\n"
        "print(len(settings.methods()) == len(list(METHODS)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
