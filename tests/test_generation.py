"""Drawing tokens against transformers' own warpers, and the thinking block's bookkeeping on scripted models."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from small_tokenizers import qwen3_like
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from evalkit.config import GenerationConfig, LongBenchV2Config, ModelConfig, Recommended, RulerConfig
from evalkit.errors import InputError
from evalkit.generation import Decoding, draw, generate
from evalkit.task_settings import Sampling

PLAIN, THINKING = Sampling(0.7, 20, 0.8, 0.0), Sampling(0.6, 20, 0.95, 0.0)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), PLAIN, THINKING, Sampling(1.5, 0, 0.9, 0.05), Sampling(0.3, 5, 1.0, 0.2), Sampling(2.0, 900)],
)
def test_draw_follows_the_distribution_of_transformers(sampling):
    logits = torch.randn(300, generator=torch.Generator().manual_seed(3)) * 3
    warpers = [TemperatureLogitsWarper(sampling.temperature)]
    warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    warpers += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    expected = LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.long), logits[None])[0].double().softmax(-1)
    steps = 4000
    found = torch.zeros(300, dtype=torch.float64)
    for step in range(steps):
        found[draw(logits, sampling, (step + 0.5) / steps)] += 1 / steps
    assert (found - expected).abs().max() <= 1.5 / steps
    assert set(found.nonzero().flatten().tolist()) <= set(expected.nonzero().flatten().tolist())


def test_extremes_of_the_quantile():
    logits = torch.tensor([0.0, 5.0, 1.0])
    assert draw(logits, Sampling(), 0.0) == 1
    assert draw(logits, Sampling(), 1.0 - 1e-16) == 0
    assert draw(logits, Sampling(top_k=1), 0.999) == 1
    assert draw(logits, Sampling(top_p=1e-9), 0.999) == 1


def test_a_picker_depends_on_the_seed_and_its_sample_only():
    logits = torch.zeros(1000)

    def stream(seed, *sample):
        pick = Decoding(Sampling(), seed).picker(*sample)
        return [pick(logits) for _ in range(8)]

    first = stream(1, "vt", 4096, 0)
    Decoding(Sampling(), 1).picker("vt", 4096, 5)(logits)
    assert stream(1, "vt", 4096, 0) == first
    others = [stream(2, "vt", 4096, 0), stream(1, "vt", 4096, 1), stream(1, "cwe", 4096, 0), stream(1, "vt", 8192, 0)]
    assert all(other != first for other in others)
    assert Decoding().picker("vt")(torch.tensor([1.0, 3.0, 2.0])) == 1


class Script:
    """A session and its logits that say given tokens, then the end token."""

    END = 9999

    def __init__(self, ids):
        self.ids, self.position = [*ids, self.END], 0

    def decode(self, token):
        assert token == self.ids[self.position]
        self.position += 1
        return torch.zeros(1, 1)

    def logits(self, hidden):
        return torch.nn.functional.one_hot(torch.tensor(self.ids[self.position]), 10000).float()


def run(text, *, limit, thinking=None):
    tokenizer = qwen3_like()
    script = Script(tokenizer(text, add_special_tokens=False).input_ids)
    made = generate(
        script,
        torch.zeros(1, 1),
        next_logits=script.logits,
        pick=Decoding().picker(),
        limit=limit,
        eos={Script.END},
        tokenizer=tokenizer,
        thinking_tokens=thinking,
    )
    return made, script


def test_plain_answers_end_at_the_end_token_or_the_limit():
    made, _ = run("one two three", limit=50)
    assert (made.text, made.ended, made.closed, made.reasoning) == ("one two three", "eos", None, None)
    length = made.tokens
    made, script = run("one two three", limit=length)
    assert (made.text, made.ended, made.tokens) == ("one two three", "limit", length)
    assert script.position == length - 1  # the last token is not fed: nothing follows it
    assert run("one two three", limit=1)[0].tokens == 1
    assert run("", limit=5)[0].text == ""


def test_the_thinking_block_is_stripped_and_does_not_count_as_answer():
    text = "<think>\nperhaps (B)? The correct answer is (B)\n</think>\n\nThe correct answer is (C)"
    made, _ = run(text, limit=30, thinking=60)
    assert made.text == "The correct answer is (C)" and made.closed and made.ended == "eos"
    assert made.reasoning == "perhaps (B)? The correct answer is (B)"
    answer = len(qwen3_like()("\n\nThe correct answer is (C)", add_special_tokens=False).input_ids)
    made, _ = run(text, limit=answer - 3, thinking=60)
    assert made.ended == "limit" and made.text.startswith("The correct") and not made.text.endswith("(C)")


def test_a_block_that_fills_its_budget_and_one_that_exceeds_it():
    thought = "<think>\nlong thought\n</think>"
    size = len(qwen3_like()(thought, add_special_tokens=False).input_ids)
    made, _ = run(thought + "yes", limit=5, thinking=size)
    assert made.closed and made.text == "yes"
    made, _ = run(thought + "yes", limit=5, thinking=size - 1)
    assert (made.closed, made.text, made.ended, made.tokens) == (False, "", "limit", size - 1)
    assert made.reasoning == "long thought"
    made, _ = run("<think>\nstopped", limit=5, thinking=50)
    assert (made.closed, made.text, made.ended, made.reasoning) == (False, "", "eos", "stopped")


def test_records_say_how_it_was_generated():
    made, _ = run("<think>a</think>b", limit=5, thinking=9)
    record = made.record(Decoding(THINKING, 3, 9), 5)
    assert record["sampling"] == dataclasses.asdict(THINKING) and record["seed"] == 3
    assert record["thinking"] == {"budget": 9, "closed": True, "text": "a"} and record["max_new_tokens"] == 5
    plain = run("b", limit=5)[0].record(Decoding(), 5)
    assert plain["sampling"] == "greedy" and "thinking" not in plain and "seed" not in plain


def test_recommended_sampling_follows_the_models_thinking():
    model = ModelConfig("m", 4096, path="a/b", recommended=Recommended(PLAIN, THINKING))
    sampled = GenerationConfig(sampling="recommended")
    assert sampled.resolve(model) == PLAIN
    assert sampled.resolve(dataclasses.replace(model, thinking=True)) == THINKING
    assert GenerationConfig().resolve(model) is None
    bare = dataclasses.replace(model, recommended=Recommended(thinking=THINKING))
    with pytest.raises(InputError, match="task.generation.sampling='recommended'.*model.recommended.plain"):
        sampled.check(bare)


def test_a_model_that_does_not_think_is_told_what_to_run_instead():
    """Its settings recommend a sampling, and none for thinking."""
    model = ModelConfig("m", 4096, path="a/b", thinking=True, recommended=Recommended(PLAIN))
    with pytest.raises(InputError, match="has no thinking mode.*longbench-v2-cot.*sweep=paper_table2_llama") as stop:
        GenerationConfig(sampling="recommended", thinking_tokens=9).check(model)
    assert stop.value.field == "model.thinking"


@pytest.mark.parametrize(
    ("task", "field", "most"),
    [
        (RulerConfig(tasks=("vt",), length=1024), "max_new_tokens", 1023),
        (RulerConfig(tasks=("vt", "qa_1"), length=1024), "thinking_tokens", 1024 - 32 - 1),
        (LongBenchV2Config(data="small", length=1024, truncate_at=300), "max_new_tokens", 1023),
        (LongBenchV2Config(data="small", length=1024, truncate_at=300), "thinking_tokens", 1024 - 128 - 1),
    ],
)
def test_an_output_that_fills_the_length_is_refused_before_anything_runs(task, field, most):
    thinks = field == "thinking_tokens"
    model = ModelConfig("m", 4096, path="a/b", thinking=thinks)
    dataclasses.replace(task, generation=GenerationConfig(**{field: most})).check(model)
    for tokens in (most + 1, 200000):
        with pytest.raises(InputError, match=f"must be at most {most}: task.length=1024 also holds the") as stop:
            dataclasses.replace(task, generation=GenerationConfig(**{field: tokens})).check(model)
        assert (stop.value.field, stop.value.value) == (f"task.generation.{field}", tokens)


def test_a_tasks_own_output_that_fills_the_length_is_named():
    task = LongBenchV2Config(data="small", mode="cot", length=1024, truncate_at=300)
    with pytest.raises(InputError, match="max_new_tokens=None: must be at most 1023.*the task's own number is 1024"):
        task.check(ModelConfig("m", 4096, path="a/b"))


def test_thinking_needs_a_budget_and_a_budget_needs_thinking():
    model = ModelConfig("m", 4096, path="a/b", thinking=True)
    with pytest.raises(InputError, match="thinking_tokens=None: must be given"):
        GenerationConfig().check(model)
    GenerationConfig(thinking_tokens=10).check(model)
    for thinking in (False, None):
        with pytest.raises(InputError, match="thinking_tokens=10: null"):
            GenerationConfig(thinking_tokens=10).check(dataclasses.replace(model, thinking=thinking))


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (Sampling(temperature=0), "temperature"),
        (Sampling(temperature=float("nan")), "temperature"),
        (Sampling(top_k=-1), "top_k"),
        (Sampling(top_p=0), "top_p"),
        (Sampling(top_p=1.1), "top_p"),
        (Sampling(min_p=1.0), "min_p"),
    ],
)
def test_sampling_refuses(sampling, field):
    with pytest.raises(InputError, match=f"model.recommended.plain.{field}="):
        ModelConfig("m", 4096, path="a/b", recommended=Recommended(plain=sampling)).validate()
