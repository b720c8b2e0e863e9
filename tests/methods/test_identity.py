"""Every setting of every method is part of what a cell's results and lm-eval's cached responses are kept under."""

from __future__ import annotations

import dataclasses
import typing
from types import SimpleNamespace

import pytest
import torch

from evalkit import identity
from evalkit.config import Cell, PerplexityConfig
from evalkit.lmeval.model import SparsePrefillLM
from evalkit.lmeval.settings import AnyTask, Settings, settings
from evalkit.methods import METHODS
from evalkit.store import cell_key

MODEL = settings({"pretrained": "smollm2"}).cell.model


def fields_of(cls, prefix=()):
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[item.name]):
            yield from fields_of(hints[item.name], (*prefix, item.name))
        elif item.init:
            yield (*prefix, item.name)


KNOBS = [(name, dotted) for name in METHODS for dotted in fields_of(METHODS.get(name))]


def changed(node, path, file):
    """``node`` with another value of the right kind at ``path``; it need not be a useful one."""
    name, *rest = path
    value = getattr(node, name)
    if rest:
        return dataclasses.replace(node, **{name: changed(value, rest, file)})
    hint = str(typing.get_type_hints(type(node))[name])
    if isinstance(value, bool):
        other = not value
    elif isinstance(value, int | float):
        other = value + 1
    elif isinstance(value, str):
        other = f"{value}-other"
    else:
        other = file if "str" in hint else 0.5
    new = dataclasses.replace(node)
    object.__setattr__(new, name, other)  # past the checks of a method that makes them early
    return new


def key(cell):
    return identity.cell_identity(cell, device=torch.device("cpu"), dtype=torch.float32, backend="torch", data={})


def cache_key(method, **more):
    """What a response is kept under, with no model loaded."""
    lm = SparsePrefillLM.__new__(SparsePrefillLM)
    asked = {"max_gen_toks": 256, "add_bos_token": None, "think_end_token": None, "seed": 0, **more}
    made = Settings(Cell(MODEL, method, AnyTask(length=512)), **asked)
    lm.identity = {**key(made.cell), "requests": made.requests}
    hook = SimpleNamespace(dbdict=SimpleNamespace())
    lm.set_cache_hook(hook)
    return hook.dbdict.encode_key("request")


@pytest.mark.parametrize(("name", "path"), KNOBS, ids=[f"{name}-{'.'.join(path)}" for name, path in KNOBS])
def test_any_setting_of_a_method_changes_both_keys(name, path, tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "calibration_digest", lambda cell: "entry")
    file = tmp_path / "table.yaml"
    file.write_text("0: 1\n")
    method = METHODS.get(name)()
    other = changed(method, path, str(file))
    task = PerplexityConfig()
    assert cell_key(key(Cell(MODEL, method, task))) != cell_key(key(Cell(MODEL, other, task)))
    assert cache_key(method) != cache_key(other)


def test_skip_scale_is_among_them():
    assert {("cosa", ("skip_scale",)), ("blasst", ("skip_scale",)), ("cosa", ("select", "p"))} <= {*KNOBS}


@pytest.mark.parametrize(
    "other", [{"max_gen_toks": 8}, {"add_bos_token": True}, {"think_end_token": "</think>"}, {"seed": 1}]
)
def test_how_requests_are_answered_changes_the_cache_key(other):
    method = METHODS.get("dense")()
    assert cache_key(method) != cache_key(method, **other)
    assert cache_key(method) == cache_key(method)


def test_the_code_digest_covers_kernels_and_task_definitions():
    names = {name for name, _ in identity.sources()}
    assert {
        "prefill_kernels/cluster_page_attention.cu",
        "prefill_kernels/cuda_page_search.cu",
        "tasks/ruler/_ruler.yaml",
        "tasks/longbench_v2/longbench_v2_direct.yaml",
        "evalkit/methods/cosa.py",
    } <= names
    assert not [name for name in names if name.startswith(("evalkit/report/", "evalkit/conf/"))]


def test_the_code_digest_follows_a_kernel(tmp_path, monkeypatch):
    file = tmp_path / "kernel.cu"
    monkeypatch.setattr(identity, "sources", lambda: [("kernel.cu", file)])
    found = []
    for text in ("a", "b"):
        file.write_text(text)
        found.append(identity.code_digest.__wrapped__())
    assert found[0] != found[1]
