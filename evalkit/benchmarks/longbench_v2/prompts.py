"""LongBench-v2's messages and what is done with answers: templates, middle truncation, extraction."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .data import Item, Question

_QUESTION = """What is the correct answer to this question: $Q$
Choices:
(A) $C_A$
(B) $C_B$
(C) $C_C$
(D) $C_D$"""
_FORMAT = 'Format your response as follows: "The correct answer is (insert answer here)".'

# The benchmark's own wording, to the letter (0shot, 0shot_cot and 0shot_cot_ans).
DIRECT = (
    "Please read the following text and answer the question below.\n\n<text>\n$DOC$\n</text>\n\n"
    f"{_QUESTION}\n\n{_FORMAT}"
)
COT = (
    "Please read the following text and answer the questions below.\n\n<text>\n$DOC$\n</text>\n\n"
    f"{_QUESTION}\n\nLet’s think step by step:"
)
COT_ANSWER = (
    "Please read the following text and answer the questions below.\n\nThe text is too long and omitted here.\n\n"
    f"{_QUESTION}\n\nLet’s think step by step: $COT$\n\n"
    f"Based on the above, what is the single, most likely answer choice? {_FORMAT}"
)
TEMPLATES = {"direct": DIRECT, "cot": COT, "loglikelihood": DIRECT}

ANSWER_PREFIX = "The correct answer is ("
"""What a choice's letter follows in the log-likelihood mode."""

ANSWER_TOKENS = 128
REASONING_TOKENS = 1024

_SLOT = re.compile(r"\$(DOC|Q|C_[A-D]|COT)\$")


def fill(template: str, item: Item | Question, reasoning: str = "") -> str:
    """Fill a template. Slots that a text itself contains stay as they are.

    Args:
        template: one of this module's templates.
        item: the question; its texts are stripped.
        reasoning: the chain of thought, for :data:`COT_ANSWER`.
    """
    values = {"DOC": item.context, "Q": item.question, "COT": reasoning}
    values |= {f"C_{letter}": choice for letter, choice in zip("ABCD", item.choices, strict=True)}
    return _SLOT.sub(lambda slot: values[slot[1]].strip(), template)


@dataclass(frozen=True)
class Cut:
    """A message that fits.

    Attributes:
        text: the message.
        tokens: tokens before anything was cut.
        truncated: its middle was cut out.
    """

    text: str
    tokens: int
    truncated: bool


def cut_middle(message: str, limit: int, tokenizer: Any) -> Cut:
    """Cut the middle out of a message longer than ``limit`` tokens, as the benchmark does: the first and the last half
    of the limit stay, as text again. Instruction and question lie at the ends and survive. Of an odd limit the end gets
    the token more.

    Args:
        message: the user's message, without chat template.
        limit: tokens, special ones not counted.
        tokenizer: the model's.
    """
    ids = tokenizer(message, add_special_tokens=False, verbose=False).input_ids
    if len(ids) <= limit:
        return Cut(message, len(ids), False)
    # The benchmark's own slices: -limit // 2 rounds away from zero, so the end takes the odd token.
    return Cut(tokenizer.decode(ids[: limit // 2] + ids[-limit // 2 :], skip_special_tokens=True), len(ids), True)


_ANSWERS = (re.compile(r"The correct answer is \(([A-D])\)"), re.compile(r"The correct answer is ([A-D])"))


def extract_answer(response: str) -> str | None:
    """The chosen letter, or None: the benchmark's rule. Asterisks are dropped, a letter in brackets goes first."""
    plain = response.replace("*", "")
    found = next((match for pattern in _ANSWERS if (match := pattern.search(plain))), None)
    return found[1] if found else None
