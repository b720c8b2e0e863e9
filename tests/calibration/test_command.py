"""evalkit calibrate on the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from evalkit import cli
from evalkit.calibration import run as run_module


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Requests that reached the search; none is run."""
    monkeypatch.chdir(tmp_path)
    requests = []

    def note(request):
        request.validate()
        requests.append(request)
        return 0

    monkeypatch.setattr(run_module, "calibrate", note)
    return requests


WANTED = ("calibrate.lengths=[2048,4096]", "calibrate.budgets=[0.2,0.3]")


def test_settings_reach_the_request(asked):
    arguments = ["method=cosa", "method.stride=4", *WANTED, "calibrate.per_head=true", "execution.page_size=128"]
    assert cli.main(["calibrate", *arguments]) == 0
    (request,) = asked
    assert request.method.stride == 4 and request.settings.per_head and request.execution.page_size == 128
    assert [(t.length, t.value) for t in request.settings.targets] == [
        (2048, 0.2),
        (2048, 0.3),
        (4096, 0.2),
        (4096, 0.3),
    ]
    assert request.model.name == "smollm2" and request.path.parent.as_posix() == "results/calibration"


def test_the_method_names_the_file(asked):
    assert cli.main(["calibrate", "method=xattention", "method.calibration=mine.yaml", *WANTED]) == 0
    assert asked[0].path.name == "mine.yaml" and asked[0].bare.calibration is None


@pytest.mark.parametrize(
    "arguments,message",
    [
        ([*WANTED], "method: must be given"),
        (["method=coas", *WANTED], "method=coas: did you mean cosa"),
        (["method=cosa"], "calibrate.lengths=[]"),
        (["method=cosa", "calibrate.lenghts=[1]"], "calibrate.lenghts: no such setting"),
        (["methd=cosa"], "methd='cosa': did you mean method"),
        (["method=cosa", "calibrate.lengths=[a]"], "calibrate.lengths"),
        (["method=cosa", *WANTED, "calibrate.windows=0"], "calibrate.windows=0"),
        (["method=dense", *WANTED], "no single knob"),
        (["method=cosa", "calibrate.lengths=[16384]", "calibrate.budgets=[0.2]"], "supports at most 8192"),
        (["preset=nothing"], "preset=nothing"),
    ],
)
def test_bad_input_is_one_line(asked, capsys, arguments, message):
    assert cli.main(["calibrate", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("evalkit: ") and "\n" not in error and message in error
    assert not asked


def test_help_and_config(asked, capsys):
    assert cli.main(["calibrate", "--help"]) == 0
    assert "cosa-llama-3.1-8b" in capsys.readouterr().out
    assert cli.main(["calibrate", "method=cosa", *WANTED, "--cfg", "job"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["calibrate"]["budgets"] == [0.2, 0.3] and not asked
    assert cli.main(["calibrate", "-h"]) == 0


def test_an_interrupt_says_that_it_goes_on(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def interrupted(request):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "calibrate", interrupted)
    assert cli.main(["calibrate", "method=cosa", *WANTED]) == 130
    assert "goes on from here" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_in_a_process_of_its_own(model_folder, corpus, tmp_path):
    arguments = [
        "model=local",
        f"model.path={model_folder}",
        "model.native_context=2048",
        "method=streaming",
        "method.block_size=64",
        "calibrate.lengths=[256]",
        "calibrate.budgets=[0.631]",
        "calibrate.windows=1",
        f"calibrate.text={corpus}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "evalkit.cli", "calibrate", *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "results" / "calibration").glob("*.yaml")
    assert f"written: results/calibration/{file.name}" in done.stdout
    assert yaml.safe_load(file.read_text())["entries"][0]["value"] == 1
