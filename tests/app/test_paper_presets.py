"""The sweeps that rebuild the paper's tables: their cells, what they may cost, and a run on the embedded model."""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from evalkit.app import estimate
from evalkit.benchmarks.longbench_v2.data import small_file
from evalkit.config import cell_from_mapping
from evalkit.report.paper.published import METHODS, MODELS, VARIANTS, read
from evalkit.store import read_cells

ROOT = Path(__file__).parents[2]
PRESETS = sorted(file.stem for file in (ROOT / "conf" / "sweep").glob("paper_*.yaml"))
SEEDS = {"0", "1", "2", "3"}


def grids(name):
    """Each grid as a dict of lists."""
    config = yaml.safe_load((ROOT / "conf" / "sweep" / f"{name}.yaml").read_text())
    return [
        {key: values.split(",") for key, _, values in (item.partition("=") for item in grid)}
        for grid in config["hydra"]["sweeper"]["grids"]
    ]


def test_there_is_a_preset_for_each_table_and_model():
    assert PRESETS == sorted(f"paper_table{t}_{m}" for t in ("1", "2", "3", "B") for m in ("qwen3", "llama"))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_runs_exactly_the_rows_of_its_table(name):
    number, model = re.fullmatch(r"paper_table(.)_(.*)", name).groups()
    published = read(ROOT / "results" / "paper")
    found = Counter(method for grid in grids(name) for method in grid["method"])
    (preset,) = {grid["model"][0] for grid in grids(name)}
    paper = MODELS[preset]
    rows = published.ablation[paper] if number == "3" else published.ruler[paper]
    wanted = set(rows) - ({"CoSA-accurate"} if number in "12" else set())
    table = VARIANTS if number == "3" else METHODS
    extra = {"dense", "cosa-iks-descending"} if number == "3" else set()
    by_row = {row: {method for method in found if method in table[row]} for row in wanted}
    assert all(len(methods) == 1 for methods in by_row.values()), by_row
    assert set(found) == {method for methods in by_row.values() for method in methods} | extra
    other = {"qwen3": "llama", "llama": "qwen3"}[model]
    assert not [method for method in found if other in method]
    if number == "2":
        assert set(found.values()) == {2}  # both modes
        reasons = [grid for grid in grids(name) if "model.thinking" in grid or grid["task"] == ["longbench-v2-cot"]]
        assert len(reasons) == 2 and ("model.thinking" in reasons[0]) == (model == "qwen3")


@pytest.mark.parametrize("name", PRESETS)
def test_dense_and_cosa_run_four_seeds_and_baselines_one(name):
    for grid in grids(name):
        assert grid["task.generation.sampling"] == ["recommended"]
        few = {"flexprefill", "xattention"} & set(grid["method"])
        assert set(grid["task.generation.seed"]) == ({"0"} if few else SEEDS)
        if grid["task"] == ["ruler"]:
            assert [int(n) for n in grid["task.length"]] == [4096 * 2**i for i in range(6)]


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "paper_table3_llama"])
def test_dry_run_lists_the_cells_and_runs_none(application, capsys, name):
    fewer = ["task.length=131072", "task.generation.seed=0,1"]
    assert application(f"sweep={name}", "--dry-run", "method=dense,cosa-qwen3-8b", *fewer) == 0
    assert application.cells == []
    out = capsys.readouterr().out.splitlines()
    modes = 2 if "table2" in name else 1
    listed = [line for line in out if line.startswith("[")]
    assert out[0] == f"{4 * modes} cells" and len(listed) == 4 * modes
    assert sum(" dense " in line for line in listed) == 2 * modes
    assert re.fullmatch(r"about \d+\.\d H200 hours of prefill .* up to \d+\.\d hours of decoding .*", out[-1])


SHORT = ["model=smollm2", "task.length=2048", "task.generation.seed=0", "task.limit=3"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_composes_for_the_embedded_model(application, capsys, name):
    """Whole, with no method replaced; what a preset lacks there is said, with what to do, and nothing runs."""
    small = ["task.data=small", "task.truncate_at=512"] if re.search("table[23]", name) else []
    code = application(f"sweep={name}", *SHORT, *small)
    said = capsys.readouterr().err.splitlines()
    if name == "paper_table2_qwen3":
        assert code == 2 and application.cells == [] and len(said) == 2
        assert said[0].startswith("evalkit: cells 6, 7, 8, 9, 10 of 10 [model=smollm2 ")
        assert "model smollm2 has no thinking mode" in said[0] and "sweep=paper_table2_llama" in said[0]
    elif name.endswith("llama"):
        assert code == 2 and application.cells == []
        assert all("evalkit calibrate" in line for line in said[:-1])
    else:
        assert code == 0 and len(application.cells) == (5 if "table1" in name else 6)


def test_rows_that_need_a_calibration_say_how_to_make_it(application, capsys):
    assert application("sweep=paper_table3_llama", "--dry-run") == 2
    assert "evalkit calibrate" in capsys.readouterr().err and application.cells == []


@pytest.mark.parametrize("name", ["paper_table2_llama", "paper_tableB_llama"])
def test_dry_run_lists_the_cells_that_need_no_calibration(application, capsys, name):
    assert application(f"sweep={name}", "--dry-run") == 2 and application.cells == []
    said = capsys.readouterr()
    listed = [line for line in said.out.splitlines() if line.startswith("[")]
    assert any(" dense " in line for line in listed) and any(" xattention " in line for line in listed)
    assert not any(" cosa " in line for line in listed)
    assert "evalkit calibrate" in said.err


def test_dry_run_of_one_cell(application, capsys):
    assert application("method=cosa", "task=perplexity", "task.limit=3", "--dry-run") == 0
    assert application.cells == []
    out = capsys.readouterr().out
    assert out.startswith("[1/1] smollm2 cosa perplexity@4096 (essays x 3): ") and "task.limit=3" in out
    assert "hours" not in out


def test_bad_input_is_refused_in_a_dry_run_too(application, capsys):
    assert application("sweep=paper_table1_qwen3", "method=dense", "task.length=4096", "task.limit=0", "--dry-run") == 2
    assert "task.limit=0" in capsys.readouterr().err


def test_the_estimate_is_printed_before_the_first_cell(application, capsys):
    assert application("sweep=paper_table1_qwen3", "method=dense", "task.length=4096") == 0
    out = capsys.readouterr().out.splitlines()
    assert "hours of prefill" in out[1] and len(application.cells) == 4


# ---------------------------------------------------------------------------------------------------------- estimate
def test_measured_times_are_those_of_the_results():
    newest = {}
    with (ROOT / "results" / "h200" / "benchmarks.csv").open() as file:
        for row in csv.DictReader(file):
            if (row["bench"], row["variant"], row["metric"]) == ("ttft", "fa2", "ttft"):
                newest[int(row["tokens"])] = float(row["value"])
    assert newest == estimate.TTFT
    for tokens, seconds in newest.items():
        assert estimate.prefill_seconds(tokens) == pytest.approx(seconds)


def test_times_between_and_beyond_the_measured_lengths_grow_as_their_neighbours_do():
    middle = estimate.prefill_seconds(65536)
    assert middle == pytest.approx((estimate.TTFT[32768] * estimate.TTFT[131072]) ** 0.5)
    assert estimate.prefill_seconds(262144) == pytest.approx(estimate.TTFT[131072] ** 2 / middle)
    assert 0 < estimate.prefill_seconds(1024) < estimate.TTFT[4096]


def cell(model="qwen3-8b", **task):
    return cell_from_mapping(
        {
            "model": {"name": model, "path": "owner/any", "native_context": 131072},
            "method": {"name": "dense"},
            "task": {"name": "ruler", "tasks": ["vt", "qa_1"], "length": 131072, "limit": 36, **task},
        }
    )


def test_hours_of_a_cell():
    prefill, decode = estimate.hours(cell())
    assert prefill == pytest.approx(2 * 36 * estimate.TTFT[131072] / 3600)
    assert decode == pytest.approx(36 * (30 + 32) * estimate.DECODE_SECONDS / 3600)
    prefill, decode = estimate.hours(_perplexity())
    assert prefill == pytest.approx(5 * estimate.TTFT[4096] / 3600) and decode == 0
    prefill, decode = estimate.hours(_longbench())
    long, short = estimate.prefill_seconds(120000), estimate.TTFT[32768]
    assert prefill == pytest.approx((180 * short + 323 * long) / 3600)
    assert decode == pytest.approx(503 * 128 * estimate.DECODE_SECONDS / 3600)


def test_questions_of_a_local_file_are_counted(tmp_path):
    lines = small_file().read_text().splitlines()[:6]
    lengths = Counter(json.loads(line)["length"] for line in lines)
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(lines) + "\n")
    prefill, decode = estimate.hours(_longbench(data=str(path)))
    short, long = estimate.TTFT[32768], estimate.prefill_seconds(120000)
    assert prefill == pytest.approx((lengths["short"] * short + (6 - lengths["short"]) * long) / 3600)
    assert decode == pytest.approx(6 * 128 * estimate.DECODE_SECONDS / 3600)
    few = estimate.hours(_longbench(data=str(path), limit=2))[1]
    assert few <= 3 * 128 * estimate.DECODE_SECONDS / 3600
    assert estimate.hours(_longbench(data="small"))[1] == pytest.approx(36 * 128 * estimate.DECODE_SECONDS / 3600)
    path.write_text("{}\n")  # the cell says what is wrong with it
    estimate._counted.cache_clear()
    assert estimate.hours(_longbench(data=str(path))) == estimate.hours(_longbench())


def _perplexity():
    made = {"name": "perplexity", "length": 4096, "limit": 5}
    return cell_from_mapping({"model": _model(), "method": {"name": "dense"}, "task": made})


def _longbench(**more):
    made = {"name": "longbench_v2", "mode": "direct", "length": 131072, **more}
    return cell_from_mapping({"model": _model(), "method": {"name": "dense"}, "task": made})


def _model():
    return {"name": "qwen3-8b", "path": "owner/any", "native_context": 131072}


def test_models_without_a_measured_time_are_said_to_be_left_out():
    assert estimate.lines([cell("smollm2")]) == []
    (line,) = estimate.lines([cell(), cell("smollm2")])
    assert "(1 cells of other models not counted)" in line
    assert line.startswith(f"about {2 * 36 * estimate.TTFT[131072] / 3600:.1f} H200 hours")


# --------------------------------------------------------------------------------------------------------- end to end
@pytest.fixture
def evalkit(tmp_path):
    """Runs the command in a folder of the test; its output, or the lines of its errors where it fails."""

    def run(*arguments, code=0):
        done = subprocess.run(
            [sys.executable, "-m", "evalkit.cli", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr.splitlines()

    return run


def printed_commands(lines):
    """Arguments of the calibrations that errors name, each once."""
    named = [line.partition("; run: evalkit ")[2] for line in lines]
    return [shlex.split(command) for command in dict.fromkeys(named) if command]


FEW = ("model=smollm2", "task.generation.seed=0", "task.generation.max_new_tokens=4", "out=runs")
# Three questions hold both difficulties, which the averages need.
SMALL = ("task.data=small", "task.limit=3")
ROWS = ["Dense", "MInf", "Flex", "XAttn", "CoSA", "CoSA-accurate"]
TABLE3 = (0.35, 0.39, 0.24, 0.24)
"""Budgets of Table 3's calibrated rows for Llama: Base, + KAP, and + IKS in both orders."""


def readme_commands():
    """The commands of README's block for the paper's tables on the embedded model, without their first word."""
    section = (ROOT / "README.md").read_text().partition("## The paper's tables")[2].partition("\n## ")[0]
    (block,) = [part for part in section.split("```")[1::2] if "model=smollm2" in part]
    return [shlex.split(line)[1:] for line in block.replace("\\\n", " ").strip().splitlines()]


def test_readme_shows_a_run_of_each_kind():
    found = [(words[0], *(word for word in words if word.startswith("sweep="))) for words in readme_commands()]
    assert [kind for kind, *_ in found] == ["run", "calibrate", "run", "report"]
    assert {sweep for _, *named in found for sweep in named} <= {f"sweep={name}" for name in PRESETS}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_commands_of_the_readme_run_as_they_stand(tmp_path, evalkit):
    *commands, report = readme_commands()
    for command in commands:
        evalkit(*command)
    printed = evalkit(*report)
    assert "Table 1: RULER, smollm2" in printed
    cells = [cell for cell in read_cells([tmp_path / "results" / "runs" / "small"]) if cell.done]
    assert len(cells) == 5 + 2  # two methods of the table for Llama are others than for Qwen3
    table = printed.partition("Table 1: RULER")[2].partition("\nTable ")[0]
    assert [line.split()[0] for line in table.splitlines() if " measured " in line] == ROWS[:5]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["paper_tableB_qwen3", "paper_table2_llama", "paper_table3_qwen3"])
def test_presets_run_whole_on_the_embedded_model(tmp_path, evalkit, name):
    """Every method of the preset; the others are in README and below."""
    ruler = ["task.tasks=[niah_single_1]", "task.limit=1"]
    more = ruler if "tableB" in name else [*SMALL, "task.truncate_at=512"]
    sweep = [f"sweep={name}", "task.length=1024", *more, *FEW]
    if "llama" in name:
        (command,) = printed_commands(evalkit("run", *sweep, code=2))
        evalkit(*command, "calibrate.windows=1")
    evalkit("run", *sweep)
    cells = [cell for cell in read_cells([tmp_path / "runs"]) if cell.done]
    assert len(cells) == (10 if "table2" in name else 6)
    printed = evalkit("report", "runs", "--paper", "--published", str(ROOT / "results" / "paper"))
    table = printed.partition(f"Table {name[len('paper_table')]}: ")[2].partition("\nTable ")[0]
    rows = {"B": ROWS, "2": ROWS[:5], "3": ["Base", "+KAP", "+IKS", "+IKS", "+RMP"]}[name[len("paper_table")]]
    assert [line.split()[0] for line in table.splitlines() if " measured " in line] == rows


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_presets_run_on_the_embedded_model_and_the_report_lays_them_out(tmp_path, evalkit):
    """Small n, short prompts, some of the methods; every table of the paper in its layout."""
    methods = ["dense", "cosa-qwen3-8b", "xattention", "cosa-base", "cosa-iks"]
    ruler = ["task.tasks=[niah_single_1]", "task.length=512", "task.limit=1"]
    small = [*SMALL, "task.length=2048", "task.truncate_at=512"]
    evalkit("run", "sweep=paper_table1_qwen3", f"method={','.join(methods)}", *ruler, *FEW)
    evalkit("run", "sweep=paper_table2_llama", f"method={','.join(methods)}", *small, *FEW)
    printed = evalkit("report", "runs", "--paper", "--published", str(ROOT / "results" / "paper"))
    assert "Table 1: RULER, smollm2" in printed and "Table 2: LongBench-v2, smollm2, self-made set" in printed
    assert "Table B" in printed and "Table 3" in printed
    text = (tmp_path / "runs" / "paper.md").read_text()
    assert "CoSA: sampled, 1 run" in text and "published" not in text.partition("## Table 1")[2].partition("##")[0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_llama_presets_of_ruler_run_after_the_calibrations_they_name(tmp_path, evalkit):
    """Tables 1 and B: the only thing changed is the model, and how much is run."""
    sweep = ["sweep=paper_tableB_llama", "task.tasks=[niah_single_1]", "task.length=1024", "task.limit=1", *FEW]
    cosa = ["cosa-llama-3.1-8b", "cosa-accurate-llama-3.1-8b"]
    commands = printed_commands(evalkit("run", *sweep, code=2))
    assert commands == [["calibrate", f"preset={name}", "model=smollm2", "calibrate.lengths=[1024]"] for name in cosa]
    for command in commands:
        assert f"results/calibration/smollm2/{command[1].partition('=')[2]}.yaml" in evalkit(*command)
    evalkit("run", *sweep)
    evalkit("run", "sweep=paper_table1_llama", *sweep[1:])
    cells = [cell for cell in read_cells([tmp_path / "runs"]) if cell.done]
    assert len(cells) == 6  # those of Table 1 are among them
    printed = evalkit("report", "runs", "--paper", "--published", str(ROOT / "results" / "paper"))
    table = printed.partition("Table B")[2].partition("Table")[0]
    assert "Table 1: RULER, smollm2" in printed
    rows = {line.split()[0]: line.split() for line in table.splitlines() if " measured " in line}
    assert list(rows) == ["Dense", "MInf", "Flex", "XAttn", "CoSA", "CoSA-accurate"]
    # Table B's budgets at 4K, its shortest: 40 and 48 %, on text of another kind than it was calibrated on.
    for name, target in (("CoSA", 40), ("CoSA-accurate", 48)):
        assert abs(float(rows[name][-1].strip("*'")) - target) < 8


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_llama_ablation_runs_after_the_calibrations_it_names(tmp_path, evalkit):
    """Table 3: a budget of its own for each row."""
    sweep = ["sweep=paper_table3_llama", *SMALL, "task.length=1024", "task.truncate_at=768", *FEW]
    commands = printed_commands(evalkit("run", *sweep, code=2))
    wanted = ["calibrate.lengths=[1024]", *(f"calibrate.budgets=[{budget}]" for budget in TABLE3)]
    assert [command[-1] for command in commands] == wanted and "model=smollm2" in commands[0]
    for command in commands:
        evalkit(*command, "calibrate.windows=1", "calibrate.tolerance=0.01")  # the default's 16 are for numbers
    evalkit("run", *sweep)
    cells = [cell for cell in read_cells([tmp_path / "runs"]) if cell.done]
    assert len(cells) == 6
    targets = sorted(cell.config["method"].get("budget_target") or 0 for cell in cells)
    assert targets == [0, 0, 0.24, 0.24, 0.35, 0.39]
    printed = evalkit("report", "runs", "--paper", "--published", str(ROOT / "results" / "paper"))
    table = printed.partition("Table 3: ablation, LongBench-v2 w/o CoT, smollm2, self-made set")[2]
    rows = [line.split()[0] for line in table.splitlines() if " measured " in line]
    assert rows == ["Base", "+KAP", "+IKS", "+IKS", "+RMP"]
