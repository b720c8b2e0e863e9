"""Colour and marker of each method, the same in every figure and on the page.

A style depends on the series' name and not on what else a figure shows. Colours are Okabe and Ito's and Tol's, without
yellow (vanishes on white). Marker and filling alone tell the named series apart, so that a figure survives grey print;
each colour has a lighter twin for a dark background.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

DENSE = "#1a1a1a"
DENSE_ON_DARK = "#f0f0f0"
FRONTIER = "#8a8a8a"


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
_STEEL = ("#5F6B76", "#AAB6C2")
_HUES = (_BLUE, _VERMILION, _GREEN, _PURPLE, _SKY, _ORANGE, _WINE, _OLIVE, _INDIGO, _STEEL)

STYLES = {
    "dense": Style(DENSE, DENSE_ON_DARK, "*"),
    "cosa": Style(*_BLUE, "o"),
    "cosa, no skip": Style(*_BLUE, "o"),
    "cosa, skip, hrm_first": Style(*_ORANGE, "o", filled=False),
    "cosa, skip, ascending": Style(*_VERMILION, ">"),
    "cosa, skip, descending": Style(*_GREEN, "<"),
    "xattention": Style(*_VERMILION, "s"),
    "flexprefill": Style(*_GREEN, "^"),
    "minference": Style(*_PURPLE, "D"),
    "blasst": Style(*_SKY, "v"),
    "blasst, skip, ascending": Style(*_SKY, "v"),
    "blasst, skip, descending": Style(*_SKY, "v", filled=False),
    "flashprefill": Style(*_ORANGE, "P"),
    "spargeattn": Style(*_WINE, "X"),
    "streaming": Style(*_OLIVE, "p"),
    "oracle_topk": Style(*_INDIGO, "D", filled=False),
    "random": Style(*_STEEL, "X", filled=False),
}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#999933", "#332288")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""For figures of things that are no methods, such as kernels: two cycles of different length tell many apart."""
_POOL = tuple(
    Style(*hue, marker, filled) for filled, marker, hue in product((False, True), ("h", "s", "^", "p", "P", "d"), _HUES)
)


def styles(series: Iterable[str]) -> dict[str, Style]:
    """Style by series name.

    A series without a style of its own takes one by a hash of its name, and the next free one where a figure would
    show the same style twice.
    """
    names = sorted(set(series))
    found = {name: STYLES[name] for name in names if name in STYLES}
    for name in names:
        if name not in found:
            used = set(found.values())
            found[name] = next((style for style in _candidates(name) if style not in used), _POOL[0])
    return found


def _candidates(name: str) -> Iterator[Style]:
    base = STYLES.get(name.partition(",")[0])
    if base is not None:
        yield Style(base.colour, base.on_dark, base.marker, filled=not base.filled)
    start = zlib.crc32(name.encode()) % len(_POOL)
    yield from (_POOL[(start + step) % len(_POOL)] for step in range(len(_POOL)))
