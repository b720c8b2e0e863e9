"""Generating an answer from a prefilled prompt: greedy or sampled, with or without a thinking block before it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .attention import Session
from .task_settings import Sampling

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Decoding:
    """How a cell generates.

    Attributes:
        sampling: ``None`` for greedy.
        seed: seed of the sampling.
        thinking_tokens: longest thinking block; ``None`` for a model that does not think.
    """

    sampling: Sampling | None = None
    seed: int = 0
    thinking_tokens: int | None = None

    def picker(self, *sample: object) -> Callable[[Tensor], int]:
        """Choose tokens for one generation.

        Args:
            sample: what tells the generation from all others; its random stream depends on nothing else.

        Returns:
            Function from the logits [V] to the token's id.
        """
        if self.sampling is None:
            return lambda logits: int(logits.argmax())
        digest = hashlib.sha256(json.dumps([self.seed, *sample]).encode()).digest()
        # On the host: the stream is then the same on every device.
        stream = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        sampling = self.sampling
        return lambda logits: draw(logits, sampling, float(torch.rand((), generator=stream, dtype=torch.float64)))

    def record(self) -> dict[str, Any]:
        """Settings for a sample's record."""
        if self.sampling is None:
            return {"sampling": "greedy"}
        return {"sampling": asdict(self.sampling), "seed": self.seed}


def draw(logits: Tensor, sampling: Sampling, u: float) -> int:
    """The token at quantile ``u`` in [0, 1) of the warped distribution, the most likely tokens first.

    Args:
        logits: float [V].
        sampling: temperature, top-k, top-p and min-p, applied in this order.
        u: a uniform random number.
    """
    count = min(sampling.top_k, logits.shape[-1]) if sampling.top_k else logits.shape[-1]
    values, ids = logits.topk(count)  # sorted, on the device of the run; little is left to copy where k is small
    p = (values.double().cpu() / sampling.temperature).softmax(-1)
    # The shortest prefix that reaches top_p: a token stays while the mass before it is below.
    keep = (p.cumsum(-1) - p < sampling.top_p) & (p >= sampling.min_p * p[0])
    keep[0] = True
    p = p[keep]
    position = int(torch.searchsorted(p.cumsum(-1) / p.sum(), torch.tensor(u, dtype=torch.float64), right=True))
    return int(ids.cpu()[keep][min(position, len(p) - 1)])


@dataclass(frozen=True)
class Generated:
    """A generated answer.

    Attributes:
        text: the answer, without the thinking block.
        reasoning: the thinking block; ``None`` for a model that does not think.
        tokens: tokens generated in all, the end token not counted.
        ended: ``eos``, or ``limit`` where the answer or the thinking block ran out of tokens.
        closed: the thinking block was closed; ``None`` for a model that does not think.
    """

    text: str
    reasoning: str | None
    tokens: int
    ended: str
    closed: bool | None

    def record(self, decoding: Decoding, limit: int) -> dict[str, Any]:
        """For a sample's record: how it was generated, and how it ended."""
        part: dict[str, Any] = {
            **decoding.record(),
            "max_new_tokens": limit,
            "tokens": self.tokens,
            "ended": self.ended,
        }
        if self.closed is not None:
            budget = {"budget": decoding.thinking_tokens, "closed": self.closed, "text": self.reasoning}
            part["thinking"] = budget
        return part


def generate(
    session: Session,
    hidden: Tensor,
    *,
    next_logits: Callable[[Tensor], Tensor],
    pick: Callable[[Tensor], int],
    limit: int,
    eos: set[int],
    tokenizer: Any,
    thinking_tokens: int | None,
) -> Generated:
    """Decode after a prefill.

    Args:
        session: the session that made ``hidden``.
        hidden: last hidden state of the prompt, [1, D].
        next_logits: checked logits of a hidden state.
        pick: chooses the next token, see :meth:`Decoding.picker`.
        limit: longest answer, tokens.
        eos: ids that end the generation.
        tokenizer: for the text.
        thinking_tokens: the model thinks first, at most this many tokens; they do not count as answer.
    """
    close: list[int] = []
    if thinking_tokens is not None:
        close = list(tokenizer(THINK_CLOSE, add_special_tokens=False).input_ids)
    output: list[int] = []
    start = 0 if thinking_tokens is None else None  # where the answer starts; None while the model thinks
    ended = "limit"
    while True:
        token = pick(next_logits(hidden))
        if token in eos:
            ended = "eos"
            break
        output.append(token)
        if start is None and output[-len(close) :] == close:
            start = len(output)
        allowed = limit if start is not None else (thinking_tokens or 0)
        if len(output) - (start or 0) >= allowed:
            break
        hidden = session.decode(token)

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    if thinking_tokens is None:
        return Generated(text(output), None, len(output), ended, None)
    closed = start is not None
    thought = output[: start - len(close)] if start is not None else output
    reasoning = text(thought).strip().removeprefix(THINK_OPEN).strip()
    answer = text(output[start:]).strip() if start is not None else ""
    return Generated(answer, reasoning, len(output), ended, closed)
