"""The task family on lm-eval's own terms: documents made of the metadata, any model."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import lm_eval
import pytest
import small_tokenizers
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from evalkit.benchmarks import docs
from evalkit.benchmarks.longbench_v2 import read_items
from evalkit.benchmarks.longbench_v2.data import small_file
from evalkit.benchmarks.longbench_v2.prompts import DIRECT, fill
from evalkit.benchmarks.longbench_v2.tasks import dataset, mean_of_own
from evalkit.errors import InputError
from evalkit.lmeval import settings


class Oracle(LM):
    """Knows every answer, and names none to every third question."""

    def __init__(self) -> None:
        super().__init__()
        self.contexts: list[str] = []

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        self.contexts += [request.args[0] for request in requests]
        answers = [request.doc["answer"] for request in requests]
        return [f"The correct answer is ({a})" if i % 3 else "I cannot say" for i, a in enumerate(answers)]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self.contexts += [request.args[0] for request in requests]
        return [(-1.0 if request.args[1].strip() == request.doc["answer"] else -2.0, False) for request in requests]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    small_tokenizers.qwen3_like().save_pretrained(folder)
    return {"data": "small", "truncate_at": 3000, "limit": 9, "tokenizer": str(folder)}


def evaluate(name, metadata):
    manager = TaskManager(include_path=str(files("evalkit.tasks")), include_defaults=False, metadata=metadata)
    model = Oracle()
    found = lm_eval.simple_evaluate(model=model, tasks=[name], task_manager=manager, bootstrap_iters=0)
    assert found is not None
    return {key.split(",")[0]: value for key, value in found["results"][name].items()}, model.contexts


def test_direct_answers_of_any_model(metadata):
    scores, contexts = evaluate("longbench_v2_direct", metadata)
    assert scores["score"] == pytest.approx(6 / 9) and scores["unparsed"] == pytest.approx(3 / 9)
    assert {"easy", "hard", "short", "medium", "long"} <= set(scores)
    assert scores["self_made"] == 1
    messages = {fill(DIRECT, item) for item in read_items("small")}
    assert len(contexts) == 9 and any(text in messages for text in contexts)
    assert any(text not in messages and text.startswith("Please read") for text in contexts)  # cut in the middle


def test_choices_of_any_model(metadata):
    scores, contexts = evaluate("longbench_v2_loglikelihood", metadata)
    assert scores["score"] == 1 and len(contexts) == 36
    assert all(text.endswith("The correct answer is (") for text in contexts)


def test_only_the_self_made_set_is_labelled(metadata, tmp_path):
    row = json.loads(small_file().read_text().splitlines()[0])
    changes = {"_id": "q0", "question": "Another?"}
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({**row, **changes}) + "\n")
    scores, _ = evaluate("longbench_v2_loglikelihood", {**metadata, "data": str(path), "limit": 1})
    assert scores["score"] == 1 and "self_made" not in scores


def test_what_cannot_be_done_without_the_harness(metadata):
    with pytest.raises(InputError, match="model='Oracle': evalkit: longbench_v2_cot asks twice"):
        evaluate("longbench_v2_cot", metadata)
    with pytest.raises(InputError, match="tokenizer="):
        dataset(**{**metadata, "tokenizer": None})
    with pytest.raises(InputError, match="metadata.limit"):
        dataset(**{**metadata, "limit": 99})


def test_the_models_arguments_do_not_choose_the_questions(metadata, monkeypatch):
    """lm-eval puts them into the metadata: the model's seed and revision are not those of the data."""

    def asked(**more):
        return [doc["id"] for doc in dataset(**metadata, **more)["test"]]

    assert asked(seed=1) == asked() == asked(data_seed=42) != asked(data_seed=1)
    asked_of_the_hub = []

    def load_dataset(name, split, revision):
        asked_of_the_hub.append(revision)
        return [json.loads(line) for line in small_file().read_text().splitlines()]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    for more in ({"revision": "of-the-model"}, {"data_revision": "of-the-data"}):
        dataset(**{**metadata, "data": "owner/set"}, **more)
    assert asked_of_the_hub == [None, "of-the-data"]


def test_the_models_own_tokenizer_is_that_of_its_revision(metadata, monkeypatch):
    asked = []
    monkeypatch.setattr(settings, "named_tokenizer", lambda *given: asked.append(given))
    folder = metadata["tokenizer"]
    for given in ({"tokenizer": folder}, {"pretrained": folder}, {"pretrained": "m", "tokenizer": folder}):
        settings.counting_tokenizer(given.get("tokenizer"), given.get("pretrained"), "r")
    assert asked == [(folder, None), (folder, "r"), (folder, None)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("truncate_at", "300"),
        ("truncate_at", 10),
        ("truncate_at", True),
        ("limit", "3"),
        ("limit", 0),
        ("data_seed", -1),
        ("data_seed", 0.5),
        ("data", 3),
        ("data", "no/such/file.jsonl"),
        ("data_revision", 1),
        ("tokenizer", 5),
    ],
)
def test_bad_metadata_is_named(metadata, name, value):
    with pytest.raises(InputError) as stop:
        dataset(**{**metadata, name: value})
    assert (stop.value.field, stop.value.value) == (f"metadata.{name}", value)


def test_rulers_metadata_is_checked_alike(metadata):
    for name, value in (("length", "600"), ("samples", 0), ("data_seed", "1")):
        with pytest.raises(InputError) as stop:
            docs.dataset(ruler_task="vt", tokenizer=metadata["tokenizer"], **{name: value})
        assert (stop.value.field, stop.value.value) == (f"metadata.{name}", value)


def test_arguments_of_other_models_are_no_metadata_of_the_task(metadata):
    """Those of lm-eval's own models are known; of a misspelt key the near ones are named."""
    others = {"trust_remote_code": True, "truncation": False, "truncate": False, "max_length": 4, "attn": "x", "p": 0.5}
    assert len(dataset(**metadata, **others)["test"]) == 9
    with pytest.raises(InputError, match=r"metadata\.truncate_att=300: did you mean truncate_at"):
        dataset(**metadata, truncate_att=300)


def test_a_category_without_questions_is_not_a_number():
    assert mean_of_own([None, 1.0, 0.0]) == 0.5
    assert mean_of_own([None]) != mean_of_own([None])
