import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from evalkit import cli
from evalkit.app import main, schema
from evalkit.app.isolation import CellOutcome
from evalkit.app.main import split_arguments
from evalkit.app.session import Session, clock
from evalkit.errors import InputError, StoreError

PPL = ("method=cosa", "task=perplexity")


# ------------------------------------------------------------------------------------------------------- what runs
def test_one_cell(application, capsys):
    assert application(*PPL, "method.select.p=0.9") == 0
    (cell,) = application.cells
    assert cell.method.select.p == 0.9 and cell.task.length == 4096 and cell.model.name == "smollm2"
    assert cell.overrides == ("model=smollm2", "method=cosa", "task=perplexity", "method.select.p=0.9")
    assert "begin smollm2 cosa select.p=0.9 perplexity@4096" in capsys.readouterr().out


def test_the_product_of_three_knobs_is_one_command(application, capsys):
    command = (
        "-m method=cosa method.select.p=0.9,0.95 method.skip_scale=-1,250,1000 "
        "method.order=ascending,descending,hrm_first task=perplexity"
    )
    assert application(*command.split()) == 0
    found = {(c.method.select.p, c.method.skip_scale, c.method.order) for c in application.cells}
    assert len(application.cells) == len(found) == 18
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "18 cells"
    assert lines[1].startswith("[ 1/18] begin ")
    assert re.fullmatch(r"\[ 1/18\] done in 2\.0 s, elapsed 0:00:\d\d, about 0:00:34 left", lines[2])
    assert re.fullmatch(r"18 of 18 cells done, elapsed 0:00:\d\d", lines[-1])


def test_hydra_writes_no_files(application, tmp_path):
    assert application("-m", *PPL, "method.stride=4,8") == 0
    assert list(tmp_path.iterdir()) == []


def test_duplicates_are_dropped(application):
    assert application("-m", *PPL, "method.select.p=0.9,0.90,0.95") == 0
    assert [c.method.select.p for c in application.cells] == [0.9, 0.95]


def test_preset_grids_and_command_line(application):
    assert application("sweep=demo", "task.limit=1", "out=elsewhere") == 0
    methods = [(c.task.name, type(c.method).__name__) for c in application.cells]
    assert methods.count(("perplexity", "Dense")) == methods.count(("ruler", "Dense")) == 1
    assert len(methods) >= 12
    assert {c.task.limit for c in application.cells} == {1}
    assert {str(c.out) for c in application.cells} == {"elsewhere"}


def test_grids_given_on_the_command_line(application):
    grids = "hydra.sweeper.grids=[['method=dense'],['method=cosa','method.select.p=0.9,0.8']]"
    assert application("-m", "task=perplexity", grids) == 0
    assert [type(c.method).__name__ for c in application.cells] == ["Dense", "CoSA", "CoSA"]


def test_batches(application):
    assert application("-m", *PPL, "method.stride=4,8,16", "hydra.sweeper.max_batch_size=2") == 0
    assert [c.method.stride for c in application.cells] == [4, 8, 16]


def test_overrides_compose_the_same_cell_again(application):
    assert application("sweep=demo") == 0
    first = list(application.cells)
    application.cells.clear()
    for cell in first[-3:]:
        assert application(*cell.overrides) == 0
    assert application.cells == first[-3:]


def test_config_dir_of_the_user(application, tmp_path):
    (tmp_path / "mine" / "method").mkdir(parents=True)
    (tmp_path / "mine" / "method" / "my-cosa.yaml").write_text("defaults: [cosa, _self_]\nstride: 16\n")
    assert application("--config-dir", "mine", "method=my-cosa", "task=perplexity") == 0
    assert application.cells[0].method.stride == 16


def test_show_config_runs_nothing(application, capsys):
    assert application(*PPL, "--cfg", "job") == 0
    assert "skip_scale: -1.0" in capsys.readouterr().out
    assert application.cells == []


# -------------------------------------------------------------------------------------------------- what is refused
TOKENS, THOUGHTS = ["task.generation.max_new_tokens=5000"], ["task.generation.thinking_tokens=200000"]
REFUSED = {
    "unknown method": (["method=cossa", "task=perplexity"], "method=cossa: did you mean cosa"),
    "unknown task": (["method=cosa", "task=perplexty"], "task=perplexty: did you mean perplexity, "),
    "unknown model": ([*PPL, "model=qwen3"], "model=qwen3: did you mean qwen3-8b"),
    "unknown preset": (["sweep=demmo"], "sweep=demmo: did you mean demo?"),
    "two presets": (["sweep=demo,ruler-cosa"], "sweep='demo,ruler-cosa': one preset at a time"),
    "unknown group": (["metod=cosa", "task=perplexity"], "metod='cosa': did you mean method"),
    "unknown key": ([*PPL, "method.strid=4"], "method.strid: no such setting; did you mean stride?"),
    "unknown nested key": (
        [*PPL, "method.select.q=4"],
        "method.select.q: no such setting; known: budget, p, p_table, rule",
    ),
    "unknown RULER task": (
        ["method=cosa", "task=ruler", "task.tasks=[niah_single_4]"],
        "task.tasks='niah_single_4': did you mean niah_single_3",
    ),
    "unknown corpus": ([*PPL, "task.corpus=esays"], "task.corpus='esays': did you mean essays?"),
    "missing corpus file": ([*PPL, "task.corpus=/none/book.txt"], "task.corpus='/none/book.txt': no such file"),
    "missing method": (["task=perplexity"], "method: must be given, method=<name>; known: blasst, cosa"),
    "missing task": (["method=cosa"], "task: must be given, task=<name>; known: longbench-v2, "),
    "missing path": ([*PPL, "model=local"], "model.native_context='???': must be given"),
    "missing model directory": (
        [*PPL, "model=local", "model.path=/none", "model.native_context=4096"],
        "model.path='/none': no such directory",
    ),
    "p above 1": ([*PPL, "method.select.p=1.5"], "method.select.p=1.5: "),
    "p of zero": ([*PPL, "method.select.p=0"], "method.select.p=0.0: "),
    "p that is no number": ([*PPL, "method.select.p=much"], "method.select.p=much: Value 'much' of type 'str' could"),
    "budget above 1": (
        [*PPL, "method.select.rule=budget", "method.select.budget=54"],
        "method.select.budget=54.0: ",
    ),
    "skip scale": ([*PPL, "method.skip_scale=.nan"], "method.skip_scale="),
    "stride of zero": ([*PPL, "method.stride=0"], "method.stride=0: "),
    "stride that is no integer": ([*PPL, "method.stride=8.5"], "method.stride=8.5: Value '8.5' of type 'float' could"),
    "output beyond the length": (
        ["method=dense", "task=longbench-v2", "task.length=1024", "task.truncate_at=300", *TOKENS, "--dry-run"],
        "task.generation.max_new_tokens=5000: must be at most 1023: task.length=1024 also holds the prompt",
    ),
    "thinking beyond the length": (
        ["method=dense", "task=longbench-v2", "model=qwen3-8b", "model.thinking=true", *THOUGHTS, "--dry-run"],
        "task.generation.thinking_tokens=200000: must be at most 130943: task.length=131072 also holds the prompt",
    ),
    "order": ([*PPL, "method.order=upward"], "method.order='upward': "),
    "block size": ([*PPL, "method.block_size=100"], "method.block_size=100: "),
    "page size": ([*PPL, "execution.page_size=48"], "execution.page_size=48: must be a power of two from 16 to 256"),
    "chunk": ([*PPL, "execution.chunk_size=200"], "execution.chunk_size=200: must be a positive multiple of 128"),
    "device": ([*PPL, "execution.device=gpu"], "execution.device='gpu': did you mean cpu? known: auto, cpu, cuda"),
    "backend": ([*PPL, "execution.backend=troch"], "execution.backend='troch': did you mean torch"),
    "length": ([*PPL, "task.length=16384"], "task.length=16384: model smollm2 supports at most 8192 without"),
    "scaled length": (
        [*PPL, "model=qwen3-8b", "task.length=200000"],
        "task.length=200000: model qwen3-8b supports at most 131072 with yarn scaling",
    ),
    "sweep without -m": ([*PPL, "method.stride=4,8"], "method.stride=4,8: more than one value makes a sweep: add -m"),
    "unreadable": ([*PPL, "method.order=[a"], "method.order=[a: cannot be read as an override"),
    "no launcher plugin": ([*PPL, "hydra/launcher=slurmm"], "hydra/launcher=slurmm: did you mean slurm?"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_and_runs_nothing(application, capsys, case):
    arguments, message = REFUSED[case]
    assert application(*arguments) == 2
    output = capsys.readouterr()
    lines = [line for line in (output.out + output.err).splitlines() if line.strip()]
    assert application.cells == []
    assert message in lines[0]
    extra = [line for line in lines[1:] if not line.startswith("evalkit: nothing was run")]
    assert extra == []


def test_one_bad_cell_stops_the_sweep_before_it_begins(application, capsys):
    assert application("-m", *PPL, "method.select.p=0.9,1.5,0.8,2") == 2
    lines = capsys.readouterr().err.splitlines()
    assert application.cells == []
    assert len(lines) == 3
    assert lines[0].startswith("evalkit: cell 2/4 [method=cosa task=perplexity method.select.p=1.5]: method.select.p=")
    assert lines[1].startswith("evalkit: cell 4/4 ")
    assert lines[2] == "evalkit: nothing was run: 2 of 4 cells cannot run"


def test_a_reason_that_cells_share_is_said_once(application, capsys):
    assert application("-m", *PPL, "method.select.p=0.9,0.8", "method.stride=0,8") == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(
        "evalkit: cells 1, 3 of 4 [method=cosa task=perplexity method.stride=0]: method.stride=0"
    )
    assert lines[1:] == ["evalkit: nothing was run: 2 of 4 cells cannot run"]


def test_a_preset_may_not_hold_values_outside_its_grids(application, capsys, tmp_path):
    (tmp_path / "mine" / "sweep").mkdir(parents=True)
    text = "# @package _global_\nexecution: {seed: 3}\nhydra: {sweeper: {grids: [[method=dense, task=perplexity]]}}\n"
    (tmp_path / "mine" / "sweep" / "bad.yaml").write_text(text)
    assert application("--config-dir", "mine", "sweep=bad") == 2
    assert "sweep='bad': a sweep preset may set hydra.* only; move execution" in capsys.readouterr().err
    assert application.cells == []


def test_wrong_key_in_a_yaml_of_the_user_names_the_file(application, capsys, tmp_path):
    (tmp_path / "mine" / "method").mkdir(parents=True)
    text = "defaults: [/schema/method/cosa@_here_, _self_]\nstrid: 4\n"
    (tmp_path / "mine" / "method" / "typo.yaml").write_text(text)
    assert application("--config-dir", "mine", "method=typo", "task=perplexity") == 2
    assert "strid: no such setting (in method/typo.yaml)" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------- the command itself
def test_failed_cells_do_not_hide_the_others(start, notes):
    process = start(
        "fake_runners:by_p", "run", "-m", *PPL, "method.select.p=0.6,0.7,0.8,0.9,0.95", "out=runs", "task.limit=1"
    )
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert [round(float(o.rpartition("=")[2]), 2) for n in notes() for o in n["overrides"] if ".p=" in o] == [0.9, 0.95]
    lines = output.splitlines()
    assert lines[-4].startswith("2 of 5 cells done, 3 failed, elapsed ")
    assert re.fullmatch(r"FAILED .*p=0\.6 .*: RuntimeError: first line of the fault \[runs\]", lines[-3])
    assert re.fullmatch(r"FAILED .*p=0\.7 .*: killed by SIGKILL .* \[runs/cells/abc\]", lines[-2])
    assert re.fullmatch(r"FAILED .*p=0\.8 .*: 59 sparse calls, 60 expected \[runs\]", lines[-1])


def test_single_failed_cell(application, monkeypatch, capsys, tmp_path):
    failed = CellOutcome("a label", "failed", "killed by SIGKILL", tmp_path, 1.0)
    monkeypatch.setattr(main, "run_isolated", lambda cell: failed)
    assert application(*PPL) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"FAILED a label: killed by SIGKILL [{tmp_path}]"


def test_help_is_quick_and_lists_the_commands():
    code = "import sys; from evalkit import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in ('torch', 'hydra', 'pandas', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    for command in ("run", "report", "status"):
        assert re.search(rf"^    {command} ", result.stdout, re.MULTILINE)
    assert result.stdout.splitlines()[-1] == "[]"


def test_run_help_lists_the_presets(capsys):
    assert cli.main(["run", "--help"]) == 0
    output = capsys.readouterr().out
    assert "smollm2" in output and "cosa" in output and "demo" in output and "ruler-quick" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rn"], "invalid choice: 'rn'"),
        ([], "required: COMMAND"),
        (["report"], "required: DIR"),
        (["status"], "required: DIR"),
    ],
)
def test_bad_command_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_report_and_status_reach_their_modules(monkeypatch, tmp_path, capsys):
    calls = []
    report, status = ModuleType("evalkit.report"), ModuleType("evalkit.status")
    report.write_report = lambda directories, out, *, formats, html: calls.append((directories, out, formats, html))
    status.print_status = lambda directories: calls.append(directories) or 1
    monkeypatch.setitem(sys.modules, "evalkit.report", report)
    monkeypatch.setitem(sys.modules, "evalkit.status", status)
    assert cli.main(["report", "--format", "csv,png", "a", "b", "--format", "svg", "--out", "c"]) == 0
    assert cli.main(["status", "a"]) == 1
    assert cli.main(["report", "a", "--html"]) == 0
    assert calls == [
        ([Path("a"), Path("b")], Path("c"), ("csv", "png", "svg"), None),
        [Path("a")],
        ([Path("a")], None, (), Path("a/report.html")),
    ]

    def fail(directories):
        raise errors[0]

    status.print_status = fail
    errors = [StoreError("cell.json: broken\nat line 3")]
    assert cli.main(["status", "a"]) == 1
    errors = [InputError("DIR", "a", "no such directory")]
    assert cli.main(["status", "a"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "evalkit: cell.json: broken at line 3",
        "evalkit: DIR='a': no such directory",
    ]


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert re.match(r"evalkit \S+", capsys.readouterr().out)


# ------------------------------------------------------------------------------------------------------ small parts
def test_split_arguments():
    schema.register()
    plain = ["method=cosa", "task=perplexity"]
    assert split_arguments(plain) == (plain, [])
    assert split_arguments(["-m", *plain, "hydra.verbose=true"]) == (["-m", "hydra.verbose=true"], plain)
    assert split_arguments(["sweep=demo", *plain]) == (["--multirun", "sweep=demo"], plain)
    assert split_arguments(["-m", *plain, "out=runs"]) == (["-m", "out=runs"], [*plain, "out=runs"])
    assert split_arguments(["sweep=demo", "--cfg", "job"]) == (["sweep=demo", "--cfg", "job"], [])


def test_clock():
    assert [clock(0.4), clock(61), clock(3661.6)] == ["0:00:00", "0:01:01", "1:01:02"]


def test_session_without_cells_is_fine(capsys):
    assert Session().close() == 0
    assert capsys.readouterr().out == ""
