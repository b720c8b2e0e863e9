"""Small tokenizers for tests, trained in a moment, that behave like the ones of the supported models."""

from __future__ import annotations

import functools
import random
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from evalkit.assets import embedded_model_files
from evalkit.benchmarks.ruler.niah import NOISE
from evalkit.corpora import Corpora

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

LLAMA3_TEMPLATE = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# The thinking behaviour of the real template: a trailing assistant message always gets a closed thinking block.
QWEN3_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{{ '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' + message.content.lstrip('\n') + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{% endif %}"
)


def _text() -> list[str]:
    lists = Corpora().words
    rng = random.Random(0)
    words = [*lists.nouns[::7], *lists.adjectives[::5], *lists.verbs[::5]]
    lines = [" ".join(rng.choices(words, k=12)) + ". " + str(rng.randint(0, 10**7)) + "\n" for _ in range(3000)]
    needle = "One of the special magic numbers for word-noun is: 1234567.\n"
    return [*lines, *[NOISE + "\n", needle, "What are all the special words? Document 1:\n"] * 200]


def _train(split: str | None, *, specials: list[str], normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if split is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2500,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_text(), trainer)
    return tokenizer


@functools.cache
def llama3_like() -> PreTrainedTokenizerFast:
    """Adds BOS through a post-processor, and the chat template writes BOS too."""
    specials = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    tokenizer = _train(LLAMA3_SPLIT, specials=specials)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A", pair=None, special_tokens=[("<|begin_of_text|>", 0)]
            ),
        ]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=specials[0], eos_token=specials[1])
    fast.chat_template = LLAMA3_TEMPLATE
    return fast


@functools.cache
def qwen3_like() -> PreTrainedTokenizerFast:
    """No BOS at all, digits one by one, a thinking switch in the template."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    tokenizer = _train(QWEN_SPLIT, specials=specials, normalizer=normalizers.NFC())
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = QWEN3_TEMPLATE
    return fast


@functools.cache
def unsplit() -> PreTrainedTokenizerFast:
    """No pre-tokenizer: tokens run across spaces and line breaks, so units' costs do not add up."""
    return PreTrainedTokenizerFast(tokenizer_object=_train(None, specials=["<eos>"]), eos_token="<eos>")


@functools.cache
def smollm2() -> Any:
    """The embedded model's tokenizer, as transformers reads it from the GGUF file."""
    folder, file = embedded_model_files()
    return AutoTokenizer.from_pretrained(folder, gguf_file=file)
