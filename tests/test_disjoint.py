"""Calibration text and samples: ranges that touch, shared runs wherever they lie, and the guard of a run."""

from __future__ import annotations

import random

import pytest
import yaml

from evalkit.calibration.disjoint import NGRAM, Fingerprints, Guard, Span, check_disjoint, check_spans
from evalkit.errors import InputError, IntegrityError


def text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(50000), k=length)


@pytest.mark.parametrize(
    "start,stop,meets", [(0, 10, False), (0, 11, True), (19, 30, True), (20, 30, False), (12, 13, True), (0, 99, True)]
)
def test_ranges(start, stop, meets):
    calibration, sample = Span("a", 10, 20), Span("a", start, stop)
    assert calibration.meets(sample) == sample.meets(calibration) == meets
    check_spans([calibration], [Span("b", start, stop)])
    if meets:
        with pytest.raises(InputError, match=f"calibrate.text='characters 10-20'.*{start}-{stop}"):
            check_spans([Span("a", 500, 600), calibration], [Span("a", 900, 901), sample])
    else:
        check_spans([calibration], [sample])


@pytest.mark.parametrize("n", [8, NGRAM])
def test_every_long_run_is_found_wherever_it_lies(n):
    calibration = text(1000, 0)
    prints = Fingerprints.of([calibration], n)
    for source in (0, 1, n - 1, n, n + 1, 500, 1000 - (2 * n - 1)):
        for place in (0, 1, n, 333):
            sample = text(700, 1)
            sample[place : place + 2 * n - 1] = calibration[source : source + 2 * n - 1]
            found = prints.shared_at(sample)
            assert found is not None and place <= found < place + n
    assert prints.shared_at(calibration[-n:]) == 0, "the end of the text belongs to it"


def test_short_runs_and_other_texts_are_not_found():
    calibration = text(1000, 0)
    prints = Fingerprints.of([calibration], 16)
    sample = text(700, 1)
    sample[100:115] = calibration[160:175]
    assert prints.shared_at(sample) is None
    assert prints.shared_at(text(100000, 2)) is None
    assert prints.shared_at(calibration[:15]) is None and Fingerprints.of([], 16).shared_at(calibration) is None
    assert Fingerprints.of([calibration[:15]], 16).shared_at(calibration) is None
    assert prints.shared_at([x + 1 for x in calibration]) is None
    assert prints.shared_at(calibration[::-1]) is None, "order counts"


def test_fingerprints_survive_a_file_and_join():
    a, b = text(300, 0), text(300, 1)
    prints = Fingerprints.of([a], 16)
    again = Fingerprints.from_plain(yaml.safe_load(yaml.safe_dump(prints.plain())), "file")
    assert (again.hashes == prints.hashes).all() and again.n == 16
    both = prints | Fingerprints.of([b], 16)
    assert both.shared_at(a) == 0 and both.shared_at(b) == 0 and prints.shared_at(b) is None
    with pytest.raises(ValueError, match="16 and 8"):
        prints | Fingerprints.of([a], 8)
    for broken in (None, {}, {"ngram": 16}, {"ngram": 16, "hashes": "?"}, {"ngram": 16, "hashes": "abcd"}):
        with pytest.raises(InputError, match="fingerprints='file'"):
            Fingerprints.from_plain(broken, "file")


def test_the_first_sample_that_shares_is_named():
    calibration = text(500, 0)
    prints = Fingerprints.of([calibration])
    check_disjoint(prints, [("one", text(500, 1))], "cal.yaml")
    with pytest.raises(IntegrityError, match="two: tokens 3 to 66 .*cal.yaml was calibrated on"):
        check_disjoint(prints, [("one", text(500, 1)), ("two", [1, 2, 3, *calibration])], "cal.yaml")


def test_the_guard_reads_files_that_say_what_they_were_fitted_on(tmp_path):
    a, b = text(300, 0), text(300, 1)
    for name, ids in (("a", a), ("b", b)):
        content = {"text": {"fingerprints": Fingerprints.of([ids]).plain()}, "values": [[1.0]]}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "table.yaml").write_text("[[0.5]]")
    (tmp_path / "other.txt").write_text("?")
    guard = Guard(str(tmp_path / name) for name in ("a.yaml", "b.yaml", "table.yaml", "other.txt"))
    guard("clean", text(300, 2))
    for ids in (a, b):
        with pytest.raises(IntegrityError, match="w: tokens 0 to 63"):
            guard("w", ids)
    Guard([])("any", a)
