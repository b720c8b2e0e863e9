import pytest

from evalkit.benchmarks.ruler import score
from evalkit.errors import InputError

DATES = ["1994", "in the year 1994", "June 1994"]


@pytest.mark.parametrize(
    ("metric", "output", "references", "expected"),
    [
        ("any", "in 1994", DATES, 1.0),
        ("all", "in 1994", DATES, 1 / 3),
        ("any", "in 1995", DATES, 0.0),
        ("any", "IN THE YEAR 1994.", ["in the year 1994"], 1.0),
        ("all", "VAR abcde, FGHIJ", ["ABCDE", "fghij", "KLMNO", "PQRST"], 0.5),
        ("all", "", ["x"], 0.0),
        ("all", "12345678", ["234"], 1.0),
        # Control characters become line breaks; they neither join nor hide what is around them.
        ("all", "\x00\x07foo\x1fbar\x00", ["foo\nbar"], 1.0),
        ("all", "foo\tbar", ["foobar"], 0.0),
        ("all", "foo\tbar", ["foo\tbar"], 0.0),
        ("any", "\x01\n yes \x02", ["yes"], 1.0),
    ],
)
def test_score(metric, output, references, expected):
    assert score(metric, output, references) == pytest.approx(expected)


def test_bad_calls():
    with pytest.raises(InputError, match="metric='mean'"):
        score("mean", "x", ["x"])
    with pytest.raises(InputError, match="references"):
        score("all", "x", [])
