import copy

import pytest
from small_tokenizers import llama3_like, qwen3_like, smollm2, unsplit

from evalkit.errors import InputError, IntegrityError
from evalkit.prompts import PromptRenderer

PREFIX = "Answer: The word is"


def test_smollm2_chat_is_the_template_with_the_answer_begun():
    renderer = PromptRenderer(smollm2(), chat=True)
    assert renderer.render("What?", PREFIX) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n" + PREFIX
    )
    # Its BOS token is the one that opens every turn; none is added by the tokenizer.
    assert renderer.expected_leading_bos == 1
    assert renderer.leading_bos(renderer.encode(renderer.render("What?", PREFIX))) == 1


def test_smollm2_raw_has_no_bos():
    renderer = PromptRenderer(smollm2(), chat=False)
    assert renderer.render("What?", PREFIX) == "What? " + PREFIX
    assert renderer.render("What?", "") == "What?"
    assert renderer.expected_leading_bos == 0


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("prefix", [PREFIX, ""])
def test_llama3_has_exactly_one_bos(chat, prefix):
    tokenizer = llama3_like()
    renderer = PromptRenderer(tokenizer, chat=chat)
    text = renderer.render("What?", prefix)
    ids = renderer.encode(text)
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert renderer.expected_leading_bos == 1
    # What transformers itself does for this model: template ids, or the tokenizer's own special tokens.
    if chat and not prefix:
        expected = tokenizer.apply_chat_template([{"role": "user", "content": "What?"}], add_generation_prompt=True)
        assert ids == list(expected["input_ids"] if hasattr(expected, "keys") else expected)
    if not chat:
        assert ids == tokenizer(f"What? {prefix}".rstrip()).input_ids
    # The fault this class is for: tokenising the rendered text with special tokens doubles the BOS.
    assert tokenizer(text).input_ids[:2] == [tokenizer.bos_token_id] * 2


def test_llama3_template_without_bos_still_gets_one():
    tokenizer = copy.deepcopy(llama3_like())
    tokenizer.chat_template = tokenizer.chat_template.replace("bos_token + content", "content")
    renderer = PromptRenderer(tokenizer, chat=True)
    assert renderer.encode(renderer.render("What?", PREFIX)).count(tokenizer.bos_token_id) == 1


def test_trailing_space_of_a_prefix_survives_or_is_trimmed_by_the_template():
    assert PromptRenderer(qwen3_like(), chat=True).render("What?", "they are: ").endswith("they are: ")
    assert PromptRenderer(llama3_like(), chat=True).render("What?", "they are: ").endswith("they are:")
    assert PromptRenderer(llama3_like(), chat=False).render("What?", "they are: ").endswith("What? they are: ")


def test_qwen3_thinking():
    tokenizer = qwen3_like()
    start = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    closed = start + "<think>\n\n</think>\n\n"
    assert PromptRenderer(tokenizer, chat=True, thinking=False).render("What?", PREFIX) == closed + PREFIX
    assert PromptRenderer(tokenizer, chat=True, thinking=False).render("What?", "") == closed
    # A prefix closes the thinking block, so a thinking run has none.
    thinker = PromptRenderer(tokenizer, chat=True, thinking=True)
    assert thinker.render("What?", PREFIX) == start and not thinker.keeps_prefix
    assert PromptRenderer(tokenizer, chat=True).render("What?", "") == start
    assert thinker.expected_leading_bos == 0


def test_thinking_needs_a_model_that_can():
    for tokenizer, chat in ((llama3_like(), True), (qwen3_like(), False)):
        with pytest.raises(InputError, match=r"model\.thinking=True"):
            PromptRenderer(tokenizer, chat=chat, thinking=True)


def test_chat_needs_a_template():
    with pytest.raises(InputError, match=r"model\.chat=True.*no chat template"):
        PromptRenderer(unsplit(), chat=True)


def test_a_template_that_drops_text_is_an_error():
    tokenizer = copy.deepcopy(llama3_like())
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'][:5] }}{% endfor %}"
    with pytest.raises(IntegrityError, match="cannot continue 'an answer prefix'"):
        PromptRenderer(tokenizer, chat=True).render("a longer message", "an answer prefix")
    with pytest.raises(IntegrityError, match="changed the user's message"):
        PromptRenderer(tokenizer, chat=True).render("a longer message", "")


def test_fingerprint_sees_everything_that_decides_the_ids():
    tokenizer = qwen3_like()
    base = PromptRenderer(tokenizer, chat=True).fingerprint
    assert base == PromptRenderer(copy.deepcopy(tokenizer), chat=True).fingerprint
    # State left by an earlier call is not part of it.
    used = copy.deepcopy(tokenizer)
    renderer = PromptRenderer(used, chat=True)
    used("some text", truncation=True, max_length=2, padding="max_length")
    assert base == renderer.fingerprint
    others = [
        PromptRenderer(tokenizer, chat=False),
        PromptRenderer(tokenizer, chat=True, thinking=False),
        PromptRenderer(llama3_like(), chat=True),
    ]
    changed = copy.deepcopy(tokenizer)
    changed.chat_template += " "
    others.append(PromptRenderer(changed, chat=True))
    grown = copy.deepcopy(tokenizer)
    grown.add_tokens(["zyzzyva"])
    others.append(PromptRenderer(grown, chat=True))
    assert len({base, *(other.fingerprint for other in others)}) == 6


def test_batch_counts_ignore_earlier_truncation_and_padding():
    tokenizer = copy.deepcopy(qwen3_like())
    renderer = PromptRenderer(tokenizer, chat=True)
    texts = ["one two three four", "five"]
    tokenizer(texts, truncation=True, max_length=2, padding="max_length")
    assert renderer.count_batch(texts) == [renderer.count(text) for text in texts]
