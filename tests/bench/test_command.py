"""Settings and the command line that needs torch alone."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from prefill_kernels.bench import COLUMNS, AttentionBench, BenchError, KernelBench, PageBench, Rows, command
from prefill_kernels.bench.rows import checkout_commit, default_out

from evalkit.bench.settings import MethodsBench, TtftBench

WRONG = [
    (KernelBench(lengths=()), "lengths=[]: token counts of at least 128"),
    (KernelBench(lengths=(64,)), "lengths=[64]"),
    (KernelBench(lengths=(4096, 4096)), "each once"),
    (KernelBench(budgets=(0.5, 1.5)), "budgets=[0.5, 1.5]: numbers above 0, at most 1"),
    (KernelBench(stride=0), "stride=0: 1 to 128"),
    (KernelBench(repeats=0), "repeats=0"),
    (KernelBench(seed=-1), "seed=-1"),
    (KernelBench(out="rows.txt"), "out='rows.txt': a file that ends in .csv"),
    (KernelBench(variants=("fa2", "osk_trition")), "variants='osk_trition': did you mean osk_triton? known: fa2"),
    (KernelBench(variants=("osk",)), "must hold fa2"),
    (AttentionBench(strides=(8, 256)), "strides=[8, 256]"),
    (AttentionBench(target=0.5), "target=0.5: above 0 and below stage1=0.29"),
    (AttentionBench(sigmas=(float("nan"),)), "sigmas="),
    (AttentionBench(inputs="/none.safetensors"), "inputs='/none.safetensors': synthetic, or an existing"),
    (TtftBench(lengths=(1000,)), "lengths=[1000]: multiples of 128"),
    (TtftBench(kv_heads=5), "kv_heads=5: a divisor of heads=32"),
    (TtftBench(variants=("fa2", "cosavote")), "did you mean cosa_vote, "),
    (TtftBench(skip_scale=0), "skip_scale=0: above 0"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=lambda item: item if isinstance(item, str) else "")
def test_bad_settings(settings, message):
    with pytest.raises(BenchError, match=re.escape(message)):
        settings.validate()


@pytest.mark.parametrize("settings", [KernelBench(), AttentionBench(), MethodsBench(), TtftBench()])
def test_defaults_are_fine(settings):
    settings.validate()


@pytest.mark.parametrize(("text", "value"), [("false", False), ("True", True)])
def test_truth_on_the_command_line(text, value):
    parser = argparse.ArgumentParser()
    command.add_options(parser, PageBench)
    given = ["--native", text, "--captures", "--native-backends", "decode:fa2", "decode:xqa"]
    settings = command.settings_from(PageBench, parser.parse_args(given))
    assert settings.native is value and settings.native_backends == ("decode:fa2", "decode:xqa")
    with pytest.raises(SystemExit):
        parser.parse_args(["--native", "no"])


def run(*argv):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command_line = [sys.executable, "-m", *argv]
    return subprocess.run(command_line, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize(
    "module", [("prefill_kernels.bench", "kernel"), ("evalkit.bench", "attention"), ("evalkit.bench", "ttft")]
)
def test_without_cuda_it_is_one_line_and_nothing_is_written(module, tmp_path):
    done = run(*module, "--out", str(tmp_path / "new" / "rows.csv"))
    assert done.returncode == 2 and not (tmp_path / "new").exists()
    assert done.stderr == f"python -m {module[0]}: device='cpu': a CUDA device is needed; torch finds none here\n"


def test_ttft_without_transformers_is_one_line():
    code = (
        "import runpy, sys; sys.modules['transformers'] = None; sys.argv = ['evalkit.bench', 'ttft'];"
        "runpy.run_module('evalkit.bench', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    told = "benchmark='ttft': needs transformers, which cannot be imported: install it"
    assert done.returncode == 2 and done.stderr == f"python -m evalkit.bench: {told}\n"


def test_options_are_the_settings_fields():
    done = run("prefill_kernels.bench", "attention", "--lengths", "4096", "100")
    assert done.returncode == 2 and "lengths=[4096, 100]" in done.stderr
    text = run("prefill_kernels.bench", "attention", "--help").stdout
    assert "--skip-scales" in text and "(default: 8 16)" in text and "capital delta" in text


def test_kernels_are_benchmarked_without_the_harness():
    code = (
        "import sys, prefill_kernels.bench.command, prefill_kernels.bench.kernel, prefill_kernels.bench.attention;"
        "print([m for m in ('evalkit', 'transformers', 'hydra', 'pandas', 'safetensors') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_options_become_settings():
    parser = command.argparse.ArgumentParser()
    command.add_options(parser, AttentionBench)
    given = ["--lengths", "512", "1024", "--budgets", ".5", "--stage1", "0.6", "--target", ".3", "--out", "x.csv"]
    settings = command.settings_from(AttentionBench, parser.parse_args([*given, "--sigmas"]))
    expected = AttentionBench(lengths=(512, 1024), budgets=(0.5,), stage1=0.6, target=0.3, out="x.csv", sigmas=())
    assert settings == expected


# ----------------------------------------------------------------------------------------------------------------- rows
def test_rows_are_appended(tmp_path):
    path = tmp_path / "deep" / "rows.csv"
    for _ in range(2):
        Rows(path, "c, with a comma", "abc", device="D").add("kernel", "fa2", 128, "dense", ms=1.234567, tflops=2)
    lines = path.read_text().splitlines()
    assert lines[0] == ",".join(COLUMNS) and len(lines) == 5
    assert lines[1].startswith(f"kernel,fa2,128,dense,ms,1.2346,ms,D,{torch.__version__},")
    assert lines[2].endswith(',abc,"c, with a comma"')


def test_a_file_of_other_columns_is_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(BenchError, match="a new file, or one whose first line is bench,variant"):
        Rows(path, "c", "abc", device="D")
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="a file that can be written to"):
        Rows(tmp_path / "file" / "rows.csv", "c", "abc", device="D")
    assert path.read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize(
    ("device", "folder"), [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"), ("AMD X", "amd-x")]
)
def test_rows_go_to_the_folder_of_the_device(device, folder):
    assert default_out(device) == Path("results") / folder / "benchmarks.csv"


def test_commit_is_that_of_the_checkout():
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?|unknown", checkout_commit())


def test_results_that_change_while_they_are_made_do_not_mark_the_commit(monkeypatch, tmp_path):
    for name in ("kernels/rows.py", "results/a.csv"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("1")
    for arguments in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    monkeypatch.setattr("prefill_kernels.bench.rows.__file__", str(tmp_path / "kernels/rows.py"))
    commit = checkout_commit()
    (tmp_path / "results/a.csv").write_text("2")
    assert re.fullmatch("[0-9a-f]{7,}", commit) and checkout_commit() == commit
    (tmp_path / "kernels/rows.py").write_text("2")
    assert checkout_commit() == f"{commit}-dirty"
