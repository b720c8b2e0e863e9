"""LongBench-v2's messages to the letter, the middle cut, the answer's extraction, and the prompts' cache."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from small_tokenizers import llama3_like, qwen3_like

from evalkit.benchmarks.longbench_v2 import load, read_items
from evalkit.benchmarks.longbench_v2 import samples as samples_module
from evalkit.benchmarks.longbench_v2.data import Item, small_file
from evalkit.benchmarks.longbench_v2.prompts import COT, COT_ANSWER, DIRECT, cut_middle, extract_answer, fill
from evalkit.benchmarks.longbench_v2.second import second_stage
from evalkit.config import GenerationConfig, LongBenchV2Config
from evalkit.errors import InputError, StoreError
from evalkit.prompts import PromptRenderer

ITEM = Item(3, "id", "d", "s", "easy", "short", " Who? ", "one", "two ", "three", "four", "B", "\nThe text.\n")

QUESTION = """What is the correct answer to this question: Who?
Choices:
(A) one
(B) two
(C) three
(D) four"""


def test_messages_to_the_letter():
    assert fill(DIRECT, ITEM) == (
        "Please read the following text and answer the question below.\n\n<text>\nThe text.\n</text>\n\n"
        + QUESTION
        + '\n\nFormat your response as follows: "The correct answer is (insert answer here)".'
    )
    assert fill(COT, ITEM) == (
        "Please read the following text and answer the questions below.\n\n<text>\nThe text.\n</text>\n\n"
        + QUESTION
        + "\n\nLet\u2019s think step by step:"
    )
    assert fill(COT_ANSWER, ITEM, " Because. ") == (
        "Please read the following text and answer the questions below.\n\nThe text is too long and omitted here.\n\n"
        + QUESTION
        + "\n\nLet\u2019s think step by step: Because.\n\nBased on the above, what is the single, most likely answer "
        'choice? Format your response as follows: "The correct answer is (insert answer here)".'
    )


def test_slots_inside_texts_stay():
    item = replace(ITEM, context="costs $Q$ and $C_A$ and \\1", question="Is $DOC$ a slot?")
    text = fill(DIRECT, item)
    assert "<text>\ncosts $Q$ and $C_A$ and \\1\n</text>" in text and "question: Is $DOC$ a slot?\n" in text
    assert "by step: $DOC$ $COT$\n" in fill(COT_ANSWER, ITEM, "$DOC$ $COT$")


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("The correct answer is (C).", "C"),
        ("**The correct answer is (B)**", "B"),
        ("The correct answer is **(D)** since", "D"),
        ("The correct answer is A", "A"),
        ("The correct answer is C, but no: The correct answer is (A)", "A"),
        ("The correct answer is (B). The correct answer is (C).", "B"),
        ("Perhaps.\n\nThe correct answer is (A) one", "A"),
        ("the correct answer is (A)", None),
        ("The correct answer is (E)", None),
        ("The correct answer is: (A)", None),
        ("The correct answer is (insert answer here)", None),
        ("(A)", None),
        ("", None),
    ],
)
def test_extraction(response, answer):
    assert extract_answer(response) == answer


@pytest.mark.parametrize("make", [qwen3_like, llama3_like])
def test_the_middle_is_cut_and_both_ends_stay(make):
    tokenizer = make()
    message = fill(DIRECT, replace(ITEM, context=" ".join(f"line {i} of the text." for i in range(400))))
    ids = tokenizer(message, add_special_tokens=False).input_ids
    for limit, end in ((300, 150), (301, 151)):  # of an odd limit the official code leaves the end one token more
        cut = cut_middle(message, limit, tokenizer)
        assert cut.truncated and cut.tokens == len(ids)
        assert cut.text == tokenizer.decode(ids[:150] + ids[-end:])
        assert cut.text.startswith("Please read") and cut.text.endswith(message[-200:])
        again = len(tokenizer(cut.text, add_special_tokens=False).input_ids)
        assert abs(again - limit) <= 2
    whole = cut_middle(message, len(ids), tokenizer)
    assert (whole.text, whole.tokens, whole.truncated) == (message, len(ids), False)
    assert cut_middle(message, len(ids) - 1, tokenizer).truncated


# ---------------------------------------------------------------------------------------------------- prepared prompts
SETTINGS = LongBenchV2Config(data="small", mode="direct", length=3000, truncate_at=2000, limit=6)


@pytest.fixture(scope="module")
def renderer():
    return PromptRenderer(qwen3_like(), chat=True, thinking=False)


def test_prompts_fit_and_say_what_was_cut(tmp_path, renderer):
    made = load(SETTINGS, renderer, tmp_path)
    assert made.task == "longbench_v2_small_direct" and made.kind == "self-made" and made.total == 36
    contexts = {item.id: item for item in read_items("small")}
    for item, prompt in zip(made.items, made, strict=True):
        message = fill(DIRECT, contexts[item.id])
        tokens = len(renderer.tokenizer(message, add_special_tokens=False).input_ids)
        assert prompt.message_tokens == tokens and prompt.truncated == (tokens > 2000)
        assert prompt.tokens == renderer.count(prompt.text) <= 2030
        assert prompt.text.startswith("<|im_start|>user\nPlease read") and prompt.text.endswith("</think>\n\n")
        assert item.context == "" and item.sha256 == contexts[item.id].sha256
    assert {prompt.truncated for prompt in made} == {True, False}


def test_a_larger_limit_adds_to_a_smaller_one(tmp_path, renderer):
    few, more = (load(replace(SETTINGS, limit=n), renderer, tmp_path) for n in (4, 9))
    assert {item.id for item in few.items} < {item.id for item in more.items}
    assert [item.index for item in more.items] == sorted(item.index for item in more.items)
    other = load(replace(SETTINGS, limit=9, seed=1), renderer, tmp_path)
    assert {item.id for item in other.items} != {item.id for item in more.items}
    with pytest.raises(InputError, match="task.limit=37: at most 36"):
        load(replace(SETTINGS, limit=37), renderer, tmp_path)


def test_prompts_are_made_once_and_damage_is_repaired(tmp_path, renderer, monkeypatch):
    first = load(SETTINGS, renderer, tmp_path)
    texts = [prompt.text for prompt in first]
    monkeypatch.setattr(samples_module, "make", None)
    assert [prompt.text for prompt in load(SETTINGS, renderer, tmp_path)] == texts
    monkeypatch.undo()
    files = sorted((tmp_path / "longbench_v2").iterdir())
    assert len(files) == 6
    files[0].write_text("{")
    content = json.loads(files[1].read_text())
    content["prompt"]["text"] += " changed"
    files[1].write_text(json.dumps(content))
    with pytest.raises(StoreError, match="changed since the cell began"):
        list(first)
    assert [prompt.text for prompt in load(SETTINGS, renderer, tmp_path)] == texts


def test_the_checksum_follows_everything(tmp_path, renderer):
    data = tmp_path / "data.jsonl"
    rows = [json.loads(line) for line in small_file().open()][:3]
    for number, row in enumerate(rows):
        row["_id"] = f"own-{number}"

    def checksum(**changes):
        data.write_text("\n".join(json.dumps(row) for row in rows))
        config = replace(SETTINGS, data=str(data), length=4000, limit=None, **changes)
        return load(config, renderer, tmp_path).checksum

    sums = [checksum(), checksum(truncate_at=1900), checksum(mode="cot")]
    rows[2]["answer"] = "ABCD"[("ABCD".index(rows[2]["answer"]) + 1) % 4]
    sums.append(checksum())
    rows[0]["choice_A"] += "!"
    sums.append(checksum())
    assert len(set(sums)) == 5
    assert load(replace(SETTINGS, data=str(data), limit=None), renderer, tmp_path).task == "longbench_v2_direct"


def test_a_prompt_that_does_not_fit_names_the_limit_that_would(tmp_path, renderer):
    tight = replace(SETTINGS, length=2100)
    with pytest.raises(InputError, match=r"task.truncate_at=2000: must be at most (\d+)") as caught:
        load(tight, renderer, tmp_path)
    fits = int(caught.value.allowed.split("at most ")[1].split(":")[0])
    assert max(prompt.tokens for prompt in load(replace(tight, truncate_at=fits - 4), renderer, tmp_path)) + 128 <= 2100
    # Where no cut of the message would do, it is the length that is named.
    full = replace(SETTINGS, length=2100, generation=GenerationConfig(max_new_tokens=2050))
    with pytest.raises(InputError, match=r"task.length=2100: must be at least (\d+) even at .*=64") as caught:
        load(full, renderer, tmp_path)
    least = int(re.search(r"at least (\d+)", str(caught.value))[1])
    assert load(replace(full, length=least, truncate_at=64 - 4), renderer, tmp_path)
    thinking = replace(SETTINGS, generation=GenerationConfig(thinking_tokens=900))
    with pytest.raises(InputError, match="task.truncate_at"):
        load(thinking, renderer, tmp_path)


def test_a_template_that_may_think_must_be_told(tmp_path):
    with pytest.raises(InputError, match="model.thinking=None: true or false"):
        load(SETTINGS, PromptRenderer(qwen3_like(), chat=True), tmp_path)


def test_modes_end_their_prompts_differently(tmp_path, renderer):
    ends = {}
    for mode in ("direct", "cot", "loglikelihood"):
        ends[mode] = load(replace(SETTINGS, mode=mode, length=4000, limit=1), renderer, tmp_path)[0]
    assert ends["loglikelihood"].text.endswith("</think>\n\nThe correct answer is (")
    assert "Format your response" in ends["loglikelihood"].text and "Format your response" not in ends["cot"].text
    thinker = PromptRenderer(qwen3_like(), chat=True, thinking=True)
    assert load(replace(SETTINGS, limit=1), thinker, tmp_path)[0].text.endswith("<|im_start|>assistant\n")


def test_the_second_stage_has_the_reasoning_and_no_text(renderer):
    text = second_stage(ITEM, "Because.", renderer)
    assert "by step: Because.\n\nBased on the above" in text and "The text." not in text
