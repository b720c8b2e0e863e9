"""Needle in a haystack: eight tasks that differ in haystack, needles and how many are asked for.

Follows the official generator, except that: sentences are split by a rule here (the official splitter needs a
download); empty pieces beside a needle leave no double space; the decoy needles of a "needle" haystack come from one
pool shared by a task's samples, drawn without replacement and never with the queried key (officially each is drawn
anew, which lets a decoy repeat the key and so make the answer ambiguous).
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .fit import Context, Draft
from .streams import permutation, stream

MAX_NEW_TOKENS = 128
TEMPLATE = (
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will quiz "
    "you about the {type_needle_v} afterwards.\n{context}\nWhat are all the special magic {type_needle_v} for {query} "
    "mentioned in the provided text?"
)
ANSWER_PREFIX = "The special magic {type_needle_v} for {query} mentioned in the provided text are"
NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = tuple(int(depth) for depth in np.round(np.linspace(0, 100, num=40, endpoint=True)))
"""Insertion depths in percent of the haystack's sentences."""

# The texts around a context: the end of the instruction, the start of the question.
_BEFORE, _AFTER = "afterwards.\n", "\nWhat"


@dataclass(frozen=True)
class Setting:
    """One NIAH task: official names and values."""

    haystack: str  # noise | essay | needle
    keys: str = "words"  # words | uuids
    values: str = "numbers"  # numbers | uuids
    num_needle_k: int = 1
    num_needle_v: int = 1
    num_needle_q: int = 1


SETTINGS = {
    "niah_single_1": Setting("noise"),
    "niah_single_2": Setting("essay"),
    "niah_single_3": Setting("essay", values="uuids"),
    "niah_multikey_1": Setting("essay", num_needle_k=4),
    "niah_multikey_2": Setting("needle"),
    "niah_multikey_3": Setting("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Setting("essay", num_needle_v=4),
    "niah_multiquery": Setting("essay", num_needle_k=4, num_needle_q=4),
}


@dataclass(frozen=True)
class _Needles:
    keys: list[str]
    lines: list[str]
    prefix: str
    references: tuple[str, ...]
    instruction: str  # the template with everything but the context filled in
    question: str


def maker(context: Context) -> Callable[[int], Draft]:
    """Return the function that drafts sample ``index`` of a NIAH task."""
    setting = SETTINGS[context.task]
    haystack = {"noise": _noise, "needle": _decoys, "essay": _essay}[setting.haystack](context, setting)
    lists = context.corpora.words

    def draft(index: int) -> Draft:
        rng = stream(context.seed, context.task, context.length, index, "needles")
        return haystack(index, _needles(setting, rng, lists.adjectives, lists.nouns))

    return draft


def _draw(kind: str, rng: random.Random, adjectives: tuple[str, ...], nouns: tuple[str, ...]) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(adjectives)}-{rng.choice(nouns)}"


def _needles(setting: Setting, rng: random.Random, adjectives: tuple[str, ...], nouns: tuple[str, ...]) -> _Needles:
    values: dict[str, list[str]] = {}
    for _ in range(1000):
        # Distinct keys: two needles of one key would make the answer ambiguous.
        key = _draw(setting.keys, rng, adjectives, nouns)
        if key not in values:
            values[key] = [_draw(setting.values, rng, adjectives, nouns) for _ in range(setting.num_needle_v)]
        if len(values) == setting.num_needle_k:
            break
    lines = [
        NEEDLE.format(type_needle_v=setting.values, key=key, value=value) for key in values for value in values[key]
    ]
    rng.shuffle(lines)
    asked = rng.sample(list(values), setting.num_needle_q)
    query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
    template, prefix, kind = TEMPLATE, ANSWER_PREFIX, setting.values
    if setting.num_needle_q * setting.num_needle_v == 1:
        # The official singular form: replacements in the template's own words.
        kind = kind[:-1]
        template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
        prefix = prefix.replace("are", "is")
    instruction, question = template.split("{context}")
    return _Needles(
        keys=list(values),
        lines=lines,
        prefix=prefix.format(type_needle_v=kind, query=query),
        references=tuple(value for key in asked for value in values[key]),
        instruction=instruction.format(type_needle_v=kind),
        question=question.format(type_needle_v=kind, query=query),
    )


def _in_lines(
    context: Context, index: int, needles: _Needles, lines: Callable[[int], list[str]]
) -> Callable[[int], str]:
    """Return the message of a haystack made of lines, with the needles inserted before random ones."""

    def user(units: int) -> str:
        hay = list(lines(units))
        rng = stream(context.seed, context.task, context.length, index, "positions")
        places = sorted(rng.sample(range(units), len(needles.lines)), reverse=True)
        for place, line in zip(places, needles.lines, strict=True):
            hay.insert(place, line)
        return needles.instruction + "\n".join(hay) + needles.question

    return user


def _noise(context: Context, setting: Setting) -> Callable[[int, _Needles], Draft]:
    cost = int(context.costs([NOISE + "\n"], before=NOISE + "\n", after="The")[0])

    def draft(index: int, needles: _Needles) -> Draft:
        minimum = len(needles.lines)
        return Draft(
            prefix=needles.prefix,
            references=needles.references,
            minimum=minimum,
            user=_in_lines(context, index, needles, lambda units: [NOISE] * units),
            added=lambda units: cost * (units - minimum),
        )

    return draft


def _decoys(context: Context, setting: Setting) -> Callable[[int, _Needles], Draft]:
    # A needle line has more than 16 tokens in any tokenizer that holds words; twice what can fit keeps draws varied.
    size = max(64, context.length // 8)
    rng = stream(context.seed, context.task, context.length, "pool", "decoys")
    lists = context.corpora.words
    pool: dict[str, str] = {}
    for _ in range(4 * size):
        key = _draw(setting.keys, rng, lists.adjectives, lists.nouns)
        value = _draw(setting.values, rng, lists.adjectives, lists.nouns)
        pool.setdefault(key, NEEDLE.format(type_needle_v=setting.values, key=key, value=value))
        if len(pool) == size:
            break
    number = {key: i for i, key in enumerate(pool)}
    lines = list(pool.values())
    text = np.array(lines, dtype=object)
    costs = context.costs([line + "\n" for line in lines], before=lines[0] + "\n", after="One")

    def draft(index: int, needles: _Needles) -> Draft:
        order = permutation(context.seed, context.task, context.length, index, "decoys", len(lines))
        taken = [number[key] for key in needles.keys if key in number]
        if taken:
            order = order[~np.isin(order, taken)]
        total = np.concatenate([[0], np.cumsum(costs[order])])
        minimum = len(needles.lines)
        return Draft(
            prefix=needles.prefix,
            references=needles.references,
            minimum=minimum,
            maximum=len(order),
            limit_reason="decoy needles",
            user=_in_lines(context, index, needles, lambda units: text[order[:units]].tolist()),
            added=lambda units: int(total[units] - total[minimum]),
        )

    return draft


_ENDS_SENTENCE = re.compile(r"[.!?][\"')\]\u201d\u2019]*$")
_ABBREVIATION = re.compile(
    r"^[\"'(\[\u201c\u2018]*(?:[A-Z]\.|(?:[A-Za-z]\.){2,}|(?:Mr|Mrs|Ms|Dr|St|vs|etc|Prof|Jr|Sr)\.)$"
)


def sentence_starts(words: tuple[str, ...] | list[str]) -> list[int]:
    """Return the indices of the words that start a sentence, 0 first.

    A sentence ends at a word that ends in ``.``, ``!`` or ``?`` (closing quotes allowed), is no abbreviation or
    initial, and is followed by a word that does not start in lower case.
    """
    starts = [0]
    for i in range(1, len(words)):
        before = words[i - 1]
        if _ENDS_SENTENCE.search(before) and not _ABBREVIATION.match(before) and not words[i][:1].islower():
            starts.append(i)
    return starts


def _essay(context: Context, setting: Setting) -> Callable[[int, _Needles], Draft]:
    # A word has at least one token, so as many words as the length has tokens is enough; essays repeat when short.
    source = context.corpora.essays
    tiles = -(-context.length // len(source))
    words = (list(source) * tiles)[: context.length]
    starts = np.asarray(sentence_starts(words), dtype=np.int64)
    distinct = sorted(set(words))
    costs = context.costs([" " + word for word in distinct], before="so", after=" so").tolist()
    table = dict(zip(distinct, costs, strict=True))
    total = np.concatenate([[0], np.cumsum(np.fromiter((table[w] for w in words), np.int64, len(words)))])
    text = " ".join(words)
    ends = np.cumsum(np.fromiter((len(w) + 1 for w in words), np.int64, len(words))) - 1  # end of word i in text

    def draft(index: int, needles: _Needles) -> Draft:
        rng = stream(context.seed, context.task, context.length, index, "depths")
        depths = sorted(rng.sample(DEPTHS, len(needles.lines)))

        def places(units: int) -> list[int]:
            sentences = int(np.searchsorted(starts, units, side="left"))
            return [int(sentences * (depth / 100)) for depth in depths]

        def cut(units: int, sentence: int) -> int:
            """Return the number of words before a sentence."""
            return min(int(starts[sentence]), units) if sentence < len(starts) else units

        def user(units: int) -> str:
            pieces, last = [], 0
            for place, line in zip(places(units), needles.lines, strict=True):
                here = cut(units, place)
                if here > last:
                    pieces.append(text[ends[last - 1] + 1 if last else 0 : ends[here - 1]])
                pieces.append(line)
                last = here
            if units > last:
                pieces.append(text[ends[last - 1] + 1 if last else 0 : ends[units - 1]])
            return needles.instruction + " ".join(pieces) + needles.question

        def border(units: int) -> int:
            """Return what the context's first and last unit cost more or less than between two words."""
            spots = places(units)
            first = needles.lines[0] if cut(units, spots[0]) == 0 else words[0]
            last = needles.lines[-1] if cut(units, spots[-1]) == units else words[units - 1]
            return (
                context.edge(first, before=_BEFORE, after=" so")
                - context.edge(first, before="so ", after=" so")
                + context.edge(last, before="so ", after=_AFTER)
                - context.edge(last, before="so ", after=" so")
            )

        at_least = border(1)
        return Draft(
            prefix=needles.prefix,
            references=needles.references,
            minimum=1,
            maximum=len(words),
            limit_reason="essay words",
            user=user,
            added=lambda units: int(total[units] - total[1]) + border(units) - at_least,
        )

    return draft
