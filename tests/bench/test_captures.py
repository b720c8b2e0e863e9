"""Files of page ids: what is refused before anything runs, and the error of FP8 on captured Q, K and V."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from prefill_kernels import PagedKV, PagePlan, attend_pages, page_attention, quantize_kv
from prefill_kernels.bench import BenchError, PageBench, captures, fp8_error, pages
from prefill_kernels.bench.command import launch
from prefill_kernels.bench.page_inputs import captured_pages
from safetensors.torch import save_file

from evalkit.capture import LayerCapture, save

CPU = torch.device("cpu")
TOKENS, PAGE = 200, 32
SMALL = PageBench(
    named=(), queries=100, heads=2, dim=16, windows=(64,), kv_dtypes=("model",), rounds=1, host=False, native=False,
    kv_union=False, shared=(), capacity_lengths=(),
)  # fmt: skip


def contents():
    """Tensors and metadata of one layer, as evalkit capture writes them."""
    g = torch.Generator().manual_seed(0)
    own = torch.arange(TOKENS) // PAGE
    ids = (torch.rand(TOKENS, 2, 4, generator=g) * (own[:, None, None] + 1)).short()
    tensors = {"pages": ids, "positions": torch.arange(TOKENS, dtype=torch.int32)}
    facts = {
        "format": "prefill-capture-1",
        "model": "toy",
        "scaling": '{"3": 0.25}',
        "tokens": "200",
        "page_size": "32",
    }
    return tensors, facts


def written(path, tensors, facts):
    save_file({f"layer.3.{name}": x.contiguous() for name, x in tensors.items()}, path, facts)
    return str(path)


def with_tensors(dtype=torch.bfloat16, heads=6):
    g = torch.Generator().manual_seed(1)
    tensors, facts = contents()
    for name, count in (("q", heads), ("k", 2), ("v", 2)):
        tensors[name] = (2 * torch.randn(TOKENS, count, 16, generator=g)).to(dtype)
    return tensors, facts


def ascending(at, value):
    x = torch.arange(TOKENS, dtype=torch.int32)
    x[at] = value
    return x


BROKEN = {
    "page size": ({"page_size": "0"}, {}, "page_size an integer of at least 1, not 0"),
    "no page size": ({"page_size": "null"}, {}, "page_size an integer of at least 1, not None"),
    "tokens": ({"tokens": "0"}, {}, "tokens an integer of at least 1, not 0"),
    "half a token": ({"tokens": "200.5"}, {}, "tokens an integer of at least 1, not 200.5"),
    "scaling": ({"scaling": "[3]"}, {}, "scaling a JSON object, softmax scaling by layer, not [3]"),
    "no scale": ({"scaling": '{"3": 0}'}, {}, "scaling of layer 3 a number above 0, not 0"),
    "no number": ({"scaling": '{"3": true}'}, {}, "scaling of layer 3 a number above 0, not True"),
    "no heads": ({}, {"pages": torch.zeros(200, 5).short()}, "pages [N, Hkv, K], each at least 1, not [200, 5]"),
    "no ids": ({}, {"pages": torch.zeros(200, 2, 0).short()}, "pages [N, Hkv, K], each at least 1, not [200, 2, 0]"),
    "no queries": (
        {},
        {"pages": torch.zeros(0, 2, 4).short(), "positions": torch.zeros(0).int()},
        "layer.3.pages [N, Hkv, K], each at least 1, not [0, 2, 4]",
    ),
    "float ids": ({}, {"pages": torch.zeros(200, 2, 4)}, "layer.3.pages in int16 or int32, not torch.float32"),
    "wide ids": ({}, {"pages": torch.zeros(200, 2, 4).long()}, "layer.3.pages in int16 or int32, not torch.int64"),
    "float positions": (
        {}, {"positions": torch.arange(200.0)}, "layer.3.positions in int16 or int32, not torch.float32"
    ),
    "few positions": ({}, {"positions": torch.arange(10).int()}, "layer.3.positions [N = 200], as its pages, not [10]"),
    "negative": ({}, {"positions": ascending(0, -5)}, "layer.3.positions from 0 to 199, the context's, not -5"),
    "beyond": ({}, {"positions": ascending(-1, 200)}, "layer.3.positions from 0 to 199, the context's, not 200"),
    "descending": ({}, {"positions": ascending(7, 5)}, "layer.3.positions strictly ascending, not 6 before 5"),
    "repeated": ({}, {"positions": ascending(7, 6)}, "layer.3.positions strictly ascending, not 6 before 6"),
    "nothing": (
        {},
        {"pages": torch.full((200, 2, 4), -1).short()},
        "selects a page, by an id from 0 to that of its own; under KV head 0 nothing is selected in layer.3.pages of "
        "the last 100 queries",
    ),
    "not causal": ({}, {"pages": torch.full((200, 2, 4), 7).short()}, "under KV head 0 nothing is selected in layer.3"),
}  # fmt: skip


@pytest.mark.parametrize(("facts", "tensors", "told"), BROKEN.values(), ids=BROKEN)
def test_broken_contents_are_refused_before_anything_runs(bench, tmp_path, monkeypatch, facts, tensors, told):
    monkeypatch.setattr(
        pages, "measure", lambda *_, **__: pytest.fail("a good capture before a broken one is measured")
    )
    plain, plain_facts = contents()
    good = written(tmp_path / "good.safetensors", plain, plain_facts)
    path = written(tmp_path / "broken.safetensors", {**plain, **tensors}, {**plain_facts, **facts})
    settings = replace(SMALL, captures=(good, path))
    settings.validate()
    with pytest.raises(BenchError, match=f"^captures='{re.escape(path)}': a capture .*{re.escape(told)}"):
        pages.run(settings, bench)


def test_only_the_queries_that_are_measured_must_select(tmp_path):
    tensors, facts = contents()
    tensors["pages"][100:, 1] = -1
    path = written(tmp_path / "x.safetensors", tensors, facts)
    assert [len(one.pages) for one in captured_pages(path, 0, 100)] == [100]
    assert [one.name for one in captured_pages(path)] == ["200/3/0", "200/3/1"]
    with pytest.raises(
        BenchError, match="under KV head 1 nothing is selected in layer.3.pages of the last 100 queries"
    ):
        captured_pages(path, 1, 100)
    assert len(captured_pages(path, 1, 101)) == 1


# ---------------------------------------------------------------------------------------------- FP8 on captured tensors
def read(path):
    found = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault((row["variant"], row["tokens"], row["setting"]), {})[row["metric"]] = float(row["value"])
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_errors_are_those_of_the_last_queries_on_the_captured_tensors(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(fp8_error, "QUERIES", 70)
    tensors, facts = with_tensors(dtype)
    (layer,) = captures.captured_layers(written(tmp_path / "x.safetensors", tensors, facts))
    q, k, v = (x.transpose(0, 1)[None] for x in layer.tensors())
    kv = PagedKV.from_dense(k, v, PAGE)
    plan = PagePlan.for_prompt(tensors["pages"][None].int(), PAGE, 0, TOKENS, kv_dtype="fp8")
    out, _ = page_attention(q, quantize_kv(kv), plan, scale=0.25, backend="torch")
    expected = attend_pages(q.float(), quantize_kv(kv), plan, 0.25)
    exact = attend_pages(q.float(), replace(kv, k_pages=kv.k_pages.float(), v_pages=kv.v_pages.float()), plan, 0.25)

    def away(a, b, queries):
        a, b = a[:, :, -queries:].float(), b[:, :, -queries:]
        return float((a - b).norm() / b.norm())

    rows = tmp_path / "rows.csv"
    settings = replace(SMALL, captures=(layer.path,), fp8_error_only=True, out=str(rows), queries=500)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launch(settings, "a command") == rows
    ((key, row),) = read(rows).items()
    shape = "last 70 queries, captured Q, K, V, 6 heads on 2 KV heads, d 16, page 32, top 4, fp8 KV, torch"
    assert key == ("fp8_error", "200", f"toy 200/3, {shape}")
    assert row["rel_err"] == pytest.approx(away(out, expected, 70), rel=1e-3)
    assert row["quantization_err"] == pytest.approx(away(expected, exact, 70), rel=1e-3)
    heads = [away(out[:, h : h + 1], expected[:, h : h + 1], 70) for h in range(6)]
    assert row["worst_head_err"] == pytest.approx(max(heads), rel=1e-3) and row["worst_head_err"] > row["rel_err"]
    assert 0.005 < row["query_err"] < 1.2 * row["rel_err"]
    assert row["rel_err"] != pytest.approx(away(out, expected, TOKENS), rel=1e-3)


def test_without_rounded_queries_only_the_probabilities_err(tmp_path):
    """Queries of powers of two are E4M3 numbers: what is left is the rounding of probabilities."""
    tensors, facts = with_tensors()
    tensors["q"] = torch.where(tensors["q"] > 0, 448.0, -448.0).to(torch.bfloat16) / 512
    (layer,) = captures.captured_layers(written(tmp_path / "x.safetensors", tensors, facts))
    found = fp8_error.fp8_errors(layer, *layer.tensors(), 100, CPU)
    assert found["query_err"] < 1e-5 < 1e-3 < found["rel_err"]


@pytest.mark.parametrize(("kv_dtypes", "count"), [(("model", "fp8"), 1), (("model",), 0)])
def test_they_come_with_the_rest_where_fp8_is_measured(bench, tmp_path, kv_dtypes, count):
    files = []
    for name, (tensors, facts) in (("with", with_tensors()), ("without", contents())):
        facts["model"] = name
        files.append(written(tmp_path / f"{name}.safetensors", tensors, facts))
    pages.run(replace(SMALL, captures=tuple(files), kv_dtypes=kv_dtypes), bench)
    found = [key for key in read(bench.rows.path) if key[0] == "fp8_error"]
    assert len(found) == count and all(setting.startswith("with 200/3, last 100 queries") for _, _, setting in found)


def test_a_file_that_evalkit_wrote(tmp_path, bench):
    tensors, _ = with_tensors()
    kept = LayerCapture(0.25, q=[tensors["q"]], k=tensors["k"], v=tensors["v"], page_size=PAGE)
    kept.pages, kept.positions = [tensors["pages"][150:]], [tensors["positions"][150:]]
    save({3: kept}, tmp_path / "x.safetensors", model="toy", metadata={"tokens": TOKENS})
    fp8_error.run(captures.captured_layers(tmp_path / "x.safetensors"), bench.rows, CPU)
    ((_, _, setting),) = read(bench.rows.path)
    assert "last 50 queries" in setting


WRONG_TENSORS = {
    "part": ({"k": None}, "layer.3.q, layer.3.k, layer.3.v together or not at all, not without layer.3.k"),
    "dtype": ({"v": torch.zeros(200, 2, 16)}, "layer.3.v in bfloat16 or float16 or float32, Q, K and V alike"),
    "short": (
        {"q": torch.zeros(100, 6, 16).bfloat16()},
        "layer.3.q [200, heads, d], one d for Q, K and V, not [100, 6",
    ),
    "dim": (
        {"k": torch.zeros(200, 2, 8).bfloat16()},
        "layer.3.k [200, heads, d], one d for Q, K and V, not [200, 2, 8]",
    ),
    "KV heads": ({"k": torch.zeros(200, 3, 16).bfloat16()}, "layer.3.k of 2 heads: its pages are of 2, not 3"),
    "heads": (
        {"q": torch.zeros(200, 5, 16).bfloat16()},
        "layer.3.q of a multiple of 2 heads: its pages are of 2, not 5",
    ),
    "NaN": ({"v": torch.full((200, 2, 16), torch.nan).bfloat16()}, "layer.3.v of finite numbers, not NaN or infinity"),
}


@pytest.mark.parametrize(("changed", "told"), WRONG_TENSORS.values(), ids=WRONG_TENSORS)
def test_tensors_that_do_not_belong_together_are_refused(tmp_path, changed, told):
    tensors, facts = with_tensors()
    tensors = {name: x for name, x in {**tensors, **changed}.items() if x is not None}
    path = written(tmp_path / "x.safetensors", tensors, facts)
    out = tmp_path / "rows.csv"
    with pytest.raises(BenchError, match=re.escape(f"captures='{path}': a capture with {told}")):
        launch(replace(SMALL, captures=(path,), fp8_error_only=True, out=str(out)), "a command")
    assert not out.exists()


def test_the_error_of_nothing_is_no_number(tmp_path):
    tensors, facts = with_tensors()
    tensors["pages"][100:, 1] = -1
    path = written(tmp_path / "x.safetensors", tensors, facts)
    out = tmp_path / "rows.csv"
    told = "under KV head 1 nothing is selected in layer.3.pages of the last 100 queries"
    with pytest.raises(BenchError, match=told):
        launch(replace(SMALL, captures=(path,), fp8_error_only=True, out=str(out)), "a command")
    assert not out.exists()
    launch(replace(SMALL, captures=(path,), fp8_error_only=True, out=str(out), queries=101), "a command")
    assert len(read(out)) == 1


def test_alone_from_the_command_line_without_a_gpu(tmp_path):
    files = [
        written(tmp_path / f"{name}.safetensors", *made)
        for name, made in (("with", with_tensors()), ("without", contents()))
    ]
    out = tmp_path / "rows.csv"

    def run(*given):
        command = [sys.executable, "-m", "prefill_kernels.bench", "pageweaver", "--fp8-error-only", "true"]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        command += ["--out", str(out), "--captures", *given]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    without = "a file of evalkit capture capture.tensors=true (it has no Q, K and V)"
    none = "captures=[]: a file at least, as fp8_error_only=true measures nothing else"
    for given, told in ((files, without), ([], none)):
        done = run(*given)
        assert done.returncode == 2 and told in done.stderr and not out.exists()
    done = run(files[0])
    assert done.returncode == 0, done.stderr
    assert [variant for variant, _, _ in read(out)] == ["fp8_error"]
    with out.open(newline="") as file:
        assert {(row["bench"], row["device"]) for row in csv.DictReader(file)} == {("pageweaver", "cpu")}
