"""``evalkit bench``: what is composed, what is refused, and that nothing is loaded before it is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
from prefill_kernels.bench import KernelBench
from prefill_kernels.bench.config import PageBench, WrongResult

from evalkit import cli
from evalkit.app import bench
from evalkit.bench.settings import MethodsBench, PageModelBench, TtftBench


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Settings and commands that would have been run."""
    calls = []
    runners = {name: (settings, "launched:record") for name, (settings, _) in bench.BENCHES.items()}
    monkeypatch.setattr(bench, "BENCHES", runners)
    load = bench._load
    record = lambda settings, command: calls.append((settings, command))  # noqa: E731
    monkeypatch.setattr(bench, "_load", lambda target: record if target == "launched:record" else load(target))
    monkeypatch.chdir(tmp_path)
    return calls


def test_defaults(launched):
    for name in ("kernel", "attention", "ttft"):
        assert cli.main(["bench", name]) == 0
    assert [settings for settings, _ in launched] == [KernelBench(), MethodsBench(), TtftBench()]
    assert [command for _, command in launched] == [f"evalkit bench {n}" for n in ("kernel", "attention", "ttft")]


def test_settings_reach_the_benchmark(launched, tmp_path):
    given = ["lengths=[4096,131072]", "budgets=[.2]", "out=rows.csv", "commit=abc", "repeats=3", "seed=4"]
    assert cli.main(["bench", "attention", *given, "strides=[4]", "variants=[fa2,cosa,'xattention:stride=16']"]) == 0
    expected = MethodsBench(
        lengths=(4096, 131072), budgets=(0.2,), out="rows.csv", commit="abc", repeats=3, seed=4, strides=(4,),
        variants=("fa2", "cosa", "xattention:stride=16"),
    )  # fmt: skip
    settings, command = launched[0]
    assert settings == expected and command.startswith("evalkit bench attention 'lengths=[4096,131072]' ")
    assert list(tmp_path.iterdir()) == [], "Hydra writes nothing"


@pytest.mark.parametrize("name", ["pageweaver", "pageweaver-model"])
def test_pageweaver_needs_good_settings_then_a_device_then_the_captures_that_it_names(
    name, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    wrong = {"pageweaver": "top_k=0", "pageweaver-model": "layers=0"}[name]
    assert cli.main(["bench", name, wrong]) == 2
    assert capsys.readouterr().err.startswith(f"evalkit: {wrong}: an integer of at least ")
    assert cli.main(["bench", name]) == 2
    assert capsys.readouterr().err == "evalkit: device='cpu': a CUDA device is needed; torch finds none here\n"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a device")
    assert cli.main(["bench", name]) == 2
    message = "evalkit: captures='captures/smollm2-yarn-8192.safetensors': an existing file; evalkit capture"
    assert capsys.readouterr().err.startswith(message)
    assert list(tmp_path.iterdir()) == [], "no file of rows either"


def test_captures_reach_pageweavers_benchmarks(launched, tmp_path):
    given = ["captures=[mine.safetensors]", "kv_dtypes=[fp8]"]
    assert cli.main(["bench", "pageweaver", *given, "windows=[64]", "backends=[hopper,cluster]", "shared=[]"]) == 0
    assert cli.main(["bench", "pageweaver-model", *given, "chunk=null", "layers=2"]) == 0
    files = {"captures": ("mine.safetensors",), "kv_dtypes": ("fp8",)}
    assert [settings for settings, _ in launched] == [
        PageBench(**files, windows=(64,), backends=("hopper", "cluster"), shared=()),
        PageModelBench(**files, chunk=None, layers=2),
    ]


def test_config_dir_of_the_user(launched, tmp_path):
    (tmp_path / "mine" / "bench").mkdir(parents=True)
    text = "# @package _global_\ndefaults: [kernel, _self_]\nlengths: [65536]\n"
    (tmp_path / "mine" / "bench" / "long.yaml").write_text(text)
    assert cli.main(["bench", "long", "--config-dir", "mine"]) == 0
    assert launched[0][0] == KernelBench(lengths=(65536,))


def test_show_config_runs_nothing(launched, capsys):
    assert cli.main(["bench", "ttft", "--cfg", "job"]) == 0
    assert "name: ttft" in capsys.readouterr().out and launched == []


REFUSED = {
    "unknown benchmark": (["kernle"], "bench=kernle: did you mean kernel? known: attention, kernel, pagew"),
    "unknown key": (["kernel", "lenghts=[1]"], "lenghts: no such setting; did you mean lengths"),
    "length": (["kernel", "lengths=[64]"], "lengths=[64]: token counts of at least 128, each once"),
    "no list": (["kernel", "lengths=4096"], "lengths=4096: Invalid value assigned: int is not a ListConfig"),
    "variant": (["attention", "variants=[fa2,cossa]"], "variants='cossa': did you mean cosa, "),
    "method": (["attention", "variants=[fa2,xatention]"], "variants='xatention': did you mean xattention"),
    "knob": (
        ["attention", "variants=[fa2,'xattention:stride=5']"],
        "variants='xattention:stride=5': method.stride=5: one",
    ),
    "ttft method": (["ttft", "variants=[fa2,'blasst:order=up']"], "variants='blasst:order=up': method.order='up': "),
    "file": (["attention", "inputs=/none.safetensors"], "inputs='/none.safetensors': synthetic, or an existing"),
    "heads": (["ttft", "kv_heads=5"], "kv_heads=5: a divisor of heads=32"),
    "window": (["pageweaver", "captures=[]", "windows=[32]"], "windows=[32]: 64 or 128, each once"),
    "precision": (["pageweaver", "captures=[]", "kv_dtypes=[fp16]"], "kv_dtypes=['fp16']: of model, fp8, each once"),
    "backend": (["pageweaver", "captures=[]", "backends=[hoper]"], "backends=['hoper']: of torch, triton, hopper"),
    "native": (
        ["pageweaver", "captures=[]", "native_backends=[decode:fa4]"],
        "native_backends=['decode:fa4']: of decode",
    ),
    "bitmaps": (["pageweaver", "captures=[]", "capacities=[100]"], "capacities=[100]: positive multiples of 32 pages"),
    "long": (["pageweaver", "captures=[]", "capacity_lengths=[1024]"], "capacity_lengths=[1024]: at least 10368"),
    "rounds": (["pageweaver", "captures=[]", "rounds=0"], "rounds=0: an integer of at least 1; an interval takes 6"),
    "context": (["pageweaver", "captures=[]", "lengths=[8192]"], "lengths=[8192]: at least 10368: queries=8192 and"),
    "no capture": (["pageweaver-model", "captures=[]"], "captures=[]: at least one file"),
    "no name": (["lengths=[1]"], "bench='lengths=[1]': its name comes first"),
    "multirun": (["kernel", "-m", "seed=1,2"], "bench='-m': one benchmark at a time"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_and_runs_nothing(launched, capsys, case):
    arguments, message = REFUSED[case]
    assert cli.main(["bench", *arguments]) == 2
    output = capsys.readouterr()
    lines = [line for line in (output.out + output.err).splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith(f"evalkit: {message}")
    assert launched == []


@pytest.mark.parametrize("name", ["kernel", "attention", "ttft"])
def test_without_cuda(name, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["bench", name]) == 2
    assert capsys.readouterr().err == "evalkit: device='cpu': a CUDA device is needed; torch finds none here\n"
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_result_is_one_line(launched, monkeypatch, capsys):
    def fail(settings, command):
        raise WrongResult("osk at 512 tokens: tile 3")

    load = bench._load
    monkeypatch.setattr(bench, "_load", lambda target: fail if target == "launched:record" else load(target))
    assert cli.main(["bench", "kernel"]) == 1
    assert capsys.readouterr().err == "evalkit: wrong result, nothing was timed of it: osk at 512 tokens: tile 3\n"


def test_help_lists_the_benchmarks(capsys):
    assert cli.main(["bench", "--help"]) == 0
    output = capsys.readouterr().out
    for name in bench.BENCHES:
        assert f"\n  {name} " in output
    assert cli.main(["bench"]) == 2


def test_settings_are_checked_without_transformers():
    code = "import sys, evalkit.app.bench as b; b.register(); print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
