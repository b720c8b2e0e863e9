"""Aggregation: the ten common words of a numbered list (cwe), the three frequent words of a coded text (fwe)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .fit import Context, Draft
from .streams import permutation, sort_keys

CWE_MAX_NEW_TOKENS = 120
CWE_TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
CWE_ANSWER_PREFIX = "Answer: The top 10 words that appear most often in the list are:"
NUM_CW = 10
SHORT_LENGTH = 4096
"""Below this length the official small variant is used."""

FWE_MAX_NEW_TOKENS = 50
FWE_TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text?"
)
FWE_ANSWER_PREFIX = "Answer: According to the coded text above, the three most frequently appeared words are:"
ALPHA = 2.0
CODED_LETTERS = 6
DOTS = "..."

_AFTER = "\nQuestion"


def repeats(length: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Return ``(example words, their common and uncommon repeats), (common, uncommon repeats)`` for a length."""
    return ((20, 3, 1), (6, 1)) if length < SHORT_LENGTH else ((40, 10, 3), (30, 3))


def vocabulary(context: Context) -> list[str]:
    """Return the distinct nouns, adjectives and verbs, sorted."""
    lists = context.corpora.words
    return sorted({*lists.nouns, *lists.adjectives, *lists.verbs})


def _instances(chosen: NDArray[np.intp], words: int, common: int, uncommon: int) -> NDArray[np.intp]:
    """Return the word of each entry before shuffling; more words only append entries."""
    return np.concatenate([np.tile(chosen[:NUM_CW], common), np.repeat(chosen[NUM_CW:words], uncommon)])


def _listed(numbers: list[str], entries: list[str]) -> str:
    parts = [""] * (2 * len(entries))
    parts[0::2] = numbers[: len(entries)]
    parts[1::2] = entries
    return " ".join(parts)


def cwe(context: Context) -> Callable[[int], Draft]:
    """Return the function that drafts sample ``index`` of common words extraction.

    Officially a list longer than the word lists changes to another vocabulary, which is not at hand; such a length
    (beyond 128K tokens) is an error here.
    """
    vocab = vocabulary(context)
    text = np.array(vocab, dtype=object)
    (shown_words, shown_common, shown_uncommon), (common, uncommon) = repeats(context.length)
    word_cost = context.costs([" " + word for word in vocab], before="1.", after=" 2.")
    minimum = NUM_CW + 1

    def size(words: int) -> int:
        """Return the number of entries."""
        return NUM_CW * common + (words - NUM_CW) * uncommon

    # An entry has at least three tokens (number, dot, word); the list ends with the words anyway.
    entries = max(shown_words * shown_common, size(minimum), min(context.length // 3, size(len(vocab))))
    numbers = [f"{i + 1}." for i in range(entries)]
    number_cost = context.costs([" " + number for number in numbers], before="word", after=" word")
    number_total = np.concatenate([[0], np.cumsum(number_cost)])
    task = (context.seed, context.task, context.length)

    def listed(cost: int, count: int) -> int:
        """Return the tokens of a list beyond those of the list ``1. {first word of the vocabulary}``."""
        # All words end in a letter, so the last one costs what it costs inside the list.
        return int(number_total[count] - number_total[1]) + cost - int(word_cost[0])

    def draft(index: int) -> Draft:
        chosen = permutation(*task, index, "words", len(vocab))
        keys = sort_keys(*task, index, "places", entries)
        # The example has its own words and places.
        example = permutation(*task, index, "example words", len(vocab))
        pool = _instances(example, shown_words, shown_common, shown_uncommon)
        pool = pool[permutation(*task, index, "example places", len(pool))]
        answer = " ".join(f"{i + 1}. {word}" for i, word in enumerate(text[example[:NUM_CW]]))

        def message(example_list: str, task_list: str) -> str:
            shown = CWE_TEMPLATE.format(context=example_list)
            return f"{shown} {CWE_ANSWER_PREFIX} {answer}\n{CWE_TEMPLATE.format(context=task_list)}"

        def user(words: int) -> str:
            order = _instances(chosen, words, common, uncommon)
            order = order[np.argsort(keys[: len(order)])]
            return message(_listed(numbers, text[pool].tolist()), _listed(numbers, text[order].tolist()))

        example_added = listed(int(word_cost[pool].sum()), len(pool))
        total = np.concatenate([[0], np.cumsum(word_cost[chosen])])

        def added(words: int) -> int:
            cost = int(common * total[NUM_CW] + uncommon * (total[words] - total[NUM_CW]))
            return example_added + listed(cost, size(words))

        return Draft(
            prefix=CWE_ANSWER_PREFIX,
            references=tuple(text[chosen[:NUM_CW]].tolist()),
            minimum=minimum,
            maximum=NUM_CW + (entries - NUM_CW * common) // uncommon,
            limit_reason="the word lists",
            user=user,
            added=added,
            anchor=message(f"1. {vocab[0]}", f"1. {vocab[0]}"),
        )

    return draft


def zipf_counts(words: int, vocab_size: int) -> NDArray[np.int64]:
    """Return how often each rank appears: ``floor(words * k**-alpha / zeta(alpha))`` for k = 1, 2, ..."""
    rank = np.arange(1, vocab_size + 1, dtype=np.float64)
    return (words * rank**-ALPHA / (math.pi**2 / 6)).astype(np.int64)


def _coded(numbers: NDArray[np.uint64]) -> list[str]:
    """Return the word of six small letters that each number below 26**6 stands for."""
    digits = numbers.astype(np.int64)[:, None] // 26 ** np.arange(CODED_LETTERS) % 26
    return (digits + 97).astype(np.uint8).view(f"S{CODED_LETTERS}").ravel().astype(str).tolist()


def fwe(context: Context) -> Callable[[int], Draft]:
    """Return the function that drafts sample ``index`` of frequent words extraction.

    The unit is one word of the Zipf law's total; a prompt takes as many as fit beside the reserved output.
    """
    vocab_size = max(context.length // 50, 5)
    task = (context.seed, context.task, context.length)
    # From here on ranks 2, 3, 4 and 5 always differ by one or more, so the three answers are decided.
    minimum = math.ceil((math.pi**2 / 6) / (1 / 16 - 1 / 25))
    dots_cost = int(context.costs([" " + DOTS], before="word", after=" word")[0])

    def draft(index: int) -> Draft:
        # Twice as many draws as needed leave enough distinct words beyond any doubt.
        drawn = sort_keys(*task, index, "vocabulary", 2 * vocab_size) % np.uint64(26**CODED_LETTERS)
        _, first = np.unique(drawn, return_index=True)
        vocab = [DOTS, *_coded(drawn[np.sort(first)][: vocab_size - 1])]
        text = np.array(vocab, dtype=object)
        costs = np.full(vocab_size, dots_cost, dtype=np.int64)
        known = 1
        keys = np.empty(0, dtype=np.uint64)

        def places(count: int) -> NDArray[np.uint64]:
            nonlocal keys
            if count > len(keys):
                keys = sort_keys(*task, index, "places", max(count, 2 * len(keys)))
            return keys[:count]

        def price(used: int) -> NDArray[np.int64]:
            """Count coded words when a size first needs them: most of the vocabulary is never used."""
            nonlocal known
            if used > known:
                used = min(vocab_size, max(used, 2 * known, 64))
                costs[known:used] = context.costs([" " + w for w in vocab[known:used]], before="word", after=" word")
                known = used
            return costs

        def ordered(words: int) -> NDArray[np.intp]:
            counts = zipf_counts(words, vocab_size)
            pool = np.repeat(np.arange(vocab_size), counts)
            return pool[np.argsort(places(len(pool)))]

        def tail(words: int, counts: NDArray[np.int64]) -> int:
            at = int(np.argmax(places(int(counts.sum()))))
            last = vocab[int(np.searchsorted(np.cumsum(counts), at, side="right"))]
            return context.edge(last, before="word ", after=_AFTER) - context.edge(last, before="word ", after=" word")

        def total(words: int) -> int:
            counts = zipf_counts(words, vocab_size)
            used = int(np.count_nonzero(counts))
            return int(counts[:used] @ price(used)[:used]) + tail(words, counts)

        smallest = total(minimum)
        return Draft(
            prefix=FWE_ANSWER_PREFIX,
            references=tuple(vocab[1:4]),
            minimum=minimum,
            user=lambda words: FWE_TEMPLATE.format(context=" ".join(text[ordered(words)].tolist())),
            added=lambda words: total(words) - smallest,
        )

    return draft
