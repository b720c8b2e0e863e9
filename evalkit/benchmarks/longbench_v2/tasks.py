"""The lm-eval side of LongBench-v2: documents, requests and scores. The YAML in ``evalkit.tasks`` points here.

Under ``evalkit run`` a document names a prepared prompt. Under lm-eval's own command line, with any model (the ``cot``
mode with ours alone, see :mod:`.two_stage`), the documents are made here, out of the task's metadata (``data``,
``data_revision``, ``truncate_at``, ``limit``, ``data_seed``, ``tokenizer`` or the model's ``pretrained``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset

from ...errors import InputError
from ...lmeval.metadata import integer, keys_of, takes, text
from ...task_settings import LEAST_TRUNCATE_AT, LONGBENCH_HUB, LongBenchV2Config
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


def documents(
    *,
    mode: str = "direct",
    data: str = LONGBENCH_HUB,
    data_revision: str | None = None,
    truncate_at: int = 120000,
    limit: int | None = None,
    data_seed: int = 42,
    tokenizer: str | None = None,
    pretrained: str | None = None,
    revision: str | None = None,
    **_: Any,
) -> list[dict[str, Any]]:
    """Documents of one task.

    Args:
        mode: the YAML's mode.
        data, truncate_at, limit: as in :class:`~evalkit.task_settings.LongBenchV2Config`.
        data_revision, data_seed: its ``revision`` and ``seed``, which among the model arguments are the model's.
        tokenizer, pretrained, revision: where the tokenizer comes from that counts tokens; ``tokenizer`` wins.
        _: everything else that is in the metadata.

    Raises:
        InputError: a value that cannot be used, or no tokenizer.
    """
    text("data", data)
    integer("truncate_at", truncate_at, least=LEAST_TRUNCATE_AT)
    integer("data_seed", data_seed, least=0)
    if limit is not None:
        integer("limit", limit)
    if data_revision is not None:
        text("data_revision", data_revision)
    config = LongBenchV2Config(
        mode=mode,
        data=data,
        revision=data_revision,
        length=truncate_at + 256,
        truncate_at=truncate_at,
        limit=limit,
        seed=data_seed,
    )
    try:
        config.validate()
        items = read_items(data, data_revision)
        chosen = choose(items, config)
    except InputError as error:
        raise InputError(error.field.replace("task.", "metadata.", 1), error.value, error.allowed) from None
    from ...lmeval.settings import counting_tokenizer

    counter = counting_tokenizer(tokenizer, pretrained, revision)
    self_made = source_kind(items) == "self-made"
    rows = []
    for item in chosen:
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
    return rows


@takes(keys_of(documents))
def dataset(docs: Sequence[Mapping[str, Any]] | None = None, **metadata: Any) -> dict[str, Dataset]:
    """The documents of one task, for lm-eval's ``custom_dataset``.

    Args:
        docs: what :func:`light_docs` made; None where lm-eval's own command line runs the task, which then makes its
            documents of the metadata, see :func:`documents`.
        metadata: the rest.
    """
    made = documents(**metadata) if docs is None else [dict(doc) for doc in docs]
    return {"test": Dataset.from_list(made)}


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
