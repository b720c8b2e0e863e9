"""Settings of generation and of LongBench-v2; :mod:`evalkit.config` puts them together with the rest of a cell."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import InputError, near_matches

if TYPE_CHECKING:
    from .config import ModelConfig

SAMPLINGS = ("greedy", "recommended")
LONGBENCH_MODES = ("direct", "cot", "loglikelihood")
LONGBENCH_HUB = "zai-org/LongBench-v2"
LEAST_TRUNCATE_AT = 64
LONGBENCH_SMALL = "small"
"""Name of the self-made set that ships with the harness."""


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise InputError(name, value, allowed)


def _at_least(name: str, value: int | None, minimum: int) -> None:
    _require(value is None or value >= minimum, name, value, f"must be an integer of at least {minimum}, or null")


def _seed(name: str, value: int) -> None:
    _require(0 <= value < 2**32, name, value, "must be an integer from 0 to 2^32 - 1")


def check_precision(value: float | None) -> None:
    """Raise InputError on a precision that no interval has."""
    ok = value is None or (math.isfinite(value) and 0 < value < 0.5)
    _require(ok, "task.precision", value, "a half-width above 0, below 0.5 (0.02 = two points), or null")


def is_path(text: str) -> bool:
    """Whether a name of data is written as a local file and not as a hub id."""
    return text.startswith(("/", "./", "../", "~")) or Path(text).suffix in (".json", ".jsonl")


# ----------------------------------------------------------------------------------------------------- generation
@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; applied in this order.

    Args:
        temperature: divides the logits.
        top_k: only the k most likely tokens; 0 = all.
        top_p: of these the shortest prefix, by falling probability, that reaches this mass.
        min_p: of these the tokens with at least this share of the largest probability.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def validate(self, prefix: str) -> None:
        """Raise InputError on the first bad value; ``prefix`` is the dotted name of these settings."""
        ok = math.isfinite(self.temperature) and self.temperature > 0
        _require(
            ok, f"{prefix}.temperature", self.temperature, "must be a number above 0; greedy is a sampling of its own"
        )
        _require(self.top_k >= 0, f"{prefix}.top_k", self.top_k, "must be an integer of at least 0")
        _require(0 < self.top_p <= 1, f"{prefix}.top_p", self.top_p, "must be above 0 and at most 1")
        _require(0 <= self.min_p < 1, f"{prefix}.min_p", self.min_p, "must be at least 0 and below 1")


@dataclass(frozen=True)
class Recommended:
    """The sampling that a model's card recommends.

    Args:
        plain: without thinking.
        thinking: with thinking.
    """

    plain: Sampling | None = None
    thinking: Sampling | None = None

    def validate(self) -> None:
        """Raise InputError on the first bad value."""
        for name in ("plain", "thinking"):
            sampling = getattr(self, name)
            if sampling is not None:
                sampling.validate(f"model.recommended.{name}")


@dataclass(frozen=True)
class GenerationConfig:
    """How answers are generated.

    Args:
        sampling: ``greedy``, or ``recommended``: what ``model.recommended`` says for the model's thinking mode.
        seed: seed of the sampling; every sample draws from a stream of its own, so the order of samples and an
            interruption change nothing.
        max_new_tokens: tokens of an answer; ``None`` = the task's own number.
        thinking_tokens: longest thinking block, needed where ``model.thinking`` is true. It lies inside the task's
            length. A block that is not closed by then leaves no answer.
    """

    sampling: str = "greedy"
    seed: int = 0
    max_new_tokens: int | None = None
    thinking_tokens: int | None = None

    def validate(self) -> None:
        """Raise InputError on the first bad value."""
        _require(
            self.sampling in SAMPLINGS,
            "task.generation.sampling",
            self.sampling,
            near_matches(self.sampling, SAMPLINGS),
        )
        _seed("task.generation.seed", self.seed)
        _at_least("task.generation.max_new_tokens", self.max_new_tokens, 1)
        _at_least("task.generation.thinking_tokens", self.thinking_tokens, 1)

    def check(self, model: ModelConfig) -> None:
        """Raise InputError where these settings and the model's do not go together."""
        self.resolve(model)
        name, value = "task.generation.thinking_tokens", self.thinking_tokens
        if model.thinking:
            _require(
                value is not None, name, value, "must be given with model.thinking=true: the longest thinking block"
            )
        else:
            _require(value is None, name, value, f"null with model.thinking={model.thinking}: nothing is thought")

    def check_fits(self, length: int, answer: int) -> None:
        """Raise InputError where the output alone fills a length that also holds the prompt.

        Args:
            length: of the task, tokens.
            answer: longest output without thinking, tokens.
        """
        if answer >= length:
            name, value, most = "max_new_tokens", self.max_new_tokens, length - 1
        else:
            name, value, most = "thinking_tokens", self.thinking_tokens, length - 1 - answer
            if self.thinking_tokens is None or self.thinking_tokens <= most:
                return
        own = "" if name == "thinking_tokens" or value is not None else f", and the task's own number is {answer}"
        allowed = f"must be at most {most}: task.length={length} also holds the prompt{own}"
        raise InputError(f"task.generation.{name}", value, allowed)

    def resolve(self, model: ModelConfig) -> Sampling | None:
        """The sampling that applies, ``None`` for greedy.

        Raises:
            InputError: the model's settings recommend none.
        """
        if self.sampling == "greedy":
            return None
        mode = "thinking" if model.thinking else "plain"
        found: Sampling | None = getattr(model.recommended, mode)
        if found is None and model.thinking and model.recommended.plain is not None:
            allowed = (
                f"null or false: model {model.name} has no thinking mode (its card recommends a sampling, and none for "
                "thinking); it reasons in two stages: task=longbench-v2-cot, for the paper's Table 2 "
                "sweep=paper_table2_llama"
            )
            raise InputError("model.thinking", model.thinking, allowed)
        if found is None:
            allowed = f"greedy: model {model.name} has no model.recommended.{mode}"
            raise InputError("task.generation.sampling", self.sampling, allowed)
        return found

    def label(self) -> str:
        """What differs from plain greedy decoding, for labels; empty if nothing."""
        parts = [f"sampled, seed {self.seed}"] if self.sampling != "greedy" else []
        parts += [f"thinking {self.thinking_tokens}"] if self.thinking_tokens is not None else []
        return ", ".join(parts)


# --------------------------------------------------------------------------------------------------- LongBench-v2
@dataclass(frozen=True)
class LongBenchV2Config:
    """LongBench-v2: multiple-choice questions over long texts.

    Args:
        name: always ``longbench_v2``.
        mode: ``direct`` asks for the answer (w/o CoT); ``cot`` first asks for a chain of thought over the text and
            then, without the text, for the answer; ``loglikelihood`` reads the probabilities of the four choices
            right after the prefill, so nothing is decoded.
        data: hub id, local .json or .jsonl file of the same schema, or ``small``: the self-made set.
        revision: hub revision.
        length: prompt and output together, in tokens; it decides the RoPE factor.
        truncate_at: longest message in tokens, before the chat template; the middle of a longer one is cut out.
        limit: number of questions, a seeded choice; ``None`` = all.
        precision: stop before the limit once the 95 % interval of the accuracy is at most this far to each side, see
            :mod:`evalkit.precision`; the questions are then asked in a seeded order. ``None`` = always run all.
        seed: seed of that choice.
        generation: how answers are generated.
    """

    name: str = "longbench_v2"
    mode: str = "direct"
    data: str = LONGBENCH_HUB
    revision: str | None = None
    length: int = 131072
    truncate_at: int = 120000
    limit: int | None = None
    precision: float | None = None
    seed: int = 42
    generation: GenerationConfig = field(default_factory=GenerationConfig)

    @property
    def label(self) -> str:
        """Short name for tables and progress lines."""
        source = Path(self.data).name if is_path(self.data) else self.data
        parts = [self.mode, self.generation.label(), "self-made set" if self.data == LONGBENCH_SMALL else source]
        count = "all" if self.limit is None else str(self.limit)
        return f"longbench_v2@{self.length} ({', '.join(part for part in parts if part)} x {count})"

    def validate(self) -> None:
        """Raise InputError on the first bad value; a local file must exist (what it holds is read later)."""
        _require(self.name == "longbench_v2", "task.name", self.name, "longbench_v2")
        _require(self.mode in LONGBENCH_MODES, "task.mode", self.mode, near_matches(self.mode, LONGBENCH_MODES))
        self._validate_data()
        _at_least("task.length", self.length, 256)
        ok = LEAST_TRUNCATE_AT <= self.truncate_at < self.length
        below = f"below task.length={self.length}, which also holds the output"
        allowed = f"must be an integer from {LEAST_TRUNCATE_AT} to {below}"
        _require(ok, "task.truncate_at", self.truncate_at, allowed)
        _at_least("task.limit", self.limit, 1)
        check_precision(self.precision)
        _seed("task.seed", self.seed)
        self.generation.validate()
        if self.mode == "loglikelihood":
            greedy = self.generation.sampling == "greedy"
            _require(greedy, "task.generation.sampling", self.generation.sampling, "greedy: nothing is generated")
            unset = self.generation.max_new_tokens is None
            _require(
                unset, "task.generation.max_new_tokens", self.generation.max_new_tokens, "null: nothing is generated"
            )

    def _validate_data(self) -> None:
        if self.data == LONGBENCH_SMALL:
            return
        if is_path(self.data):
            path = Path(self.data).expanduser()
            _require(path.is_file(), "task.data", self.data, "no such file")
            _require(
                path.suffix in (".json", ".jsonl"), "task.data", self.data, "a local file must end in .json or .jsonl"
            )
            return
        hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", self.data) is not None
        known = near_matches(self.data, (LONGBENCH_SMALL, LONGBENCH_HUB))
        _require(hub_id, "task.data", self.data, f"{known}; or a local .json or .jsonl file, or owner/name")

    def check(self, model: ModelConfig) -> None:
        """Raise InputError where the mode and the model's thinking do not go together, or the output cannot fit."""
        if model.thinking and self.mode != "direct":
            why = {
                "cot": "a model that thinks reasons by itself",
                "loglikelihood": "the choices are read before anything is thought",
            }
            raise InputError("task.mode", self.mode, f"direct with model.thinking=true: {why[self.mode]}")
        from .benchmarks.longbench_v2.samples import answer_limits

        self.generation.check(model)
        self.generation.check_fits(self.length, answer_limits(self)[0])
