"""Proof that calibration text and evaluation samples share nothing.

Two checks. Where both sides come from one known text, their character ranges must not meet. For any two sequences of
token ids, n-grams are compared: of the calibration text every n-th n-gram is kept as a hash, of a sample all of them
are looked up, so that every run of 2n - 1 shared tokens is found wherever it lies.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ..errors import InputError, IntegrityError

NGRAM = 64
"""Tokens of an n-gram: a shared run of 127 tokens is always found, one of fewer than 64 never.

Shorter ones are no evidence: one author's essays repeat acknowledgements and footers of up to 45 tokens to the word."""

_BASE = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True)
class Span:
    """Characters ``start`` to ``stop`` of one text.

    Attributes:
        text: checksum of the whole text.
        start, stop: half-open range.
    """

    text: str
    start: int
    stop: int

    def meets(self, other: Span) -> bool:
        """Whether the two share a character."""
        return self.text == other.text and max(self.start, other.start) < min(self.stop, other.stop)


def check_spans(calibration: Iterable[Span], evaluation: Iterable[Span], *, field: str = "calibrate.text") -> None:
    """Raise :class:`InputError` naming ``field`` where a calibration range meets an evaluation range."""
    other = list(evaluation)
    for span in calibration:
        for sample in other:
            if span.meets(sample):
                raise InputError(
                    field,
                    f"characters {span.start}-{span.stop}",
                    f"text that no sample holds (a sample holds characters {sample.start}-{sample.stop})",
                )


@dataclass(frozen=True)
class Fingerprints:
    """Hashes of token n-grams.

    Attributes:
        hashes: uint64, sorted and distinct.
        n: tokens of an n-gram.
    """

    hashes: np.ndarray
    n: int = NGRAM

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]], n: int = NGRAM) -> Fingerprints:
        """Fingerprints of some token sequences: the n-grams at 0, n, 2n, ... and the last one of each.

        Sequences shorter than n have none: give whole windows, without a BOS token that samples share too.
        """
        kept = []
        for ids in sequences:
            hashes = _rolling(ids, n)
            kept.append(hashes[::n])
            kept.append(hashes[-1:])
        return cls(np.unique(np.concatenate(kept)) if kept else np.empty(0, np.uint64), n)

    def shared_at(self, ids: Sequence[int]) -> int | None:
        """First position of ``ids`` where an n-gram of this text begins, or None."""
        hashes = _rolling(ids, self.n)
        if not len(hashes) or not len(self.hashes):
            return None
        place = np.searchsorted(self.hashes, hashes).clip(max=len(self.hashes) - 1)
        found = np.flatnonzero(self.hashes[place] == hashes)
        return int(found[0]) if len(found) else None

    def __or__(self, other: Fingerprints) -> Fingerprints:
        """Fingerprints of both texts."""
        if self.n != other.n:
            raise ValueError(f"n-grams of {self.n} and {other.n} tokens cannot be joined")
        return Fingerprints(np.union1d(self.hashes, other.hashes), self.n)

    def plain(self) -> dict[str, Any]:
        """Form for a YAML or JSON file."""
        packed = base64.b64encode(self.hashes.astype("<u8").tobytes()).decode()
        return {"ngram": self.n, "hashes": packed}

    @classmethod
    def from_plain(cls, value: Any, source: str) -> Fingerprints:
        """Read what :meth:`plain` wrote.

        Raises:
            InputError: it is something else; the message names the file ``source``.
        """
        try:
            raw = base64.b64decode(value["hashes"], validate=True)
            return cls(np.frombuffer(raw, "<u8").astype(np.uint64), int(value["ngram"]))
        except (TypeError, KeyError, ValueError, binascii.Error):
            raise InputError("fingerprints", source, "n-gram hashes as this harness writes them") from None


def check_disjoint(fingerprints: Fingerprints, samples: Iterable[tuple[str, Sequence[int]]], source: str) -> None:
    """Raise :class:`IntegrityError` for the first sample that shares text with the calibration.

    Args:
        fingerprints: of the calibration text.
        samples: name and token ids of each sample.
        source: the file that was made with the calibration text, for the message.
    """
    for name, ids in samples:
        position = fingerprints.shared_at(ids)
        if position is not None:
            raise IntegrityError(
                f"{name}: tokens {position} to {position + fingerprints.n - 1} are in the text that {source} was "
                "calibrated on; calibrate on other text, or evaluate on other samples"
            )


class Guard:
    """Checks each sample of a run against every text that its method was fitted on.

    Args:
        files: files with ``text: {fingerprints: ...}``; others among them (plain tables) say nothing and are left out.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self.known: list[tuple[str, Fingerprints]] = []
        for name in files:
            content = _mapping(name)
            text = content.get("text")
            if isinstance(text, Mapping) and "fingerprints" in text:
                self.known.append((name, Fingerprints.from_plain(text["fingerprints"], name)))

    def __call__(self, name: str, ids: Sequence[int]) -> None:
        """Raise :class:`IntegrityError` where the sample shares text with one of them."""
        for source, fingerprints in self.known:
            check_disjoint(fingerprints, [(name, ids)], source)


def _mapping(name: str) -> Mapping[str, Any]:
    file = Path(name).expanduser()
    if file.suffix not in (".yaml", ".yml", ".json"):
        return {}
    content = yaml.load(file.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return content if isinstance(content, Mapping) else {}


def _rolling(ids: Sequence[int], n: int) -> np.ndarray:
    """Hash of the n-gram at every position, uint64 [len(ids) - n + 1]."""
    tokens = np.asarray(ids, dtype=np.uint64) + np.uint64(1)
    count = len(tokens) - n + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    state = np.zeros(count, np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(n):
            state = state * _BASE + tokens[offset : offset + count]
        # The finaliser of SplitMix64: neighbouring sums end far apart.
        state = (state ^ (state >> np.uint64(30))) * _MIX[0]
        state = (state ^ (state >> np.uint64(27))) * _MIX[1]
    return state ^ (state >> np.uint64(31))
