"""The embedded model: conversion, and identity at 100 % on a real model with 9 query heads on 3 KV heads."""

from __future__ import annotations

import json

import huggingface_hub.constants
import pytest
import torch

from evalkit.assets import EMBEDDED_MODEL
from evalkit.attention import Session
from evalkit.config import ModelConfig, PackageRef
from evalkit.corpora import Corpora
from evalkit.errors import InputError, MissingAsset
from evalkit.methods.cosa import CoSA, Select
from evalkit.methods.dense import Dense
from evalkit.models.loading import load_model, locate, resolve_device, resolve_dtype

CONFIG = ModelConfig(
    name="smollm2",
    native_context=8192,
    package=PackageRef(EMBEDDED_MODEL.name, EMBEDDED_MODEL.version, EMBEDDED_MODEL.sha256, EMBEDDED_MODEL.member),
)
CPU = torch.device("cpu")
FULL = CoSA(select=Select(p=1.0))


@pytest.fixture(scope="module")
def loaded():
    return load_model(CONFIG, locate(CONFIG), 2048, CPU, torch.float32)


@pytest.fixture(scope="module")
def ids(loaded):
    tokens = loaded.tokenizer(Corpora().essays_text[:8000], add_special_tokens=False)["input_ids"]
    return torch.tensor(tokens[:717])  # no block divides it


def session_logits(model, method, ids, **kw):
    with Session(model, method, **kw) as session:
        return session.logits(session.prefill(ids, keep_from=0))


@torch.inference_mode()
def own_logits(model, implementation, ids):
    model.set_attn_implementation(implementation)
    out = model(ids[None]).logits[0].float()
    model.set_attn_implementation("sdpa")
    return out


def kl(p, q):
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("method", [FULL, CoSA(select=Select(p=1.0), order="descending"), Dense()])
def test_identity_in_float32(loaded, ids, method):
    """The error of SDPA against eager is itself 6e-5 to 9e-5 here, so the twin, SDPA, is what is compared with."""
    some = ids[:229]
    sdpa = own_logits(loaded.model, "sdpa", some)
    got = session_logits(loaded.model, method, some, page_size=64, page_shuffle=1)
    assert (got - sdpa).abs().max() <= 1e-4
    sparse = session_logits(loaded.model, CoSA(select=Select(p=0.9)), some)
    assert (sparse - sdpa).abs().max() > 1, "a sparse run must fail this check"


@torch.inference_mode()
def test_identity_in_float64_in_chunks(ids):
    """Float64 attention leaves the float32 norms, RoPE and eager softmax of the model as the only difference."""
    model = load_model(CONFIG, locate(CONFIG), 2048, CPU, torch.float64).model
    model.set_attn_implementation("eager")
    eager = model(ids[None]).logits[0]
    with Session(model, FULL, chunk_size=256, page_size=64, page_shuffle=1) as session:
        got = model.lm_head(session.prefill(ids, keep_from=0))
    assert (got - eager).abs().max() <= 5e-5


def test_identity_in_bfloat16_is_within_three_times_sdpa_against_eager(ids):
    model = load_model(CONFIG, locate(CONFIG), 2048, CPU, torch.bfloat16).model
    eager, sdpa = own_logits(model, "eager", ids), own_logits(model, "sdpa", ids)
    floor = kl(sdpa, eager)
    assert floor > 0
    assert kl(sdpa, session_logits(model, FULL, ids)) <= 3 * floor


def test_in_kernel_skip_spends_less_on_real_attention(loaded, ids):
    spent = {}
    for order in ("ascending", "descending", "hrm_first"):
        with Session(loaded.model, CoSA(select=Select(p=0.99), order=order, skip_scale=0.25 * len(ids))) as session:
            session.prefill(ids, keep_from=len(ids) - 1)
            spent[order] = session.account().budget.record()
    assert all(r["B"] < r["B_stage1"] for r in spent.values())
    assert spent["hrm_first"]["B"] < spent["ascending"]["B"]


def test_conversion_happens_once_and_damage_is_found(loaded, monkeypatch):
    source = locate(CONFIG)
    assert source.checksum == EMBEDDED_MODEL.sha256
    from evalkit.models import loading

    monkeypatch.setattr(loading, "extract_member", None)  # a second conversion would need it
    assert locate(CONFIG) == source
    stamp = json.loads(open(f"{source.location}/conversion.json").read())
    assert "model.safetensors" in stamp and "tokenizer.json" in stamp
    monkeypatch.setattr(loading, "_digests", lambda files: dict.fromkeys(files, "0" * 64))
    with pytest.raises(MissingAsset, match="damaged; delete"):
        locate(CONFIG)


def test_local_directory_loads_the_same_weights(loaded, tmp_path, monkeypatch):
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    local = ModelConfig(name="local", native_context=8192, path=locate_converted(loaded))
    source = locate(local)
    again = load_model(local, source, 1024, CPU, torch.float32)
    for (name, a), (_, b) in zip(again.model.named_parameters(), loaded.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert locate(local).checksum == source.checksum


def locate_converted(loaded) -> str:
    return loaded.model.config._name_or_path


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MissingAsset, match="no config.json"):
        locate(ModelConfig(name="x", native_context=10, path=str(tmp_path)))
    with pytest.raises(MissingAsset, match=r"model.path='nobody/none'.*give its directory"):
        locate(ModelConfig(name="x", native_context=10, path="nobody/none"))


def test_model_types_that_are_not_patched_are_refused_before_weights_are_read(tmp_path):
    from transformers import MistralConfig

    MistralConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    config = ModelConfig(name="x", native_context=10, path=str(tmp_path))
    with pytest.raises(InputError, match="model='mistral': a model of type llama, qwen2, qwen3"):
        load_model(config, locate(config), 10, CPU, torch.float32)


def test_context_the_weights_do_not_have_is_refused(loaded):
    from dataclasses import replace

    with pytest.raises(InputError, match="model.native_context=16384: at most max_position_embeddings=8192"):
        load_model(replace(CONFIG, native_context=16384), locate(CONFIG), 10000, CPU, torch.float32)


def test_auto_device_and_dtype():
    device = resolve_device("auto")
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_dtype("float16", device) == torch.float16
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="execution.device='cuda'"):
            resolve_device("cuda")
