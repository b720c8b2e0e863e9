"""Answering a LongBench-v2 question: one generation, a chain of two, or the choices' probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...attention import Session
from ...errors import IntegrityError
from ...generation import Decoding, Generated, generate
from ...prompts import PromptRenderer
from ..perplexity import ids_sha256
from .data import LETTERS, Item
from .prompts import extract_answer
from .samples import Prompt, PromptSet
from .second import conclude


@dataclass(frozen=True)
class Answerer:
    """Answers the questions of one cell.

    Attributes:
        session: entered session of the cell's method.
        renderer: the model's prompt renderer.
        prompts: the cell's questions.
        decoding: how answers are generated.
        eos: ids that end a generation.
        next_logits: checked logits of a hidden state.
        fits: raises where so many tokens exceed the model, with the sample's name.
        guard: called with each question's name and token ids before it is run.
    """

    session: Session
    renderer: PromptRenderer
    prompts: PromptSet
    decoding: Decoding
    eos: set[int]
    next_logits: Callable[[Tensor], Tensor]
    fits: Callable[[int, str], None]
    guard: Callable[[str, Sequence[int]], None] = lambda name, ids: None

    def __call__(self, doc: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one question.

        Returns:
            The parts of its record that say what was asked, what came out and what it scores.
        """
        position = int(doc["position"])
        item, prompt = self.prompts.items[position], self.prompts[position]
        name = f"{self.prompts.task}[{item.index}] {item.id}"
        ids = self.renderer.encode(prompt.text)
        if len(ids) != prompt.tokens:
            raise IntegrityError(f"{name}: prompt has {len(ids)} tokens, prepared with {prompt.tokens}")
        leading = self.renderer.leading_bos(ids)
        if leading != self.renderer.expected_leading_bos:
            raise IntegrityError(f"{name}: {leading} leading BOS, expected {self.renderer.expected_leading_bos}")
        limit = self.prompts.limit
        reserve = limit + (self.decoding.thinking_tokens or 0)
        self.fits(len(ids) + reserve, name)
        self.guard(name, ids)
        hidden = self.session.prefill(torch.tensor(ids), keep_from=len(ids) - 1, reserve=reserve)
        common = {
            "references": [item.answer],
            "prompt": {
                "sha256": ids_sha256(ids),
                "tokens": len(ids),
                "leading_bos": leading,
                "truncated": prompt.truncated,
                "message_tokens": prompt.message_tokens,
                "truncate_at": self.prompts.truncate_at,
                "answer_prefix": bool(prompt.answer_prefix),
                "thinking": self.renderer.thinking,
            },
        }
        if self.prompts.mode == "loglikelihood":
            return {**common, **self._choices(item, prompt, hidden)}
        first = self._generate(self.session, hidden, item, 1, limit)
        generation = first.record(self.decoding, limit)
        if self.prompts.mode == "direct":
            return {**common, **_judged(item, first.text), "generation": generation}
        return {**common, **self._second(item, first.text.strip(), name), "generation": generation}

    def _generate(self, session: Session, hidden: Tensor, item: Item, stage: int, limit: int) -> Generated:
        return generate(
            session,
            hidden,
            next_logits=self.next_logits,
            pick=self.decoding.picker(self.prompts.task, item.id, stage),
            limit=limit,
            eos=self.eos,
            tokenizer=self.renderer.tokenizer,
            thinking_tokens=self.decoding.thinking_tokens,
        )

    def _second(self, item: Item, reasoning: str, name: str) -> dict[str, Any]:
        """Ask for the answer that follows from the reasoning."""
        limit = self.prompts.answer_limit
        found = conclude(
            self.session.model,
            item,
            reasoning,
            self.renderer,
            encode=self.renderer.encode,
            fits=lambda tokens: self.fits(tokens, f"{name}, second stage"),
            generate=lambda dense, hidden: self._generate(dense, hidden, item, 2, limit),
            limit=limit,
        )
        if found is None:
            return {**_judged(item, ""), "reasoning": ""}
        stage = {"prompt": {"sha256": ids_sha256(found.ids), "tokens": len(found.ids)}}
        return {
            **_judged(item, found.answer.text),
            "reasoning": reasoning,
            "second_stage": {**stage, "generation": found.answer.record(self.decoding, limit)},
        }

    def _choices(self, item: Item, prompt: Prompt, hidden: Tensor) -> dict[str, Any]:
        log_p = self.next_logits(hidden).double().log_softmax(-1).cpu()
        tokens = self._letters(prompt.text[-256:])
        values = {letter: float(log_p[token]) for letter, token in tokens.items()}
        prediction = max(LETTERS, key=lambda letter: values[letter])
        likely = int(log_p.argmax())
        return {
            "metrics": {"score": float(prediction == item.answer), "first_token": math.exp(values[item.answer])},
            "output": prediction,
            "item": describe(item, prediction),
            "choices": {letter: [value, tokens[letter] == likely] for letter, value in values.items()},
        }

    def _letters(self, tail: str) -> dict[str, int]:
        """Token id of each choice's letter behind the end of a prompt."""
        known = self.renderer.encode(tail)
        found = {}
        for letter in LETTERS:
            ids = self.renderer.encode(tail + letter)
            if ids[: len(known)] != known or len(ids) != len(known) + 1:
                raise IntegrityError(f"the tokenizer does not keep the choice {letter} apart from {tail[-24:]!r}")
            found[letter] = ids[-1]
        return found


def _judged(item: Item, text: str) -> dict[str, Any]:
    prediction = extract_answer(text.strip())
    return {
        "metrics": {"score": float(prediction == item.answer), "unparsed": float(prediction is None)},
        "output": text,
        "item": {**describe(item, prediction), "empty": not text.strip()},
    }


def describe(item: Item, prediction: str | None) -> dict[str, Any]:
    """What a record says of its question."""
    return {
        "id": item.id,
        "domain": item.domain,
        "sub_domain": item.sub_domain,
        "difficulty": item.difficulty,
        "length": item.length,
        "answer": item.answer,
        "prediction": prediction,
    }
