"""The realized budget in lm-eval's results and samples files, for any task.

A response carries an account of the prefills behind it. lm-eval hands responses to a task's ``process_results`` after
its filters, which make new strings, so the account is read from the raw responses of the document and added to the
metrics the task returns. No task has to know.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from .hook import before_evaluation

BUDGETS = ("B", "B_stage1", "B_cost", "B_block", "B_stage1_block")
"""Ratios of a document, and of a task, under the names of the store's records (see :mod:`evalkit.budget`)."""


class Text(str):
    """Generated text with the prefills behind it."""

    prefills: tuple[dict[str, Any], ...]

    def __new__(cls, text: str, prefills: Sequence[dict[str, Any]] = ()) -> Self:
        """Attach ``prefills`` to ``text``; unpickling gives the text alone and restores the rest after it."""
        self = super().__new__(cls, text)
        self.prefills = tuple(prefills)
        return self


class Chain(Text):
    """A reasoning and the answer that was asked for after it, as one text.

    Attributes:
        answer: the answer alone.
    """

    answer: str

    def __new__(cls, reasoning: str, answer: str = "", prefills: Sequence[dict[str, Any]] = ()) -> Self:
        """Join both; unpickling gives the whole text alone and restores the rest after it."""
        self = super().__new__(cls, f"{reasoning}\n\n{answer}" if answer else reasoning, prefills)
        self.answer = answer
        return self


class LogLikelihood(tuple[float, bool]):
    """``(log-likelihood, is greedy)`` with the prefills behind it."""

    prefills: tuple[dict[str, Any], ...]

    def __new__(cls, pair: tuple[float, bool], prefills: Sequence[dict[str, Any]] = ()) -> LogLikelihood:
        """Attach ``prefills`` to ``pair``."""
        self = super().__new__(cls, pair)
        self.prefills = tuple(prefills)
        return self


class Rolling(float):
    """Log-likelihood of a document with the prefills of its windows."""

    prefills: tuple[dict[str, Any], ...]

    def __new__(cls, value: float, prefills: Sequence[dict[str, Any]] = ()) -> Rolling:
        """Attach ``prefills`` to ``value``."""
        self = super().__new__(cls, value)
        self.prefills = tuple(prefills)
        return self


class Weighted(float):
    """A number that an average takes with a weight."""

    weight: float

    def __new__(cls, value: float, weight: float = 1.0) -> Weighted:
        """Attach ``weight`` to ``value``."""
        self = super().__new__(cls, value)
        self.weight = weight
        return self


def weighted_mean(items: Sequence[float]) -> float:
    """Mean of numbers by their weights: documents by their prefilled tokens."""
    weights = [getattr(item, "weight", 1.0) for item in items]
    return math.fsum(item * weight for item, weight in zip(items, weights, strict=True)) / math.fsum(weights)


def document_metrics(responses: Sequence[Any]) -> dict[str, float]:
    """Budget of one document: token-weighted over the distinct prefills behind its responses.

    The choices of a question share one prefill, which counts once. Empty where no response carries an account.
    """
    prefills = {found["sha256"]: found for response in responses for found in getattr(response, "prefills", ())}
    if not prefills:
        return {}
    parts = list(prefills.values())
    tokens = sum(part["tokens"] for part in parts)
    means = {
        name: weighted_mean([Weighted(part["budget"][name], part["tokens"]) for part in parts]) for name in BUDGETS
    }
    return {**{name: Weighted(value, tokens) for name, value in means.items()}, "prefill_tokens": tokens}


AGGREGATION: dict[str, Callable[[Sequence[float]], float]] = {
    **dict.fromkeys(BUDGETS, weighted_mean),
    "prefill_tokens": weighted_mean,
}


def attach(task: Any) -> None:
    """Make a task's results hold the budget of each of its documents, and their average."""
    documents, process, aggregation = task.doc_iterator, task.process_results, task.aggregation
    better = task.higher_is_better
    current: dict[str, Any] = {}
    responses: dict[Any, list[Any]] = defaultdict(list)

    @functools.wraps(documents)
    def doc_iterator(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, Any]]:
        for doc_id, doc in documents(*args, **kwargs):
            current["doc_id"] = doc_id
            yield doc_id, doc

    @functools.wraps(process)
    def process_results(*args: Any, **kwargs: Any) -> dict[str, Any]:
        if not responses:
            for instance in task.instances:
                responses[instance.doc_id] += instance.resps
        own = document_metrics(responses[current.get("doc_id")])
        metrics = process(*args, **kwargs)
        # Where a task has a metric of the same name, its own stays.
        return {**metrics, **{name: value for name, value in own.items() if name not in metrics}}

    task.doc_iterator = doc_iterator
    task.process_results = process_results
    task.aggregation = lambda: {**AGGREGATION, **aggregation()}
    task.higher_is_better = lambda: {**dict.fromkeys(AGGREGATION), **better()}


def install(applies: Callable[[Any], bool]) -> None:
    """Have lm-eval attach the budget to the tasks it evaluates with a model of ours; may be called again.

    Args:
        applies: whether a model is one.
    """

    def look(model: Any, tasks: Mapping[str, Any]) -> None:
        if applies(model):
            for task in tasks.values():
                if hasattr(task, "process_results"):
                    attach(task)

    before_evaluation("budget", look)
