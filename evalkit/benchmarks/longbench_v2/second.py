"""The second stage of LongBench-v2's chain of thought: the answer that follows from it, asked for without the text.

One implementation, whether the question comes from ``evalkit run`` or through lm-eval's own command line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...attention import Session
from ...generation import Generated
from ...methods.dense import Dense
from ...prompts import PromptRenderer
from .data import Item, Question
from .prompts import COT_ANSWER, fill


def second_stage(question: Item | Question, reasoning: str, renderer: PromptRenderer) -> str:
    """The prompt that asks for the answer after the reasoning, without the text."""
    return renderer.render(fill(COT_ANSWER, question, reasoning), "")


@dataclass(frozen=True)
class Conclusion:
    """What the second stage asked and got.

    Attributes:
        ids: its prompt.
        answer: what was generated after it.
    """

    ids: list[int]
    answer: Generated


def conclude(
    model: PreTrainedModel,
    question: Item | Question,
    reasoning: str,
    renderer: PromptRenderer,
    *,
    encode: Callable[[str], Sequence[int]],
    fits: Callable[[int], None],
    generate: Callable[[Session, Tensor], Generated],
    limit: int,
) -> Conclusion | None:
    """Ask for the answer that follows from the reasoning.

    The prompt holds no document; it is prefilled densely, whatever the method of the first stage, and is in no budget.

    Args:
        model: the model; a session of the first stage may be patching its attention.
        question: what was reasoned about.
        reasoning: the chain of thought, stripped.
        renderer: renders the prompt as that of the first stage was.
        encode: token ids of a rendered prompt.
        fits: raises where so many tokens exceed the model.
        generate: decodes in the dense session, from the last hidden state of the prompt.
        limit: longest answer, tokens.

    Returns:
        None where nothing was reasoned: there is nothing to conclude from, and no answer.
    """
    if not reasoning:
        return None
    ids = list(encode(second_stage(question, reasoning, renderer)))
    fits(len(ids) + limit)
    with Session(model, Dense()) as dense:
        hidden = dense.prefill(torch.tensor(ids), keep_from=len(ids) - 1, reserve=limit)
        answer = generate(dense, hidden)
        dense.account()
    return Conclusion(ids, answer)
