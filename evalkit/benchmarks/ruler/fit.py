"""Fit a prompt to a length: as many units of context as the length holds, and not one more.

The length covers everything: chat template, instruction, one-shot example, context, question, answer prefix and the
tokens reserved for the output.

Counting a 128K prompt takes a third of a second, and a search counts it many times. Tokenizers with a pre-tokenizer
split text at the space or line break between two units before they look for tokens, so there the count of a prompt is
the count of a short version of it plus the costs of the added units, each counted once. That is done only for
such tokenizers, and :mod:`.samples` still compares whole prompts of each batch and falls back to counting everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...corpora import Corpora
from ...errors import InputError
from ...prompts import PromptRenderer


@dataclass
class Draft:
    """One sample whose size is still open.

    Attributes:
        prefix: answer prefix, without a leading space.
        references: expected strings.
        minimum: smallest number of units that makes a valid sample.
        user: number of units -> the user's message.
        added: number of units -> tokens beyond the anchor, if costs add up.
        anchor: a short message that is counted as a whole; the message with ``minimum`` units by default.
        maximum: largest number of units there are, ``None`` for no limit.
        limit_reason: what ends at ``maximum``, for the error message.
    """

    prefix: str
    references: tuple[str, ...]
    minimum: int
    user: Callable[[int], str]
    added: Callable[[int], int]
    anchor: str | None = None
    maximum: int | None = None
    limit_reason: str = ""


@dataclass
class Context:
    """What a task's sample maker is given: the tokenizer, the corpora and the sample's coordinates."""

    task: str
    length: int
    seed: int
    renderer: PromptRenderer
    corpora: Corpora
    _edges: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def costs(self, texts: Sequence[str], *, before: str, after: str) -> NDArray[np.int64]:
        """Return the tokens that each text adds between its neighbours ``before`` and ``after``."""
        alone = self.renderer.count(before + after)
        counts = self.renderer.count_batch([before + text + after for text in texts])
        return np.asarray(counts, dtype=np.int64) - alone

    def edge(self, text: str, *, before: str, after: str) -> int:
        """Return the token count of ``before + text + after``, remembered: for the units at a context's ends."""
        key = (before, text, after)
        if key not in self._edges:
            if len(self._edges) > 50_000:
                self._edges.clear()
            self._edges[key] = self.renderer.count(before + text + after)
        return self._edges[key]


def smallest(draft: Draft, context: Context, *, exact: bool) -> int:
    """Return the tokens of a draft's smallest prompt; see :func:`fit`."""
    renderer = context.renderer
    if exact or draft.anchor is None:
        return renderer.count(renderer.render(draft.user(draft.minimum), draft.prefix))
    return renderer.count(renderer.render(draft.anchor, draft.prefix)) + draft.added(draft.minimum)


class TooShort(InputError):
    """A length that does not hold the smallest version of a sample."""


def fit(draft: Draft, context: Context, reserve: int, *, exact: bool) -> tuple[str, int, int]:
    """Return the largest prompt that fits.

    Args:
        draft: the sample.
        context: tokenizer and target length.
        reserve: output tokens that the length must also hold.
        exact: count whole prompts instead of adding units' costs.

    Returns:
        ``(text, units, tokens)``: the rendered prompt, its number of units, its number of tokens.

    Raises:
        TooShort: not even the smallest version fits.
        InputError: the task runs out of units before the length is filled.
    """
    renderer, room = context.renderer, context.length - reserve

    def render(units: int) -> str:
        return renderer.render(draft.user(units), draft.prefix)

    base = smallest(draft, context, exact=exact)
    if base > room:
        raise TooShort("task.length", context.length, f"too short for {context.task}: at least {base + reserve} tokens")
    offset = base - draft.added(draft.minimum)

    def estimate(units: int) -> int:
        return offset + draft.added(units)

    units = _largest(estimate, room, draft, guess=draft.minimum)
    tokens = estimate(units)
    if exact:
        counted: dict[int, int] = {}

        def count(units: int) -> int:
            if units not in counted:
                counted[units] = renderer.count(render(units))
            return counted[units]

        units = _largest(count, room, draft, guess=units)
        tokens = count(units)
    if units == draft.maximum:
        raise InputError(
            "task.length",
            context.length,
            f"too long for {context.task}: {draft.limit_reason} end at {tokens + reserve} tokens",
        )
    return render(units), units, tokens


def _largest(size: Callable[[int], int], room: int, draft: Draft, *, guess: int) -> int:
    """Return n with ``size(n) <= room < size(n + 1)`` (or ``maximum``), given ``size(minimum) <= room``.

    Steps double outwards from ``guess``, then the interval is halved; the two invariants hold even where ``size`` is
    not monotone. Every loop is bounded.
    """
    minimum, ceiling = draft.minimum, draft.maximum
    # No unit kind costs less than 1/64 token on average; a size beyond this would be a fault, not a long prompt.
    bound = minimum + 64 * (room + 64)
    top = bound if ceiling is None else min(ceiling, bound)
    guess = min(max(guess, minimum), top)
    step = 1
    if size(guess) <= room:
        low, high = guess, min(guess + step, top)
        while size(high) <= room:
            if high == top:
                if ceiling is None or top < ceiling:
                    raise RuntimeError(f"a unit of {draft.prefix!r} adds no tokens")
                return top
            low, step = high, step * 2
            high = min(high + step, top)
    else:
        high, low = guess, max(guess - step, minimum)
        while low > minimum and size(low) > room:
            high, step = low, step * 2
            low = max(low - step, minimum)
    while high - low > 1:
        middle = (low + high) // 2
        if size(middle) <= room:
            low = middle
        else:
            high = middle
    return low
