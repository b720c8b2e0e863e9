"""The console command: it is lm_eval with one model more."""

from __future__ import annotations

import functools
import json
import sys
import tomllib
from pathlib import Path

import pytest
from lm_eval.tasks import TaskManager

from evalkit.benchmarks.longbench_v2.data import small_file
from evalkit.lmeval import TARGET, cli
from evalkit.lmeval.cli import with_own_tasks

ROOT = Path(__file__).parents[2]


@pytest.fixture
def own_tasks_only(monkeypatch):
    """Spare lm-eval the index of its own 14 000 task files."""
    monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False))


@pytest.fixture
def command(monkeypatch, tmp_path):
    def run(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["evalkit-lm-eval", *arguments])
        return cli.main()

    return run


def written(out: Path) -> tuple[dict, list[dict]]:
    (results,) = out.glob("*/results_*.json")
    (samples,) = out.glob("*/samples_*.jsonl")
    return json.loads(results.read_text()), [json.loads(line) for line in samples.read_text().splitlines()]


def test_results_and_samples_files_hold_the_budget(own_tasks_only, command, small_model, tasks, tmp_path):
    arguments = f"pretrained={small_model},method=cosa,p=0.5,skip_scale=100,dtype=float32"
    wanted = ["--include_path", str(tasks), "--tasks", "toy_choice", "--limit", "2", "--log_samples"]
    assert (
        command("--model", "evalkit", "--model_args", arguments, *wanted, "--output_path", str(tmp_path / "out")) == 0
    )
    results, samples = written(tmp_path / "out")
    assert 0 < results["results"]["toy_choice"]["B,none"] < 1 and "acc,none" in results["results"]["toy_choice"]
    assert results["config"]["evalkit"]["identity"]["method"]["skip_scale"] == 100
    assert len(samples) == 2 and all(0 < sample["B"] < 1 for sample in samples)
    pooled = sum(s["B"] * s["prefill_tokens"] for s in samples) / sum(s["prefill_tokens"] for s in samples)
    assert results["results"]["toy_choice"]["B,none"] == pytest.approx(pooled)


def test_the_harness_own_tasks_run_there_with_the_prompts_of_evalkit_run(
    own_tasks_only, command, small_model, tmp_path
):
    """RULER's documents are made for the model's tokenizer; with its chat template the prompt is the harness's own."""
    from transformers import AutoTokenizer

    from evalkit.benchmarks import ruler
    from evalkit.corpora import Corpora
    from evalkit.prompts import PromptRenderer

    wanted = ["--include_path", "evalkit", "--tasks", "ruler_niah_single_1", "--apply_chat_template", "--log_samples"]
    metadata = ["--metadata", '{"length": 600, "samples": 2}', "--output_path", str(tmp_path / "out")]
    arguments = f"pretrained={small_model},method=cosa,p=0.5,dtype=float32,enable_thinking=false"
    assert command("--model", "evalkit", "--model_args", arguments, *wanted, *metadata) == 0
    results, samples = written(tmp_path / "out")
    assert "score,none" in results["results"]["ruler_niah_single_1"]
    assert 0 < results["results"]["ruler_niah_single_1"]["B,none"] < 1
    renderer = PromptRenderer(AutoTokenizer.from_pretrained(small_model), chat=True, thinking=False)
    corpora = Corpora()
    own = ruler.build("niah_single_1", 600, 2, seed=42, renderer=renderer, corpora=corpora)
    assert [s["arguments"]["gen_args_0"]["arg_0"] for s in samples] == [sample.prompt for sample in own]
    assert [s["prefill_tokens"] for s in samples] == [sample.prompt_tokens for sample in own]
    assert samples[0]["arguments"]["gen_args_0"]["arg_1"]["max_gen_toks"] == own[0].max_new_tokens


def test_cached_prompts_are_kept_apart_by_the_metadata(own_tasks_only, command, small_model, tmp_path, monkeypatch):
    """lm-eval's own key knows neither the length nor the number of samples."""
    monkeypatch.setattr("lm_eval.caching.cache.PATH", str(tmp_path / "prompts"))
    arguments = f"pretrained={small_model},dtype=float32"
    wanted = ["--include_path", "evalkit", "--tasks", "ruler_niah_single_1", "--log_samples", "--cache_requests"]

    def prompts(out, **metadata):
        given = ["--metadata", json.dumps(metadata), "--output_path", str(tmp_path / out)]
        assert command("--model", "evalkit", "--model_args", arguments, *wanted, *given) == 0
        return [sample["arguments"]["gen_args_0"]["arg_0"] for sample in written(tmp_path / out)[1]]

    short, long = prompts("a", length=400, samples=1), prompts("b", length=700, samples=1)
    assert len(long[0]) > 1.3 * len(short[0])
    assert prompts("c", length=400, samples=2)[:1] == short and len(list((tmp_path / "prompts").iterdir())) == 3
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "prompts").iterdir()}
    assert prompts("d", length=700, samples=1) == long
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "prompts").iterdir()} == before  # read, not built


def test_cached_prompts_are_kept_apart_by_the_data(own_tasks_only, command, small_model, tmp_path, monkeypatch):
    """A file that was edited under its name, and another revision of a hub's set, are other documents."""
    monkeypatch.setattr("lm_eval.caching.cache.PATH", str(tmp_path / "prompts"))
    wanted = ["--include_path", "evalkit", "--tasks", "longbench_v2_loglikelihood", "--log_samples", "--cache_requests"]
    row = json.loads(small_file().read_text().splitlines()[0])
    data = tmp_path / "own.jsonl"

    def asked(out, question):
        data.write_text(json.dumps({**row, "_id": "q0", "question": question}) + "\n")
        metadata = json.dumps({"data": str(data), "truncate_at": 300})
        given = ["--metadata", metadata, "--output_path", str(tmp_path / out)]
        assert command("--model", "evalkit", "--model_args", f"pretrained={small_model}", *wanted, *given) == 0
        ((sample,), prompts) = written(tmp_path / out)[1], list((tmp_path / "prompts").iterdir())
        return sample["arguments"]["gen_args_0"]["arg_0"], len(prompts)

    first, before = asked("a", "Which one?")
    second, after = asked("b", "Which other?")
    assert "Which one?" in first and "Which other?" in second and (before, after) == (1, 2)
    assert asked("c", "Which one?") == (first, 2)


@pytest.mark.parametrize(
    ("task", "key", "says"),
    [
        ("longbench_v2_direct", "truncate_att", "did you mean truncate_at"),
        ("ruler_vt", "lenght", "did you mean length"),
        ("ruler_vt", "max_seq_lengths", "known: chat, data_seed"),
        ("longbench_v2_direct", "docments", "known: data, data_revision, data_seed, limit"),
    ],
)
def test_unknown_metadata_is_refused(own_tasks_only, command, small_model, capsys, task, key, says):
    model = ["--model", "evalkit", "--model_args", f"pretrained={small_model},method=cosa,p=0.5,seed=1"]
    known = {"data": "small", "truncate_at": 200, "limit": 1} if "longbench" in task else {"length": 1000, "samples": 1}
    wanted = ["--include_path", "evalkit", "--tasks", task, "--metadata", json.dumps({**known, key: 300})]
    assert command(*model, *wanted) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"evalkit-lm-eval: metadata.{key}=300: ") and says in last


def test_bad_input_is_one_line(own_tasks_only, command, tasks, capsys):
    model = ["--model", "evalkit", "--model_args", "pretrained=smollm2,method=cosa,delta=2000"]
    assert command(*model, "--include_path", str(tasks), "--tasks", "toy_choice") == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("evalkit-lm-eval: delta=2000: lm-eval reads this name as delta weights; use skip_scale")


def test_include_path_evalkit_stands_for_the_packages_tasks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (own,) = {*with_own_tasks(["--include_path", "evalkit"])[1:]}
    assert (Path(own) / "ruler" / "vt.yaml").is_file()
    assert with_own_tasks(["--include_path=evalkit"]) == [f"--include_path={own}"]
    assert with_own_tasks(["--tasks", "evalkit", "--include_path", "mine"]) == [
        "--tasks",
        "evalkit",
        "--include_path",
        "mine",
    ]
    (tmp_path / "evalkit").mkdir()
    assert with_own_tasks(["--include_path", "evalkit"]) == ["--include_path", "evalkit"]


def test_ruler_tasks_generate_what_the_length_reserves():
    import yaml

    from evalkit.benchmarks.ruler import TASKS, task_spec

    for name in TASKS:
        task = yaml.safe_load((ROOT / "tasks" / "ruler" / f"{name}.yaml").read_text())
        assert task["task"] == f"ruler_{name}" and task["dataset_kwargs"] == {"ruler_task": name}
        assert task["generation_kwargs"] == {
            "do_sample": False,
            "until": [],
            "max_gen_toks": task_spec(name).max_new_tokens,
        }


def test_the_entry_points_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["lm_eval.models"] == {"evalkit": TARGET}
    assert project["scripts"]["evalkit-lm-eval"] == "evalkit.lmeval.cli:main"


@pytest.mark.slow
def test_a_stock_task_of_lm_eval_runs_sparse(command, tmp_path, monkeypatch):
    """lm-eval's own niah_single_1, which needs no download, on the embedded model."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from evalkit.lmeval.settings import settings
    from evalkit.models.loading import locate

    tokenizer = locate(settings({"pretrained": "smollm2"}).cell.model).location
    metadata = json.dumps({"max_seq_lengths": [512], "tokenizer": tokenizer})
    wanted = ["--tasks", "niah_single_1", "--limit", "1", "--log_samples", "--output_path", str(tmp_path / "out")]
    model = ["--model", "evalkit", "--model_args", "pretrained=smollm2,method=cosa,p=0.9"]
    assert command(*model, *wanted, "--metadata", metadata) == 0
    results, samples = written(tmp_path / "out")
    assert 0 < results["results"]["niah_single_1"]["B,none"] < 1 and samples[0]["B"] < 1
