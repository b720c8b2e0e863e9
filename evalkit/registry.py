"""A typed registry whose entries may be named before they are imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from .errors import InputError, near_matches

T = TypeVar("T")


class Registry(Generic[T]):
    """Map names to objects of one kind.

    Entries are given eagerly with the :meth:`register` decorator, or lazily as ``"package.module:attribute"``
    so that listing names imports nothing heavy.

    Args:
        kind: the field name used in error messages, e.g. ``"method"``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T | str] = {}

    def add_lazy(self, name: str, target: str) -> None:
        """Name an entry by import path; it is imported on first :meth:`get`."""
        self._claim(name, target)

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that stores the object under ``name``."""

        def store(obj: T) -> T:
            self._claim(name, obj)
            return obj

        return store

    def get(self, name: str) -> T:
        """Return the entry, importing it if lazy.

        Raises:
            InputError: unknown name; the message lists near matches.
        """
        if name not in self._entries:
            raise InputError(self.kind, name, near_matches(name, self._entries))
        entry = self._entries[name]
        if isinstance(entry, str):
            module, attribute = entry.split(":")
            entry = getattr(importlib.import_module(module), attribute)
            self._entries[name] = entry
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def _claim(self, name: str, entry: T | str) -> None:
        present = self._entries.get(name)
        if present is not None and present != entry:
            raise ValueError(f"{self.kind} {name!r} is registered twice: {present!r} and {entry!r}")
        self._entries[name] = entry
