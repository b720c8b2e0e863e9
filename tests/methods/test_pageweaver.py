"""PageWeaver as a method: plan, budget, executed work, regrouping that changes nothing, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from prefill_kernels import PagedKV, PagePlan, attend_pages, page_attention, regroup_queries
from prefill_kernels.regroup import greedy_order
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from evalkit import runner
from evalkit.assets import EMBEDDED_MODEL
from evalkit.attention import Session
from evalkit.benchmarks import ruler
from evalkit.benchmarks.perplexity import build_windows
from evalkit.budget import BudgetMeter
from evalkit.calibration.search import Axis
from evalkit.config import ModelConfig, PackageRef, PerplexityConfig, cell_from_mapping
from evalkit.corpora import Corpora
from evalkit.errors import InputError
from evalkit.methods import METHODS, PlanContext
from evalkit.methods.pageweaver import PageWeaver
from evalkit.models.loading import load_model, load_tokenizer, locate
from evalkit.prompts import PromptRenderer
from evalkit.runner import run_cell

HEADS, KV_HEADS, DIM, SCALE = 6, 2, 16, 0.3
METHOD = PageWeaver(page_size=16, top_k=4)


def inputs(length, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(1, HEADS, length, DIM, generator=g)
    k, v = (torch.randn(1, KV_HEADS, length, DIM, generator=g) for _ in range(2))
    return q, PagedKV.from_dense(k, v, 32, generator=g)


def planned(method, q, kv, offset=0):
    return method.plan(q, kv, PlanContext(0, offset, kv.kv_len, SCALE, "torch"))


def supports(plan: PagePlan) -> list[list[set[int]]]:
    """S_i by KV head and query."""
    return [[{p for p in row if p >= 0} for row in plan.pages[0, :, h].tolist()] for h in range(plan.pages.shape[2])]


def built(kind, heads, kv_heads, vocabulary=89):
    torch.manual_seed(1)
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[kind]
    config = config_class(
        vocab_size=vocabulary, hidden_size=16 * heads, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16, max_position_embeddings=4096,
        initializer_range=0.2,
    )  # fmt: skip
    return model_class(config).eval()


def prompt(length, seed=0):
    return torch.randint(0, 89, (length,), generator=torch.Generator().manual_seed(seed))


def ran(model, method, ids, **kw):
    with Session(model, method, **kw) as session:
        return session.logits(session.prefill(ids, keep_from=0)), session.account()


# ------------------------------------------------------------------------------------------------------ plan and budget
@pytest.mark.parametrize("length", [1, 16, 17, 131, 300])
def test_budget_and_work_equal_a_brute_force_count(length):
    q, kv = inputs(length, seed=length)
    for regroup in ("off", "64", "128"):
        method = replace(METHOD, regroup=regroup)
        plan = planned(method, q, kv)
        plan.check()
        out, stats = page_attention(q, kv, plan, scale=SCALE, backend="torch")
        torch.testing.assert_close(out, attend_pages(q, kv, plan, SCALE), rtol=1e-4, atol=1e-5)
        meter = BudgetMeter(1, HEADS, method.block_size, method.work_ratios)
        meter.add_sparse(0, 0, length, stats, method.estimator_cells(0, length), method.work(stats))
        record = meter.read().record()

        chosen = supports(plan)
        cells = sum(
            min(16, i + 1 - 16 * p) for head in chosen for i, pages in enumerate(head) for p in pages if 16 * p <= i
        )
        assert record["computed"] == record["visited"] == cells * HEADS // KV_HEADS
        assert record["B"] == pytest.approx(cells / KV_HEADS / (length * (length + 1) // 2))
        if length == 300:
            assert record["B"] < 0.6, "the case is meant to drop pages"

        members, unions, halves, imbalance, groups = 0, 0, 0, 0, 0
        window = {"off": 0, "64": 64, "128": 128}[regroup]
        for head in chosen:
            order = list(range(length))
            if window:
                order = [
                    start + j for start in range(0, length, window) for j in greedy_order(head[start : start + window])
                ]
            for start in range(0, length, 8):
                group = [head[i] for i in order[start : start + 8]]
                low, high = set().union(*group[:4]), set().union(*group[4:])
                members += sum(map(len, group))
                unions += len(low | high)
                halves += len(low) + len(high)
                imbalance += abs(len(low) - len(high))
                groups += 1
        work = record["work"]
        assert work["counts"] == {
            "member_pages": members, "union_pages": unions, "half_pages": halves, "imbalance_pages": imbalance,
            "groups": groups, "calls": 1, "calls_beyond_capacity": 0,
        }  # fmt: skip
        assert work["ratios"] == pytest.approx(
            {
                "mean_union": unions / groups, "mean_halves": halves / groups, "mean_imbalance": imbalance / groups,
                "useful_share": members / (8 * unions), "identity_share": 0.0,
            }
        )  # fmt: skip


def test_regrouping_cannot_change_the_budget_and_shrinks_unions():
    model, ids = built("qwen3", HEADS, KV_HEADS), prompt(700)
    records = {r: ran(model, replace(METHOD, regroup=r), ids)[1].budget.record() for r in ("off", "64", "128")}
    work = {name: record.pop("work")["ratios"] for name, record in records.items()}
    assert records["off"] == records["64"] == records["128"] and records["off"]["B"] < 0.3
    assert work["128"]["mean_union"] < work["off"]["mean_union"]
    assert work["128"]["useful_share"] > work["off"]["useful_share"]


def test_the_estimators_share_is_in_the_record():
    model, ids = built("qwen3", HEADS, KV_HEADS), prompt(301)
    record = ran(model, METHOD, ids)[1].budget.record()
    cells = 3 * HEADS * sum(i // 16 for i in range(64, 301))
    assert record["estimator"] == pytest.approx(cells / (2 * record["dense"])) and cells > 0
    assert record["B_cost"] == pytest.approx(record["B"] + record["estimator"])


def test_work_of_chunks_and_layers_adds_up():
    model, ids = built("llama", HEADS, KV_HEADS), prompt(600)
    _, account = ran(model, METHOD, ids, chunk_size=256)
    counts = account.budget.record()["work"]["counts"]
    assert counts["calls"] == 9 and counts["groups"] == 3 * KV_HEADS * 600 // 8
    assert counts["member_pages"] == 3 * KV_HEADS * sum(min(4, i // 16 + 1) for i in range(600))


def test_beyond_the_capacity_the_queries_keep_their_order_and_it_is_recorded():
    model, ids = built("qwen3", HEADS, KV_HEADS), prompt(600)
    small = replace(METHOD, capacity=32)
    got, account = ran(model, small, ids)
    plain, _ = ran(model, replace(METHOD, regroup="off"), ids)
    assert torch.equal(got, plain)
    work = account.budget.record()["work"]
    assert work["ratios"]["identity_share"] == 1.0 and work["counts"]["calls_beyond_capacity"] == 3
    assert "38 pages of N=600 are more than capacity=32: not regrouped" in small.warnings(600)
    assert replace(small, regroup="off").warnings(600) == METHOD.warnings(600) == []
    # The first chunk of 512 tokens fits, the second does not.
    half = ran(model, small, ids, chunk_size=512)[1].budget.record()["work"]
    assert half["ratios"]["identity_share"] == 0.5


def test_a_dense_method_counts_no_work():
    model = built("qwen3", HEADS, KV_HEADS)
    assert "work" not in ran(model, METHODS.get("dense")(), prompt(50))[1].budget.record()


# ------------------------------------------------------------------------------------------------------------- identity
@pytest.mark.parametrize("kind,heads,kv_heads", [("llama", 6, 2), ("qwen3", 8, 2), ("qwen3", 16, 1), ("llama", 3, 3)])
@pytest.mark.parametrize("page,top_k", [(16, 19), (64, 5), (128, 3)])
def test_every_page_is_dense(kind, heads, kv_heads, page, top_k):
    model, ids = built(kind, heads, kv_heads), prompt(301)
    method = PageWeaver(page_size=page, top_k=top_k)
    got, account = ran(model, method, ids, page_size=32, page_shuffle=5)
    dense, _ = ran(model, METHODS.get("dense")(), ids)
    assert (got - dense).abs().max() <= 1e-4
    record = account.budget.record()
    assert record["B"] == 1.0 and record["estimator"] == 0
    less, _ = ran(model, replace(method, top_k=2), ids)
    assert (less - dense).abs().max() > 1e-2, "a sparse run must fail this check"


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("length", [128, 129, 700])
def test_chunks_and_pages_change_nothing(kind, length):
    model, ids = built(kind, HEADS, KV_HEADS), prompt(length)
    whole, account = ran(model, METHOD, ids, page_size=256)
    for chunk, physical, shuffle in ((128, 16, 3), (384, 64, None)):
        parts, split = ran(model, METHOD, ids, chunk_size=chunk, page_size=physical, page_shuffle=shuffle)
        assert (parts - whole).abs().max() < 1e-4
        one, other = split.budget.record(), account.budget.record()
        assert one.pop("work")["counts"]["member_pages"] == other.pop("work")["counts"]["member_pages"]
        assert one == pytest.approx(other)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_regrouping_changes_no_bit_of_the_logits(kv_heads):
    model, ids = built("qwen3", HEADS, kv_heads), prompt(517)
    off, _ = ran(model, replace(METHOD, regroup="off"), ids)
    for regroup in ("64", "128"):
        assert torch.equal(ran(model, replace(METHOD, regroup=regroup), ids)[0], off)
    q, kv = inputs(517)
    assert not torch.equal(
        regroup_queries(planned(METHOD, q, kv)), regroup_queries(planned(replace(METHOD, regroup="off"), q, kv))
    ), "the case is meant to move queries"


SMOLLM2 = ModelConfig(
    name="smollm2",
    native_context=8192,
    package=PackageRef(EMBEDDED_MODEL.name, EMBEDDED_MODEL.version, EMBEDDED_MODEL.sha256, EMBEDDED_MODEL.member),
)


def texts(tokenizer, root):
    """Two perplexity windows and a RULER prompt: ids, and the first position whose logits count."""
    windows = build_windows(PerplexityConfig(length=768, limit=2), tokenizer, bos=False, corpora=Corpora())
    renderer = PromptRenderer(tokenizer, chat=True, thinking=None)
    (sample,) = ruler.load(
        "niah_multikey_2", 1024, 1, seed=42, renderer=renderer, corpora=Corpora(), max_new_tokens=128, root=root
    )
    ids = renderer.encode(sample.prompt)
    return [*((ids, len(ids) // 2) for ids in windows.ids), (ids, len(ids) - 1)]


def assert_no_bit_changes(model, method, ids, kept):
    found, work = {}, {}
    for regroup in ("off", "64", "128"):
        with Session(model, replace(method, regroup=regroup)) as session:
            found[regroup] = session.logits(session.prefill(torch.tensor(ids), keep_from=kept))
            work[regroup] = session.account().budget.record()["work"]["ratios"]["mean_union"]
    assert torch.equal(found["off"], found["64"]) and torch.equal(found["off"], found["128"])
    assert max(work["64"], work["128"]) < work["off"], "the case is meant to move queries"
    return found["off"]


@pytest.mark.parametrize("kind,heads,kv_heads", [("llama", 6, 2), ("qwen3", 16, 1)])
def test_regrouping_changes_no_bit_in_bfloat16_over_perplexity_windows_and_a_ruler_prompt(
    tmp_path, kind, heads, kv_heads
):
    tokenizer = load_tokenizer(locate(SMOLLM2), SMOLLM2)
    model = built(kind, heads, kv_heads, len(tokenizer)).to(torch.bfloat16)
    for ids, kept in texts(tokenizer, tmp_path):
        logits = assert_no_bit_changes(model, PageWeaver(page_size=32, top_k=8), ids, kept)
        assert logits.isfinite().all() and model.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_regrouping_changes_no_bit_of_smollm2_over_perplexity_windows_and_a_ruler_prompt(tmp_path, dtype):
    loaded = load_model(SMOLLM2, locate(SMOLLM2), 1024, torch.device("cpu"), dtype)
    for ids, kept in texts(loaded.tokenizer, tmp_path):
        assert_no_bit_changes(loaded.model, PageWeaver(page_size=32, top_k=8), ids, kept)


def test_fp8_costs_little_and_is_not_the_models_precision():
    model, ids = built("qwen3", HEADS, KV_HEADS), prompt(517)
    method = replace(METHOD, page_size=32)
    exact, _ = ran(model, method, ids)
    rounded, account = ran(model, replace(method, kv_dtype="fp8"), ids)
    distance = float((rounded - exact).norm() / exact.norm())
    assert 1e-4 < distance < 0.3 and account.budget.record()["B"] < 1
    assert torch.equal(ran(model, replace(method, kv_dtype="fp8", regroup="off"), ids)[0], rounded)


# ------------------------------------------------------------------------------------------------------------- settings
WRONG = [
    ({"top_k": 1}, "method.top_k", "2 or more pages"),
    ({"page_size": 48}, "method.page_size", "a power of two from 16 to 256 tokens"),
    ({"page_size": 512}, "method.page_size", "a power of two from 16 to 256 tokens"),
    ({"page_size": 8}, "method.page_size", "a power of two from 16 to 256 tokens"),
    ({"page_size": 16, "kv_dtype": "fp8"}, "method.page_size", "a power of two from 32 to 256 tokens under"),
    ({"page_size": 64, "union": "hopper"}, "method.page_size", "128 under method.union=hopper"),
    ({"kv_dtype": "model", "union": "cluster"}, "method.kv_dtype", "fp8 under method.union=cluster"),
    ({"block_size": 64}, "method.block_size", "128 tokens"),
    ({"summary": "men"}, "method.summary", "did you mean mean?"),
    ({"regroup": "32"}, "method.regroup", "known: 128, 64, off"),
    ({"regroup": False}, "method.regroup", "64"),
    ({"kv_dtype": "fp16"}, "method.kv_dtype", "fp8"),
    ({"union": "hoper"}, "method.union", "did you mean hopper?"),
    ({"capacity": 500}, "method.capacity", "a multiple of 32"),
]


@pytest.mark.parametrize("change,field,allowed", WRONG, ids=lambda x: str(x))
def test_a_wrong_setting_is_named_with_what_is_allowed(change, field, allowed):
    with pytest.raises(InputError) as error:
        PageWeaver(**change).validate()
    assert error.value.field == field and error.value.value == next(iter(change.values()))
    assert allowed in error.value.allowed


def test_fp8_refuses_chunks_and_says_why():
    method = PageWeaver(kv_dtype="fp8")
    with pytest.raises(InputError, match="execution.chunk_size=128: null: pageweaver scales a KV head by its whole"):
        Session(built("qwen3", HEADS, KV_HEADS), method, chunk_size=128)
    settings = {
        "model": {"name": "toy", "native_context": 4096, "path": "x/y"},
        "method": {"name": "pageweaver", "kv_dtype": "fp8"},
        "task": {"name": "perplexity", "length": 1024},
        "execution": {"chunk_size": 256},
    }
    with pytest.raises(InputError, match="kv_dtype=fp8: use null") as error:
        cell_from_mapping(settings)
    assert error.value.field == "execution.chunk_size"
    cell_from_mapping({**settings, "method": {"name": "pageweaver"}})


def test_each_knob_reaches_the_plan():
    q, kv = inputs(300)
    base = planned(METHOD, q, kv)
    assert (base.regroup, base.capacity, base.kv_dtype, base.page_size) == (128, 512, "model", 16)
    assert planned(replace(METHOD, regroup="64"), q, kv).regroup == 64
    assert planned(replace(METHOD, regroup="off"), q, kv).regroup == 0
    assert planned(replace(METHOD, kv_dtype="fp8"), q, kv).kv_dtype == "fp8"
    assert planned(replace(METHOD, capacity=64), q, kv).capacity == 64
    assert not torch.equal(planned(replace(METHOD, summary="minmax"), q, kv).pages, base.pages)
    assert planned(replace(METHOD, top_k=7), q, kv).pages.shape[-1] == 7
    assert replace(METHOD, union="triton").kernel_backend("auto") == "triton"
    assert METHOD.kernel_backend("hopper") == "hopper"


def test_the_union_kernel_that_is_named_is_asked_for(monkeypatch):
    asked = []

    def attend(q, kv, plan, *, scale, backend):
        asked.append(backend)
        return page_attention(q, kv, plan, scale=scale, backend="torch")

    monkeypatch.setattr("evalkit.attention.interface.sparse_attention", attend)
    method = replace(METHOD, union="cluster", page_size=128, kv_dtype="fp8")
    ran(built("qwen3", HEADS, KV_HEADS), method, prompt(40))
    assert asked == ["cluster"] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for GPU kernels where there is no GPU")
@pytest.mark.parametrize(
    "method,field,why",
    [
        ({"union": "hopper"}, "method.union='hopper'", "compute capability 9.0"),
        ({"union": "cluster", "kv_dtype": "fp8"}, "method.union='cluster'", "compute capability 9.0"),
        ({"union": "triton"}, "method.union='triton'", "triton|Triton"),
    ],
)
def test_a_union_kernel_that_cannot_run_here_is_refused_before_loading(tmp_path, monkeypatch, method, field, why):
    monkeypatch.setattr(runner, "locate", None)
    settings = {
        "model": {"name": "toy", "native_context": 4096, "path": "x/y", "dtype": "bfloat16"},
        "method": {"name": "pageweaver", **method},
        "task": {"name": "perplexity", "length": 1024},
        "out": str(tmp_path),
    }
    with pytest.raises(InputError, match=f"{field}: auto or torch here: .*({why})"):
        run_cell(cell_from_mapping(settings))


def test_what_a_named_kernel_asks_of_the_settings_is_checked_on_the_device():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("messages of the interpreter")
    here = torch.device("cpu"), torch.float32
    METHOD.check_device(*here, "triton", 32)
    replace(METHOD, union="triton").check_device(*here, "auto", 32)
    replace(METHOD, union="torch").check_device(torch.device("cpu"), torch.bfloat16, "triton", 32)
    METHOD.check_device(*here, "auto", 32)
    fp8 = replace(METHOD, page_size=32, kv_dtype="fp8")
    for method, backend, field in ((fp8, "triton", "execution.backend"), (fp8, "auto", "method.union")):
        method = method if backend == "triton" else replace(method, union="triton")
        with pytest.raises(InputError, match=f"{field}='triton': .*cannot multiply E4M3"):
            method.check_device(*here, backend, 32)


def test_calibration_turns_top_k_from_two_pages_to_all():
    knob = METHOD.knob
    assert knob is not None
    axis = Axis(knob, 8192)
    assert (knob.field, axis.value(0.0), axis.value(1.0)) == ("top_k", 2.0, 512.0)
    assert "top_k=16 covers the 16 pages of N=2048: dense" in PageWeaver().warnings(2048)
    assert math.ceil(2049 / 128) == 17 and PageWeaver().warnings(2049) == []


def test_a_capacity_without_regrouping_cannot_act():
    with pytest.raises(InputError, match="method.capacity=64: .*, its default, with method.regroup='off'"):
        PageWeaver(regroup="off", capacity=64).validate()
    PageWeaver(regroup="64", capacity=64).validate()
