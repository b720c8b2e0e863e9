"""LongBench-v2's chain of thought through lm-eval: both stages, as `evalkit run` asks them, and no other model's."""

from __future__ import annotations

import functools
import json
import sqlite3
import sys
from importlib.resources import files
from pathlib import Path

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from evalkit.benchmarks.longbench_v2 import second, two_stage
from evalkit.benchmarks.perplexity import ids_sha256
from evalkit.config import Cell, ExecutionConfig, GenerationConfig, LongBenchV2Config, ModelConfig
from evalkit.errors import InputError
from evalkit.generation import Generated
from evalkit.lmeval import cli
from evalkit.lmeval import model as model_module
from evalkit.lmeval.budget import Chain
from evalkit.lmeval.model import SparsePrefillLM
from evalkit.methods.cosa import CoSA, Select
from evalkit.runner import run_cell
from evalkit.store import read_cells

NAME = "longbench_v2_cot"
SETTINGS = {"data": "small", "truncate_at": 901, "limit": 3}
TOKENS = 12


@pytest.fixture
def made(small_model):
    models = []

    def make(**arguments):
        given = {"pretrained": small_model, "dtype": "float32", "max_length": 1200, "enable_thinking": False}
        models.append(SparsePrefillLM(**given | {"method": "cosa", "p": 0.6} | arguments))
        return models[-1]

    yield make
    for model in models:
        model.close()


@pytest.fixture
def evaluate(small_model):
    """Evaluates the task; its samples by id and its scores."""

    def run(model, tasks=(NAME,), chat=True, **more):
        manager = TaskManager(
            include_path=str(files("evalkit.tasks")),
            include_defaults=False,
            metadata={**SETTINGS, "tokenizer": small_model},
        )
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=list(tasks),
            task_manager=manager,
            bootstrap_iters=0,
            apply_chat_template=chat,
            gen_kwargs={"max_gen_toks": TOKENS} | more.pop("gen_kwargs", {}),
            log_samples=True,
            **more,
        )
        scores = {name.partition(",")[0]: value for name, value in found["results"][NAME].items()}
        return {sample["doc"]["id"]: sample for sample in found["samples"][NAME]}, scores

    return run


@pytest.fixture
def cell(small_model, tmp_path, monkeypatch):
    """The same questions in a run of the harness."""
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))

    def run():
        task = LongBenchV2Config(
            mode="cot", length=1200, generation=GenerationConfig(max_new_tokens=TOKENS), **SETTINGS
        )
        model = ModelConfig("tiny", 2048, small_model, dtype="float32", thinking=False)
        run_cell(Cell(model, CoSA(select=Select(p=0.6)), task, ExecutionConfig(), tmp_path / "runs"))
        (found,) = read_cells([tmp_path / "runs"])
        return {record["item"]["id"]: record for record in found.records}, found.summary["lm_eval"]

    return run


def spoken(monkeypatch, *answers):
    """Let both commands answer the second stage with ``answers``, by turns; random weights name no letter."""
    said, seen = iter(answers * 2), []
    plain = second.conclude

    def conclude(*args, generate, **rest):
        def speak(session, hidden):
            generated = generate(session, hidden)
            seen.append((session.method.name, session._prompt_len, rest["limit"], generated.text))
            return Generated(next(said), None, 3, "eos", None)

        return plain(*args, generate=speak, **rest)

    monkeypatch.setattr(second, "conclude", conclude)
    monkeypatch.setattr("evalkit.benchmarks.longbench_v2.run.conclude", conclude)
    return seen


def test_both_stages_are_those_of_evalkit_run(made, evaluate, cell):
    """Greedy: the same prompt, reasoning, answer, budget and score for each question."""
    samples, scores = evaluate(made())
    records, own = cell()
    assert samples.keys() == records.keys() and len(records) == 3
    for name, record in records.items():
        sample = samples[name]
        ((response,),) = sample["resps"]
        assert sample["filtered_resps"] == [record["output"]] and record["second_stage"]["generation"]["tokens"]
        assert response == f"{record['reasoning']}\n\n{record['output']}" and record["reasoning"]
        assert response.prefills[0]["sha256"] == record["prompt"]["sha256"] and len(response.prefills) == 1
        assert {key: sample[key] for key in ("B", "B_stage1", "B_cost")} == pytest.approx(
            {key: record["budget"][key] for key in ("B", "B_stage1", "B_cost")}
        )
        assert sample["prefill_tokens"] == record["prompt"]["tokens"]  # the second stage is in no budget
        assert (sample["score"], sample["unparsed"]) == (record["metrics"]["score"], record["metrics"]["unparsed"])
    (summary,) = own.values()
    assert {key: scores[key] for key in summary} == summary and scores["self_made"] == 1


def test_the_second_answer_is_what_is_judged(made, evaluate, cell, monkeypatch):
    seen = spoken(monkeypatch, "The correct answer is (A)", "The correct answer is (B)", "no idea")
    samples, scores = evaluate(made())
    records, own = cell()
    assert [sample["score"] for sample in samples.values()] == [r["metrics"]["score"] for r in records.values()]
    (summary,) = own.values()
    assert {key: scores[key] for key in summary} == summary
    assert scores["unparsed"] == pytest.approx(1 / 3)
    assert {(method, limit) for method, _, limit, _ in seen} == {("dense", TOKENS)}
    assert seen[:3] == seen[3:]  # the prompts and what greedy decoding makes of them


def test_the_prompt_of_the_second_stage(made, evaluate, monkeypatch):
    lm = made()
    prompts = []
    prefill = second.Session.prefill

    def note(session, ids, **rest):
        prompts.append((session.method.name, lm.tokenizer.decode(ids)))
        return prefill(session, ids, **rest)

    monkeypatch.setattr(second.Session, "prefill", note)
    for chat in (True, False):
        samples, _ = evaluate(lm, chat=chat, limit=1)
        ((name, sample),) = samples.items()
        (_, first), (method, then) = prompts[-2:]
        asked = sample["arguments"][0][1][two_stage.ARGUMENT]
        assert method == "dense" and "omitted here" in then and sample["doc"]["question"].strip() in then
        assert asked["chat"] is chat and then.startswith("<|im_start|>") is chat is first.startswith("<|im_start|>")
        reasoning, _, answer = str(sample["resps"][0][0]).rpartition("\n\n")
        assert f"step by step: {reasoning}" in then.replace(lm.tokenizer.eos_token, "") or not reasoning
    assert ids_sha256(lm.tok_encode(first)) == sample["resps"][0][0].prefills[0]["sha256"]


def test_nothing_reasoned_is_no_answer(made, monkeypatch):
    lm = made()
    monkeypatch.setattr(lm, "_generate", lambda item: model_module.Text(" \n", [{"sha256": "a"}]))
    (found,) = lm.generate_until([request()], disable_tqdm=True)
    assert found == "" and found.answer == "" and isinstance(found, Chain)


def request(**arguments):
    asked = {"question": "Q?", "choices": ["1", "2", "3", "4"], "chat": True, "max_gen_toks": 128}
    given = {"until": [], "max_gen_toks": TOKENS, "do_sample": False, two_stage.ARGUMENT: asked} | arguments
    return Instance("generate_until", {}, ("A b c", given), 0, ("t", 0, 1))


def test_sampling_draws_both_stages_by_seed(made):
    def ask(seed):
        lm = made(seed=seed)
        return [lm.generate_until([request(do_sample=True, temperature=2.0)], True)[0] for _ in range(2)]

    (first, again), (other, _) = ask(1), ask(2)
    assert first == again != other and first.answer == again.answer != other.answer


def test_the_second_stage_draws_too(made, monkeypatch):
    """After one and the same reasoning."""

    def ask(seed, **sampling):
        lm = made(seed=seed)
        monkeypatch.setattr(lm, "_generate", lambda item: model_module.Text("Thus.", [{"sha256": "a"}]))
        return lm.generate_until([request(**sampling)], True)[0].answer

    sampled = {"do_sample": True, "temperature": 2.0}
    assert ask(1, **sampled) == ask(1, **sampled) != ask(2, **sampled)
    assert ask(1) == ask(2) != ask(1, **sampled)


# ------------------------------------------------------------------------------------------------------------ refusals
def test_other_models_are_refused_before_anything_runs(evaluate, small_model, monkeypatch, tmp_path):
    theirs = HFLM(pretrained=small_model, dtype="float32", device="cpu", max_length=1200)
    monkeypatch.setattr(HFLM, "generate_until", None)
    for cache in ({}, {"use_cache": str(tmp_path / "responses")}):
        with pytest.raises(InputError, match="longbench_v2_cot asks twice") as stop:
            evaluate(theirs, **cache)
        assert stop.value.field == "model" and stop.value.value == "HFLM"


def test_an_answer_of_one_stage_is_not_judged(small_model):
    """Where a model slips by, its plain text is no chain."""
    with pytest.raises(InputError, match="longbench_v2_cot asks twice"):
        two_stage.answers([["The correct answer is (A)"]], [{"message": "text"}])
    assert two_stage.answers([["plain"]], [{"name": "of a prepared prompt"}]) == ["plain"]


def test_what_a_chain_cannot_have(made, evaluate):
    for arguments, field in (
        ({"enable_thinking": True}, "enable_thinking"),
        ({"enable_thinking": None}, "enable_thinking"),
        ({"think_end_token": "</think>"}, "think_end_token"),
    ):
        lm = made(**arguments)
        with pytest.raises(InputError) as stop:
            lm.generate_until([request()], disable_tqdm=True)
        assert stop.value.field == field and lm.get_model_info()["evalkit"]["prefills"] == {}
    with pytest.raises(InputError, match="system_instruction='Be brief.'"):
        evaluate(made(), system_instruction="Be brief.")


# --------------------------------------------------------------------------------------------------------------- cache
def test_the_response_cache_keeps_one_stage_and_two_apart(made, evaluate, tmp_path):
    """One cache file, the same prompts asked once with and once without a second stage."""
    path = str(tmp_path / "cache")
    lm = made()

    def prefills():
        return lm.get_model_info()["evalkit"]["prefills"].get("generate_until", {}).get("count", 0)

    samples, scores = evaluate(lm, use_cache=path)
    assert prefills() == 3
    again, same = evaluate(lm, use_cache=path)
    assert prefills() == 3 and same == scores  # answers, budget and both stages out of the cache
    assert [s["filtered_resps"] for s in again.values()] == [s["filtered_resps"] for s in samples.values()]
    cached = lm_eval.api.model.CachingLM(lm, f"{path}_rank0.db")
    alone = []
    for sample in samples.values():
        context, arguments = sample["arguments"][0]
        plain = {name: value for name, value in arguments.items() if name != two_stage.ARGUMENT}
        alone.append(Instance("generate_until", {}, (context, plain), 0, ("t", 0, 1)))
    answers = cached.generate_until(alone)
    assert prefills() == 6 and not any(isinstance(answer, Chain) for answer in answers)
    keys = [key for (key,) in sqlite3.connect(f"{path}_rank0.db").execute("SELECT key FROM unnamed")]
    assert len(keys) == 6


def test_questions_of_one_prompt_are_apart_in_the_cache():
    """A cut prompt may have lost its question; the key holds it all the same."""
    first = request()
    asked = {**first.args[1][two_stage.ARGUMENT], "question": "Another?"}
    key = lm_eval.api.model.hash_args
    assert key("generate_until", first.args) != key("generate_until", request(**{two_stage.ARGUMENT: asked}).args)


# -------------------------------------------------------------------------------------------------------- command line
def test_the_command_line_writes_both_stages(small_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False))
    monkeypatch.chdir(tmp_path)
    shared = ["--include_path", "evalkit", "--tasks", NAME, "--metadata", json.dumps(SETTINGS)]
    shared += [
        "--apply_chat_template",
        "--gen_kwargs",
        f"max_gen_toks={TOKENS}",
        "--log_samples",
        "--output_path",
        "out",
    ]
    arguments = f"pretrained={small_model},method=cosa,p=0.6,dtype=float32,enable_thinking=false"

    def command(*more):
        monkeypatch.setattr(sys, "argv", ["evalkit-lm-eval", *shared, *more])
        return cli.main()

    assert command("--model", "evalkit", "--model_args", arguments, "--apply_chat_template") == 0
    (file,) = Path("out").glob("*/samples_*.jsonl")
    for line in file.read_text().splitlines():
        sample = json.loads(line)
        ((response,),), (answer,) = sample["resps"], sample["filtered_resps"]
        assert response.endswith(answer) and len(response) > len(answer) and 0 < sample["B"] < 1
        assert sample["arguments"]["gen_args_0"]["arg_1"][two_stage.ARGUMENT]["question"] in sample["doc"]["message"]
    assert command("--model", "hf", "--model_args", f"pretrained={small_model},dtype=float32", "--device", "cpu") == 2
    assert "model='HFLM': evalkit: longbench_v2_cot asks twice" in capsys.readouterr().err.splitlines()[-1]
