"""LongBench-v2 questions: the hub data set, a local file of the same schema or the self-made set, and their checks."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...errors import InputError, MissingAsset, near_matches
from ...task_settings import LONGBENCH_SMALL, is_path

LETTERS = ("A", "B", "C", "D")
DIFFICULTIES = ("easy", "hard")
LENGTHS = ("short", "medium", "long")
TEXTS = ("domain", "sub_domain", "question", "choice_A", "choice_B", "choice_C", "choice_D", "context")
SMALL_ID = "self-made-"
"""Start of the ids of the self-made set: a copy of it under another name is still known for what it is."""
OFFICIAL_COUNTS = {"easy": 192, "hard": 311}
SHOWN_PROBLEMS = 20


@dataclass(frozen=True)
class Item:
    """One question; the attributes are the fields of the published schema, ``_id`` without its underscore.

    Attributes:
        index: position in the data set.
    """

    index: int
    id: str
    domain: str
    sub_domain: str
    difficulty: str
    length: str
    question: str
    choice_A: str
    choice_B: str
    choice_C: str
    choice_D: str
    answer: str
    context: str

    @property
    def choices(self) -> tuple[str, str, str, str]:
        """The four choices in order."""
        return self.choice_A, self.choice_B, self.choice_C, self.choice_D

    @cached_property
    def sha256(self) -> str:
        """Checksum of everything in the question."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Question:
    """What a prompt without the text shows of an :class:`Item`, and nothing that tells its answer."""

    question: str
    choices: tuple[str, str, str, str]
    context: str = ""


@dataclass(frozen=True)
class Problem:
    """What is wrong with one record.

    Attributes:
        record: which one: its number, its line in a JSONL file, and its ``_id`` where it has one.
        message: field, value and what is allowed.
    """

    record: str
    message: str

    def __str__(self) -> str:
        return f"{self.record}: {self.message}"


@dataclass(frozen=True)
class NotJson:
    """A line that is not JSON, with the reason."""

    reason: str


def source_kind(items: Sequence[Item]) -> str:
    """``official`` for the whole published set by its size, ``self-made`` for ours, ``other`` for everything else."""
    if any(item.id.startswith(SMALL_ID) for item in items):
        return "self-made"
    return "official" if Counter(item.difficulty for item in items) == OFFICIAL_COUNTS else "other"


def read_items(data: str, revision: str | None = None) -> list[Item]:
    """Read a data set.

    Args:
        data: hub id, local .json or .jsonl file, or ``small`` for the self-made set.
        revision: hub revision.

    Raises:
        InputError: a local file that is missing or has a bad record, which the message names.
        MissingAsset: the hub cannot be reached, or has no such data set.
    """
    if data == LONGBENCH_SMALL:
        return read_file(small_file())
    if is_path(data):
        return read_file(Path(data).expanduser())
    from datasets import load_dataset

    try:
        rows = load_dataset(data, split="train", revision=revision)
    except Exception as error:  # datasets raises its own, the hub's and the network's errors alike
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        first = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        raise MissingAsset(
            f"data set {data} is not to be had from the hub ({first}); download its data.json elsewhere and give the "
            f"file's path, or use the self-made set, {LONGBENCH_SMALL}"
        ) from None
    return _checked(data, [(f"record {i}", row) for i, row in enumerate(rows)])


def small_file() -> Path:
    """The self-made set's file."""
    return Path(str(files("evalkit.benchmarks.longbench_v2") / "small.jsonl"))


def read_file(path: Path) -> list[Item]:
    """Read a local file.

    Raises:
        InputError: the file is missing or not of the schema; the message names the first bad record.
    """
    return _checked(str(path), raw_records(path))


def _checked(name: str, raw: Sequence[tuple[str, Any]]) -> list[Item]:
    found = problems(raw)
    if found:
        more = f" (and {len(found) - 1} more; see evalkit validate)" if len(found) > 1 else ""
        raise InputError("task.data", name, f"{found[0]}{more}")
    return [_item(index, row) for index, (_, row) in enumerate(raw)]


def _item(index: int, row: dict[str, Any]) -> Item:
    rest = {key: row[key] for key in (*TEXTS, "difficulty", "length", "answer")}
    return Item(index=index, id=row["_id"], **rest)


def raw_records(path: Path) -> list[tuple[str, Any]]:
    """Records of a file with what each is called in messages, unchecked.

    Raises:
        InputError: the file cannot be read, or is not JSON at all.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError("task.data", str(path), f"a readable file ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError("task.data", str(path), f"UTF-8 text (byte {error.start} is not)") from None
    if path.suffix == ".jsonl":
        return list(_lines(text))
    try:
        content = _parsed(text)
    except ValueError as error:
        raise InputError("task.data", str(path), f"a JSON list of records ({error})") from None
    if not isinstance(content, list):
        raise InputError("task.data", str(path), f"a JSON list of records, not {_kind(content)}")
    return [(f"record {number}", row) for number, row in enumerate(content)]


def _lines(text: str) -> Iterator[tuple[str, Any]]:
    number = 0
    for line_number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        name = f"record {number} (line {line_number})"
        try:
            yield name, _parsed(line)
        except ValueError as error:
            yield name, NotJson(str(error))
        number += 1


def _parsed(text: str) -> Any:
    """JSON without repeated fields, of which Python's parser would silently take the last.

    Raises:
        ValueError: the text is not that, or nested too deeply to be read.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"field {repeated!r} is given twice")
    return found


def problems(raw: Sequence[tuple[str, Any]]) -> list[Problem]:
    """Everything wrong with some records; a file without records is a problem too."""
    if not raw:
        return [Problem("file", "holds no record")]
    found: list[Problem] = []
    seen: dict[str, str] = {}
    for name, row in raw:
        if isinstance(row, NotJson):
            found.append(Problem(name, f"not JSON ({row.reason})"))
            continue
        if not isinstance(row, dict):
            found.append(Problem(name, f"must be an object, not {_kind(row)}"))
            continue
        identity = row.get("_id")
        named = f"{name}, _id {identity!r}" if isinstance(identity, str) and identity else name
        found += [Problem(named, message) for message in _record_problems(row)]
        if isinstance(identity, str) and identity:
            if identity in seen:
                found.append(Problem(named, f"_id is that of {seen[identity]} too"))
            seen.setdefault(identity, name)
    return found


def _record_problems(row: dict[str, Any]) -> Iterator[str]:
    closed = {"difficulty": DIFFICULTIES, "length": LENGTHS, "answer": LETTERS}
    for name in ("_id", *TEXTS, *closed):
        if name not in row:
            close = near_matches(name, row).partition("? known")[0] if row else ""
            hint = f" ({close}?)" if close.startswith("did you mean") else ""
            yield f"field {name} is missing{hint}"
            continue
        value = row[name]
        if not isinstance(value, str):
            yield f"field {name} must be a string, not {_kind(value)}"
        elif name in closed and value not in closed[name]:
            yield f"{name}={value!r}: must be one of {', '.join(closed[name])}"
        elif any("\ud800" <= character <= "\udfff" for character in value):
            yield f"field {name} holds half a surrogate pair, which is no text"
        elif not value.strip():
            yield f"field {name} is empty"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def validate_file(path: Path) -> tuple[list[str], list[Problem]]:
    """Check a file.

    Returns:
        Lines that describe it, and everything wrong with it.

    Raises:
        InputError: the file cannot be read at all.
    """
    if path.suffix not in (".json", ".jsonl"):
        raise InputError("FILE", str(path), "a .json file (a list of records) or a .jsonl file (a record a line)")
    raw = raw_records(path)
    found = problems(raw)
    if found:
        return [], found
    items = [_item(index, row) for index, (_, row) in enumerate(raw)]
    words = sorted(len(item.context.split()) for item in items)

    def counts(name: str, values: Sequence[str]) -> str:
        counted = Counter(getattr(item, name) for item in items)
        return ", ".join(f"{value} {counted[value]}" for value in values)

    kind = source_kind(items)
    what = {
        "official": "as many easy and hard questions as the published set",
        "self-made": "the self-made set; its scores are no LongBench-v2 scores",
        "other": "not the whole published set (192 easy and 311 hard questions)",
    }[kind]
    return [
        f"{len(items)} questions, {what}",
        counts("difficulty", DIFFICULTIES),
        counts("length", LENGTHS),
        f"answers: {counts('answer', LETTERS)}",
        f"context: {words[0]} to {words[-1]} words, median {words[len(words) // 2]}",
    ], []
