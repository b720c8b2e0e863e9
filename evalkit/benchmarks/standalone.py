"""RULER documents for lm-eval's own command line, where no run of the harness prepares the samples.

The samples are those of ``evalkit run`` for the same model, length and seed. A document holds the message and the
answer prefix apart, so that ``--apply_chat_template`` renders the prompt that the harness would; without it the model
reads the raw text, which is shorter by the template's tokens.
"""

from __future__ import annotations

from typing import Any

from ..corpora import Corpora
from ..lmeval.metadata import integer
from ..prompts import PromptRenderer
from . import ruler
from .ruler import Builder


def ruler_documents(
    *,
    ruler_task: str,
    pretrained: str | None = None,
    tokenizer: str | None = None,
    revision: str | None = None,
    enable_thinking: bool | None = None,
    length: int = 4096,
    samples: int = 100,
    data_seed: int = 42,
    chat: bool | None = None,
    **_: Any,
) -> list[dict[str, Any]]:
    """Documents of one task.

    Args:
        ruler_task: name out of RULER's 13.
        pretrained, tokenizer, revision, enable_thinking: as in the model arguments, which lm-eval passes along;
            ``tokenizer`` wins over ``pretrained``.
        length: prompt, template and output together, in tokens.
        samples: how many; ``--limit`` then takes the first of them.
        data_seed: seed of the samples.
        chat: whether the length holds a chat template; None = where the tokenizer has one.
        _: everything else that is in the metadata.

    Raises:
        InputError: a value that cannot be used.
    """
    from ..lmeval.settings import counting_tokenizer

    integer("length", length)
    integer("samples", samples)
    integer("data_seed", data_seed, least=0)
    loaded = counting_tokenizer(tokenizer, pretrained, revision)
    chat = bool(loaded.chat_template) if chat is None else chat
    renderer = PromptRenderer(loaded, chat=chat, thinking=enable_thinking if chat else None)
    corpora = Corpora()
    found = ruler.load(ruler_task, length, samples, seed=data_seed, renderer=renderer, corpora=corpora)
    builder = Builder(ruler_task, length, seed=data_seed, renderer=renderer, corpora=corpora)
    documents = []
    for sample in found:
        message, prefix = builder.message(sample.index, sample.units)
        documents.append(
            {
                "task": sample.task,
                "length": sample.length,
                "index": sample.index,
                "metric": sample.metric,
                "references": list(sample.references),
                "message": message,
                "prefix": prefix if renderer.keeps_prefix else "",
            }
        )
    return documents
