"""What the cluster kernel says where it cannot run, and that it is built once, by nvcc, on first use."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import ptxas
import pytest
from page_cases import make
from prefill_kernels import BackendUnavailable, nvcc, union_attention
from prefill_kernels import cluster_page_attention as cluster
from prefill_kernels.regroup import regroup_queries
from prefill_kernels.unions import prepare_unions


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache, and nothing remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remembered = cluster.library, nvcc.compiler
    for known in remembered:
        known.cache_clear()
    yield tmp_path
    for known in remembered:
        known.cache_clear()


def test_a_named_backend_without_a_gpu_says_what_it_needs():
    case = make([(20, 60)])
    unions = prepare_unions(case.plan, regroup_queries(case.plan))
    with pytest.raises(BackendUnavailable, match="compute capability 9.0"):
        union_attention(case.q, case.kv, case.plan, unions, scale=case.scale, backend="cluster")


def test_without_nvcc_the_text_says_so(fresh, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(nvcc.os, "access", lambda *args: False)
    assert nvcc.compiler() is None and "nvcc" in nvcc.problem(cluster.SOURCE)
    with pytest.raises(BackendUnavailable, match="nvcc"):
        cluster.library()


def test_a_failing_compiler_is_told(fresh, monkeypatch, tmp_path):
    fake = tmp_path / "nvcc"
    fake.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'no such architecture' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(nvcc, "compiler", lambda: str(fake))
    with pytest.raises(BackendUnavailable, match="no such architecture"):
        cluster.library()
    assert not list((fresh / "prefill_kernels").glob("*"))


def test_import_builds_nothing_and_needs_no_compiler():
    code = "import prefill_kernels.cluster_page_attention, subprocess; print('fine')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={"PATH": "", "PYTHONPATH": str(Path(cluster.__file__).parents[1]), "HOME": "/nonexistent"},
    )  # fmt: skip
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_builds_it_once(fresh, monkeypatch):
    first = cluster.library()
    assert first.page_attention_error(1).decode()
    built = list((fresh / "prefill_kernels").glob("*"))
    assert len(built) == 1 and built[0].suffix == ".so"
    stamp = built[0].stat().st_mtime_ns
    cluster.library.cache_clear()
    cluster.library()
    assert built[0].stat().st_mtime_ns == stamp
    # What was built before serves where there is no compiler.
    cluster.library.cache_clear()
    monkeypatch.setattr(nvcc, "compiler", lambda: None)
    assert nvcc.problem(cluster.SOURCE) is None and cluster.library().page_attention_error(1).decode()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_three_blocks_fit_a_multiprocessor_and_nothing_spills(tmp_path):
    used, told = ptxas.registers(cluster.SOURCE, tmp_path)
    assert len(used) == 4 and max(used) <= 168
    assert "C75" not in told, "wgmma was serialised"
