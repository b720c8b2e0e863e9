"""Errors a user can act on: one line that names the field, the value and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EvalkitError(Exception):
    """Base of every error the command line prints as one line, without a traceback."""


class InputError(EvalkitError, ValueError):
    """A value the user gave that cannot be used.

    Args:
        field: dotted name of the setting, as written on the command line.
        value: what was given.
        allowed: what would have been accepted, in words.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"{field}={value!r}: {allowed}")

    def __reduce__(self) -> tuple[type[InputError], tuple[str, object, str]]:
        # Exceptions are rebuilt from ``args`` when they cross a process; ours holds one formatted string there.
        return type(self), (self.field, self.value, self.allowed)


class MissingAsset(EvalkitError):
    """A model, corpus or package that is needed and not here; the message says how to get it."""


class StoreError(EvalkitError):
    """A results directory that cannot be trusted: corrupt record, wrong identity, second writer."""


class IntegrityError(EvalkitError):
    """A run that finished but proves nothing: call accounting, RoPE, prompt or identity checks failed."""


def near_matches(name: str, known: Iterable[str]) -> str:
    """Return "did you mean ...? known: ..." for an unknown ``name``."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}? " if close else ""
    return f"{hint}known: {', '.join(known)}"
