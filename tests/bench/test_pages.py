"""PageWeaver's benchmark on the CPU: three paths, counts, checks that must fail, the native path, overlaps."""

from __future__ import annotations

import csv
import functools
import importlib
import json
import types
from dataclasses import replace

import pytest
import torch
from prefill_kernels import (
    PagedKV,
    PagePlan,
    attend_pages,
    page_attention,
    prepare_unions,
    quantize_kv,
    search_unions,
    sparse_attention,
    union_attention,
)
from prefill_kernels.bench import PageBench, native, pages, paired, planned
from prefill_kernels.bench.config import NATIVE_PATHS, BenchError, WrongResult
from prefill_kernels.bench.page_inputs import (
    Selection,
    captured_pages,
    overlap,
    page_inputs,
    searched_pages,
    synthetic_pages,
)
from safetensors.torch import save_file

from evalkit.bench import attention
from evalkit.bench.settings import MethodsBench

CPU = torch.device("cpu")
bench_inputs = importlib.import_module("prefill_kernels.bench.page_inputs")
regroup, unions = (importlib.import_module(f"prefill_kernels.{name}") for name in ("regroup", "unions"))
SMALL = PageBench(
    lengths=(2048,), captures=(), named=("700/3", "700/5"), queries=200, heads=16, dim=16, windows=(64,),
    shared=(0.0, 1.0), clusters=4, page_size=32, top_k=5, rounds=1, capacity_lengths=(),
)  # fmt: skip


@pytest.fixture
def capture(tmp_path):
    """Two captured layers of 700 tokens and two KV heads."""
    path = tmp_path / "toy.safetensors"
    g = torch.Generator().manual_seed(0)
    own = torch.arange(700) // 32
    tensors = {}
    for layer in (3, 5):
        drawn = (torch.rand(700, 2, 4, generator=g) * (own[:, None, None] + 1)).short()
        tensors[f"layer.{layer}.pages"] = torch.cat([drawn, own[:, None, None].expand(-1, 2, 1).short()], -1)
        tensors[f"layer.{layer}.positions"] = torch.arange(700, dtype=torch.int32)
    facts = {"format": "prefill-capture-1", "model": "toy", "scaling": json.dumps({"3": 0.1, "5": 0.1})}
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, {**facts, "tokens": "700", "page_size": "32"})
    return path


def read(bench):
    found = {}
    with bench.rows.path.open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault((row["variant"], row["tokens"], row["setting"]), {})[row["metric"]] = float(row["value"])
    return found


def test_rows_of_a_capture_and_their_geometric_mean(bench, capture):
    settings = replace(SMALL, captures=(str(capture),), shared=())
    settings.validate()
    pages.run(settings, bench)
    rows = read(bench)
    shape = "last 200 queries, synthetic Q, K, V, 16 heads on 1 KV head, d 16, page 32, top 5"
    for layer in (3, 5):
        for kv in ("bf16 KV", "fp8 KV"):
            setting = f"toy 700/{layer}, {shape}, {kv}, torch"
            original, ready, online = (rows[v, "700", setting] for v in ("original", "precomputed_64", "online_64"))
            assert original["regroup_ms"] == ready["regroup_ms"] == 0 < online["regroup_ms"]
            assert online["preparation_share"] == (online["regroup_ms"] + online["union_ms"]) / online["ms"]
            assert ready["mean_union"] == online["mean_union"] < original["mean_union"]
            assert online["useful_share"] > original["useful_share"]
            # The clock numbers the calls of a round: original, precomputed, online, then the attention of each order.
            assert (original["ms"], ready["ms"], online["ms"]) == (2, 3, 4)
            assert (original["attention_ms"], ready["attention_ms"], online["attention_ms"]) == (5, 6, 6)
            assert ready["gain"] == -0.5 and online["gain"] == -1 and "gain_low" not in online, "one round"
            assert online["host_ms"] > 0 and "graph_ms" not in online
            assert online["tflops"] < original["tflops"] / 2, "twice the time, and fewer rows"
            assert online["useful_tflops"] == pytest.approx(original["useful_tflops"] / 2, rel=1e-3)
            assert ("quantization_err" in online) == (kv == "fp8 KV")
            assert online["rel_err"] < pages.TOLERANCE["fp8" if kv == "fp8 KV" else "model"]
    union = {key[2]: row for key, row in rows.items() if key[0] == "kv_union"}
    assert len(union) == 2 * 2 * 2
    for setting, row in union.items():
        assert ("quantization_err" in row) == (", fp8 KV, " in setting) != (", bf16 KV, " in setting)
    partials = {setting.rsplit(", ", 1)[1]: row["partials"] for setting, row in union.items()}
    assert partials["float32 partials"] > 1.5 * partials["bfloat16 partials"] > 0
    mean = rows["online_64", "0", "geometric mean of 2 captures, bf16 KV, torch"]
    assert mean == {"gain": -1}, "no FlashInfer here"


def test_without_named_captures_there_is_no_geometric_mean(bench, capture):
    settings = replace(SMALL, captures=(str(capture),), shared=(), kv_dtypes=("model",), named=(), kv_union=False)
    settings.validate()
    pages.run(settings, bench)
    assert {key[1] for key in read(bench)} == {"700"}
    for wrong in (("8192",), ("700/3", "700/3")):
        with pytest.raises(BenchError, match="named=.*captures as <tokens>/<layer>, or none for no geometric mean"):
            replace(settings, named=wrong).validate()


def test_counts_are_those_of_the_unions(bench, capture):
    selection = captured_pages(capture, 1)[0].last(200)
    case = pages.case_of(SMALL, bench, selection, "model", {})
    bench.shape = None
    plan = case.plan(64)
    counts = pages.count(pages.prepare_unions(plan, pages.regroup_queries(plan)))
    _, stats = page_attention(case.first.q, case.first.kv, plan, scale=case.first.scale)
    assert counts == pages.Counts(
        int(stats.member_pages.sum()), int(stats.union_pages.sum()), int(stats.half_pages.sum()),
        int(stats.imbalance.sum()), stats.groups,
    )  # fmt: skip
    assert overlap(selection.pages[:, None], selection.positions, 32).support == pytest.approx(counts.members / 200)


@pytest.mark.parametrize("kv_dtype", ["model", "fp8"])
def test_a_wrong_result_is_not_timed(bench, capture, monkeypatch, kv_dtype):
    def wrong(q, kv, plan, unions, *, scale, backend):
        return union_attention(q, kv, plan, unions, scale=1.5 * scale, backend=backend)

    monkeypatch.setattr(pages, "union_attention", wrong)
    settings = replace(SMALL, captures=(str(capture),), kv_dtypes=(kv_dtype,))
    with pytest.raises(WrongResult, match="original at 700 tokens, toy 700/3"):
        pages.run(settings, bench)
    assert read(bench) == {}


def test_dense_output_fails_the_check(bench, capture):
    selection = captured_pages(capture, 0)[0].last(200)
    case = pages.case_of(SMALL, bench, selection, "model", {})
    every = torch.arange(22, dtype=torch.int32).expand(200, -1).contiguous()
    dense = replace(selection, pages=every).plan(CPU)
    out = attend_pages(case.first.q, case.first.kv, dense, case.first.scale)
    with pytest.raises(WrongResult, match="away from float32"):
        pages.check_pages("dense", case, case.plan(), out)


def test_a_backend_that_cannot_run_is_left_out(bench, capture, capsys):
    settings = replace(SMALL, captures=(str(capture),), backends=("hopper", "torch"), kv_dtypes=("model",), shared=())
    pages.run(settings, bench)
    assert "hopper, bf16 KV: left out, it cannot run here" in capsys.readouterr().err
    assert {key[2].rsplit(", ", 1)[1] for key in read(bench) if key[0] == "original"} == {"torch"}


# --------------------------------------------------------------------------------------------------------- native path
def test_requests_list_each_querys_pages_with_the_partial_one_last():
    g = torch.Generator().manual_seed(1)
    positions = torch.arange(90, 130, dtype=torch.int32)
    ids = (torch.rand(40, 6, generator=g) * 12).int() - 1  # -1, and pages beyond the causal ones
    ids[:, 0] = 1
    selection = Selection("x", ids, positions, 130, 16, "x")
    table = torch.randperm(30, generator=g)[None, :9].int()
    requests = native.page_requests(selection.plan(CPU), table)
    assert requests.indptr.dtype == requests.indices.dtype == requests.last_page_len.dtype == torch.int32
    for i, position in enumerate(positions.tolist()):
        wanted = sorted({p for p in ids[i].tolist() if 0 <= p <= position // 16})
        mine = requests.indices[requests.indptr[i] : requests.indptr[i + 1]].tolist()
        assert mine == [int(table[0, p]) for p in wanted]
        partial = position % 16 + 1 if wanted[-1] == position // 16 else 16
        assert int(requests.last_page_len[i]) == partial
    with pytest.raises(ValueError, match="a query selects none"):
        native.page_requests(replace(selection, pages=torch.full((40, 2), -1, dtype=torch.int32)).plan(CPU), table)


class Wrapper:
    """FlashInfer's wrappers, in float32: a request's query attends to all tokens of its pages."""

    made: list = []
    prefill = False

    def __init__(self, workspace, layout, *, backend, use_tensor_cores=None):
        assert layout == "NHD" and use_tensor_cores is (None if self.prefill else True)
        if self.prefill and backend == "fa3":
            raise RuntimeError("no such kernel\nand more")
        self.backend, self.plans = backend, 0
        type(self).made.append(self)

    def plan(
        self, *given, q_data_type, kv_data_type, sm_scale, o_data_type=None, causal=None
    ):  # fmt: skip
        if self.prefill:
            assert causal and given[0].tolist() == list(range(len(given[0])))
            given = given[1:]
        indptr, indices, last, heads, kv_heads, dim, page = given
        self.plans += 1
        self.given = indptr.tolist(), indices.tolist(), last.tolist()
        self.shape, self.scale, self.dtypes = (heads, kv_heads, dim, page), sm_scale, (q_data_type, kv_data_type)
        self.out = o_data_type or q_data_type

    def run(self, q, kv, *scales, k_scale=1.0, v_scale=1.0):
        indptr, indices, last = self.given
        assert q.shape == (len(last), self.shape[0], self.shape[2]) and self.dtypes == (q.dtype, kv[0].dtype)
        q_scale = torch.ones(self.shape[0])
        if q.dtype == torch.float8_e4m3fn:
            q_scale, k_scale, v_scale = scales
            assert q_scale.shape == (self.shape[0],) and k_scale.shape == v_scale.shape == (1,)
        pages = [indices[a:b] for a, b in zip(indptr, indptr[1:], strict=False)]
        seen = [(len(mine) - 1) * self.shape[3] + tail for mine, tail in zip(pages, last, strict=True)]
        return attended(q.float() * q_scale[:, None], kv, pages, seen, self.scale * k_scale, v_scale).to(self.out)


def attended(q, kv, pages, seen, scale, v_scale):
    out = torch.empty(q.shape)
    for i, (mine, tokens) in enumerate(zip(pages, seen, strict=True)):
        k, v = (x.float()[torch.tensor(mine), :, 0].flatten(0, 1)[:tokens] for x in kv)
        out[i] = (q[i] @ k.T * scale).softmax(-1) @ v * v_scale
    return out


def xqa(q, kv, workspace, tables, lengths, longest, *, bmm1_scale, bmm2_scale, kv_layout, backend):
    assert kv_layout == "NHD" and backend == "xqa" and int(lengths.max()) <= longest == tables.shape[1] * kv[0].shape[1]
    assert tables.dtype == lengths.dtype == torch.int32 and not workspace.any()
    return attended(q.float(), kv, tables.tolist(), lengths.tolist(), bmm1_scale, bmm2_scale).to(q.dtype)


@pytest.fixture
def flashinfer(monkeypatch):
    """A FlashInfer of this file's wrappers; returns those that were made."""
    made: list = []
    decode = type("Decode", (Wrapper,), {"made": made})
    prefill = type("Prefill", (Wrapper,), {"made": made, "prefill": True})
    module = types.SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=decode, BatchPrefillWithPagedKVCacheWrapper=prefill
    )
    modules = __import__("sys").modules
    monkeypatch.setitem(modules, "flashinfer", module)
    monkeypatch.setitem(modules, "flashinfer.decode", types.SimpleNamespace(trtllm_batch_decode_with_kv_cache=xqa))
    monkeypatch.setattr(native, "WORKSPACE", 16)
    return made


class Clock:
    """Milliseconds by what a call runs: each way through FlashInfer its own, one for everything else."""

    def __init__(self, times, other):
        self.times, self.other = times, other

    def __call__(self, calls):
        return [self.of(call) for call in calls]

    def of(self, call):
        call()
        path = getattr(getattr(call, "func", None), "__self__", None)
        return self.times[path.precision, path.name] if isinstance(path, native.NativePath) else self.other


TIMES = {
    ("bf16", "decode:fa2"): 5.0, ("bf16", "prefill:fa2"): 4.0, ("bf16", "decode:fa3"): 3.0, ("bf16", "decode:xqa"): 7.0,
    ("fp8", "decode:fa2"): 8.0, ("fp8", "prefill:fa2"): 9.0, ("fp8", "decode:xqa"): 6.0,
    ("fp8", "decode:fa3-fp8q"): 6.5,
}  # fmt: skip


def test_the_fastest_native_path_of_each_precision_is_compared(bench, capture, flashinfer, monkeypatch, capsys):
    class Named(native.NativePath):
        def __init__(self, plan, kv, *, path, **rest):
            self.name, self.precision = path, plan.kv_dtype.replace("model", "bf16")
            super().__init__(plan, kv, path=path, **rest)

    monkeypatch.setattr(pages, "NativePath", Named)
    bench.timed = Clock(TIMES, 1.5)
    assert SMALL.native_backends == NATIVE_PATHS, "FP8 queries are in the default search"
    settings = replace(SMALL, captures=(str(capture),), shared=(), kv_union=False, named=("700/3",), kv_head=0)
    settings.validate()
    pages.run(settings, bench)
    told = capsys.readouterr().err
    assert "flashinfer prefill:fa3, bf16 KV: left out, it cannot run here (no such kernel)" in told
    assert "flashinfer decode:fa3, fp8 KV: left out, it cannot run here (fa3 takes FP8 keys with FP8 queries" in told
    assert "flashinfer decode:fa3-fp8q, bf16 KV: left out" in told
    rows = read(bench)
    for precision, best in (("bf16", "decode:fa3"), ("fp8", "decode:xqa")):
        mine = {key: row for key, row in rows.items() if f"{precision} KV" in key[2]}
        found = {key[0].partition(" ")[2]: row for key, row in mine.items() if key[0].startswith("flashinfer ")}
        assert {name: row["ms"] for name, row in found.items()} == {
            name: ms for (kind, name), ms in TIMES.items() if kind == precision
        }
        chosen = [(key, row) for key, row in mine.items() if key[0] == "flashinfer"]
        assert len(chosen) == 2
        for key, row in chosen:
            assert key[2].endswith(f", {precision} KV, fastest of 4: {best}")
            assert row["ms"] == min(row["ms"] for row in found.values()) and row["host_plan_ms"] > 0 < row["host_ms"]
        for name, row in found.items():
            assert row["rel_err"] < (5e-2 if name == "decode:fa3-fp8q" else 5e-3), name
            assert ("quantization_err" in row) == (precision == "fp8")
        online = next(row for key, row in mine.items() if key[0] == "online_64" and key[1] == "700")
        assert online["speedup_flashinfer_bf16"] == online["speedup_flashinfer"] == 2 < 4
        assert online["speedup_flashinfer_fp8"] == 4
        assert online["break_even_native_preparation"] == 0.5, "3 ms, of which the attention takes 1.5"
        assert online["break_even_native_tflops"] == online["useful_tflops"]
    mean = rows["online_64", "0", "geometric mean of 1 captures, fp8 KV, torch"]
    assert mean == {"speedup_flashinfer": 2, "speedup_flashinfer_bf16": 2, "speedup_flashinfer_fp8": 4, "gain": 0}


def test_a_native_path_that_computes_something_else_is_left_out(bench, capture, flashinfer, monkeypatch, capsys):
    def wrong(self, queries, *pages):
        return 2 * run(self, queries, *pages)

    run = native.NativePath.run
    monkeypatch.setattr(native.NativePath, "run", wrong)
    pages.run(replace(SMALL, captures=(str(capture),), shared=(), kv_union=False, windows=()), bench)
    assert {key[0] for key in read(bench)} == {"original"}
    assert "flashinfer decode:fa2, bf16 KV: left out" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["decode:fa2", "prefill:fa2", "decode:xqa", "decode:fa3-fp8q"])
def test_planned_requests_in_fp8_use_the_caches_scales(flashinfer, path):
    selection = synthetic_pages(640, 64, page_size=32, top_k=4, shared=0.5, cluster=2, seed=0)
    one = page_inputs(selection, heads=4, kv_heads=1, dim=16, seed=0, device=CPU, dtype=torch.float32)
    plan, kv = selection.plan(CPU), quantize_kv(one.kv)
    made = native.NativePath(plan, kv, heads=4, scale=one.scale, dtype=torch.float32, path=path)
    near = {"rtol": 1e-4, "atol": 1e-5} if "fp8q" not in path else {"rtol": 0.1, "atol": 0.05}
    expected = attend_pages(one.q, kv.dequantize(), plan, one.scale)
    torch.testing.assert_close(made(one.q, kv.k_pages, kv.v_pages.contiguous()), expected, **near)
    made.replan()
    torch.testing.assert_close(made(one.q, kv.k_pages, kv.v_pages.contiguous()), expected, **near)
    assert [wrapper.plans for wrapper in flashinfer] == ([] if "xqa" in path else [2])


# ------------------------------------------------------------------------------------------------------------- in turn
def test_the_search_is_within_every_timed_online_call(bench, capture, monkeypatch):
    searches, runs = [0], {}
    search = regroup._regroup_torch

    def counted(plan):
        searches[0] += 1
        return search(plan)

    def timed(calls):
        for call in calls:
            for _ in range(3):
                before = searches[0]
                call()
                runs.setdefault(len(calls), []).append(searches[0] - before)
        return [1.0] * len(calls)

    monkeypatch.setattr(regroup, "_regroup_torch", counted)
    bench.timed = timed
    settings = replace(SMALL, kv_dtypes=("model",), rounds=2)
    selection = captured_pages(capture, 0)[0].last(200)
    pages.measure_paths(settings, pages.case_of(settings, bench, selection, "model", {}), "torch")
    # Original, precomputed, online, and the attention of both orders; three runs each, two rounds.
    assert runs[5] == 2 * (3 * [0] + 3 * [0] + 3 * [1] + 6 * [0])


def test_unions_are_prepared_within_every_timed_call(bench, capture, monkeypatch):
    prepared, runs = [0], {}
    prepare = unions._unions_torch

    def counted(plan, ids):
        prepared[0] += 1
        return prepare(plan, ids)

    def timed(calls):
        for call in calls:
            before = prepared[0]
            call()
            runs.setdefault(len(calls), []).append(prepared[0] - before)
        return [1.0] * len(calls)

    monkeypatch.setattr(unions, "_unions_torch", counted)
    bench.timed = timed
    settings = replace(SMALL, kv_dtypes=("model",), rounds=2)
    selection = captured_pages(capture, 0)[0].last(200)
    pages.measure_paths(settings, pages.case_of(settings, bench, selection, "model", {}), "torch")
    # Original, precomputed and online order each prepare their own; the attention of both orders prepares none.
    assert runs[5] == 2 * [1, 1, 1, 0, 0]


@pytest.mark.parametrize(("kv_dtype", "allowed", "refused"), [("model", 0.008, 0.012), ("fp8", 0.04, 0.06)])
def test_how_far_from_float32_a_result_may_be(bench, capture, kv_dtype, allowed, refused):
    selection = captured_pages(capture, 0)[0].last(200)
    case = pages.case_of(SMALL, bench, selection, kv_dtype, {})
    exact = attend_pages(case.first.q.float(), case.caches[0], case.plan(), case.first.scale)
    errors = pages.check_pages("near", case, case.plan(), exact * (1 + allowed))
    assert errors["rel_err"] == pytest.approx(allowed, rel=1e-3)
    with pytest.raises(WrongResult, match="far: 0.0.* away from float32"):
        pages.check_pages("far", case, case.plan(), exact * (1 + refused))


@pytest.mark.parametrize(("l2", "count"), [(1, 1), (1000, 1), (1001, 2), (3999, 4), (4001, 5)])
def test_inputs_taken_in_turn_are_together_as_large_as_the_cache(monkeypatch, l2, count):
    """On a CUDA device; tensors there are pretended. One input has 200 + 300 + 500 bytes."""

    def on_a_gpu(numel, size):
        return types.SimpleNamespace(
            numel=lambda: numel, element_size=lambda: size, device=types.SimpleNamespace(type="cuda")
        )

    one = types.SimpleNamespace(
        q=on_a_gpu(100, 2), kv=types.SimpleNamespace(k_pages=on_a_gpu(75, 4), v_pages=on_a_gpu(500, 1))
    )
    monkeypatch.setattr(bench_inputs, "L2_BYTES", l2)
    assert bench_inputs.rotation(one) == count
    one.q.device.type = "cpu"
    assert bench_inputs.rotation(one) == 1


def test_every_input_of_the_rotation_is_another_and_called(bench, capture, monkeypatch):
    monkeypatch.setattr(pages, "rotation", lambda one: 3)
    calls = []
    bench.timed = lambda given: calls.append(len(given)) or [1.0] * len(given)
    settings = replace(SMALL, kv_dtypes=("fp8",), host=False)
    case = pages.case_of(settings, bench, captured_pages(capture, 0)[0].last(200), "fp8", {})
    assert len({float(one.q.float().sum()) for one in case.inputs}) == len(case.caches) == 3
    assert len({float(kv.k_pages.float().sum()) for kv in case.caches}) == 3
    pages.measure_paths(settings, case, "torch")
    assert calls[-1] == 3 * 5, "three paths and the attention of two orders, on each input"


def test_gains_are_paired_by_round(bench, capture):
    drift = iter([1.0, 3.0, 1.5, 2.0, 1.2, 9.0, 1.1])

    def timed(calls):
        for call in calls:
            call()
        if len(calls) != 5:
            return [0.05] * len(calls)
        now = next(drift)
        return [now * ms for ms in (1.0, 0.9, 0.95 if now < 9 else 2.0, 0.9, 0.8)]

    bench.timed = timed
    settings = replace(SMALL, kv_dtypes=("model",), rounds=7, host=False)
    selection = captured_pages(capture, 0)[0].last(200)
    case = pages.case_of(settings, bench, selection, "model", {"model": 3.0})
    found = pages.measure_paths(settings, case, "torch")["online_64"]
    assert found["gain"] == pytest.approx(0.05), "drift of the device, and one bad round, leave it"
    assert (found["gain_low"], found["gain_high"]) == (pytest.approx(-1), pytest.approx(0.05))
    assert found["ms"] == pytest.approx(1.5 * 0.95)
    # 1.5 ms originally, attention 1.35 and then 1.2; the search costs 0.05 ms more.
    assert found["break_even_preparation"] == pytest.approx(0.3 / 1.5)
    assert found["break_even_attention_speed"] == pytest.approx(0.15 / 0.05)
    assert found["break_even_native_preparation"] == pytest.approx(1.8 / 3)


def test_ways_are_timed_in_turn_and_inputs_rotate(bench):
    seen = []
    bench.timed = lambda calls: [call() for call in calls]

    def call(way, item):
        seen.append((way, item))
        return float(len(seen))

    groups = {way: [functools.partial(call, way, item) for item in range(3)] for way in "ab"}
    assert bench.in_turn(groups, 2) == {"a": [2, 8], "b": [5, 11]}
    assert seen == 2 * [(way, item) for way in "ab" for item in range(3)]


def test_spreads():
    assert paired.spread([3, 1, 2]) == paired.Spread(2, None), "three values cannot say it"
    assert paired.spread([5, 1, 2, 3, 4, 6]) == paired.Spread(3.5, (1, 6))
    assert paired.spread(list(range(9))) == paired.Spread(4, (1, 7))
    assert paired.spread(list(range(15))).interval == (3, 11)
    assert paired.saved([4, 2], [2, 1]).metrics("gain") == {"gain": 0.5}
    assert paired.faster([4] * 6, [2] * 6).metrics("x") == {"x": 1, "x_low": 1, "x_high": 1}


# ---------------------------------------------------------------------------------------------------------- capacities
def test_larger_bitmaps_regroup_longer_contexts(bench, capsys):
    settings = replace(SMALL, captures=(), shared=(), capacities=(32, 96), capacity_lengths=(2048, 4096))
    settings.validate()
    pages.run(settings, bench)
    rows = {
        (key[0], key[1], "bitmaps of 96 pages" in key[2]): row
        for key, row in read(bench).items()
        if "shared 0.75" in key[2]
    }
    assert rows["online_64", "2048", True]["regroup_ms"] > 0 and "gain" in rows["online_64", "2048", True]
    for tokens, large in (("2048", False), ("4096", False), ("4096", True)):
        assert rows["online_64", tokens, large] == {"regrouped": 0} and ("original", tokens, large) in rows
    assert "128 pages are beyond the capacity: not regrouped" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- overlaps
def test_synthetic_overlap_is_what_was_asked_for():
    make = lambda shared: synthetic_pages(4096, 512, page_size=32, top_k=8, shared=shared, cluster=8, seed=1)  # noqa: E731
    alone, joined = make(0.0), make(1.0)
    for one in (alone, joined):
        assert one.pages.shape == (512, 8) and (one.pages[:, 0] == 0).all()
        assert torch.equal(one.pages[:, -1], one.positions // 32) and one.positions[-1] == 4095
        one.plan(CPU, regroup=64).check()
    # Eight interleaved clusters: a window of 64 queries holds one group of each, with one pool of six pages.
    plan = joined.plan(CPU, regroup=64)
    found = pages.count(pages.prepare_unions(plan, pages.regroup_queries(plan)))
    assert found.unions / found.groups <= 8 + 2
    base = pages.count(pages.prepare_unions(plan, pages.regroup_queries(joined.plan(CPU))))
    assert base.unions / base.groups > 30
    with pytest.raises(ValueError, match="tokens=512: 5 pages to choose from"):
        synthetic_pages(512, 300, page_size=32, top_k=8, shared=0.0, cluster=8, seed=1)


def test_overlap_counts_pages_that_causality_lets_a_query_see():
    """Eight queries of page 0 that name every page, then one of page 3 that names three of them and none."""
    ids = torch.tensor([[0, 1, 2, 3]] * 8 + [[-1, 1, 3, 1]], dtype=torch.int32)[:, None]
    positions = torch.tensor([*range(8), 100], dtype=torch.int32)
    found = overlap(ids, positions, 32)
    assert (found.support, found.union, found.distinct) == (pytest.approx((8 * 1 + 2) / 9), (1 + 2) / 2, 3)


def test_the_sweep_ends_with_the_overlap_at_which_the_gain_begins(bench, monkeypatch):
    """Unions are those of the ids; a call takes as long as they are, and a search 2 % of it."""
    points = []

    def measured(settings, case, backend):
        assert not settings.host
        found = {}
        for name, window in (("original", 0), ("online_64", 64)):
            plan = case.plan(window)
            counts = pages.count(pages.prepare_unions(plan, pages.regroup_queries(plan)))
            found[name] = {"mean_union": counts.unions / counts.groups}
        reduction = 1 - found["online_64"]["mean_union"] / found["original"]["mean_union"]
        found["online_64"]["gain"] = reduction - 0.02
        points.append((case.selection.name, reduction))
        return found

    monkeypatch.setattr(pages, "measure_paths", measured)
    pages.run(replace(SMALL, kv_dtypes=("model",)), bench)
    ((searched, nothing), (first, least), (last, most)) = points
    assert (searched, first, last) == ("shared 0 in the order of a search", "shared 0", "shared 1")
    assert nothing == 0 and 0.02 < least < most, "drawn at random, ids overlap enough for a gain"
    ((key, row),) = read(bench).items()
    assert key == ("break_even_online_64", "2048", "synthetic ids, 4 clusters, bf16 KV, torch")
    assert row == {"union_reduction": pytest.approx(0.02, rel=1e-4)}


def test_without_windows_there_is_no_curve(bench):
    pages.run(replace(SMALL, windows=(), kv_dtypes=("model",)), bench)
    names = {setting.partition(",")[0] + setting.split(",")[1] for _, _, setting in read(bench)}
    assert names == {f"synthetic ids 4 clusters shared {share}" for share in (0, 1)}


@pytest.mark.parametrize("window", [64, 128])
def test_regrouping_leaves_pages_in_the_order_of_a_search(window):
    """Pages are shorter than windows and queries begin within a page, so that own pages differ in a window."""
    drawn = synthetic_pages(20_010, 300, page_size=32, top_k=8, shared=0.3, cluster=8, seed=1)
    made = searched_pages(drawn, 128)
    assert len(made.pages) == 300 and made.positions is drawn.positions
    assert (made.pages >= 0).all() and (made.pages <= (made.positions // 32)[:, None]).all(), "causal"
    for begin in (0, 128, 256):
        inner = [sorted(map(tuple, one.pages[begin : begin + 128, :-1].tolist())) for one in (drawn, made)]
        assert inner[0] == inner[1], "the same pages, moved within a window"
    plan = replace(made.plan(CPU, regroup=window), capacity=640)
    assert torch.equal(pages.regroup_queries(plan), pages.regroup_queries(made.plan(CPU)))
    assert not torch.equal(made.pages[:, :-1], drawn.pages[:, :-1])


def test_break_even_between_points_or_nowhere():
    assert pages.break_even([(0.5, 0.2), (0.0, -0.2)]) == pytest.approx(0.25)
    assert pages.break_even([(0.1, 0.1), (0.5, 0.2)]) is None and pages.break_even([(0.1, -0.1)]) is None


def test_inputs_are_in_shuffled_pages_and_zero_beyond_the_context():
    selection = synthetic_pages(650, 64, page_size=32, top_k=4, shared=0.5, cluster=2, seed=0)
    one = page_inputs(selection, heads=4, kv_heads=1, dim=16, seed=3, device=CPU, dtype=torch.bfloat16)
    assert isinstance(one.kv, PagedKV) and one.kv.page_table.tolist() != [list(range(21))]
    last = int(one.kv.page_table[0, -1])
    assert (one.kv.k_pages[last, 650 - 640 :] == 0).all() and (one.kv.k_pages[last, :10] != 0).any()
    assert one.q.stride(-1) == 1 and one.q.shape == (1, 4, 64, 16)


# ----------------------------------------------------------------------------------------- among the methods of a bench
def test_a_page_plan_is_measured_as_any_methods(bench):
    names = ("pageweaver:top_k=3:page_size=32", "pageweaver:top_k=3:page_size=32:kv_dtype=fp8:regroup=off")
    settings = MethodsBench(lengths=(500,), variants=("fa2", *names), sigmas=())
    settings.validate()
    attention.run(settings, bench)
    with bench.rows.path.open(newline="") as file:
        found = {(row["variant"], row["metric"]): row for row in csv.DictReader(file)}
    cells = sum(min(3, i // 32 + 1) * 32 - 31 + i % 32 for i in range(500))
    for name in names:
        assert float(found[name, "B"]["value"]) == pytest.approx(cells / (500 * 501 / 2), rel=1e-3)
        assert float(found[name, "rel_err"]["value"]) < (0.1 if "fp8" in name else 1e-2)
    assert found[names[0], "ms"]["setting"].startswith(
        "normal inputs (flat mass), top_k=3 page_size=32 summary=mean regroup=128 capacity=512 kv_dtype=model"
    )


def test_pages_that_were_not_planned_are_found(bench, monkeypatch):
    def wrong(q, kv, plan, *, scale, backend):
        other = replace(plan, pages=plan.pages.roll(1, 2)) if isinstance(plan, PagePlan) else plan
        return sparse_attention(q, kv, other, scale=scale, backend=backend)

    monkeypatch.setattr(planned, "sparse_attention", wrong)
    settings = MethodsBench(lengths=(500,), variants=("fa2", "pageweaver:top_k=3:page_size=32"), sigmas=())
    with pytest.raises(WrongResult, match="pageweaver:top_k=3:page_size=32 at 500 tokens"):
        attention.run(settings, bench)


# --------------------------------------------------------------------------------------------------------- one kernel
@pytest.mark.parametrize("search", ["auto", "cuda", "triton"])
@pytest.mark.parametrize("problem", [None, "nvcc is not there"])
def test_beside_a_hopper_kernel_one_kernel_searches_and_rows_say_so(
    bench, capture, monkeypatch, capsys, search, problem
):
    """Everything runs in torch here; only what is asked of it, and what rows say, is looked at."""
    asked, united = [], set()

    def searched(plan, *, backend):
        asked.append(backend)
        return search_unions(plan, backend="torch")

    def prepared(plan, ids, *, backend):
        united.add(backend)
        return prepare_unions(plan, ids, backend="torch")

    monkeypatch.setattr(pages, "cuda_problem", lambda plan: problem)
    monkeypatch.setattr(pages, "search_unions", searched)
    monkeypatch.setattr(pages, "prepare_unions", prepared)
    monkeypatch.setattr(pages, "_preparation", lambda backend: "torch")
    monkeypatch.setattr(
        pages, "union_attention", lambda *call, scale, backend: union_attention(*call, scale=scale, backend="torch")
    )
    settings = replace(
        SMALL, captures=(str(capture),), shared=(), kv_union=False, kv_dtypes=("model",), backends=("hopper",),
        search=search,
    )  # fmt: skip
    pages.run(settings, bench)
    by = "cuda" if search == "cuda" or search == "auto" and not problem else "triton"
    assert set(asked) == {by}
    assert united == {"cuda" if by == "cuda" else "torch"}, "all paths prepare unions in one kernel"
    rows = {key: row for key, row in read(bench).items() if key[1] == "700"}
    assert len(rows) == 2 * 3 and all(setting.endswith(f", hopper, search {by}") for _, _, setting in rows)
    for (variant, _, _), row in rows.items():
        whole = variant == "online_64" and by == "cuda"
        assert (row["union_ms"] == 0) == whole and (row["regroup_ms"] > 0) == (variant == "online_64")
        assert row["preparation_share"] == pytest.approx((row["regroup_ms"] + row["union_ms"]) / row["ms"], rel=1e-3)
    assert ("online_64", "0", f"geometric mean of 2 captures, bf16 KV, hopper, search {by}") in read(bench)
    assert ("search in Triton: nvcc is not there" in capsys.readouterr().err) == (
        search == "auto" and problem is not None
    )


def test_settings_name_the_searches():
    with pytest.raises(BenchError, match="search"):
        replace(SMALL, search="torch").validate()


def test_no_order_is_made_within_a_timed_call_but_by_a_search(bench, capture, monkeypatch):
    """The original order is there before the call, as a precomputed one is."""
    made, real = [], pages.regroup_queries
    monkeypatch.setattr(pages, "regroup_queries", lambda *a, **kw: made.append(1) or real(*a, **kw))
    selection = captured_pages(capture, 0)[0].last(200)
    case = pages.case_of(SMALL, bench, selection, "model", {})
    counted = {}

    def in_turn(groups, rounds):
        for name, calls in groups.items():
            before = len(made)
            calls[0]()
            counted[name] = len(made) - before
        return {name: [1.0] for name in groups}

    bench.in_turn = in_turn
    pages.measure_paths(replace(SMALL, host=False), case, "torch")
    assert set(counted) >= {"original", "precomputed_64", "online_64"} and not any(counted.values())
