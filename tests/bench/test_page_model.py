"""Whole-model prefill under captured page ids, on a tiny model on the CPU."""

from __future__ import annotations

import csv
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prefill_kernels import BackendUnavailable, attend_pages, page_attention
from prefill_kernels.bench import Rows, native
from prefill_kernels.bench.config import BenchError, WrongResult

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


def captured(path, *, page_size=32, top_k=5, queries=None):
    """Write a capture of two layers with two KV heads each, of 512 tokens."""
    ids = torch.randint(0, 99, (512,), generator=torch.Generator().manual_seed(2)).tolist()
    method = PageWeaver(page_size=page_size, top_k=top_k)
    request = Request(ModelConfig("toy", 4096, path="x/y"), CaptureConfig(tensors=False, queries=queries), method)
    found = record(request, build(TINY, CPU), (0, 1), ids)
    save(found.captures, path, model="toy", metadata={"tokens": 512})
    return str(path)


@pytest.fixture
def settings(tmp_path):
    """Settings with a capture of 512 tokens."""
    path = captured(tmp_path / "toy.safetensors")
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


# ---------------------------------------------------------------------------------- refused before the model is built
@pytest.fixture
def refused(tmp_path, monkeypatch):
    """The message under which settings are refused; the model may not be built."""
    monkeypatch.setattr(pageweaver_model, "build", lambda *_: pytest.fail("the model was built"))

    def run(settings):
        with pytest.raises(BenchError) as caught:
            pageweaver_model.run(settings, rows(tmp_path), CPU)
        return str(caught.value)

    return run


def test_captures_are_read_first(settings, tmp_path, refused):
    (tmp_path / "bad.safetensors").write_text("nothing")
    settings = replace(settings, captures=(*settings.captures, str(tmp_path / "bad.safetensors")))
    assert refused(settings).startswith(f"captures='{tmp_path}/bad.safetensors': a readable capture")


def test_a_length_without_all_its_queries_is_refused(settings, tmp_path, refused):
    allowed = "a length of which a capture holds the pages of all queries"
    assert refused(replace(settings, lengths=(512, 1024))) == f"lengths=1024: {allowed}: 512"
    last = captured(tmp_path / "last.safetensors", queries=100)
    assert refused(replace(settings, captures=(last,))) == f"lengths=512: {allowed}: none"


def test_captures_of_two_page_sizes_are_refused(settings, tmp_path, refused):
    (first,) = settings.captures
    other = captured(tmp_path / "other.safetensors", page_size=64)
    message = refused(replace(settings, captures=(first, other)))
    assert message == f"captures={[first, other]}: files of one page size; {first} has 32, {other} has 64"


def test_a_backend_that_cannot_run_here_is_refused(settings, refused):
    message = refused(replace(settings, backend="hopper"))
    assert message.startswith("backend='hopper': hopper cannot run kv_dtypes=model (tensors on cpu: needs a CUDA")
    assert message.split("); ")[-1].split(", ")[0] == "torch" and "kv_dtypes=[" not in message


def test_a_backend_for_one_precision_is_refused_with_both(settings, monkeypatch, refused):
    asked = []

    def resolve(q, kv, plan, backend):
        fp8 = hasattr(kv, "k_scale")
        asked.append((tuple(q.shape), tuple(kv.k_pages.shape), plan.page_size, fp8))
        if backend == "cluster" and not fp8:
            raise BackendUnavailable("backend='cluster': runs FP8 pages alone: kv_dtype=fp8")
        if backend == "hopper":
            raise BackendUnavailable("backend='hopper': no")
        return backend

    monkeypatch.setattr(pageweaver_model, "resolve_page_backend", resolve)
    message = refused(replace(settings, backend="cluster"))
    reason = "cluster cannot run kv_dtypes=model (runs FP8 pages alone: kv_dtype=fp8)"
    assert message == f"backend='cluster': {reason}; torch, triton, or kv_dtypes=[fp8]"
    assert asked[:2] == [((1, 4, 1, 16), (1, 32, 2, 16), 32, fp8) for fp8 in (False, True)], "the model's own shape"
    pageweaver_model.check_backend(replace(settings, backend="cluster", kv_dtypes=("fp8",)), 32, CPU)


# ---------------------------------------------------------------------------------- FlashInfer, for what it is
class Wrapper:
    """FlashInfer's decode wrapper: writes ones, and lists its plans and its outputs."""

    plans: list
    outputs: list

    def __init__(self, workspace, layout, **_):
        pass

    def plan(self, *_, **__):
        self.plans.append(self)

    def run(self, rows, kv, **_):
        self.outputs.append(torch.ones_like(rows))
        return self.outputs[-1]


@pytest.fixture
def wrapper(monkeypatch):
    made = type("Made", (Wrapper,), {"plans": [], "outputs": []})
    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=made))
    monkeypatch.setattr(native, "WORKSPACE", 16)
    native._workspace.cache_clear()
    yield made
    native._workspace.cache_clear()


def forward_of(settings, variant, *, kv_heads=2):
    settings = replace(settings, kv_heads=kv_heads)
    whole = pageweaver_model.replays(settings)[512]
    return pageweaver_model.PageForward(settings, build(settings, CPU), variant, "model", whole, 512)


def prompt():
    return torch.randint(0, 99, (1, 512), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_native_output_is_not_copied_on_its_way_to_the_model(settings, wrapper, monkeypatch, kv_heads):
    forward, seen = forward_of(settings, "flashinfer", kv_heads=kv_heads), []
    attend = pageweaver_model.PageForward._attend

    def spied(self, *args, **kwargs):
        out, _ = attend(self, *args, **kwargs)
        seen.append(out)
        return out, None

    monkeypatch.setattr(pageweaver_model.PageForward, "_attend", spied)
    forward(prompt())
    assert len(seen) == 3 * 2 and len(wrapper.outputs) == len(seen) * kv_heads
    for i, out in enumerate(seen):
        assert out.shape == (1, 256, 4, 16)
        assert out.reshape(1, 256, -1).data_ptr() == out.data_ptr(), "the model's reshape copies nothing"
        if kv_heads == 1:
            assert out.data_ptr() == wrapper.outputs[i].data_ptr(), "nor is it copied before"


@pytest.mark.parametrize("variant,again", [("flashinfer", 0), ("flashinfer_replan", 1)])
def test_replanning_is_in_every_call_of_its_variant_alone(settings, wrapper, variant, again):
    forward = forward_of(settings, variant)
    forward(prompt())
    distinct, calls = 2 * 2 * 2, 3 * 2 * 2  # pairs of captured heads (layers), KV heads, chunks
    first = distinct + again * (calls - distinct)
    assert len(wrapper.plans) == first and len(set(map(id, wrapper.plans))) == distinct
    for done in (1, 2):  # what is timed
        forward(prompt())
        assert len(wrapper.plans) == first + done * again * calls and len(wrapper.outputs) == (1 + done) * calls


def test_heads_of_different_widths_are_replayed_together(settings, tmp_path):
    (first,) = settings.captures
    wide = captured(tmp_path / "wide.safetensors", top_k=7)
    forward = forward_of(replace(settings, captures=(first, wide), layers=8, heads=3), "original", kv_heads=3)
    mixed = forward.pages[3][0]  # heads 3 (the narrow file's last), 4 and 5
    assert mixed.shape == (512, 3, 7) and bool((mixed[:, 0, 5:] == -1).all()) and bool((mixed[-1, 1:] >= 0).all())
