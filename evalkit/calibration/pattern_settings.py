"""Settings of ``evalkit search-patterns``, validated before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..config import CORPORA, CORPUS_SUFFIXES
from ..errors import InputError


@dataclass(frozen=True)
class PatternSearchConfig:
    """What is searched, and on what text (MInference, Algorithm 1 and Table 7).

    Attributes:
        length: tokens of a calibration window.
        windows: calibration windows; the paper uses one.
        text: ``essays`` or a local .txt, .json or .jsonl file; windows are cut from its second half.
        text_field: field that holds the text in JSON.
        initial, local: the A-shape whose executed blocks every candidate is brought to.
        columns: numbers of columns of the vertical-slash candidates; the number of diagonals follows from the target.
        step: slashes are found in multiples of it.
        block_size: query tile, and block of the block-sparse candidate.
        last_q: last queries that columns and diagonals are estimated from.
        execution: ``token`` or ``block``, as of the method that is to run the table.
    """

    length: int = 30000
    windows: int = 1
    text: str = "essays"
    text_field: str = "text"
    initial: int = 1024
    local: int = 4096
    columns: tuple[int, ...] = (30, 100, 500, 3000)
    step: int = 50
    block_size: int = 64
    last_q: int = 64
    execution: str = "token"

    def validate(self) -> None:
        """Raise InputError on the first bad value."""
        for name, least in (("length", 16), ("windows", 1), ("initial", 0), ("local", 1), ("step", 1), ("last_q", 1)):
            if getattr(self, name) < least:
                raise InputError(f"search.{name}", getattr(self, name), f"at least {least}")
        if self.initial + self.local >= self.length:
            allowed = (
                f"with search.initial={self.initial} less than search.length={self.length}: nothing would be left out"
            )
            raise InputError("search.local", self.local, allowed)
        if not self.columns or len(set(self.columns)) < len(self.columns) or not 1 <= min(self.columns):
            raise InputError("search.columns", list(self.columns), "different numbers of columns, each at least 1")
        if max(self.columns) >= self.length:
            raise InputError("search.columns", list(self.columns), f"each below search.length={self.length}")
        if self.block_size not in (64, 128):
            raise InputError("search.block_size", self.block_size, "64 or 128 tokens")
        if self.last_q > 128:
            raise InputError("search.last_q", self.last_q, "at most 128")
        if self.execution not in ("token", "block"):
            raise InputError("search.execution", self.execution, "token or block")
        if self.text not in CORPORA:
            path = Path(self.text).expanduser()
            allowed = f"{', '.join(CORPORA)} or a local file ending in {', '.join(CORPUS_SUFFIXES)}"
            if path.suffix not in CORPUS_SUFFIXES or not path.is_file():
                raise InputError("search.text", self.text, allowed)
