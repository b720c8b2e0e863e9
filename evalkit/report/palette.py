"""Colour and marker of each method, the same in every figure and on the page.

A style depends on the series' name and not on what else a figure shows. A method has one colour, which no other method
has; its variants (skip, order, execution) differ in marker and filling. These alone tell the named series apart, for
print in grey. Colours are Okabe and Ito's and Tol's, without yellow (vanishes on white); each has a lighter twin for a
dark background.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

DENSE = "#1a1a1a"
DENSE_ON_DARK = "#f0f0f0"
FRONTIER = "#8a8a8a"

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Style:
    """How a series is drawn.

    Attributes:
        colour: on white.
        on_dark: on a dark background.
        marker: as matplotlib names it.
        filled: or an outline only.
    """

    colour: str
    on_dark: str
    marker: str
    filled: bool = True


_BLUE, _SKY = ("#0072B2", "#4DB2F0"), ("#56B4E9", "#8CD0F5")
_VERMILION, _GREEN = ("#D55E00", "#F58A3C"), ("#009E73", "#33CFA2")
_PURPLE, _ORANGE = ("#CC79A7", "#E6A3C6"), ("#E69F00", "#F7C04A")
_WINE, _OLIVE, _INDIGO = ("#882255", "#D66A9E"), ("#999933", "#CFCF66"), ("#332288", "#9D8CF2")
_STEEL, _BROWN = ("#5F6B76", "#AAB6C2"), ("#8C5A2B", "#C89B6C")
_SPARE = (
    ("#44AA99", "#7FD4C6"),
    ("#CC6677", "#E89AA6"),
    ("#117733", "#5FBF7F"),
    ("#AA4499", "#DD88CC"),
    ("#661100", "#C97B63"),
)
"""For methods that are not named below; where a figure has more of them, they share these and differ in shape."""

STYLES = {
    "dense": Style(DENSE, DENSE_ON_DARK, "*"),
    "cosa": Style(*_BLUE, "o"),
    "cosa, no skip": Style(*_BLUE, "o"),
    "cosa, skip, hrm_first": Style(*_BLUE, "o", filled=False),
    "cosa, skip, ascending": Style(*_BLUE, ">"),
    "cosa, skip, descending": Style(*_BLUE, "<", filled=False),
    "xattention": Style(*_VERMILION, "s"),
    "flexprefill": Style(*_GREEN, "^"),
    "minference": Style(*_PURPLE, "D"),
    "minference, token": Style(*_PURPLE, "D"),
    "minference, block": Style(*_PURPLE, "d", filled=False),
    "blasst": Style(*_SKY, "v"),
    "blasst, skip, ascending": Style(*_SKY, "v"),
    "blasst, skip, descending": Style(*_SKY, "v", filled=False),
    "flashprefill": Style(*_ORANGE, "P"),
    "spargeattn": Style(*_WINE, "X"),
    "pageweaver": Style(*_BROWN, "h"),
    "streaming": Style(*_OLIVE, "p"),
    "oracle_topk": Style(*_INDIGO, "D", filled=False),
    "random": Style(*_STEEL, "X", filled=False),
}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#999933", "#332288")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""For figures of things that are no methods, such as kernels: two cycles of different length tell many apart."""
_SHAPES = tuple(
    (marker, filled)
    for filled in (False, True)
    for marker in ("h", "s", "^", "p", "P", "d", ">", "<", "o", "v", "D", "X")
)
_TAKEN = {(style.marker, style.filled) for style in STYLES.values()}


def styles(series: Iterable[str]) -> dict[str, Style]:
    """Style by series name.

    A series without a style of its own takes a shape that no named one has by a hash of its name, and the next free one
    where a figure would show the same twice; an unknown method takes its colour in the same way.
    """
    names = sorted(set(series))
    found = {name: STYLES[name] for name in names if name in STYLES}
    hues = _hues(names)
    for name in names:
        if name not in found:
            hue = hues[_method(name)]
            used = {(style.marker, style.filled) for style in found.values()}
            same = {(style.marker, style.filled) for style in found.values() if style.colour == hue[0]}
            shapes = _candidates(name)
            # Shapes run out before names do: then a shape comes again, in another colour.
            free = [shape for shape in shapes if shape not in used] or [shape for shape in shapes if shape not in same]
            marker, filled = (free or shapes)[0]
            found[name] = Style(*hue, marker, filled)
    return found


def _method(series: str) -> str:
    return series.partition(",")[0]


def _hues(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colours on white and on dark of the methods of some series."""
    found: dict[str, tuple[str, str]] = {}
    for method in sorted({_method(name) for name in names}):
        if method in STYLES:
            found[method] = (STYLES[method].colour, STYLES[method].on_dark)
            continue
        ordered = _turned(_SPARE, method)
        found[method] = next((hue for hue in ordered if hue not in found.values()), ordered[0])
    return found


def _candidates(name: str) -> list[tuple[str, bool]]:
    """Shapes for a series that is not named: the method's own in the other filling, then any; named series' last."""
    shapes = _turned(_SHAPES, name)
    base = STYLES.get(_method(name))
    if base is not None:
        shapes = [(base.marker, not base.filled), *shapes]
    return sorted(shapes, key=lambda shape: shape in _TAKEN)


def _turned(items: Sequence[_Item], name: str) -> list[_Item]:
    """The items from one on that a hash of the name chooses, round to the one before it."""
    start = zlib.crc32(name.encode()) % len(items)
    return [*items[start:], *items[:start]]
