"""Tables with one number for each layer and query head, such as a Top-p threshold a head.

A table file is YAML or JSON: a list with one list of numbers a layer, or a mapping that holds such a list under
``values`` beside whatever else is worth writing down.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InputError


@dataclass(frozen=True, eq=False)
class HeadTable:
    """One number for each layer and query head.

    Attributes:
        values: ``values[layer][head]``; every layer has the same number of heads.
        source: the file it came from, for errors.
    """

    values: tuple[tuple[float, ...], ...]
    source: str

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.values)

    @property
    def heads(self) -> int:
        """Number of query heads of each layer."""
        return len(self.values[0])

    def check_model(self, field: str, layers: int, heads: int) -> None:
        """Raise :class:`InputError` naming ``field`` unless the table has one number for each head of the model."""
        if (self.layers, self.heads) != (layers, heads):
            wanted = f"a table of {layers} layers x {heads} query heads, as this model has"
            raise InputError(field, self.source, f"{wanted} (it is {self.layers} x {self.heads})")

    def row(self, layer: int, device: torch.device) -> Tensor:
        """Values of one layer's heads, float64 [heads]; copied to a device once, so that no call waits for it."""
        return _on(self, device)[layer]


@functools.lru_cache(maxsize=16)
def _on(table: HeadTable, device: torch.device) -> Tensor:
    return torch.tensor(table.values, dtype=torch.float64, device=device)


def load_table(path: str, field: str, *, above: float = -math.inf, at_most: float = math.inf) -> HeadTable:
    """Read a table file; a file read before is read again only when it has changed.

    Args:
        path: YAML or JSON file.
        field: dotted name of the setting that names the file, for errors.
        above, at_most: range of the values.

    Raises:
        InputError: no such file, not a table, ragged rows, or a value out of range; the message names the place.
    """
    file = Path(path).expanduser()
    try:
        state = file.stat()
    except OSError as error:
        raise InputError(field, path, f"a readable table file ({error.strerror})") from None
    return _read(str(file), state.st_mtime_ns, state.st_size, field, above, at_most)


@functools.lru_cache(maxsize=64)
def _read(path: str, changed: int, size: int, field: str, above: float, at_most: float) -> HeadTable:
    import yaml  # a method without a table needs torch alone

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = Path(path).read_text(encoding="utf-8")
        # The YAML reader takes a number like 1e-05, as JSON writes it, for text.
        content = json.loads(text) if path.endswith(".json") else yaml.load(text, Loader=loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(field, path, f"a YAML or JSON table ({str(error).splitlines()[0]})") from None
    rows = content.get("values") if isinstance(content, dict) else content
    return table_from(rows, path, field, above=above, at_most=at_most)


def table_from(
    rows: object, source: str, field: str, *, above: float = -math.inf, at_most: float = math.inf
) -> HeadTable:
    """Make a table of nested lists.

    Raises:
        InputError: not one equally long, non-empty list of numbers a layer, or a value out of range.
    """
    lists = (list, tuple)
    if not isinstance(rows, lists) or not rows or not all(isinstance(row, lists) and row for row in rows):
        raise InputError(field, source, "a table: a list with one list of numbers for each layer")
    for layer, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise InputError(
                field, source, f"as many values in layer {layer} ({len(row)}) as in layer 0 ({len(rows[0])})"
            )
        for head, value in enumerate(row):
            good = isinstance(value, (int, float)) and not isinstance(value, bool) and above < value <= at_most
            if not good:
                limits = f" above {above:g} and at most {at_most:g}" if math.isfinite(above) else ""
                raise InputError(field, source, f"numbers{limits} (layer {layer}, head {head} is {value!r})")
    return HeadTable(tuple(tuple(float(value) for value in row) for row in rows), source)
