"""``evalkit analyze``: what is composed, what is refused, and that nothing is loaded before it is refused."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files

import pytest

from evalkit import cli
from evalkit.analysis import settings as kinds
from evalkit.app import analyze


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Settings and commands that would have been run."""
    calls = []

    def record(settings, command, **more):
        calls.append((settings, command, more))
        return 0

    runners = {name: (settings, "launched:record") for name, (settings, _) in analyze.ANALYSES.items()}
    monkeypatch.setattr(analyze, "ANALYSES", runners)
    load = analyze._load
    monkeypatch.setattr(analyze, "_load", lambda target: record if target == "launched:record" else load(target))
    monkeypatch.chdir(tmp_path)
    return calls


def refused(capsys, *argv):
    assert cli.main(["analyze", *argv]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    return error


@pytest.mark.parametrize(
    ("name", "cls"),
    [("iou", kinds.IouAnalysis), ("rowmax", kinds.RowmaxAnalysis), ("heads", kinds.HeadsAnalysis)],
)
def test_defaults(launched, name, cls, tmp_path):
    assert cli.main(["analyze", name]) == 0
    (settings, command, _) = launched[0]
    assert type(settings) is cls and settings.model.name == "smollm2" and settings.length == 8192
    assert settings == cls(settings.model) and command == f"evalkit analyze {name}"
    assert list(tmp_path.iterdir()) == [], "Hydra writes nothing"


def test_the_remap_analysis_takes_tasks_and_keeps_its_loss(launched):
    assert (
        cli.main(["analyze", "remap", "model=qwen3-8b", "task=perplexity-longbench-v2", "execution.page_size=64"]) == 0
    )
    settings, _, more = launched[0]
    assert settings.task.score == "all" and settings.task.windows == "first" and settings.task.corpus == "longbench_v2"
    assert not settings.task.fidelity and settings.execution.page_size == 64
    assert settings.budgets == (1.0, 0.54, 0.42, 0.32, 0.28)
    assert settings.scales == [-1, 100, 200, 500, 1000, 2000, 3000, 5000]
    assert "model=qwen3-8b" in more["overrides"]


def test_settings_reach_the_analysis(launched, tmp_path):
    (tmp_path / "runs").mkdir()
    assert cli.main(["analyze", "iou", "budgets=[.1,.2]", "proxies=[kap,random]", "length=1024", "forced=false"]) == 0
    assert cli.main(["analyze", "frontier", "directories=[runs]", "interpolation=linear"]) == 0
    iou, frontier = (settings for settings, _, _ in launched)
    assert (iou.budgets, iou.proxies, iou.length, iou.forced) == ((0.1, 0.2), ("kap", "random"), 1024, False)
    assert frontier.directories == ("runs",) and frontier.interpolation == "linear"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["iou", "proxies=[kip]"], "proxies='kip': did you mean kap?"),
        (["iou", "budgets=[0.1,1.5]"], "budgets=[0.1, 1.5]: shares above 0, at most 1"),
        (["iou", "tasks=[vt]"], "tasks='vt': "),
        (["iou", "length=9000"], "length=9000: model smollm2 supports at most 8192"),
        (["iou", "length=100"], "length=100: must be an integer of at least 256"),
        (["iou", "lenght=1024"], "lenght='1024': did you mean length?"),
        (["iou", "device=tpu"], "device='tpu': did you mean cpu? known: auto, cpu, cuda"),
        (["rowmax", "shown=[3]"], "shown="),
        (["heads", "methods=[coza]"], "methods='coza': did you mean cosa,"),
        (
            ["heads", "methods=['cosa:select.p=2']"],
            "methods='cosa:select.p=2': method.select.p=2.0: above 0, at most 1",
        ),
        (["heads", "methods=[dense]"], "methods='dense': a sparse method"),
        (["heads", "states=mine"], "states='mine': known: dense, own"),
        (["heads", "methods=['xattention:threshold=0.95:threshold=0.9']"], "method.threshold='0.9': each setting once"),
        (
            ["heads", "methods=['pageweaver:regroup=off:capacity=64']"],
            "method.capacity=64: 512, its default, with method.regroup='off', beside which it cannot act",
        ),
        (
            ["heads", "methods=[cosa-llama-3.1-8b]", "model=llama-3.1-8b-instruct"],
            "methods='cosa-llama-3.1-8b': method.calibration=",
        ),
        (
            ["heads", "methods=[cosa-llama-3.1-8b]", "model=llama-3.1-8b-instruct"],
            "cosa-llama-3.1-8b.yaml, which is missing; run: evalkit calibrate preset=cosa-llama-3.1-8b",
        ),
        (["remap", "ratios=[-1]"], "ratios=[-1.0]: at least one above 0"),
        (["remap", "ratios=[0.1]", "skip_scales=[100]"], "skip_scales=[100.0]: either skip_scales or ratios, not both"),
        (["remap", "task.length=100"], "task.length=100: at least 256, two blocks of 128 tokens"),
        (
            ["remap", "task=ruler"],
            "task='ruler': the analysis needs a loss; known: perplexity, perplexity-longbench-v2",
        ),
        (["remap", "task=longbench-v2-cot"], "task='longbench-v2-cot': the analysis needs a loss"),
        (["remap", "task=rular"], "task=rular: did you mean ruler"),
        (["remap", "task.limit=0"], "task.limit=0"),
        (["remap", "task.precision=0.1"], "task.precision=0.1: null"),
        (["remap", "ratios=[2]"], "ratios=2.0: at most 1"),
        (["frontier"], "directories=[]: at least one results directory"),
        (["frontier", "directories=[nowhere]"], "directories='nowhere': a results directory"),
        (["figures_smollm2", "steps=['rm -r /']"], "steps='rm -r /': run, analyze or report"),
        (["iuo"], "iou"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_loaded(launched, capsys, argv, message):
    assert message in refused(capsys, *argv).replace("\n", " ")
    assert launched == []


def test_the_name_comes_first(launched, capsys):
    assert "its name comes first" in refused(capsys, "length=3")
    assert cli.main(["analyze"]) == 2 and cli.main(["analyze", "--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in analyze.ANALYSES)
    assert max(map(len, said.splitlines())) <= 120


def test_every_analysis_has_a_config_and_the_cli_names_it():
    found = {item.name.removesuffix(".yaml") for item in (files("evalkit.conf") / "analyze").iterdir()}
    assert found == set(analyze.ANALYSES) and "analyze" in cli.HYDRA_COMMANDS


def test_the_preset_of_all_figures_composes(launched, monkeypatch, tmp_path):
    """Every step of the preset is a command that this version takes."""
    import shlex

    from evalkit.app.session import SESSION

    assert cli.main(["analyze", "figures_smollm2"]) == 0
    steps = launched.pop()[0].steps
    (tmp_path / "results" / "runs" / "figures_smollm2").mkdir(parents=True)
    analyses = [shlex.split(step) for step in steps if step.startswith("analyze")]
    for step in analyses:
        assert cli.main(step) == 0, step
    assert [settings.out for settings, _, _ in launched] == ["results/smollm2/figures"] * len(analyses)
    assert {type(settings).__name__ for settings, _, _ in launched} == {
        "IouAnalysis", "RowmaxAnalysis", "HeadsAnalysis", "RemapAnalysis", "FrontierAnalysis",
    }  # fmt: skip
    (run,) = [shlex.split(step) for step in steps if step.startswith("run")]
    assert cli.main([*run, "--dry-run"]) == 0 and SESSION.total > 30
    out = next(item for item in run if item.startswith("out="))
    assert f"directories=[{out.partition('=')[2]}]" in " ".join(analyses[-1])


def test_steps_run_one_after_another(monkeypatch, tmp_path, capfd):
    from evalkit.analysis import sequence

    monkeypatch.chdir(tmp_path)
    steps = ("analyze iou length=512 --cfg job", "analyze frontier 'directories=[no where]'", "analyze heads --cfg job")
    settings = kinds.FiguresAnalysis(steps=steps)
    assert sequence.run(settings, "c") == 2
    out = capfd.readouterr().out
    assert "length: 512" in out and "[2/3] exit code 2" in out and "[3/3]" not in out
    assert sequence.run(kinds.FiguresAnalysis(steps=steps[1:], keep_going=True), "c") == 2
    assert "[2/2] exit code 0" in capfd.readouterr().out


def test_nothing_heavy_is_imported_to_refuse_a_setting():
    code = (
        "import sys; from evalkit import cli; assert cli.main(['analyze', 'iou', 'budgets=[3]']) == 2; "
        "assert 'transformers' not in sys.modules and 'lm_eval' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
