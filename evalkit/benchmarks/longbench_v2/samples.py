"""Prompts of LongBench-v2 questions for one tokenizer, kept on disk: a long document is cut and rendered once.

A prompt depends on its question, the mode, the limit of tokens and the renderer; its file is named by a hash of them
and holds its own checksum. A damaged file is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, overload

from ...assets import cache_dir
from ...errors import InputError, StoreError
from ...prompts import PromptRenderer
from ...task_settings import LEAST_TRUNCATE_AT, LongBenchV2Config
from .data import Item, read_items, source_kind
from .prompts import ANSWER_PREFIX, ANSWER_TOKENS, REASONING_TOKENS, TEMPLATES, cut_middle, fill

PROMPTS_VERSION = 2
"""Raise it with any change that can alter a prompt."""


@dataclass(frozen=True)
class Prompt:
    """The prompt of one question.

    Attributes:
        text: rendered; tokenise it with ``add_special_tokens=False``.
        tokens: number of its tokens.
        message_tokens: tokens of the message before it was cut.
        truncated: the message's middle was cut out.
        answer_prefix: what the prompt ends with, "" for a free answer.
    """

    text: str
    tokens: int
    message_tokens: int
    truncated: bool
    answer_prefix: str

    @property
    def sha256(self) -> str:
        """Checksum of everything in the prompt."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


class PromptSet(Sequence[Prompt]):
    """Prompts of the chosen questions, read as they are asked for; the texts of the questions are not held.

    Attributes:
        items: the questions without their contexts.
        kind: see :func:`.data.source_kind`, of the whole data set.
        task: name in records: the self-made set has one of its own.
        mode, length, truncate_at: the cell's settings.
        limit: tokens of an answer or, in the ``cot`` mode, of the reasoning.
        answer_limit: tokens of the answer that follows the reasoning.
        checksum: sha256 over questions and prompts.
        total: number of questions in the data set.
    """

    def __init__(
        self, config: LongBenchV2Config, items: list[Item], kind: str, total: int, files: list[Path], sums: list[str]
    ) -> None:
        self.items, self.kind, self.total = items, kind, total
        family = "longbench_v2_small" if kind == "self-made" else "longbench_v2"
        self.task = f"{family}_{config.mode}"
        self.mode, self.length, self.truncate_at = config.mode, config.length, config.truncate_at
        self.limit, self.answer_limit = answer_limits(config)
        self._files, self._sums = files, sums
        parts = [[item.sha256, digest] for item, digest in zip(items, sums, strict=True)]
        self.checksum = hashlib.sha256(json.dumps([kind, parts]).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._files)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        """Return one prompt, or a list."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        prompt = _read(self._files[index])
        if prompt is None or prompt.sha256 != self._sums[index]:
            raise StoreError(f"{self._files[index]}: changed since the cell began; run the cell again")
        return prompt


def answer_limits(config: LongBenchV2Config) -> tuple[int, int]:
    """Tokens of the first output and, in the ``cot`` mode, of the answer that follows it."""
    if config.mode == "loglikelihood":
        return 0, 0
    asked = config.generation.max_new_tokens
    if config.mode == "direct":
        return asked or ANSWER_TOKENS, 0
    return asked or REASONING_TOKENS, min(asked or ANSWER_TOKENS, ANSWER_TOKENS)


def load(config: LongBenchV2Config, renderer: PromptRenderer, root: Path | None = None) -> PromptSet:
    """The prompts of a cell.

    Args:
        config: validated settings.
        renderer: tokenizer and prompt format.
        root: folder of the cache, ``cache_dir()/samples`` by default.

    Raises:
        InputError: a bad record, a limit above the number of questions, a prompt that the length does not hold, or a
            chat template whose thinking is neither on nor off.
        MissingAsset: the hub's data set is not to be had.
    """
    if renderer.switchable and renderer.thinking is None:
        raise InputError("model.thinking", None, "true or false: this model's chat template thinks unless it is told")
    whole = read_items(config.data, config.revision)
    kind, total = source_kind(whole), len(whole)
    chosen = choose(whole, config)
    folder = (root if root is not None else cache_dir() / "samples") / "longbench_v2"
    folder.mkdir(parents=True, exist_ok=True)
    files, sums = [], []
    for item in chosen:
        name = [PROMPTS_VERSION, config.mode, config.truncate_at, renderer.fingerprint, item.sha256]
        file = folder / f"{hashlib.sha256(json.dumps(name).encode()).hexdigest()[:24]}.json"
        prompt = _read(file)
        if prompt is None:
            prompt = make(item, config, renderer)
            _write(file, prompt)
        _check_fits(item, prompt, config)
        files.append(file)
        sums.append(prompt.sha256)
    light = [_without_context(item) for item in chosen]
    return PromptSet(config, light, kind, total, files, sums)


def choose(items: list[Item], config: LongBenchV2Config) -> list[Item]:
    """The questions that a limit keeps, in the data set's order; a larger limit adds to a smaller one's.

    With a precision they come in the seeded order, so that the first of them are a random sample.

    Raises:
        InputError: the data set has fewer.
    """
    if config.limit is None and config.precision is None:
        return items
    limit = len(items) if config.limit is None else config.limit
    if limit > len(items):
        raise InputError("task.limit", config.limit, f"at most {len(items)}, the number of questions, or null")
    order = list(range(len(items)))
    random.Random(config.seed).shuffle(order)
    kept = order[:limit]
    return [items[i] for i in (kept if config.precision is not None else sorted(kept))]


def make(item: Item, config: LongBenchV2Config, renderer: PromptRenderer) -> Prompt:
    """Fill, cut and render one question."""
    cut = cut_middle(fill(TEMPLATES[config.mode], item), config.truncate_at, renderer.tokenizer)
    prefix = ANSWER_PREFIX if config.mode == "loglikelihood" else ""
    text = renderer.render(cut.text, prefix)
    return Prompt(text, renderer.count(text), cut.tokens, cut.truncated, prefix)


def _check_fits(item: Item, prompt: Prompt, config: LongBenchV2Config) -> None:
    output = answer_limits(config)[0] + (config.generation.thinking_tokens or 0)
    if prompt.tokens + output > config.length:
        fits = min(prompt.message_tokens, config.truncate_at) - (prompt.tokens + output - config.length)
        if fits < LEAST_TRUNCATE_AT:  # no cut of the message makes room
            least = config.length - fits + LEAST_TRUNCATE_AT
            allowed = (
                f"must be at least {least} even at task.truncate_at={LEAST_TRUNCATE_AT}: the output may have {output} "
                f"tokens, and the prompt of {item.id} stands before it"
            )
            raise InputError("task.length", config.length, allowed)
        allowed = (
            f"must be at most {fits}: the prompt of {item.id} has {prompt.tokens} tokens, the output may have "
            f"{output}, and task.length is {config.length}"
        )
        raise InputError("task.truncate_at", config.truncate_at, allowed)


def _without_context(item: Item) -> Item:
    # The checksum is remembered: it covers the context that is let go of.
    light = Item(**{**asdict(item), "context": ""})
    light.__dict__["sha256"] = item.sha256
    return light


def _read(file: Path) -> Prompt | None:
    """A prompt whose file is whole, else None."""
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        prompt = Prompt(**content["prompt"])
        return prompt if prompt.sha256 == content["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, prompt: Prompt) -> None:
    scratch = file.with_suffix(f".{os.getpid()}")
    content = {"prompt": asdict(prompt), "sha256": prompt.sha256}
    scratch.write_text(json.dumps(content), encoding="utf-8")
    os.replace(scratch, file)
