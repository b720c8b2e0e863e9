"""Which sparse pattern each head of a model follows, and the tables that say so.

A table is a YAML or JSON file in one of two forms: ours, written by ``evalkit search-patterns``, a mapping that holds
under ``patterns`` one list a layer with one ``[pattern, size, ...]`` a query head; or that of MInference's published
configurations, a list with one mapping a layer from head number to ``[pattern, size, size, score]``.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError, near_matches

SIZES = {
    "vertical_slash": ("columns", "slashes"),
    "a_shape": ("initial tokens", "window tokens"),
    "block_sparse": ("blocks",),
}
"""What the numbers of each pattern count."""

PUBLISHED = {"vertical_and_slash": "vertical_slash", "stream_llm": "a_shape", "block_sparse": "block_sparse"}
"""Patterns of MInference's configurations under our names."""
PUBLISHED_BLOCKS = 100
"""Blocks of a block-sparse head in MInference, whatever its configuration says."""


@dataclass(frozen=True)
class HeadPattern:
    """The pattern of one head.

    Attributes:
        name: a key of :data:`SIZES`.
        sizes: its numbers, as :data:`SIZES` names them.
    """

    name: str
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.sizes))})"


@dataclass(frozen=True, eq=False)
class PatternTable:
    """The pattern of every head.

    Attributes:
        heads: ``heads[layer][head]``; every layer has the same number of heads.
        source: the file it came from, for errors.
        search: settings of the search that found the sizes; empty where the file does not say.
    """

    heads: tuple[tuple[HeadPattern, ...], ...]
    source: str
    search: Mapping[str, Any] = field(default_factory=dict)

    def check_model(self, field: str, layers: int, heads: int) -> None:
        """Raise :class:`InputError` naming ``field`` unless the table has one pattern for each head of the model."""
        shape = len(self.heads), len(self.heads[0])
        if shape != (layers, heads):
            raise InputError(
                field,
                self.source,
                f"a table of {layers} layers x {heads} query heads for this model (it has {shape[0]} x {shape[1]})",
            )

    def counts(self) -> Counter[HeadPattern]:
        """How many heads follow each pattern."""
        return Counter(pattern for layer in self.heads for pattern in layer)


def load_patterns(path: str, field: str) -> PatternTable:
    """Read a table file; a file read before is read again only when it has changed.

    Args:
        path: YAML or JSON file of either form.
        field: dotted name of the setting that names the file, for errors.

    Raises:
        InputError: no such file, not a table, an unknown pattern, or heads that are missing; the message names the
            place.
    """
    file = Path(path).expanduser()
    try:
        state = file.stat()
    except OSError as error:
        raise InputError(field, path, f"a readable table file ({error.strerror})") from None
    return _read(str(file), state.st_mtime_ns, state.st_size, field)


@functools.lru_cache(maxsize=64)
def _read(path: str, changed: int, size: int, field: str) -> PatternTable:
    import yaml  # a method without a table needs torch alone

    try:
        # JSON is YAML: one reader for both.
        content = yaml.load(
            Path(path).read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        )
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(field, path, f"a YAML or JSON table ({str(error).splitlines()[0]})") from None
    layers = content.get("patterns") if isinstance(content, Mapping) else content
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        raise InputError(field, path, "a table: patterns: with one list for each layer")
    rows = tuple(_layer(layer, number, path, field) for number, layer in enumerate(layers))
    for number, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise InputError(
                field, path, f"as many heads in layer {number} ({len(row)}) as in layer 0 ({len(rows[0])})"
            )
    searched = content.get("search") if isinstance(content, Mapping) else None
    return PatternTable(rows, path, searched if isinstance(searched, Mapping) else {})


def _layer(layer: Any, number: int, path: str, field: str) -> tuple[HeadPattern, ...]:
    if isinstance(layer, Mapping):
        named = {int(head): entry for head, entry in layer.items() if str(head).isdigit()}
        if not named or sorted(named) != list(range(len(layer))):
            raise InputError(field, path, f"heads 0, 1, 2, ... in layer {number}")
        entries = [_published(named[head]) for head in sorted(named)]
    elif isinstance(layer, Sequence) and not isinstance(layer, str) and layer:
        entries = list(layer)
    else:
        raise InputError(field, path, f"a list with one pattern for each head (layer {number})")
    return tuple(_pattern(entry, f"layer {number}, head {head}", path, field) for head, entry in enumerate(entries))


def _published(entry: Any) -> Any:
    """An entry of MInference's configurations in our form; what is no such entry is returned as it is."""
    if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) < 3 or entry[0] not in PUBLISHED:
        return entry
    name = PUBLISHED[entry[0]]
    return [name, PUBLISHED_BLOCKS] if name == "block_sparse" else [name, *entry[1:3]]


def _pattern(entry: Any, where: str, path: str, field: str) -> HeadPattern:
    if not isinstance(entry, Sequence) or isinstance(entry, str) or not entry:
        raise InputError(field, path, f"[pattern, size, ...] ({where} is {entry!r})")
    name, *sizes = entry
    if name not in SIZES:
        raise InputError(field, path, f"a known pattern ({where} is {name!r}); {near_matches(str(name), SIZES)}")
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes)
    if len(sizes) != len(SIZES[name]) or not whole:
        raise InputError(field, path, f"{name} with whole numbers of {' and '.join(SIZES[name])} ({where}: {sizes})")
    return HeadPattern(name, tuple(sizes))


def table_text(heads: Sequence[Sequence[HeadPattern]], facts: Mapping[str, Any]) -> str:
    """A table in our form as YAML, one head a line, under ``facts`` that say where it came from."""
    import yaml

    lines = [yaml.safe_dump(dict(facts), sort_keys=False, allow_unicode=True).rstrip(), "patterns:"]
    for layer in heads:
        for head, pattern in enumerate(layer):
            lines.append(f"{'- ' if head == 0 else '  '}- [{', '.join(map(str, (pattern.name, *pattern.sizes)))}]")
    return "\n".join(lines) + "\n"
