"""The lm-eval side of the benchmarks: documents that name prepared samples, and scoring.

The YAML in ``evalkit.tasks`` points here. Documents are light: they name a
sample whose prompt stays on disk, so that a 128K benchmark does not sit in memory several times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset

from ..lmeval.metadata import keys_of, takes
from . import ruler
from .perplexity import Windows
from .standalone import ruler_documents


@takes(keys_of(ruler_documents))
def dataset(docs: Sequence[Mapping[str, Any]] | None = None, **metadata: Any) -> dict[str, Dataset]:
    """The documents of one task, for lm-eval's ``custom_dataset``, out of the task's metadata.

    Args:
        docs: what :func:`ruler_docs` or :func:`perplexity_docs` made; None where lm-eval's own command line runs the
            task, which then makes its documents of the metadata, see :mod:`.standalone`.
        metadata: the rest.
    """
    if docs is None and "ruler_task" in metadata:
        docs = ruler_documents(**metadata)
    if docs is None:
        raise ValueError("docs: run this task through `evalkit run`, which prepares its samples")
    return {"test": Dataset.from_list([dict(doc) for doc in docs])}


def ruler_docs(samples: Sequence[ruler.Sample]) -> list[dict[str, Any]]:
    """Light documents of prepared samples."""
    return [
        {
            "task": sample.task,
            "length": sample.length,
            "index": sample.index,
            "metric": sample.metric,
            "references": list(sample.references),
            "name": f"{sample.task}/{sample.length}/{sample.index}",
        }
        for sample in samples
    ]


def perplexity_docs(windows: Windows) -> list[dict[str, Any]]:
    """Light documents of perplexity windows."""
    return [
        {
            "task": "perplexity",
            "length": windows.length,
            "index": index,
            "scored_tokens": len(ids) - start,
            "name": f"perplexity/{windows.length}/{index}",
        }
        for index, (ids, start) in enumerate(zip(windows.ids, windows.starts, strict=True))
    ]


def ruler_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """RULER's string match of one sample, in [0, 1]."""
    return {"score": ruler.score(doc["metric"], str(results[0]), tuple(doc["references"]))}


def perplexity_results(doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, Any]:
    """Log-likelihood and weight of one window; KL and top-1 agreement ride on the result where they were measured."""
    (result,) = results
    metrics = result.record["metrics"]
    extra = {name: metrics[name] for name in ("kl", "top1") if name in metrics}
    return {"perplexity": (float(result), doc["scored_tokens"]), **extra}


def token_perplexity(items: Sequence[tuple[float, int]]) -> float:
    """Token-weighted perplexity over windows: exp of minus the summed log-likelihood over the summed tokens."""
    return math.exp(-sum(value for value, _ in items) / sum(tokens for _, tokens in items))
