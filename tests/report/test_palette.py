from __future__ import annotations

import itertools

import pytest

from evalkit.methods import METHODS
from evalkit.report.palette import STYLES, styles

ALIKE = {"cosa, no skip": "cosa", "blasst, skip, ascending": "blasst", "minference, token": "minference"}


def test_named_series_are_told_apart_without_colour():
    shapes: dict[tuple[str, bool], str] = {}
    for name, style in STYLES.items():
        other = shapes.setdefault((style.marker, style.filled), ALIKE.get(name, name))
        assert other == ALIKE.get(name, name), f"{name} has the shape of {other}"


def test_a_style_does_not_depend_on_the_others():
    names = [*STYLES, "new, skip, ascending", "newer"]
    alone = {name: styles([name])[name] for name in names}
    for pair in itertools.combinations(names, 2):
        found = styles(pair)
        if alone[pair[0]] != alone[pair[1]]:
            assert found == {name: alone[name] for name in pair}


def test_many_unknown_series_differ():
    found = styles([f"method{i}" for i in range(60)])
    assert len(set(found.values())) == 60


def test_a_variant_of_a_method_keeps_its_colour_and_shape():
    base, variant = STYLES["xattention"], styles(["xattention, skip, descending"])["xattention, skip, descending"]
    assert (variant.colour, variant.marker, variant.filled) == (base.colour, base.marker, not base.filled)


VARIANTS = ["", ", no skip", ", token", ", block"]
VARIANTS += [f", skip, {order}" for order in ("hrm_first", "ascending", "descending")]


def test_every_series_of_a_method_has_its_colour_and_no_other_has_it():
    assert set(METHODS) <= set(STYLES), "each method of the harness has a colour of its own"
    names = [f"{method}{variant}" for method in [*METHODS, "new", "newer"] for variant in VARIANTS]
    found = styles(names)
    owners: dict[str, set[str]] = {}
    for name in names:
        for colour in (found[name].colour, found[name].on_dark):
            owners.setdefault(colour, set()).add(name.partition(",")[0])
    assert all(len(methods) == 1 for methods in owners.values()), owners
    assert len(owners) == 2 * (len(list(METHODS)) + 2), "one colour a method and ground"
    assert {style.marker for style in found.values()} <= set("o><s^DdvPXhp*"), "what the page draws, too"
    spare = {style.colour for style in styles(f"method{i}" for i in range(60)).values()}
    assert not spare & {style.colour for style in STYLES.values()}


@pytest.mark.parametrize("method", [*METHODS, "new"])
def test_variants_of_a_method_are_told_apart_without_colour(method):
    """Beside every named series, too."""
    found = styles([*STYLES, *(f"{method}{variant}" for variant in VARIANTS)])
    shapes: dict[tuple[str, bool], str] = {}
    for name, style in found.items():
        other = shapes.setdefault((style.marker, style.filled), ALIKE.get(name, name))
        assert other == ALIKE.get(name, name), f"{name} has the shape of {other}"


@pytest.mark.parametrize("ground", ["light", "dark"])
def test_colours_stand_out_from_their_ground(ground):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    back = luminance("#ffffff" if ground == "light" else "#14171a")
    for name, style in STYLES.items():
        front = luminance(style.colour if ground == "light" else style.on_dark)
        contrast = (max(front, back) + 0.05) / (min(front, back) + 0.05)
        assert contrast > 2, f"{name}: {contrast:.2f}"
