"""Search and union preparation together: two steps or one kernel, what the kernel refuses, and what runs instead."""

from __future__ import annotations

import contextlib
import importlib
import shutil
from dataclasses import replace

import page_cases
import ptxas
import pytest
import torch
from prefill_kernels import (
    BackendUnavailable,
    executed,
    nvcc,
    page_attention,
    page_search,
    prepare_unions,
    regroup_queries,
    search_unions,
)
from prefill_kernels import cuda_page_search as kernel
from prefill_kernels.page_search import SEARCH_BACKENDS

FIELDS = ("ids", "pages", "members", "count", "requests")
GPU = torch.cuda.is_available()


@pytest.fixture
def hopper(monkeypatch):
    """Everything but the tensors says that the kernel can run."""
    monkeypatch.setattr(kernel, "_device_problem", lambda device: None)
    monkeypatch.setattr(kernel, "_build_problem", lambda device: None)


@pytest.mark.parametrize("regroup", [0, 64, 128])
def test_it_is_the_two_steps(regroup):
    plan = page_cases.make([(70, 300), (9, 40)], heads=(2, 2), seed=2, local=True, regroup=regroup).plan
    with executed() as ran:
        found = search_unions(plan, backend="torch")
    want = prepare_unions(plan, regroup_queries(plan))
    assert all(torch.equal(getattr(found, name), getattr(want, name)) for name in FIELDS)
    assert ran.counts["union", "torch"] == 1 and not ran.refused


def test_a_broken_plan_is_told_before_anything_runs():
    plan = page_cases.make([(9, 40)], regroup=64).plan
    with pytest.raises(ValueError, match="regroup=32"):
        search_unions(replace(plan, regroup=32))


def test_names():
    plan = page_cases.make([(9, 40)], regroup=64).plan
    assert SEARCH_BACKENDS == ("torch", "triton", "cuda")
    with pytest.raises(BackendUnavailable, match="backend='nothing'"):
        search_unions(plan, backend="nothing")
    if not GPU:
        for window in (0, 64):
            with pytest.raises(
                BackendUnavailable, match="backend='cuda': needs a CUDA device of compute capability 9.0"
            ):
                prepare_unions(plan, regroup_queries(plan), backend="cuda")
            with pytest.raises(
                BackendUnavailable, match="backend='cuda': needs a CUDA device of compute capability 9.0"
            ):
                search_unions(replace(plan, regroup=window), backend="cuda")


def test_what_the_kernel_refuses(hopper):
    plan = page_cases.make([(9, 16 * 2100)], width=64, regroup=64, capacity=2048).plan
    assert kernel.refusal(plan) is None and kernel.rows(plan) == 2048
    assert kernel.rows(replace(plan, capacity=32)) == 32
    assert kernel.rows(page_cases.make([(9, 16 * 33)], regroup=64).plan) == 64
    assert "2112 pages" in kernel.refusal(replace(plan, capacity=4096))
    wide = replace(plan, pages=torch.zeros(1, 9, 1, 65, dtype=torch.int32))
    assert "65 pages a query" in kernel.refusal(wide)
    assert kernel.refusal(replace(plan, regroup=0)) is None, "an order that is there needs no window"
    assert kernel.refusal(page_cases.make([(0, 40)], regroup=64).plan) == "no queries"


@pytest.mark.skipif(GPU, reason="asks for the kernel where there is no GPU")
def test_auto_and_the_hopper_kernels_take_it_and_say_why_not(monkeypatch):
    """Beside a GPU backend; here the attention is the reference, and only what is asked of the search is looked at."""
    attention = importlib.import_module("prefill_kernels.page_attention")
    monkeypatch.setattr(attention, "resolve_page_backend", lambda *call: "torch")
    monkeypatch.setattr(attention, "triton_refusal", lambda *call: lambda: "no Triton here")
    asked = []

    def searched(plan, ids=None):
        asked.append(ids)
        return search_unions(plan, backend="torch") if ids is None else prepare_unions(plan, ids, backend="torch")

    monkeypatch.setattr(kernel, "search_cuda", searched)
    one = page_cases.make([(20, 60)], regroup=64)
    want, _ = page_attention(one.q, one.kv, one.plan, scale=1.0, backend="torch")

    for able in (True, False):
        monkeypatch.setattr(kernel, "refusal", lambda plan, able=able: None if able else "nvcc was not found")
        for backend in ("hopper", "cluster", "triton"):
            asked.clear()
            with executed() as ran:
                out, stats = page_attention(one.q, one.kv, one.plan, scale=1.0, backend=backend)
            assert torch.equal(out, want) and stats.regrouped
            fused = able and backend != "triton"
            assert len(asked) == fused == ran.counts["regroup", "cuda"] == ran.counts["union", "cuda"]
            assert not any(ids is not None for ids in asked)
            told = ran.refused.get(("regroup", "cuda"))
            assert told == (None if able or backend == "triton" else "nvcc was not found")
        # Nothing to search: asked for the unions of the order that is there.
        asked.clear()
        with executed() as ran:
            page_attention(one.q, one.kv, one.planned(regroup=0).plan, scale=1.0, backend="hopper")
        assert [ids[0, :20].tolist() for ids in asked] == [list(range(20))] * able
        assert ran.counts["union", "cuda"] == able and ran.counts["regroup", "cuda"] == 0
        assert ("regroup", "cuda") not in ran.refused and (("union", "cuda") in ran.refused) is not able


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache, nothing remembered, and a device that would do."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel, "_device_problem", lambda device: None)
    remembered = kernel.library, kernel._build_problem, nvcc.compiler
    for known in remembered:
        known.cache_clear()
    yield tmp_path
    for known in remembered:
        known.cache_clear()


def test_without_nvcc_it_refuses(fresh, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(nvcc.os, "access", lambda *args: False)
    plan = page_cases.make([(9, 40)], regroup=64).plan
    assert "nvcc, which builds this kernel on first use" in kernel.refusal(plan)
    assert page_search.cuda_problem(plan) == kernel.refusal(plan)


@pytest.mark.skipif(GPU, reason="the current device is asked")
def test_a_compiler_that_fails_is_asked_once(fresh, monkeypatch, tmp_path):
    fake, log = tmp_path / "nvcc", tmp_path / "log"
    asked = f'[ "$1" = --version ] && exit 0\necho called >> {log}'
    fake.write_text(f"#!/bin/sh\n{asked}\necho 'no host compiler' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(nvcc, "compiler", lambda: str(fake))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    plan = page_cases.make([(9, 40)], regroup=64).plan
    for _ in range(3):
        assert "no host compiler" in kernel.refusal(plan)
    assert log.read_text() == "called\n"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nothing_spills_and_two_windows_fit_a_multiprocessor(tmp_path):
    used, _ = ptxas.registers(kernel.SOURCE, tmp_path)
    assert len(used) == 6 and max(used) <= 128, "512 threads at 128 registers fill a multiprocessor"
    assert sorted(used)[1] <= 64, "tables of 16 bits: two windows of 128, or four of 64"
