"""What the kernel benchmarks do, on the CPU with the reference backend: everything but the clock."""

from __future__ import annotations

import csv
import dataclasses

import pytest
import torch
from prefill_kernels import block_attention
from prefill_kernels.bench import AttentionBench, BenchError, KernelBench, attention, kernel, measure
from prefill_kernels.bench.check import check_attention, check_dense, check_selection, every_block
from prefill_kernels.bench.config import WrongResult
from prefill_kernels.bench.inputs import Shape, captured, rotation, synthetic
from prefill_kernels.bench.measure import bisect_scale, budgets, with_scale


def read(bench):
    with bench.rows.path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(bench):
    found = {}
    for row in read(bench):
        found.setdefault((row["bench"], row["variant"], int(row["tokens"]), row["setting"]), {})[row["metric"]] = row
    return found


def value(rows, *key, metric):
    return float(rows[key][metric]["value"])


def test_kernel_rows(bench):
    settings = KernelBench(lengths=(512, 300), variants=("fa2", "osk"), skip_lengths=(512,))
    settings.validate()
    kernel.run(settings, bench)
    rows = table(bench)
    assert {key[1:3] for key in rows if key[0] == "kernel"} == {(v, n) for v in ("fa2", "osk") for n in (512, 300)}
    # 10 causal blocks at 512 tokens; half of the causal ones of a tile, at least one: 1 + 1 + 2 + 2.
    assert value(rows, "kernel", "osk", 512, "budget 50%", metric="B_block") == pytest.approx(6 / 10)
    assert value(rows, "kernel", "osk", 512, "all blocks, vote, none skipped", metric="vote_cost") == 0
    assert value(rows, "kernel", "osk", 512, "all blocks", metric="speedup_fa2") == 1
    flops = 4 * 4 * 10 * 128 * 128 * 32
    assert value(rows, "kernel", "osk", 512, "all blocks", metric="tflops") == pytest.approx(flops / 2e-3 / 1e12, 1e-4)
    dense = 2 * 512 * 512 * 32 * 4 / 2e-3 / 1e12
    assert value(rows, "kernel", "fa2", 512, "dense", metric="tflops") == pytest.approx(dense, 1e-4)
    share = value(rows, "kernel", "osk", 512, "all blocks", metric="share_of_dense")
    assert share == pytest.approx(flops / 2e-3 / 1e12 / dense, 1e-4)
    assert value(rows, "skip", "osk", 512, "none skipped", metric="B_block") == 1
    skipped = rows["skip", "osk", 512, "all but one skipped"]
    assert float(skipped["B_block"]["value"]) == pytest.approx(4 / 10) and float(skipped["B_stage1"]["value"]) == 1
    assert float(skipped["tflops"]["value"]) == pytest.approx(flops / 2 * 1.4 / 2e-3 / 1e12, 1e-4)
    assert all(float(m["rel_err"]["value"]) < 5e-3 for m in rows.values())
    assert {row["unit"] for row in read(bench)} == {"ms", "TF/s", "ratio"}
    assert {row["commit"] for row in read(bench)} == {"abc"} and {row["device"] for row in read(bench)} == {"cpu"}


def test_attention_rows(bench):
    settings = AttentionBench(lengths=(700,), budgets=(0.3,), strides=(8, 16), sigmas=(2.0,), variants=("fa2", "cosa"))
    settings = dataclasses.replace(settings, stage1=0.8, target=0.5)
    settings.validate()
    attention.run(settings, bench)
    rows = table(bench)
    assert [key[3] for key in rows if key[1] == "call"] == [
        "Stage-1 30 %, vote off, stride 8",
        "Stage-1 30 %, vote off, stride 16",
        "Stage-1 80 % to B 50 %, stride 8, sigma 2",
    ]
    stages = {key[1] for key in rows if key[3] == "Stage-1 30 %, vote off, stride 16"}
    assert stages == {"kap", "select", "osk", "call"}
    call = rows["attention", "call", 700, "Stage-1 80 % to B 50 %, stride 8, sigma 2"]
    assert float(call["B"]["value"]) < float(call["B_stage1"]["value"])
    assert {"host_ms", "kap_select_share", "tflops", "speedup_dense", "rel_err"} <= set(call)
    assert {key[3] for key in rows if key[1] == "fa2"} == {"dense", "sigma 2, dense"}, "dense on every kind of input"
    # Proxy and selection took 2 ms each by the pretended clock, and so did the call.
    assert float(call["kap_select_share"]["value"]) == 2


def test_speedups_are_over_fa2_and_over_the_fastest_dense_kernel(bench):
    one = synthetic(Shape(4, 2, 32), 256, 0, device=bench.device, dtype=bench.dtype)
    bench.base = {"fa2": 8.0, "cudnn": 5.0, "flashinfer": 6.0}
    assert bench.speedups(2.0) == {"speedup_fa2": 4.0, "speedup_dense": 2.5}
    assert bench.rates(measure.dense_flops(one), 10.0, one)["share_of_dense"] == 0.5


@pytest.mark.skipif(torch.cuda.is_available(), reason="bfloat16 on the GPU: test_gpu_bench.py")
def test_jumping_and_logical_skipping_in_the_interpreter(bench):
    small = dataclasses.replace(bench, dtype=torch.float16, shape=Shape(2, 1, 64))
    variants = ("fa2", "osk_triton", "logical_triton")
    kernel.run(KernelBench(lengths=(300,), budgets=(0.5,), variants=variants), small)
    rows = table(bench)
    assert value(rows, "kernel", "osk_triton", 300, "budget 50%", metric="gain_of_jumping") == 1
    assert value(rows, "kernel", "logical_triton", 300, "budget 50%", metric="rel_err") < 1e-3


def test_a_dense_kernel_that_cannot_run_is_left_out_and_said(bench, capsys):
    one = synthetic(bench.shape, 256, 0, device=bench.device)
    measure.dense(bench, "kernel", ("fa2", "cudnn", "flashinfer"), [one])
    assert set(bench.base) == {"fa2"}
    errors = capsys.readouterr().err
    assert "cudnn: left out" in errors and "flashinfer: left out" in errors


def test_baseline_that_cannot_run_is_an_error(bench, monkeypatch):
    def fail(one):
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(measure.DENSE_KERNELS, "fa2", fail)
    with pytest.raises(RuntimeError, match="no such kernel"):
        measure.dense(bench, "kernel", ("fa2",), [synthetic(bench.shape, 256, 0, device=bench.device)])


def test_operating_point_that_cannot_be_reached_is_said(bench, capsys):
    settings = AttentionBench(lengths=(300,), budgets=(0.5,), strides=(8,), sigmas=(1.0,), variants=("fa2", "cosa"))
    attention.run(settings, bench)
    assert "300 tokens: the vote reaches B 50.0 %, not the target of 20 %" in capsys.readouterr().err


def test_operating_point_is_reached(bench):
    one = synthetic(bench.shape, 2048, 5, sigma=2.0, device=bench.device)
    plan = bench.select(bench.scores(one, 8), 2048, budget=0.5)
    scale = bisect_scale(bench, [one], [plan], 0.35)
    (tuned,) = with_scale([plan], scale)
    stats = block_attention(one.q, one.kv, tuned, scale=one.scale)[1]
    assert budgets([one], [stats])["B_block"] == pytest.approx(0.35, abs=0.03)


# ------------------------------------------------------------------------------ what is timed is right
@pytest.fixture
def case(bench):
    one = synthetic(bench.shape, 900, 3, sigma=1.5, device=bench.device)
    scores = bench.scores(one, 8)
    plan = bench.select(scores, 900, budget=0.4)
    out, stats = block_attention(one.q, one.kv, plan, scale=one.scale)
    return one, scores, plan, out, stats


def test_right_results_pass(case):
    one, scores, plan, out, stats = case
    assert 0 < check_attention("osk", one, plan, out, stats) < 5e-3
    check_selection("osk", one, scores, plan, 8, {"budget": 0.4})
    everything = every_block(one)
    everything.check()
    assert check_dense("dense", one, block_attention(one.q, one.kv, everything, scale=one.scale)[0]) < 5e-3


def test_dense_output_fails_the_check_of_a_sparse_kernel(case):
    one, _, plan, _, stats = case
    dense = block_attention(one.q, one.kv, every_block(one), scale=one.scale)[0]
    with pytest.raises(WrongResult, match="osk: tile .* away from float32"):
        check_attention("osk", one, plan, dense, stats)


def test_nan_fails(case):
    one, _, plan, out, stats = case
    out[0, -1, -1, 0] = float("nan")
    with pytest.raises(WrongResult):
        check_attention("osk", one, plan, out, stats)


def test_other_counts_fail(case):
    one, _, plan, out, stats = case
    wrong = dataclasses.replace(stats, computed_blocks=stats.computed_blocks - 3)
    with pytest.raises(WrongResult, match="computes other blocks"):
        check_attention("osk", one, plan, out, wrong)


def test_a_tie_in_most_tiles_fails(case):
    one, _, plan, out, stats = case
    tied = dataclasses.replace(stats, computed_blocks=stats.computed_blocks - 1)
    with pytest.raises(WrongResult, match="6 of 6 checked tiles"):
        check_attention("osk", one, plan, out, tied)


def test_wrong_scores_and_wrong_lists_fail(case):
    one, scores, plan, _, _ = case
    with pytest.raises(WrongResult, match="proxy of tile"):
        check_selection("c", one, dataclasses.replace(scores, score=scores.score * 1.1), plan, 8, {"budget": 0.4})
    with pytest.raises(WrongResult, match="lists other blocks"):
        check_selection("c", one, scores, plan, 8, {"budget": 0.6})
    swapped = dataclasses.replace(plan, order=plan.order.clone())
    swapped.order[0, 0, -1, :2] = plan.order[0, 0, -1, :2].flip(0)
    with pytest.raises(WrongResult, match="lists other blocks"):
        check_selection("c", one, scores, swapped, 8, {"budget": 0.4})


def test_inputs_leave_the_cache_behind():
    assert rotation(50 << 20, torch.device("cuda")) == 4
    assert rotation(1 << 30, torch.device("cuda")) == 1
    assert rotation(1, torch.device("cpu")) == 1


# ------------------------------------------------------------------------------ captures
def test_not_a_capture(tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "text.safetensors").write_text("no")
    with pytest.raises(BenchError, match="a readable capture"):
        captured(tmp_path / "text.safetensors", torch.device("cpu"))
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(BenchError, match="a file of evalkit bench capture"):
        captured(tmp_path / "other.safetensors", torch.device("cpu"))
