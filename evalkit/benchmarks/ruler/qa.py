"""Question answering over documents: the question's own paragraphs among others of the corpus."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .fit import Context, Draft
from .streams import permutation, sort_keys

MAX_NEW_TOKENS = 32
TEMPLATE = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me "
    "the answer and do not output any other words.\n\nQuestion: {query}"
)
ANSWER_PREFIX = "Answer:"
DOCUMENT = "Document {i}:\n{document}"
CORPUS = {"qa_1": "squad", "qa_2": "hotpotqa"}


def maker(context: Context) -> Callable[[int], Draft]:
    """Return the function that drafts sample ``index``: the corpus's question ``index``, in file order.

    Documents join in a fixed order of preference: the question's own, related ones, all others; the corpus repeats
    when it is too small, as officially.
    """
    corpus = context.corpora.squad if CORPUS[context.task] == "squad" else context.corpora.hotpotqa
    documents, questions = corpus.documents, corpus.questions
    task = (context.seed, context.task, context.length)
    # A document has at least five tokens, its heading alone.
    most = context.length // 5
    headings = context.costs([f"Document {i + 1}:\n" for i in range(most)], before="word.\n\n", after="The")
    heading_total = np.concatenate([[0], np.cumsum(headings)])
    costs = np.full(len(documents), -1, dtype=np.int64)

    def price(ids: np.ndarray) -> np.ndarray:
        """Count documents when they are first drawn."""
        new = np.unique(ids[costs[ids] < 0])
        if len(new):
            texts = [documents[i] + "\n\n" for i in new]
            costs[new] = context.costs(texts, before="Document 1:\n", after="Document")
        return costs[ids]

    def draft(index: int) -> Draft:
        question = questions[index % len(questions)]
        own, related = list(question.documents), np.asarray(question.related, dtype=np.intp)
        related = related[permutation(*task, index, "related", len(related))]
        mixed = permutation(*task, index, "others", len(documents))
        others = mixed[~np.isin(mixed, [*own, *question.related])]
        order = np.concatenate([np.asarray(own, dtype=np.intp), related, others])
        order = np.resize(order, max(most, len(own)))
        keys = sort_keys(*task, index, "places", len(order))
        total = np.zeros(1, dtype=np.int64)

        def tokens(units: int) -> int:
            nonlocal total
            if units >= len(total):
                until = min(len(order), max(units, 2 * len(total), 16))
                total = np.concatenate([[0], np.cumsum(price(order[:until]))])
            return int(total[units] + heading_total[units])

        def user(units: int) -> str:
            shown = order[:units][np.argsort(keys[:units])]
            context_text = "\n\n".join(DOCUMENT.format(i=i + 1, document=documents[d]) for i, d in enumerate(shown))
            return TEMPLATE.format(context=context_text, query=question.query)

        minimum = len(own)
        return Draft(
            prefix=ANSWER_PREFIX,
            references=question.answers,
            minimum=minimum,
            maximum=max(most, minimum),
            limit_reason="documents",
            user=user,
            added=lambda units: tokens(units) - tokens(minimum) if units > minimum else 0,
        )

    return draft
