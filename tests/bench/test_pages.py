"""PageWeaver's benchmark on the CPU: three paths, counts, checks that must fail, the native path, overlaps."""

from __future__ import annotations

import csv
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
    quantize_kv,
    sparse_attention,
    union_attention,
)
from prefill_kernels.bench import PageBench, native, pages, planned
from prefill_kernels.bench.config import WrongResult
from prefill_kernels.bench.page_inputs import Selection, overlap, page_inputs, synthetic_pages
from safetensors.torch import save_file

from evalkit.bench import attention
from evalkit.bench.settings import MethodsBench

CPU = torch.device("cpu")
SMALL = PageBench(
    lengths=(2048,), captures=(), named=("700/3", "700/5"), queries=200, heads=16, dim=16, windows=(64,),
    shared=(0.0, 1.0), clusters=4, page_size=32, top_k=5,
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
            assert online["gain"] == 0, "a clock that stands still"
            assert online["tflops"] < original["tflops"] and online["useful_tflops"] == original["useful_tflops"]
            assert ("quantization_err" in online) == (kv == "fp8 KV")
            assert online["rel_err"] < pages.TOLERANCE["fp8" if kv == "fp8 KV" else "model"]
    partials = {key[2].rsplit(", ", 1)[1]: row["partials"] for key, row in rows.items() if key[0] == "kv_union"}
    assert partials["float32 partials"] > 1.5 * partials["bfloat16 partials"] > 0
    mean = rows["online_64", "0", "geometric mean of 2 captures, bf16 KV, torch"]
    assert mean == {"gain": 0}, "no FlashInfer here"


def test_counts_are_those_of_the_unions(bench, capture):
    selection = pages.captured_pages(capture, 1)[0].last(200)
    case = pages.case_of(SMALL, bench, selection, "model", {})
    bench.shape = None
    plan = case.plan(64)
    unions = pages.prepare_unions(plan, pages.regroup_queries(plan))
    counts = pages.count(unions)
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
    selection = pages.captured_pages(capture, 0)[0].last(200)
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
    """FlashInfer's decode wrapper, in float32: a request's query attends to all tokens of its pages."""

    plans = 0

    def __init__(self, workspace, layout, *, use_tensor_cores, backend):
        assert layout == "NHD" and use_tensor_cores
        if backend == "auto":
            raise RuntimeError("no such kernel\nand more")

    def plan(self, indptr, indices, last, heads, kv_heads, dim, page, *, q_data_type, kv_data_type, sm_scale):
        type(self).plans += 1
        self.given = indptr.tolist(), indices.tolist(), last.tolist()
        self.shape, self.scale, self.dtypes = (heads, kv_heads, dim, page), sm_scale, (q_data_type, kv_data_type)

    def run(self, q, kv, k_scale=1.0, v_scale=1.0):
        indptr, indices, last = self.given
        assert q.shape == (len(last), self.shape[0], self.shape[2]) and self.dtypes == (q.dtype, kv[0].dtype)
        out = torch.empty_like(q)
        for i in range(len(last)):
            mine = torch.tensor(indices[indptr[i] : indptr[i + 1]])
            seen = (len(mine) - 1) * self.shape[3] + last[i]
            k, v = (x.float()[mine, :, 0].flatten(0, 1)[:seen] for x in kv)
            weights = (q[i].float() @ k.T * k_scale * self.scale).softmax(-1)
            out[i] = (weights @ v * v_scale).to(q.dtype)
        return out


def test_the_native_path_is_checked_and_compared(bench, capture, monkeypatch, capsys):
    fake = types.SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", fake)
    monkeypatch.setattr(native, "WORKSPACE", 16)
    settings = replace(SMALL, captures=(str(capture),), shared=(), kv_union=False)
    pages.run(settings, bench)
    assert "flashinfer auto, bf16 KV: left out, it cannot run here (no such kernel)" in capsys.readouterr().err
    rows = read(bench)
    native_rows = {key: row for key, row in rows.items() if key[0] == "flashinfer"}
    assert len(native_rows) == 4
    for key, row in native_rows.items():
        assert row["ms"] == 2 and row["host_plan_ms"] > 0
        assert row["rel_err"] < 5e-3, key
        assert ("quantization_err" in row) == (", fp8 KV" in key[2])
    for key, row in rows.items():
        if key[0] == "online_64" and key[1] == "700":
            assert row["speedup_flashinfer"] == row["speedup_flashinfer_fp8"] == row["speedup_flashinfer_bf16"] == 1
    mean = rows["online_64", "0", "geometric mean of 2 captures, fp8 KV, torch"]
    assert mean["speedup_flashinfer"] == 1 and mean["gain"] == 0


def test_planned_requests_in_fp8_use_the_caches_scales(monkeypatch):
    monkeypatch.setitem(
        __import__("sys").modules, "flashinfer", types.SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    )
    selection = synthetic_pages(640, 64, page_size=32, top_k=4, shared=0.5, cluster=2, seed=0)
    one = page_inputs(selection, heads=4, kv_heads=1, dim=16, seed=0, device=CPU, dtype=torch.float32)
    plan, kv = selection.plan(CPU), quantize_kv(one.kv)
    before = Wrapper.plans
    path = native.NativePath(plan, kv, heads=4, scale=one.scale, dtype=torch.float32, backend="fa2")
    out = path(one.q, kv.k_pages, kv.v_pages.contiguous())
    torch.testing.assert_close(out, attend_pages(one.q, kv.dequantize(), plan, one.scale), rtol=1e-4, atol=1e-5)
    path.replan()
    assert Wrapper.plans == before + 2


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


def test_the_sweep_ends_with_the_overlap_at_which_the_gain_begins(bench, monkeypatch):
    gains = iter([-0.1, 0.3])

    def measured(settings, case, backend):
        gain = next(gains)
        return {
            "original": {"ms": 1.0, "mean_union": 30.0},
            "online_64": {"gain": gain, "mean_union": 27.0 if gain < 0 else 15.0},
        }

    monkeypatch.setattr(pages, "measure_paths", measured)
    pages.run(replace(SMALL, kv_dtypes=("model",)), bench)
    ((key, row),) = read(bench).items()
    assert key == ("break_even_online_64", "2048", "synthetic ids, 4 clusters, bf16 KV, torch")
    assert row == {"union_reduction": pytest.approx(0.1 + 0.4 * 0.1 / 0.4)}


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
