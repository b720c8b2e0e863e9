"""Whole-model prefill under captured page ids, on a tiny model on the CPU."""

from __future__ import annotations

import csv
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prefill_kernels import attend_pages, page_attention
from prefill_kernels.bench import Rows, native
from prefill_kernels.bench.config import WrongResult

from evalkit.attention import Session
from evalkit.bench import pageweaver_model, ttft
from evalkit.bench.capture import Request, record
from evalkit.bench.settings import PageModelBench
from evalkit.bench.ttft import build
from evalkit.capture import save
from evalkit.capture_settings import CaptureConfig
from evalkit.config import ModelConfig
from evalkit.methods.dense import Dense
from evalkit.methods.pageweaver import PageWeaver

CPU = torch.device("cpu")
TINY = PageModelBench(
    lengths=(512,), repeats=1, variants=("original", "online_64"), chunk=256, layers=3, hidden=64, intermediate=64,
    heads=4, kv_heads=2, dim=16, vocab=99,
)  # fmt: skip


@pytest.fixture
def settings(tmp_path):
    """Settings with a capture of two layers with two KV heads each, of 512 tokens."""
    ids = torch.randint(0, 99, (512,), generator=torch.Generator().manual_seed(2)).tolist()
    method = PageWeaver(page_size=32, top_k=5)
    request = Request(ModelConfig("toy", 4096, path="x/y"), CaptureConfig(tensors=False), method)
    found = record(request, build(TINY, CPU), (0, 1), ids)
    path = tmp_path / "toy.safetensors"
    save(found.captures, path, model="toy", metadata={"tokens": 512})
    made = replace(TINY, captures=(str(path),))
    made.validate()
    return made


def read(path: Path):
    found: dict[tuple[str, str], dict[str, float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault((row["variant"], row["setting"]), {})[row["metric"]] = float(row["value"])
    return found


def rows(tmp_path):
    return Rows(tmp_path / "rows.csv", "a command", "abc", device="cpu")


def test_rows(settings, tmp_path):
    out = rows(tmp_path)
    pageweaver_model.run(replace(settings, variants=("online_64", "original", "online_128")), out, CPU)
    found = read(out.path)
    assert len(found) == 6
    shape = "Qwen3 class, 3 layers, hidden 64, 4 heads on 2 KV heads, random weights, 4 captured heads of toy"
    for kv in ("bf16 KV", "fp8 KV at a fixed scale"):
        original, online = (found[v, f"{shape}, chunks of 256, {kv}"] for v in ("original", "online_64"))
        assert original["throughput"] == pytest.approx(512 / original["prefill"], rel=1e-3)
        assert "throughput_gain" not in original and "throughput_gain_low" not in online, "one round"
        assert online["logit_distance"] == 0, "regrouping changes no bit"


def test_variants_run_in_turn_and_gains_are_paired_by_round(settings, tmp_path, monkeypatch):
    ran, now = [], [0.0]
    costs = iter(range(1, 100))

    class Clock:
        @staticmethod
        def perf_counter():
            return now[0]

    call = pageweaver_model.PageForward.__call__

    def counted(self, ids):
        ran.append(self.variant)
        drift = next(costs)
        now[0] += {"original": 1.0, "online_64": 0.5, "online_128": 0.25}[self.variant] * (drift // 3)
        return call(self, ids)

    monkeypatch.setattr(pageweaver_model.PageForward, "__call__", counted)
    monkeypatch.setattr(ttft, "time", Clock)
    out, names = rows(tmp_path), ("original", "online_64", "online_128")
    pageweaver_model.run(replace(settings, variants=names, repeats=6, kv_dtypes=("model",)), out, CPU)
    first, second, third = names
    assert ran[:6] == [*names, *names] and ran[6:15] == [*names, second, third, first, third, first, second]
    assert len(ran) == 3 * 8
    found = {name: row for (name, _), row in read(out.path).items()}
    # Every round is slower than the one before; within a round a step of the clock may fall between two variants.
    assert found[second]["throughput_gain"] == pytest.approx(1, abs=0.35)
    assert (
        found[second]["throughput_gain_low"]
        <= found[second]["throughput_gain"]
        <= found[second]["throughput_gain_high"]
    )


def test_the_model_replays_the_captured_pages_over_one_cache(settings, monkeypatch):
    model, seen = build(settings, CPU), []

    def attend(q, kv, plan, *, scale, backend, stats):
        seen.append((plan, kv.kv_len))
        return page_attention(q, kv, plan, scale=scale, backend="torch", stats=stats)

    monkeypatch.setattr(pageweaver_model, "page_attention", attend)
    selections = pageweaver_model.captured_pages(settings.captures[0])
    ids = torch.randint(0, 99, (1, 512), generator=torch.Generator().manual_seed(3))
    forward = pageweaver_model.PageForward(settings, model, "online_64", "model", selections, 512)
    first = forward(ids)
    assert torch.equal(forward(ids), first), "a prefill begins with an empty cache"
    assert [length for _, length in seen[:6]] == [256] * 3 + [512] * 3
    for call, (plan, _) in enumerate(seen[:6]):
        chunk, layer = divmod(call, 3)
        for head in (0, 1):
            wanted = selections[(2 * layer + head) % 4].pages[256 * chunk : 256 * (chunk + 1)]
            assert torch.equal(plan.pages[0, :, head], wanted)
        assert plan.regroup == 64 and plan.positions[0] == 256 * chunk


def test_every_page_is_the_dense_model(settings):
    model = build(settings, CPU)
    ids = torch.randint(0, 99, (1, 512), generator=torch.Generator().manual_seed(3))
    selections = [
        replace(one, pages=torch.arange(16, dtype=torch.int32).expand(512, -1).contiguous())
        for one in pageweaver_model.captured_pages(settings.captures[0])
    ]
    with Session(model, Dense()) as session, torch.inference_mode():
        dense = session.logits(session.prefill(ids[0], keep_from=511))[0]
    for kv_dtype, most in (("model", 0.02), ("fp8", 0.2)):
        for chunk in (256, None):
            forward = pageweaver_model.PageForward(
                replace(settings, chunk=chunk), model, "original", kv_dtype, selections, 512
            )
            assert float((forward(ids).float() - dense).norm() / dense.norm()) < most


def test_the_native_path_reads_the_same_cache_one_kv_head_at_a_time(settings, tmp_path, monkeypatch):
    plans = []

    class Native:
        def __init__(self, plan, kv, *, heads, scale, dtype, path, head):
            assert path == "prefill:fa2"
            self.plan, self.scale, self.head = plan, scale, head
            self.table, self.length = kv.page_table, kv.kv_len
            self.scales = (kv.k_scale[head], kv.v_scale[head]) if hasattr(kv, "k_scale") else (1.0, 1.0)
            self.replan()

        def replan(self):
            plans.append(self.head)

        def __call__(self, q, k_pages, v_pages):
            assert k_pages.shape == v_pages.shape and k_pages.shape[2] == 1
            k, v = (pages.float() * scale for pages, scale in zip((k_pages, v_pages), self.scales, strict=True))
            kv = native.PagedKV(k, v, self.table, self.length)
            few = replace(self.plan, pages=self.plan.pages[:, :, self.head, None].contiguous(), kv_dtype="model")
            return attend_pages(q.float(), kv, few, self.scale).to(q.dtype)

    monkeypatch.setattr(pageweaver_model, "NativePath", Native)
    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace())
    out = rows(tmp_path)
    names = ("original", "flashinfer", "flashinfer_replan")
    pageweaver_model.run(replace(settings, variants=names, native_backend="prefill:fa2"), out, CPU)
    found = read(out.path)
    assert len(found) == 6 and all((", prefill:fa2" in setting) == name.startswith("flash") for name, setting in found)
    for (name, setting), row in found.items():
        assert row["logit_distance"] < (0.1 if "fp8" in setting else 0.03)
        assert ("throughput_over_flashinfer" in row) == (name == "original")
    # Two distinct pairs of heads, two KV heads and two chunks; then again for each layer of the two later prefills.
    once = 2 * 2 * 2
    assert len(plans) == 2 * (2 * once + 2 * (3 * 2 * 2) + (3 * 2 * 2 - once))


def test_variants_that_do_not_agree_stop_it(settings, tmp_path, monkeypatch):
    def wrong(q, kv, plan, *, scale, backend, stats):
        return page_attention(q, kv, plan, scale=(3 if plan.regroup else 1) * scale, backend="torch", stats=stats)

    monkeypatch.setattr(pageweaver_model, "page_attention", wrong)
    monkeypatch.setattr(pageweaver_model, "TOLERANCE", {"model": 1e-3, "fp8": 1e-3})
    with pytest.raises(WrongResult, match="online_64 at 512 tokens: logits are"):
        pageweaver_model.run(settings, rows(tmp_path), CPU)


def test_a_length_without_all_its_queries_is_left_out(settings, tmp_path, capsys):
    out = rows(tmp_path)
    pageweaver_model.run(replace(settings, lengths=(1024,)), out, CPU)
    assert "1024 tokens: left out" in capsys.readouterr().err and read(out.path) == {}
