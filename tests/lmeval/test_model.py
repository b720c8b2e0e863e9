"""The model inside lm-eval: lm-eval's own when dense, budget in the results, no mixing in the response cache."""

from __future__ import annotations

import csv
import pickle
import re
import sqlite3
from pathlib import Path

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from evalkit.errors import InputError
from evalkit.lmeval import budget, register
from evalkit.lmeval.budget import LogLikelihood, Rolling, Text, document_metrics, weighted_mean
from evalkit.lmeval.model import SparsePrefillLM
from evalkit.lmeval.parity import FIELDS, KINDS, MODELS, compare

NAMES = ["toy_choice", "toy_generate", "toy_rolling"]
SPARSE = {"method": "cosa", "p": 0.5, "skip_scale": 100}


@pytest.fixture
def made(small_model):
    """Makes models, and gives their attention back."""
    models = []

    def make(**arguments):
        models.append(
            SparsePrefillLM(**{"pretrained": small_model, "dtype": "float32", "max_length": 1024} | arguments)
        )
        return models[-1]

    yield make
    for model in models:
        model.close()


@pytest.fixture(scope="module")
def manager(tasks):
    return TaskManager(include_path=str(tasks), include_defaults=False)


def evaluate(model, manager, names=NAMES, **more):
    return lm_eval.simple_evaluate(
        model=model, tasks=list(names), task_manager=manager, bootstrap_iters=0, log_samples=True, **more
    )


def test_dense_is_lm_evals_own_model(made, manager, small_model):
    """Same requests, same scores; log-likelihoods to float32."""
    ours = evaluate(made(), manager)
    theirs = evaluate(HFLM(pretrained=small_model, dtype="float32", device="cpu", max_length=1024), manager)
    for name in NAMES:
        for mine, other in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            assert mine["arguments"] == other["arguments"] and mine["prompt_hash"] == other["prompt_hash"]
            for (a,), (b,) in zip(mine["resps"], other["resps"], strict=True):
                if name == "toy_choice":
                    assert a[1] == b[1] and a[0] == pytest.approx(b[0], abs=2e-4)
                elif name == "toy_rolling":
                    assert a == pytest.approx(b, rel=1e-6)
                else:
                    assert str(a) == b
    for name, metric in (("toy_choice", "acc"), ("toy_generate", "exact_match")):
        assert ours["results"][name][f"{metric},none"] == theirs["results"][name][f"{metric},none"]
    assert ours["results"]["toy_choice"]["B,none"] == 1.0
    assert "B,none" not in theirs["results"]["toy_choice"]  # the hook leaves other models alone


def test_generation_stops_as_lm_evals_own_model_does(made, small_model):
    """Stop texts that appear inside the output, across tokens too."""
    theirs = HFLM(pretrained=small_model, dtype="float32", device="cpu", max_length=1024)
    ours = made()

    def ask(lm, until):
        request = Instance("generate_until", {}, ("The 3 of 757", {"until": until, "max_gen_toks": 24}), 0, ("t", 0, 1))
        return str(lm.generate_until([request], disable_tqdm=True)[0])

    whole = ask(theirs, [])
    assert ask(ours, []) == whole and len(whole) > 6
    for until in ([whole[3:5]], [whole[4:8], "never"], [whole[:1]]):
        assert ask(ours, until) == ask(theirs, until) == whole[: min(whole.find(t) for t in until if t in whole)]


def test_budget_is_in_results_and_samples_of_tasks_that_know_nothing_of_it(made, manager, monkeypatch):
    monkeypatch.setattr("evalkit.attention.session.slower_backends", lambda refused, best: ["proxy fell back"])
    found = evaluate(made(**SPARSE), manager)
    for name in NAMES:
        results, samples = found["results"][name], found["samples"][name]
        values = [sample["B"] for sample in samples]
        tokens = [sample["prefill_tokens"] for sample in samples]
        assert all(0 < value < 1 for value in values) and len(set(tokens)) == 3
        expected = sum(v * t for v, t in zip(values, tokens, strict=True)) / sum(tokens)
        assert results["B,none"] == pytest.approx(expected, rel=1e-12)
        assert results["B_stage1,none"] >= results["B,none"] and results["B_cost,none"] > results["B,none"]
        assert {"B", "B_stage1", "B_cost", "B_block"} <= set(samples[0]["metrics"])
    info = found["config"]["evalkit"]
    assert info["identity"]["method"]["select"]["p"] == 0.5
    assert {kind: part["count"] for kind, part in info["prefills"].items()} == {
        "loglikelihood": 3,  # four choices share one prefill
        "generate_until": 3,
        "loglikelihood_rolling": 3,
    }
    assert info["prefills"]["loglikelihood"]["backends"] == {"proxy:torch": 6, "select:torch": 6, "torch": 6}
    assert all("proxy fell back" in part["warnings"] for part in info["prefills"].values())


def test_sparse_differs_from_dense_and_full_selection_does_not(made):
    requests = [Instance("loglikelihood", {}, (" ".join(f"{i} and" for i in range(150)), " here."), 0, ("t", 0, 1))]
    dense, full, sparse = (
        made(**arguments).loglikelihood(requests, disable_tqdm=True)[0][0]
        for arguments in ({}, {"method": "cosa", "p": 1.0}, {"method": "cosa", "p": 0.3})
    )
    assert full == pytest.approx(dense, abs=1e-4) and abs(sparse - dense) > 1e-3


def test_choices_of_one_context_do_not_disturb_each_other(made):
    context = " ".join(f"{i} of it" for i in range(100))
    ends = [" a b c d", " x", " a b c e", " x"]
    requests = [Instance("loglikelihood", {}, (context, end), i, ("t", 0, 1)) for i, end in enumerate(ends)]
    lm = made(**SPARSE)
    together = lm.loglikelihood(requests, disable_tqdm=True)
    alone = [lm.loglikelihood([request], disable_tqdm=True)[0] for request in requests]
    assert [a[0] for a in together] == pytest.approx([b[0] for b in alone], abs=1e-5)
    assert together[1] == together[3]


@pytest.mark.parametrize("kind", ["generate_until", "loglikelihood"])
def test_nothing_is_truncated_and_nothing_runs_before_all_fit(made, kind):
    lm = made(max_length=128)
    long = " ".join(str(i) for i in range(200))
    second = {"max_gen_toks": 4, "until": []} if kind == "generate_until" else " a"
    requests = [Instance(kind, {}, (text, second), i, ("t", i, 1)) for i, text in enumerate(("short", long))]
    with pytest.raises(InputError, match="nothing is truncated") as stop:
        getattr(lm, kind)(requests, disable_tqdm=True)
    assert stop.value.field == "max_length" and lm.get_model_info()["evalkit"]["prefills"] == {}


def test_the_longest_request_that_fits_runs(made):
    lm = made(max_length=128)
    ids = lm.tok_encode(" ".join(str(i) for i in range(200)))[:124]
    text = lm.tokenizer.decode(ids)
    fits = len(lm.tok_encode(text))
    request = Instance("generate_until", {}, (text, {"max_gen_toks": 128 - fits, "until": []}), 0, ("t", 0, 1))
    assert isinstance(lm.generate_until([request], disable_tqdm=True)[0], Text)


def test_sampling_draws_by_seed_and_unknown_arguments_are_refused(made):
    def ask(lm, **arguments):
        asked = {"until": [], "max_gen_toks": 12, **arguments}
        return str(lm.generate_until([Instance("generate_until", {}, ("A b c", asked), 0, ("t", 0, 1))], True)[0])

    first, other = made(seed=1), made(seed=2)
    sampled = {"do_sample": True, "temperature": 3.0}
    assert ask(first, **sampled) == ask(first, **sampled) != ask(other, **sampled)
    assert ask(first) == ask(other) == ask(first, do_sample=True, top_k=1)
    for bad, field in (({"num_beams": 4}, "num_beams"), ({"do_sample": True, "top_p": 2.0}, "top_p")):
        with pytest.raises(InputError) as stop:
            ask(first, **bad)
        assert stop.value.field == f"gen_kwargs.{field}"


def test_every_repeat_of_a_document_is_a_draw_of_its_own(made, manager, tmp_path):
    """Through lm-eval, with its response cache as without: the same four draws in every run."""

    def ask(**more):
        found = evaluate(made(**SPARSE), manager, ["toy_repeats"], **more)
        return [[str(text) for text in sample["resps"][0]] for sample in found["samples"]["toy_repeats"]]

    first = ask()
    assert [len(set(texts)) for texts in first] == [4, 4, 4]
    cached = {"use_cache": str(tmp_path / "cache")}
    assert ask() == ask(**cached) == ask(**cached) == first


def test_a_draw_depends_on_its_document_and_its_turn_not_on_what_else_is_asked(made):
    asked = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 3.0}
    a, b = (Instance("generate_until", {}, ("A b c", asked), 0, ("t", doc_id, 3)) for doc_id in (0, 1))
    lm = made()

    def ask(*requests):
        return [str(text) for text in lm.generate_until(list(requests), disable_tqdm=True)]

    together = ask(a, a, a, b, b, b)
    assert len(set(together)) == 6
    mixed = ask(b, a, b, a, a, b)
    assert [mixed[i] for i in (1, 3, 4, 0, 2, 5)] == together and ask(a) == together[:1]


def test_sampling_that_the_response_cache_takes_for_greedy_is_refused(made, tmp_path):
    request = Instance("generate_until", {}, ("A b c", {"until": [], "temperature": 3.0, "max_gen_toks": 4}), 0)
    lm = made()
    assert lm.generate_until([request], disable_tqdm=True)
    with pytest.raises(InputError, match="every repeat") as stop:
        lm_eval.api.model.CachingLM(lm, str(tmp_path / "responses.db")).generate_until([request])
    assert stop.value.field == "gen_kwargs.do_sample"


ANSWER = "The correct answer is (A)"


@pytest.mark.parametrize(
    ("said", "arguments", "answer"),
    [
        (f"So. {ANSWER}", {"enable_thinking": True}, ""),  # never closed: no answer, whatever was thought
        (f"No.</think>\n{ANSWER}", {"enable_thinking": True}, ANSWER),
        (f"No.</think>{ANSWER}</think>x", {"enable_thinking": True}, f"{ANSWER}x"),  # the first one ends it
        (f"So. {ANSWER}", {"think_end_token": "</think>"}, ""),
        (f"No. STOP {ANSWER} STOP", {"enable_thinking": True, "think_end_token": "STOP"}, f"{ANSWER} STOP"),
        (ANSWER, {"enable_thinking": False, "think_end_token": "</think>"}, ANSWER),
        (ANSWER, {"enable_thinking": False}, ANSWER),
    ],
)
def test_a_think_block_is_judged_as_in_a_run_of_the_harness(made, monkeypatch, said, arguments, answer):
    lm = made(**arguments)
    tokens = iter([*lm.tok_encode(said), lm.eot_token_id])
    monkeypatch.setattr("evalkit.lmeval.model.Decoding.picker", lambda self, *sample: lambda logits: next(tokens))
    request = Instance("generate_until", {}, ("A b c", {"until": [], "max_gen_toks": 200}), 0, ("t", 0, 1))
    (found,) = lm.generate_until([request], disable_tqdm=True)
    assert found == answer


def test_think_block_is_cut_and_its_stop_texts_do_not_count(made):
    lm = made(think_end_token="</think>")
    stop = lm._stops(["\n"])
    ids = [lm.tok_encode(part) for part in ("a\nb", "</think>", "c", "\n")]
    assert not stop(ids[0]) and not stop(ids[0] + ids[1]) and not stop(ids[0] + ids[1] + ids[2])
    assert made()._stops(["\n"])(ids[0] + ids[3])


# ------------------------------------------------------------------------------------------------------------- cache
def test_the_response_cache_mixes_neither_methods_nor_settings_nor_models(made, manager, small_model, tmp_path):
    """One cache file for all: lm-eval's key ignores the model, ours does not."""
    path = str(tmp_path / "cache")
    calls = []

    def answers(lm):
        before = sum(part["count"] for part in info(lm).values())
        found = evaluate(lm, manager, ["toy_choice"], use_cache=path)
        calls.append(sum(part["count"] for part in info(lm).values()) - before)
        return [sample["resps"] for sample in found["samples"]["toy_choice"]], found["results"]["toy_choice"]

    def info(lm):
        return lm.get_model_info()["evalkit"]["prefills"]

    dense, dense_results = answers(made())
    sparse, sparse_results = answers(made(**SPARSE))
    sparser, _ = answers(made(**SPARSE | {"p": 0.2}))
    chunked, _ = answers(made(**SPARSE, chunk_size=128))
    assert calls == [3, 3, 3, 3] and dense != sparse != sparser
    assert dense_results["B,none"] == 1.0 and sparse_results["B,none"] < 1.0
    again, again_results = answers(made(**SPARSE))
    assert (
        calls[-1] == 0 and again == sparse and again_results == sparse_results
    )  # the budget comes out of the cache too
    theirs = HFLM(pretrained=small_model, dtype="float32", device="cpu", max_length=1024)
    own = evaluate(theirs, manager, ["toy_choice"], use_cache=path)
    assert "B,none" not in own["results"]["toy_choice"]
    connection = sqlite3.connect(f"{path}_rank0.db")
    keys = [key for (key,) in connection.execute("SELECT key FROM unnamed")]
    assert len(keys) == 5 * 12 and len({key.partition(":")[0] for key in keys if ":" in key}) == 4


def test_answers_are_in_the_cache_one_by_one(made, tmp_path, monkeypatch):
    """A kill loses the request in flight, not the task."""
    lm = made()
    stored = {}

    class Hook:
        dbdict = None

        def add_partial(self, attr, request, result):
            stored[request] = (attr, result)

    lm.set_cache_hook(Hook())
    requests = [Instance("loglikelihood", {}, (f"{i} is", " it"), 0, ("t", i, 1)) for i in range(3)]
    prefill, done = lm.session.prefill, []

    def stop_at_the_third(*args, **kwargs):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return prefill(*args, **kwargs)

    monkeypatch.setattr(lm.session, "prefill", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        lm.loglikelihood(requests, disable_tqdm=True)
    assert list(stored) == [("0 is", " it"), ("1 is", " it")]


# ------------------------------------------------------------------------------------------------------------ budget
def account(name, tokens, b):
    return {"sha256": name, "tokens": tokens, "budget": dict.fromkeys(budget.BUDGETS, b)}


@pytest.mark.parametrize("answer", [Text("x", [account("a", 10, 0.5)]), LogLikelihood((-1.5, True)), Rolling(-2.0)])
def test_answers_survive_the_cache(answer):
    back = pickle.loads(pickle.dumps(answer))
    assert back == answer and type(back) is type(answer) and back.prefills == answer.prefills


def test_a_document_counts_each_prefill_once_and_weighs_by_tokens():
    answers = [LogLikelihood((-1.0, False), [account("a", 100, 0.5)]) for _ in range(4)]
    found = document_metrics([*answers, LogLikelihood((-1.0, False), [account("b", 300, 0.1)])])
    assert found["B"] == pytest.approx(0.2) and found["prefill_tokens"] == 400
    assert weighted_mean([found["B"], document_metrics(answers)["B"]]) == pytest.approx((0.2 * 400 + 0.5 * 100) / 500)
    assert document_metrics(["plain text"]) == {}


def test_a_tasks_own_metric_of_the_same_name_stays():
    class Task:
        instances = [Instance("generate_until", {}, ("a", {}), 0, ("t", 7, 1))]

        def doc_iterator(self):
            yield 7, {}

        def process_results(self, doc, results):
            return {"B": 42.0}

        def aggregation(self):
            return {"B": max}

        def higher_is_better(self):
            return {"B": True}

    task = Task()
    task.instances[0].resps = [Text("x", [account("a", 10, 0.5)])]
    budget.attach(task)
    for _, doc in task.doc_iterator():
        found = task.process_results(doc, ["x"])
    assert found["B"] == 42.0 and found["B_cost"] == 0.5
    assert task.aggregation()["B"] is max and task.aggregation()["B_cost"] is weighted_mean
    assert task.higher_is_better()["B"] is True and task.higher_is_better()["B_cost"] is None


def test_register_leaves_the_built_in_models():
    from lm_eval.api.registry import get_model

    register()
    register()
    assert get_model("evalkit") is SparsePrefillLM and get_model("hf") is HFLM


def test_the_committed_comparison_holds():
    """Dense through this model: the scores of lm-eval's own, at no more time and working memory."""
    with (Path(__file__).parents[2] / "results" / "lm_eval_parity.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["kind"], row["model"]) for row in rows] == [(kind, model) for kind in KINDS for model in MODELS]
    assert {row["equal_scores"] for row in rows} == {"True"}
    assert list(rows[0]) == list(FIELDS) and all(re.fullmatch(r"[0-9a-f]{7,}", row["commit"]) for row in rows)
    for row in rows:
        assert float(row["max_abs_difference"]) < 1e-3  # nats, rolling ones over 2048 tokens
        if row["model"] == "evalkit":
            assert float(row["wall_to_hf"]) <= 1.0 and float(row["peak_to_hf"]) <= 1.02


def test_comparison_sees_differences():
    same = [(-1.0, False), (-2.0, False), (-3.0, True), (-4.0, False)]
    other = [(-1.0, False), (-0.5, False), (-3.0, True), (-4.0, False)]
    assert compare("loglikelihood", same, same) == (True, 0.0)
    assert compare("loglikelihood", same, other) == (False, 1.5)
    assert compare("loglikelihood", same, [(-1.0, True), *same[1:]]) == (False, 0.0)
    assert compare("generate_until", ["a"], ["b"])[0] is False
    assert compare("loglikelihood_rolling", [-5.0], [-5.25]) == (True, 0.25)
