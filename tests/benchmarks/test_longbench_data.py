"""LongBench-v2 records: checks, the self-made set with answers worked out again from its texts, and the command."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from evalkit.benchmarks.longbench_v2 import make_small
from evalkit.benchmarks.longbench_v2.data import read_items, small_file, source_kind, validate_file
from evalkit.cli import main
from evalkit.errors import InputError, MissingAsset


def record(number=0, **changes):
    base = {"_id": f"q{number}", "domain": "d", "sub_domain": "s", "difficulty": "easy", "length": "short"}
    base |= {"question": "Who?", "answer": "A", "context": "Some text.", "extra": 1}
    return {**base, **{f"choice_{letter}": f"choice {letter}" for letter in "ABCD"}, **changes}


def without(name):
    made = record(1)
    del made[name]
    return made


def write(path, rows, lines=False):
    path.write_text("\n".join(json.dumps(row) for row in rows) if lines else json.dumps(rows))
    return path


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_a_good_file_is_read_in_order(tmp_path, suffix):
    path = write(
        tmp_path / f"data.{suffix}", [record(0), record(1, answer="D", context="line\u2028one")], suffix == "jsonl"
    )
    items = read_items(str(path))
    assert [(item.index, item.id, item.answer) for item in items] == [(0, "q0", "A"), (1, "q1", "D")]
    assert items[1].context == "line\u2028one" and items[0].choices == tuple(f"choice {x}" for x in "ABCD")
    assert items[0].sha256 != items[1].sha256
    assert validate_file(path)[1] == []


BAD = [
    (without("context"), "field context is missing"),
    (without("_id"), "field _id is missing"),
    ({**without("question"), "questoin": "?"}, r"field question is missing \(did you mean questoin\?\)"),
    (record(1, answer="E"), "answer='E': must be one of A, B, C, D"),
    (record(1, answer="a"), "answer='a'"),
    (record(1, difficulty="Easy"), "difficulty='Easy': must be one of easy, hard"),
    (record(1, length="tiny"), "length='tiny': must be one of short, medium, long"),
    (record(1, choice_C=3), "field choice_C must be a string, not a number"),
    (record(1, question=" \n"), "field question is empty"),
    (record(1, context="half \ud83d"), "field context holds half a surrogate pair"),
    (record(1, context=None), "field context must be a string, not null"),
    (record(0), "_id is that of record 0"),
    ([1], "must be an object, not a list"),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[message[:24] for _, message in BAD])
@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_a_bad_record_is_named(tmp_path, suffix, bad, message):
    path = write(tmp_path / f"data.{suffix}", [record(0), bad, record(2)], suffix == "jsonl")
    place = r"record 1 \(line 2\)" if suffix == "jsonl" else "record 1"
    with pytest.raises(InputError, match=f"task.data=.*{place}.*{message}"):
        read_items(str(path))
    lines, problems = validate_file(path)
    assert not lines and len(problems) == 1


def test_files_that_are_no_records(tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps(record(0)) + "\n\n{not json\n" + json.dumps(record(0)))
    found = [str(problem) for problem in validate_file(broken)[1]]
    assert found[0].startswith("record 1 (line 3): not JSON") and "record 2 (line 4)" in found[1]
    for content, message in [("{", "a JSON list of records"), ("{}", "not an object"), ("[]", "holds no record")]:
        path = tmp_path / "data.json"
        path.write_text(content)
        with pytest.raises(InputError, match=message):
            read_items(str(path))
    path.write_bytes(b"[\xff]")
    with pytest.raises(InputError, match="UTF-8 text .byte 1"):
        read_items(str(path))
    with pytest.raises(InputError, match="No such file"):
        read_items(str(tmp_path / "absent.json"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 200_000 + "]" * 200_000, "nested too deeply"),
        (json.dumps(record(0))[:-1] + ', "answer": "B"}', "field 'answer' is given twice"),
    ],
)
def test_json_that_python_reads_badly_is_one_line(tmp_path, capsys, line, message):
    for path, text in ((tmp_path / "a.jsonl", line), (tmp_path / "a.json", f"[{line}]")):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            read_items(str(path))
        assert main(["validate", str(path)]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert message in said


def test_the_hub_out_of_reach_is_one_clear_error(monkeypatch):
    import datasets

    def fail(*_, **__):
        try:
            raise ConnectionError("no route to the hub\nand more")
        except ConnectionError as error:
            raise ValueError("wrapped") from error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(MissingAsset, match=r"zai-org/LongBench-v2 is not to be had.*no route to the hub\); download"):
        read_items("zai-org/LongBench-v2")


def test_hub_rows_are_checked_like_a_file(monkeypatch):
    import datasets

    asked = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or [record(0), record(1, answer="")]
    )
    with pytest.raises(InputError, match="record 1, _id 'q1': answer=''"):
        read_items("owner/set", "abc")
    assert asked == [(("owner/set",), {"split": "train", "revision": "abc"})]


def test_what_counts_as_the_published_set():
    rows = [record(i, difficulty="easy" if i < 192 else "hard") for i in range(503)]
    items = [make_item(row, i) for i, row in enumerate(rows)]
    assert source_kind(items) == "official"
    assert source_kind(items[1:]) == "other"
    assert source_kind(read_items("small")) == "self-made"


def make_item(row, index):
    from evalkit.benchmarks.longbench_v2.data import _item

    return _item(index, row)


# -------------------------------------------------------------------------------------------------- the self-made set
def test_the_file_is_what_its_maker_makes():
    assert small_file().read_text(encoding="utf-8") == make_small.text()


def test_the_self_made_set_is_balanced():
    items = read_items("small")
    assert len(items) == 36 and all(len(set(item.choices)) == 4 for item in items)
    assert Counter(item.answer for item in items) == dict.fromkeys("ABCD", 9)
    cells = Counter((item.domain, item.difficulty, item.length) for item in items)
    assert len(cells) == 36 and set(cells.values()) == {1}
    words = {name: [len(item.context.split()) for item in items if item.length == name] for name in make_small.WORDS}
    assert max(words["short"]) < min(words["medium"]) and max(words["medium"]) < min(words["long"])


def solve(item):
    """The answer's text, worked out from the context alone."""
    text, question = item.context, item.question
    if item.sub_domain == "Chronicle":
        if item.difficulty == "easy":
            return re.search(r"week (.+?) bought a stuffed heron", text)[1]
        spent = Counter()
        for name, price in re.findall(r"^On .*?([A-Z][a-z]+ [A-Z][a-z]+) bought .* for (\d+) shillings", text, re.M):
            spent[name] += int(price)
        (first, most), (_, second) = spent.most_common(2)
        assert most > second
        return first
    if item.sub_domain == "Letters":
        writer, town = re.search(r"number\. (.+?) to the registry\. The sealed map .* house in (\w+),", text).groups()
        return writer if item.difficulty == "easy" else re.search(rf"warden of {town} is (.+?)\.", text)[1]
    if item.sub_domain == "Phrase book":
        lexicon = {meaning: word for word, meaning in re.findall(r"The word (\w+) means (\w+)\.", text)}
        if item.difficulty == "easy":
            return next(meaning for meaning, word in lexicon.items() if f" {word} " in question)
        quality, noun = re.search(r"'many (\w+) (\w+)s'", question).groups()
        ending = re.search(r"ending -(\w+)", text)[1]
        return f"{lexicon[noun]}{ending} {lexicon[quality]}"
    if item.sub_domain == "Meeting":
        if item.difficulty == "hard":
            return re.findall(r"fair (?:at|to) (.+?)\. All", text)[-1]
        task = re.search(r"promised to (.+)\?", question)[1]
        return re.search(rf"^(.+?): I will {task}", text, re.M)[1]
    if item.sub_domain == "Code base":
        if item.difficulty == "easy":
            name = question.split()[-1].rstrip("?")
            return re.findall(r"# file: (\S+)", text[: text.index(f"def {name}(")])[-1]
        scope: dict = {}
        for part in re.findall(r"^def .*?(?=^def |^# file|\Z)", text, re.M | re.S):
            exec(part, scope)
        return str(scope["run"]())
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    if item.difficulty == "easy":
        number = re.search(r"\d+", question)[0]
        return next(row[1] for row in rows if row[0] == number)
    tons = Counter()
    for row in rows:
        tons[row[2]] += int(row[4])
    (first, most), (_, second) = tons.most_common(2)
    assert most > second
    return first


@pytest.mark.parametrize(
    "item", read_items("small"), ids=lambda item: f"{item.sub_domain}-{item.difficulty}-{item.length}"
)
def test_the_known_answers_follow_from_the_texts(item):
    assert solve(item) == item.choices["ABCD".index(item.answer)]


# -------------------------------------------------------------------------------------------------------- the command
def test_validate_describes_a_good_file(capsys):
    assert main(["validate", str(small_file())]) == 0
    out = capsys.readouterr().out
    assert "36 questions, the self-made set; its scores are no LongBench-v2 scores" in out
    assert "easy 18, hard 18" in out and "short 12, medium 12, long 12" in out and "A 9, B 9, C 9, D 9" in out


def test_validate_names_every_bad_record(tmp_path, capsys):
    rows = [record(0), record(1, answer="X"), record(2, length="huge"), *[record(i, context="") for i in range(3, 40)]]
    assert main(["validate", str(write(tmp_path / "bad.jsonl", rows, lines=True))]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert (
        "record 1 (line 2), _id 'q1': answer='X'" in lines[0]
        and "record 2 (line 3), _id 'q2': length='huge'" in lines[1]
    )
    assert len(lines) == 21 and lines[-1].endswith("and 19 more")
    assert main(["validate", str(tmp_path / "none.json")]) == 2
    assert main(["validate", str(tmp_path)]) == 2
