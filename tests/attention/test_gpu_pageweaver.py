"""PageWeaver on a CUDA device: the same bits with regroup on and off, dense at 100 %, selection, benchmarks."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest
import torch
from prefill_kernels import PagedKV, PagePlan, attend_pages, page_attention, quantize_kv
from prefill_kernels.bench import PageBench
from prefill_kernels.bench.command import launch
from prefill_kernels.page_select import select_pages
from transformers import Qwen3Config, Qwen3ForCausalLM

from evalkit.attention import Session
from evalkit.methods.dense import Dense
from evalkit.methods.pageweaver import PageWeaver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
METHOD = PageWeaver(top_k=5)


def build(heads, kv_heads, dim=128, dtype=torch.bfloat16):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=89, hidden_size=64 * heads, intermediate_size=128, num_hidden_layers=3, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=dim, max_position_embeddings=16384, initializer_range=0.1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval().to("cuda", dtype)


def prompt(length, seed=1):
    return torch.randint(0, 89, (length,), generator=torch.Generator().manual_seed(seed))


def ran(model, method, ids, **kw):
    with Session(model, method, **{"page_size": 128, **kw}) as session:
        return session.logits(session.prefill(ids, keep_from=0)), session.account()


@pytest.mark.parametrize("heads,kv_heads,dim", [(16, 1, 128), (8, 2, 128), (9, 3, 64), (6, 6, 64)])
@pytest.mark.parametrize("length", [1301, 4096])
def test_regrouping_changes_no_bit(heads, kv_heads, dim, length):
    model, ids = build(heads, kv_heads, dim), prompt(length)
    off, account = ran(model, replace(METHOD, regroup="off"), ids)
    for regroup in ("64", "128"):
        got, again = ran(model, replace(METHOD, regroup=regroup), ids)
        assert torch.equal(got, off)
        one, other = again.budget.record(), account.budget.record()
        assert one.pop("work")["counts"]["member_pages"] == other.pop("work")["counts"]["member_pages"]
        assert one == other
    assert "torch" not in account.backends


@pytest.mark.parametrize("heads,kv_heads,dim", [(16, 1, 128), (8, 2, 128), (9, 3, 64)])
def test_every_page_is_dense(heads, kv_heads, dim):
    model, ids = build(heads, kv_heads, dim), prompt(1301)
    got, account = ran(model, replace(METHOD, top_k=11), ids)
    dense, _ = ran(model, Dense(), ids)
    sparse, _ = ran(model, METHOD, ids)
    error, other = ((x - dense).norm() / dense.norm() for x in (got, sparse))
    assert error < 0.03 and other > 3 * error and account.budget.record()["B"] == 1.0


@pytest.mark.parametrize("kv_dtype,most", [("model", 1e-2), ("fp8", 5e-2)])
@pytest.mark.parametrize("heads,kv_heads", [(16, 1), (8, 2)])
def test_a_plan_of_the_selector_is_executed(heads, kv_heads, kv_dtype, most):
    g = torch.Generator(device="cuda").manual_seed(0)
    q = torch.randn(1, heads, 2000, 128, device="cuda", dtype=torch.bfloat16, generator=g)
    k, v = (torch.randn(1, kv_heads, 2000, 128, device="cuda", dtype=torch.bfloat16, generator=g) for _ in range(2))
    kv = PagedKV.from_dense(k, v, 128, spare=0)
    pages = select_pages(q, kv, page_size=128, top_k=5, scale=0.1)
    on_host = PagedKV.from_dense(k.cpu().float(), v.cpu().float(), 128, spare=0)
    expected = select_pages(q.cpu().float(), on_host, page_size=128, top_k=5, scale=0.1)
    assert (pages.cpu() != expected).any(-1).float().mean() < 1e-3, "beyond ties to within rounding"
    plan = PagePlan.for_prompt(pages, 128, 0, 2000, regroup=128, kv_dtype=kv_dtype)
    out, stats = page_attention(q, kv, plan, scale=0.1)
    assert stats.backend != "torch"
    given = kv if kv_dtype == "model" else quantize_kv(kv).dequantize()
    given = replace(given, k_pages=given.k_pages.float(), v_pages=given.v_pages.float())
    oracle = attend_pages(q.float(), given, replace(plan, kv_dtype="model"), 0.1)
    assert (out.float() - oracle).norm() / oracle.norm() < most


def test_nothing_of_a_call_waits_for_the_device(monkeypatch):
    model, ids, seen = build(16, 1), prompt(2048), []
    ran(model, METHOD, ids)  # compiles, and makes tables that are kept
    plan = PageWeaver.plan

    def watched(self, q, kv, context):
        torch.cuda.set_sync_debug_mode("error")
        try:
            made = plan(self, q, kv, context)
            page_attention(q, kv, made, scale=context.scale)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        seen.append(context.layer)
        return made

    monkeypatch.setattr(PageWeaver, "plan", watched)
    ran(model, METHOD, ids)
    assert seen == [0, 1, 2]


def test_chunks_select_and_attend_as_the_whole():
    model, ids = build(16, 1), prompt(3000)
    whole, account = ran(model, METHOD, ids)
    parts, split = ran(model, METHOD, ids, chunk_size=1024)
    assert (parts - whole).norm() / whole.norm() < 0.05
    assert abs(split.budget.record()["B"] - account.budget.record()["B"]) < 2e-3


def test_the_benchmark_runs_on_synthetic_ids(tmp_path):
    settings = PageBench(
        lengths=(16384,), captures=(), queries=1024, shared=(0.0, 1.0), repeats=1, windows=(64,),
        out=str(tmp_path / "rows.csv"), commit="test",
    )  # fmt: skip
    settings.validate()
    launch(settings, "a command")
    with (tmp_path / "rows.csv").open(newline="") as file:
        unions = {}
        for row in csv.DictReader(file):
            if row["metric"] == "mean_union" and "shared 1," in row["setting"] and "bf16" in row["setting"]:
                unions[row["variant"]] = float(row["value"])
    assert unions["online_64"] < 0.5 * unions["original"]
