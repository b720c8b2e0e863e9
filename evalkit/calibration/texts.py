"""Calibration windows: from the end of a text backwards, never out of its first half, which evaluation reads first."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..benchmarks.perplexity import documents
from ..config import PerplexityConfig
from ..corpora import Corpora
from ..errors import InputError
from .disjoint import Fingerprints, Span, check_spans
from .settings import CalibrateConfig


@dataclass(frozen=True)
class CalibrationText:
    """Windows of one length.

    Attributes:
        ids: token ids of each window, all of the same length.
        spans: the characters each was cut from, counted through all documents of the corpus.
        fingerprints: of the windows without their BOS token.
        checksum: of the whole corpus.
    """

    ids: list[list[int]]
    spans: list[Span]
    fingerprints: Fingerprints
    checksum: str


class CalibrationTexts:
    """The corpus of a calibration, tokenised from its end as far as the windows need.

    Args:
        config: validated settings.
        tokenizer: the model's tokenizer.
        bos: begin each window with the BOS token, counted in its length.
        corpora: where the essays come from.
    """

    def __init__(
        self, config: CalibrateConfig, tokenizer: PreTrainedTokenizerBase, *, bos: bool, corpora: Corpora
    ) -> None:
        source = PerplexityConfig(corpus=config.text, text_field=config.text_field)
        self._documents = list(documents(source, corpora))
        self._tokenizer, self._count, self._name = tokenizer, config.windows, config.text
        self._prefix: list[int] = []
        if bos:
            if tokenizer.bos_token_id is None:
                raise InputError("model.perplexity_bos", True, "false: this tokenizer has no BOS token")
            self._prefix = [tokenizer.bos_token_id]
        self.checksum = hashlib.sha256("\0".join(self._documents).encode()).hexdigest()

    def windows(self, length: int) -> CalibrationText:
        """Cut windows of ``length`` tokens.

        Raises:
            InputError: the second half of the text has fewer of them than ``calibrate.windows``.
        """
        body = length - len(self._prefix)
        total = sum(map(len, self._documents))
        ids: list[list[int]] = []
        spans: list[Span] = []
        stop = total
        for text in reversed(self._documents):
            stop -= len(text)  # first character of this document
            for piece, start, end in self._from_the_end(text, body, self._count - len(ids)):
                if stop + start < total // 2:
                    break
                ids.append(self._prefix + piece)
                spans.append(Span(self.checksum, stop + start, stop + end))
            if len(ids) == self._count or stop < total // 2:
                break
        if len(ids) < self._count:
            allowed = f"at most {len(ids)}: the second half of {self._name} has no more windows of {length} tokens"
            raise InputError("calibrate.windows", self._count, allowed)
        check_spans(spans, [Span(self.checksum, 0, total // 2)])
        prints = Fingerprints.of([window[len(self._prefix) :] for window in ids])
        return CalibrationText(ids, spans, prints, self.checksum)

    def _from_the_end(self, text: str, body: int, wanted: int) -> list[tuple[list[int], int, int]]:
        """Up to ``wanted`` windows of one document, last first: ids, first character, end."""
        # Tokens average well below 16 characters; only what the windows need is tokenised.
        skipped = max(0, len(text) - (wanted * body * 16 + 1024))
        encoded = self._tokenizer(text[skipped:], add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
        first = 1 if skipped else 0  # the cut may have split a token
        found: list[tuple[list[int], int, int]] = []
        for end in range(len(ids), first + body - 1, -body):
            if len(found) == wanted:
                break
            begin = end - body
            found.append((ids[begin:end], skipped + offsets[begin][0], skipped + offsets[end - 1][1]))
        return found
