"""Variable tracking: one chain of assignments among noise, after one worked example."""

from __future__ import annotations

import random
import string
from collections.abc import Callable

from .fit import Context, Draft
from .niah import NOISE
from .streams import stream

MAX_NEW_TOKENS = 30
TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find "
    "all variables that are assigned the value {query} in the text above."
)
# The trailing space is official: the answer starts right behind it.
ANSWER_PREFIX = (
    "Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are assigned the "
    "value {query}, they are: "
)
HOPS = 4
EXAMPLE_TOKENS = 500
EXAMPLE_MINIMUM = 5
_LETTERS = string.ascii_uppercase


def _names(rng: random.Random, count: int, letters: int) -> list[str]:
    """Return distinct names of ``letters`` capital letters."""
    numbers = rng.sample(range(26**letters), count)
    return ["".join(_LETTERS[number // 26**i % 26] for i in range(letters)) for number in numbers]


def _chain(names: list[str], value: int) -> list[str]:
    # The official lines: every hop ends in a space.
    hops = [f"VAR {new} = VAR {old} " for old, new in zip(names, names[1:], strict=False)]
    return [f"VAR {names[0]} = {value}", *hops]


def _text(chain: list[str], noises: int, rng: random.Random) -> str:
    lines = [NOISE] * noises
    for shift, place in enumerate(sorted(rng.sample(range(noises), len(chain)))):
        lines.insert(place + shift, chain[shift])
    return "\n".join(lines)


def example(rng: random.Random, noises: int, avoid: int | None = None) -> tuple[str, str]:
    """Return the worked example: a short task of its own up to the answer prefix, and its answer.

    Args:
        rng: names, value and places are drawn from it.
        noises: number of noise lines.
        avoid: a value that the example must not use.
    """
    names = _names(rng, HOPS + 1, 3)
    value = rng.randint(10000, 99998)
    if value == avoid:
        value = 10000 + (value - 10000 + 1) % 89999
    task = TEMPLATE.format(context=_text(_chain(names, value), noises, rng), query=value)
    return f"{task} {ANSWER_PREFIX.format(num_v=HOPS + 1, query=value)}", " ".join(names)


def example_size(context: Context) -> int:
    """Return the number of noise lines that makes the example's task as long as 500 tokens allow, at least 5."""
    size = EXAMPLE_MINIMUM
    for noises in range(EXAMPLE_MINIMUM, EXAMPLE_TOKENS):
        if context.renderer.count(example(random.Random(0), noises)[0]) > EXAMPLE_TOKENS:
            break
        size = noises
    return size


def maker(context: Context) -> Callable[[int], Draft]:
    """Return the function that drafts sample ``index`` of variable tracking."""
    cost = int(context.costs([NOISE + "\n"], before=NOISE + "\n", after="The")[0])
    noises = example_size(context)

    def draft(index: int) -> Draft:
        def rng(purpose: str) -> random.Random:
            return stream(context.seed, context.task, context.length, index, purpose)

        source = rng("chain")
        names = _names(source, HOPS + 1, 5)
        value = source.randint(10000, 99998)
        chain = _chain(names, value)
        shown, answer = example(rng("example"), noises, avoid=value)

        def user(units: int) -> str:
            task = TEMPLATE.format(context=_text(chain, units, rng("positions")), query=value)
            return f"{shown} {answer}\n\n{task}"

        return Draft(
            prefix=ANSWER_PREFIX.format(num_v=HOPS + 1, query=value),
            references=tuple(names),
            minimum=len(chain),
            user=user,
            added=lambda units: cost * (units - len(chain)),
        )

    return draft
