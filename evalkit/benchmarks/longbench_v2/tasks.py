"""The lm-eval side of LongBench-v2: documents, requests and scores. The YAML in ``evalkit.tasks`` points here.

Under ``evalkit run`` a document names a prepared prompt. Under lm-eval's own command line, with any model (the ``cot``
mode with ours alone, see :mod:`.two_stage`), the documents are made here, out of the task's metadata (``data``,
``truncate_at``, ``limit``, ``tokenizer`` or the model's ``pretrained``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset

from ...task_settings import LONGBENCH_HUB, LongBenchV2Config
from . import two_stage
from .data import DIFFICULTIES, LENGTHS, LETTERS, read_items, source_kind
from .prompts import TEMPLATES, cut_middle, extract_answer, fill
from .samples import PromptSet, choose

CATEGORIES = (*DIFFICULTIES, *LENGTHS)


def light_docs(prompts: PromptSet) -> list[dict[str, Any]]:
    """Documents that name prepared prompts."""
    return [
        {
            "task": prompts.task,
            "length": prompts.length,
            "index": item.index,
            "position": position,
            "id": item.id,
            "answer": item.answer,
            "difficulty": item.difficulty,
            "bucket": item.length,
            "name": f"{prompts.task}/{item.id}",
        }
        for position, item in enumerate(prompts.items)
    ]


def dataset(
    mode: str = "direct",
    docs: Sequence[Mapping[str, Any]] | None = None,
    data: str = LONGBENCH_HUB,
    revision: str | None = None,
    truncate_at: int = 120000,
    limit: int | None = None,
    seed: int = 42,
    tokenizer: str | None = None,
    pretrained: str | None = None,
    **_: Any,
) -> dict[str, Dataset]:
    """The documents of one task, for lm-eval's ``custom_dataset``.

    Args:
        mode: the YAML's mode.
        docs: what :func:`light_docs` made; all else is for runs without prepared prompts.
        data, revision, truncate_at, limit, seed: as in :class:`~evalkit.task_settings.LongBenchV2Config`.
        tokenizer, pretrained: where the tokenizer comes from that counts tokens.

    Raises:
        InputError: a value that cannot be used.
        ValueError: no tokenizer.
    """
    if docs is not None:
        return {"test": Dataset.from_list([dict(doc) for doc in docs])}
    name = tokenizer or pretrained
    if name is None:
        raise ValueError("longbench_v2: give metadata tokenizer=<directory or hub id>; it counts the tokens")
    config = LongBenchV2Config(
        mode=mode, data=data, revision=revision, length=2 * truncate_at, truncate_at=truncate_at, limit=limit, seed=seed
    )
    config.validate()
    from ...lmeval.settings import named_tokenizer

    counter = named_tokenizer(name)
    rows = []
    items = read_items(data, revision)
    self_made = source_kind(items) == "self-made"
    for item in choose(items, config):
        cut = cut_middle(fill(TEMPLATES[mode], item), truncate_at, counter)
        rows.append(
            {
                "id": item.id,
                "answer": item.answer,
                "difficulty": item.difficulty,
                "bucket": item.length,
                "message": cut.text,
                "message_tokens": cut.tokens,
                "truncated": cut.truncated,
                "self_made": self_made,
                **(two_stage.fields_of(item) if mode == "cot" else {}),
            }
        )
    return {"test": Dataset.from_list(rows)}


def doc_to_text(doc: Mapping[str, Any]) -> str:
    """The message, or the name of a prepared prompt."""
    return str(doc["message"] if "message" in doc else doc["name"])


def results(doc: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, float | None]:
    """Scores of a generated answer."""
    prediction = extract_answer(str(outputs[0]).strip())
    return {**_scores(doc, prediction), "unparsed": float(prediction is None)}


def choice_results(doc: Mapping[str, Any], outputs: Sequence[tuple[float, bool]]) -> dict[str, float | None]:
    """Scores of the most likely choice."""
    values = [value for value, _ in outputs]
    return _scores(doc, LETTERS[values.index(max(values))])


def _scores(doc: Mapping[str, Any], prediction: str | None) -> dict[str, float | None]:
    score = float(prediction == doc["answer"])
    categories = {name: score if name in (doc["difficulty"], doc["bucket"]) else None for name in CATEGORIES}
    # A metric of its own in lm-eval's table, which else says nothing of the data: 1 on the self-made set, else absent.
    label = {"self_made": 1.0} if doc.get("self_made") else {}
    return {"score": score, **categories, **label}


def mean_of_own(items: Sequence[float | None]) -> float:
    """Mean over the questions of a category; NaN where there is none."""
    own = [item for item in items if item is not None]
    return math.fsum(own) / len(own) if own else math.nan
