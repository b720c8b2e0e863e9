"""LongBench-v2 cells on small random-weight models: all modes, thinking and sampling, records, identity, resume."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import small_tokenizers
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from evalkit import lm as lm_module
from evalkit import runner
from evalkit.attention import Session
from evalkit.benchmarks.longbench_v2 import load, read_items
from evalkit.benchmarks.longbench_v2 import run as run_module
from evalkit.benchmarks.longbench_v2.second import second_stage
from evalkit.benchmarks.perplexity import ids_sha256
from evalkit.config import (
    Cell,
    ExecutionConfig,
    GenerationConfig,
    LongBenchV2Config,
    ModelConfig,
    Recommended,
    RulerConfig,
)
from evalkit.errors import InputError, IntegrityError
from evalkit.generation import Generated
from evalkit.methods.cosa import CoSA, Select
from evalkit.methods.dense import Dense
from evalkit.prompts import PromptRenderer
from evalkit.runner import run_cell
from evalkit.store import cell_key, read_cells
from evalkit.task_settings import Sampling

SPARSE = CoSA(select=Select(p=0.6))
CLASSES = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}
    for kind, tokenizer in (("qwen3", small_tokenizers.qwen3_like()), ("llama", small_tokenizers.llama3_like())):
        config_class, model_class = CLASSES[kind]
        torch.manual_seed(0)
        config = config_class(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=2048,
            initializer_range=0.2,
            eos_token_id=tokenizer.eos_token_id,
        )
        made[kind] = tmp_path_factory.mktemp(kind)
        model_class(config).save_pretrained(made[kind])
        tokenizer.save_pretrained(made[kind])
    return made


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Prompts go to a folder of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVALKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def cell(models, out, method=SPARSE, kind="qwen3", thinking=None, limit=3, **task) -> Cell:
    generation = {"max_new_tokens": None if task.get("mode") == "loglikelihood" else 12, **task.pop("generation", {})}
    settings = {"data": "small", "length": 1200, "truncate_at": 900, "limit": limit, **task}
    plain = thinking if thinking is not None else (False if kind == "qwen3" else None)
    drawn = Recommended(Sampling(0.7, 20, 0.8), Sampling(0.6, 20, 0.95))
    model = ModelConfig(kind, 2048, str(models[kind]), dtype="float32", thinking=plain, recommended=drawn)
    config = LongBenchV2Config(generation=GenerationConfig(**generation), **settings)
    return Cell(model, method, config, ExecutionConfig(), Path(out))


def done(made: Cell):
    run_cell(made)
    (found,) = [c for c in read_cells([made.out]) if c.done]
    return found


def records(made: Cell):
    return sorted(done(made).records, key=lambda record: record["index"])


def scripted(monkeypatch, *texts):
    """Let the model say ``texts``, one a generation."""
    said = iter(texts)
    seen = []

    def speak(session, hidden, *, limit, **rest):
        seen.append((session.method.name, session._prompt_len, limit))
        return Generated(next(said), None, 3, "eos", None)

    monkeypatch.setattr(run_module, "generate", speak)
    return seen


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_direct_cell_end_to_end(models, tmp_path, kind):
    made = cell(models, tmp_path, kind=kind)
    found = done(made)
    items = {item.id: item for item in read_items("small")}
    assert len(found.records) == 3
    for record in found.records:
        item = items[record["item"]["id"]]
        assert record["task"] == "longbench_v2_small_direct" and record["index"] == item.index
        assert (record["item"]["difficulty"], record["item"]["length"]) == (item.difficulty, item.length)
        assert record["references"] == [item.answer] and record["metrics"] == {"score": 0.0, "unparsed": 1.0}
        prompt = record["prompt"]
        assert prompt["truncated"] and prompt["message_tokens"] > prompt["truncate_at"] == 900 < prompt["tokens"] < 940
        assert prompt["leading_bos"] == (1 if kind == "llama" else 0)
        assert record["generation"]["sampling"] == "greedy" and record["generation"]["max_new_tokens"] == 12
        assert 0 < record["budget"]["B"] < 1 and record["calls"]["sparse"] == 2
        assert record["calls"]["expected"] == record["calls"]["sparse"] + record["calls"]["decode"]
    scores = found.summary["lm_eval"]["longbench_v2_small_direct_1200"]
    assert scores["score"] == 0 and scores["unparsed"] == 1
    present = {record["item"]["difficulty"] for record in found.records} | {r["item"]["length"] for r in found.records}
    assert present <= set(scores) and not set(scores) - present - {"score", "unparsed"}


def test_answers_are_judged_and_counted_apart(models, tmp_path, monkeypatch):
    right = load(cell(models, tmp_path).task, renderer()).items
    wrong = "ABCD"[("ABCD".index(right[1].answer) + 1) % 4]
    scripted(monkeypatch, f"The correct answer is ({right[0].answer})", f"The correct answer is ({wrong})", " ")
    found = done(cell(models, tmp_path))
    assert [r["metrics"] for r in found.records] == [
        {"score": 1.0, "unparsed": 0.0},
        {"score": 0.0, "unparsed": 0.0},
        {"score": 0.0, "unparsed": 1.0},
    ]
    assert [r["item"]["prediction"] for r in found.records] == [right[0].answer, wrong, None]
    assert [r["item"]["empty"] for r in found.records] == [False, False, True]
    scores = found.summary["lm_eval"]["longbench_v2_small_direct_1200"]
    assert scores["score"] == pytest.approx(1 / 3) and scores["unparsed"] == pytest.approx(1 / 3)
    for name in ("easy", "hard", "short", "medium", "long"):
        own = [r["metrics"]["score"] for r in found.records if name in (r["item"]["difficulty"], r["item"]["length"])]
        assert (name in scores) == bool(own) and (not own or scores[name] == pytest.approx(sum(own) / len(own)))


def renderer(kind="qwen3", thinking=False):
    tokenizer = {"qwen3": small_tokenizers.qwen3_like, "llama": small_tokenizers.llama3_like}[kind]()
    return PromptRenderer(tokenizer, chat=True, thinking=thinking if kind == "qwen3" else None)


def test_the_chain_of_two(models, tmp_path, monkeypatch):
    made = cell(models, tmp_path, mode="cot", limit=2, generation={"max_new_tokens": 200})
    prompts = load(made.task, renderer())
    first, second = prompts.items
    seen = scripted(
        monkeypatch,
        f" The correct answer is ({first.choices[0]}) ",
        f"The correct answer is ({first.answer})",
        "",
    )
    one, two = records(made)
    assert [(method, limit) for method, _, limit in seen] == [("cosa", 200), ("dense", 128), ("cosa", 200)]
    ids = renderer().encode(second_stage(first, f"The correct answer is ({first.choices[0]})", renderer()))
    assert seen[1][1] == len(ids) == one["second_stage"]["prompt"]["tokens"]
    assert one["second_stage"]["prompt"]["sha256"] == ids_sha256(ids)
    assert one["metrics"] == {"score": 1.0, "unparsed": 0.0} and one["item"]["prediction"] == first.answer
    assert one["reasoning"].startswith("The correct") and one["prompt"]["tokens"] == prompts[0].tokens
    # No reasoning: there is nothing to ask for an answer about.
    assert two["metrics"] == {"score": 0.0, "unparsed": 1.0} and "second_stage" not in two and two["item"]["empty"]


def test_the_second_stage_is_in_no_budget(models, tmp_path):
    chained = cell(models, tmp_path / "cot", mode="cot", limit=2)
    for record in records(chained):
        tokens = record["prompt"]["tokens"]
        assert record["budget"]["dense"] == 2 * 4 * tokens * (tokens + 1) // 2
        assert record["calls"]["sparse"] == 2 and record["second_stage"]["prompt"]["tokens"] < tokens


def test_choices_are_those_of_the_whole_model(models, tmp_path):
    made = cell(models, tmp_path, Dense(), mode="loglikelihood", limit=2)
    found = done(made)
    model = AutoModelForCausalLM.from_pretrained(models["qwen3"], dtype=torch.float32)
    prompts = load(made.task, renderer())
    for position, record in enumerate(sorted(found.records, key=lambda r: r["index"])):
        ids = renderer().encode(prompts[position].text)
        with torch.inference_mode():
            log_p = model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
        expected = {x: float(log_p[renderer().encode(x)[0]]) for x in "ABCD"}
        assert {x: value for x, (value, _) in record["choices"].items()} == pytest.approx(expected, abs=1e-4)
        best = max(expected, key=lambda letter: expected[letter])
        answer = prompts.items[position].answer
        assert record["item"]["prediction"] == record["output"] == best
        assert record["metrics"]["score"] == float(best == answer)
        assert record["metrics"]["first_token"] == pytest.approx(math.exp(expected[answer]), rel=1e-3)
        assert record["calls"]["decode"] == 0 and record["prompt"]["answer_prefix"]
    mean = sum(record["metrics"]["score"] for record in found.records) / 2
    assert found.summary["lm_eval"]["longbench_v2_small_loglikelihood_1200"]["score"] == mean


def test_four_choices_take_one_prefill(models, tmp_path, monkeypatch, capsys):
    prefills = []
    whole = Session.prefill
    monkeypatch.setattr(Session, "prefill", lambda self, ids, **k: prefills.append(len(ids)) or whole(self, ids, **k))
    assert len(done(cell(models, tmp_path, mode="loglikelihood")).records) == len(prefills) == 3
    shown = [line.split()[0] for line in capsys.readouterr().err.splitlines()]
    assert shown[-1] == "3/3" and len(shown) == len(set(shown))


def test_a_tokenizer_that_joins_bracket_and_letter_is_refused(models, tmp_path, monkeypatch):
    encode = PromptRenderer.encode
    joined = lambda self, text: encode(self, text)[:-1] if text.endswith("(C") else encode(self, text)  # noqa: E731
    monkeypatch.setattr(PromptRenderer, "encode", joined)
    with pytest.raises(IntegrityError, match="does not keep the choice C apart"):
        run_cell(cell(models, tmp_path, mode="loglikelihood", limit=1))


# ------------------------------------------------------------------------------------------------ thinking, sampling
def test_a_thinking_cell_states_its_budget_and_has_no_prefix(models, tmp_path):
    found = done(cell(models, tmp_path, thinking=True, generation={"thinking_tokens": 20}))
    for record in found.records:
        assert record["prompt"]["thinking"] is True
        thinking = record["generation"]["thinking"]
        # Random weights never close the block: no answer, which is counted and told.
        assert thinking["budget"] == 20 and thinking["closed"] is False and thinking["text"]
        assert record["output"] == "" and record["metrics"]["unparsed"] == 1 and record["item"]["empty"]
        assert record["generation"]["tokens"] == 20 and record["generation"]["ended"] == "limit"


def test_a_thought_answer_is_read_behind_the_block(models, tmp_path, monkeypatch):
    made = cell(models, tmp_path, thinking=True, limit=1, generation={"thinking_tokens": 60, "max_new_tokens": 20})
    answer = load(made.task, renderer(thinking=True)).items[0].answer
    wrong = "ABCD"[("ABCD".index(answer) + 1) % 4]
    text = f"<think>The correct answer is ({wrong})</think>\n\nThe correct answer is ({answer})"
    ids = iter([*renderer().encode(text), renderer().tokenizer.eos_token_id])
    monkeypatch.setattr("evalkit.generation.Decoding.picker", lambda *_: lambda logits: next(ids))
    (record,) = records(made)
    assert record["metrics"]["score"] == 1 and record["output"] == f"The correct answer is ({answer})"
    assert record["generation"]["thinking"]["closed"] and wrong in record["generation"]["thinking"]["text"]


def test_thinking_ruler_reserves_its_block_inside_the_length(models, tmp_path):
    base = cell(models, tmp_path, thinking=True)
    task = RulerConfig(tasks=("niah_single_1",), length=1500, limit=1, generation=GenerationConfig(thinking_tokens=300))
    (record,) = records(replace(base, task=task))
    assert record["generation"]["thinking"]["budget"] == 300 and record["generation"]["max_new_tokens"] == 128
    assert 1000 < record["prompt"]["tokens"] <= 1500 - 300 - 128
    assert record["generation"]["tokens"] <= 428


def outputs(found):
    return {record["index"]: record["output"] for record in found}


def test_sampling_is_reproducible_and_independent_of_order_and_interruption(models, tmp_path, monkeypatch):
    sampled = {"sampling": "recommended", "seed": 7}
    whole = outputs(records(cell(models, tmp_path / "a", generation=sampled)))
    assert outputs(records(cell(models, tmp_path / "b", generation=sampled))) == whole
    fewer = outputs(records(cell(models, tmp_path / "c", generation=sampled, limit=2)))
    assert fewer == {index: whole[index] for index in fewer}
    measured = lm_module.EvalkitLM._measured
    ran = []

    def failing(self, doc, run):
        if len(ran) == 1:
            raise RuntimeError("lost the machine")
        ran.append(doc["name"])
        return measured(self, doc, run)

    monkeypatch.setattr(lm_module.EvalkitLM, "_measured", failing)
    with pytest.raises(RuntimeError):
        run_cell(cell(models, tmp_path / "d", generation=sampled))
    monkeypatch.undo()
    assert outputs(records(cell(models, tmp_path / "d", generation=sampled))) == whole
    other = outputs(records(cell(models, tmp_path / "e", generation={**sampled, "seed": 8})))
    greedy = records(cell(models, tmp_path / "f"))
    assert all(other[i] != whole[i] for i in whole) and all(outputs(greedy)[i] != whole[i] for i in whole)


def test_records_hold_the_sampling(models, tmp_path):
    for thinking, temperature in ((False, 0.7), (True, 0.6)):
        generation = {"sampling": "recommended", "seed": 3} | ({"thinking_tokens": 8} if thinking else {})
        (record,) = records(cell(models, tmp_path / str(thinking), thinking=thinking, limit=1, generation=generation))
        assert record["generation"]["sampling"]["temperature"] == temperature and record["generation"]["seed"] == 3


# ----------------------------------------------------------------------------------------------------------- identity
def test_identity_holds_what_changes_a_number(models, tmp_path):
    base = cell(models, tmp_path)
    sampled = replace(base.task, generation=replace(base.task.generation, sampling="recommended"))
    seeded = replace(sampled, generation=replace(sampled.generation, seed=1))
    hotter = replace(base.model, recommended=Recommended(plain=Sampling(1.0)))
    variants = [
        base,
        replace(base, task=replace(base.task, truncate_at=800)),
        replace(base, task=replace(base.task, limit=2)),
        replace(base, task=replace(base.task, seed=1)),
        replace(base, task=replace(base.task, mode="cot")),
        replace(base, task=sampled),
        replace(base, task=seeded),
        replace(base, task=sampled, model=hotter),
        replace(base, task=replace(base.task, generation=GenerationConfig(max_new_tokens=13))),
    ]
    keys = [cell_key(runner._resolve(variant).identity) for variant in variants]
    assert len(set(keys)) == len(keys)
    # What greedy decoding does not read changes nothing.
    assert cell_key(runner._resolve(replace(base, model=hotter)).identity) == keys[0]
    idle = replace(base.task, generation=replace(base.task.generation, seed=5))
    assert cell_key(runner._resolve(replace(base, task=idle)).identity) == keys[0]


def test_a_copy_of_the_self_made_set_under_another_name_is_known(models, tmp_path):
    from evalkit.benchmarks.longbench_v2.data import small_file

    copy = tmp_path / "data.jsonl"
    copy.write_bytes(small_file().read_bytes())
    base = cell(models, tmp_path / "runs", limit=1)
    (record,) = records(replace(base, task=replace(base.task, data=str(copy))))
    assert record["task"] == "longbench_v2_small_direct"


def test_bad_records_and_lengths_stop_before_a_model_is_loaded(models, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "load_model", None)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"_id": "x"}))
    base = cell(models, tmp_path)
    with pytest.raises(InputError, match="record 0 .line 1., _id 'x': field domain is missing"):
        run_cell(replace(base, task=replace(base.task, data=str(data), limit=None)))
    with pytest.raises(InputError, match="task.truncate_at=900: must be at most"):
        run_cell(replace(base, task=replace(base.task, length=910)))
    with pytest.raises(InputError, match="task.length=4096"):
        run_cell(replace(base, task=replace(base.task, length=4096)))


def test_modes_that_do_not_go_with_thinking(models, tmp_path):
    for mode in ("cot", "loglikelihood"):
        with pytest.raises(InputError, match=f"task.mode='{mode}': direct with model.thinking=true"):
            cell(models, tmp_path, mode=mode, thinking=True).validate()
