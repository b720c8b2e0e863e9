"""Build RULER samples and keep them on disk.

A sample depends on (seed, task, length, index), the tokenizer and the corpora, never on how many samples are built,
on other tasks or on other lengths. The cache key hashes all of that with the generator's version, so a stale file
cannot be read; a file's checksum is compared before it is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, overload

import pyarrow as pa
import pyarrow.parquet as pq

from ...assets import cache_dir, sha256_file
from ...corpora import Corpora
from ...errors import InputError, IntegrityError, StoreError, near_matches
from ...prompts import PromptRenderer
from . import aggregation, niah, qa, vt
from .fit import Context, Draft, TooShort, fit, smallest

GENERATOR_VERSION = 1
"""Raise it with any change that can alter a sample."""

_ROWS = 8
_SCHEMA = pa.schema(
    [
        ("index", pa.int64()),
        ("prompt", pa.large_string()),
        ("answer_prefix", pa.string()),
        ("references", pa.list_(pa.string())),
        ("prompt_tokens", pa.int64()),
        ("units", pa.int64()),
        ("sha256", pa.string()),
    ]
)


@dataclass(frozen=True)
class Sample:
    """One prompt with what is expected of the answer.

    Attributes:
        task: RULER task name.
        length: tokens that prompt and reserved output may fill.
        index: number of the sample within (task, length, seed).
        prompt: rendered text; tokenise it with ``add_special_tokens=False``.
        answer_prefix: start of the answer that the prompt ends with ("" when the model thinks first).
        references: expected strings.
        metric: ``"all"`` or ``"any"``, see :func:`.score.score`.
        max_new_tokens: output tokens that the length holds.
        prompt_tokens: number of tokens of ``prompt``.
        seed: the run's seed.
        units: number of context units (noise lines, words, documents, ...) in the prompt.
    """

    task: str
    length: int
    index: int
    prompt: str
    answer_prefix: str
    references: tuple[str, ...]
    metric: str
    max_new_tokens: int
    prompt_tokens: int
    seed: int
    units: int = 0

    def sha256(self) -> str:
        """Return the checksum of everything in the sample."""
        # The prompt is hashed as it is: escaping half a megabyte as JSON would take longer than making it.
        rest = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "prompt"}
        digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
        digest.update(b"\0" + self.prompt.encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class TaskSpec:
    """What distinguishes one task."""

    maker: Callable[[Context], Callable[[int], Draft]]
    max_new_tokens: int
    metric: str
    corpora: tuple[str, ...]


def _niah_corpora(name: str) -> tuple[str, ...]:
    return ("words", "essays") if niah.SETTINGS[name].haystack == "essay" else ("words",)


SPECS: dict[str, TaskSpec] = {
    **{name: TaskSpec(niah.maker, niah.MAX_NEW_TOKENS, "all", _niah_corpora(name)) for name in niah.SETTINGS},
    "vt": TaskSpec(vt.maker, vt.MAX_NEW_TOKENS, "all", ()),
    "cwe": TaskSpec(aggregation.cwe, aggregation.CWE_MAX_NEW_TOKENS, "all", ("words",)),
    "fwe": TaskSpec(aggregation.fwe, aggregation.FWE_MAX_NEW_TOKENS, "all", ()),
    **{name: TaskSpec(qa.maker, qa.MAX_NEW_TOKENS, "any", (corpus,)) for name, corpus in qa.CORPUS.items()},
}
TASKS: tuple[str, ...] = tuple(SPECS)


def task_spec(task: str) -> TaskSpec:
    """Return a task's specification.

    Raises:
        InputError: unknown task; the message lists near matches.
    """
    if task not in SPECS:
        raise InputError("task.tasks", task, near_matches(task, SPECS))
    return SPECS[task]


def _check(length: int, count: int, seed: int, start: int = 0) -> None:
    for field, value, least in (
        ("task.length", length, 1),
        ("task.limit", count, 1),
        ("task.seed", seed, 0),
        ("start", start, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(field, value, f"an integer, at least {least}")


class Builder:
    """Make samples of one (task, length, seed) for one tokenizer.

    Args:
        task: RULER task name.
        length: tokens for prompt and reserved output together.
        seed: the run's seed.
        renderer: tokenizer and prompt format.
        corpora: where texts come from.
        max_new_tokens: tokens to reserve instead of the official number (a model that thinks needs more).
        exact: count every prompt as a whole while fitting; slow, needed where units' costs do not add up. ``None``
            decides by checking, see :meth:`verify`.
    """

    def __init__(
        self,
        task: str,
        length: int,
        *,
        seed: int,
        renderer: PromptRenderer,
        corpora: Corpora,
        max_new_tokens: int | None = None,
        exact: bool | None = None,
    ) -> None:
        self.spec = task_spec(task)
        _check(length, 1, seed)
        self.reserve = self.spec.max_new_tokens if max_new_tokens is None else max_new_tokens
        if self.reserve < 1:
            raise InputError("max_new_tokens", max_new_tokens, "an integer, at least 1")
        self.context = Context(task, length, seed, renderer, corpora)
        self.exact = exact
        self._draft = self.spec.maker(self.context)

    def sample(self, index: int) -> Sample:
        """Return sample ``index``.

        Raises:
            InputError: the length is too short for the sample, or longer than the task's material.
        """
        context = self.context
        draft = self._draft(index)
        text, units, tokens = fit(draft, context, self.reserve, exact=bool(self.exact))
        return Sample(
            task=context.task,
            length=context.length,
            index=index,
            prompt=text,
            answer_prefix=draft.prefix if context.renderer.keeps_prefix else "",
            references=draft.references,
            metric=self.spec.metric,
            max_new_tokens=self.reserve,
            prompt_tokens=tokens,
            seed=context.seed,
            units=units,
        )

    def needs(self, index: int) -> int:
        """Return the shortest length that holds sample ``index``: its smallest prompt and the reserved output."""
        return smallest(self._draft(index), self.context, exact=bool(self.exact)) + self.reserve

    def prompt(self, index: int, units: int) -> str:
        """Return the prompt of sample ``index`` with another number of units, fitting or not."""
        draft = self._draft(index)
        return self.context.renderer.render(draft.user(units), draft.prefix)

    def message(self, index: int, units: int) -> tuple[str, str]:
        """Return sample ``index`` before it is rendered: the user's message and the answer prefix."""
        draft = self._draft(index)
        return draft.user(units), draft.prefix

    def verify(self, indices: Sequence[int]) -> None:
        """Decide how to count, once: compare the given samples with their full token counts.

        Where one differs, and for a tokenizer whose tokens can span units, all samples are counted in full.
        """
        if self.exact is None:
            self.exact = not self.context.renderer.splits_words
            if self.exact:
                return
            for index in indices:
                sample = self.sample(index)
                if self.context.renderer.count(sample.prompt) != sample.prompt_tokens:
                    self.exact = True
                    break

    def samples(self, start: int, stop: int) -> Iterator[Sample]:
        """Yield samples ``start`` to ``stop - 1``; the first, a middle and the last one are verified first.

        Raises:
            InputError: the length is too short for one of them; the message says how many tokens all of them need.
        """
        try:
            self.verify(sorted({start, (start + stop) // 2, stop - 1}))
            for index in range(start, stop):
                yield self.sample(index)
        except TooShort:
            context, needed = self.context, max(self.needs(index) for index in range(start, stop))
            raise InputError(
                "task.length",
                context.length,
                f"too short for {context.task}: samples {start} to {stop - 1} need at least {needed} tokens, "
                f"{self.reserve} of them reserved for the output",
            ) from None


def build(
    task: str,
    length: int,
    count: int,
    *,
    seed: int,
    renderer: PromptRenderer,
    corpora: Corpora,
    start: int = 0,
    max_new_tokens: int | None = None,
) -> list[Sample]:
    """Build samples ``start`` to ``start + count - 1`` in memory.

    Args:
        task: RULER task name.
        length: tokens for prompt and reserved output together.
        count: number of samples.
        seed: the run's seed.
        renderer: tokenizer and prompt format.
        corpora: where texts come from.
        start: index of the first sample.
        max_new_tokens: tokens to reserve instead of the official number.

    Raises:
        InputError: unknown task, bad number, or a length that the task cannot fill.
    """
    _check(length, count, seed, start)
    builder = Builder(task, length, seed=seed, renderer=renderer, corpora=corpora, max_new_tokens=max_new_tokens)
    return list(builder.samples(start, start + count))


class SampleSet(Sequence[Sample]):
    """Samples 0 to n - 1 of one (task, length, seed), read from disk as they are asked for.

    Attributes:
        folder: where the files are.
        data_checksum: SHA-256 over the samples' own checksums: the same samples give the same value, however many
            files or additions they came in.
    """

    def __init__(self, folder: Path, parts: list[dict[str, Any]], count: int, fixed: dict[str, Any]) -> None:
        self.folder = folder
        self._parts = parts
        self._count = count
        self._fixed = fixed
        self._held: tuple[tuple[str, int], list[Sample]] | None = None
        digests: list[str] = []
        for part in parts:
            try:
                digests += pq.read_table(folder / part["file"], columns=["sha256"])["sha256"].to_pylist()
            except (OSError, pa.ArrowException) as error:
                raise _corrupt(folder / part["file"], str(error)) from None
        if len(digests) < count:
            raise _corrupt(folder, f"{len(digests)} samples where {count} are listed")
        self.data_checksum = hashlib.sha256("\n".join(digests[:count]).encode()).hexdigest()

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        """Return one sample or a list of samples."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        number = index + self._count if index < 0 else index
        if not 0 <= number < self._count:
            raise IndexError(index)
        part = next(part for part in self._parts if part["start"] <= number < part["stop"])
        group, row = divmod(number - part["start"], _ROWS)
        if self._held is None or self._held[0] != (part["file"], group):
            self._held = ((part["file"], group), self._read(part["file"], group))
        return self._held[1][row]

    def _read(self, file: str, group: int) -> list[Sample]:
        try:
            with pq.ParquetFile(self.folder / file) as parquet:
                rows = parquet.read_row_group(group).to_pylist()
        except (OSError, pa.ArrowException) as error:
            raise _corrupt(self.folder / file, str(error)) from None
        samples = []
        for row in rows:
            row.pop("sha256")
            row["references"] = tuple(row["references"])
            samples.append(Sample(**self._fixed, **row))
        return samples


def _corrupt(path: Path, problem: str) -> StoreError:
    folder = path if path.is_dir() else path.parent
    return StoreError(f"{path}: corrupt sample cache ({problem}); to rebuild it, run: rm -r {folder}")


def load(
    task: str,
    length: int,
    count: int,
    *,
    seed: int,
    renderer: PromptRenderer,
    corpora: Corpora,
    max_new_tokens: int | None = None,
    root: str | os.PathLike[str] | None = None,
) -> SampleSet:
    """Return samples 0 to ``count - 1``, building only those that are not on disk yet.

    Args:
        task: RULER task name.
        length: tokens for prompt and reserved output together.
        count: number of samples; a larger number later adds to what is there.
        seed: the run's seed.
        renderer: tokenizer and prompt format.
        corpora: where texts come from.
        max_new_tokens: tokens to reserve instead of the official number.
        root: folder of the cache, ``cache_dir()/samples`` by default.

    Raises:
        InputError: unknown task, bad number, or a length that the task cannot fill.
        StoreError: a cached file is corrupt; the message names it and says how to rebuild.
    """
    _check(length, count, seed)
    spec = task_spec(task)
    reserve = spec.max_new_tokens if max_new_tokens is None else max_new_tokens
    identity = {
        "generator": GENERATOR_VERSION,
        "task": task,
        "length": length,
        "seed": seed,
        "max_new_tokens": reserve,
        "tokenizer": renderer.fingerprint,
        "corpora": {name: corpora.sha256(name) for name in spec.corpora},
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    folder = (Path(root) if root is not None else cache_dir() / "samples") / f"{task}-{length}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        parts = _manifest(folder, identity)
        for part in parts:
            _verify_part(folder, part)
        have = parts[-1]["stop"] if parts else 0
        if have < count:
            builder = Builder(
                task, length, seed=seed, renderer=renderer, corpora=corpora, max_new_tokens=max_new_tokens
            )
            parts.append(_write_part(folder, builder, have, count))
            _replace(folder / "manifest.json", json.dumps({"identity": identity, "parts": parts}, indent=1))
    fixed = {"task": task, "length": length, "metric": spec.metric, "max_new_tokens": reserve, "seed": seed}
    return SampleSet(folder, [part for part in parts if part["start"] < count], count, fixed)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process build at a time; the others wait and then read what it wrote."""
    with open(folder / ".lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _manifest(folder: Path, identity: dict[str, Any]) -> list[dict[str, Any]]:
    path = folder / "manifest.json"
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text())
        parts = [
            {"file": str(p["file"]), "start": int(p["start"]), "stop": int(p["stop"]), "sha256": str(p["sha256"])}
            for p in content["parts"]
        ]
        known = content["identity"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _corrupt(path, f"{type(error).__name__}: {error}") from None
    if known != identity:
        raise _corrupt(path, "it describes other samples")
    if [p["start"] for p in parts] != [0, *(p["stop"] for p in parts)][: len(parts)]:
        raise _corrupt(path, "its parts do not follow one another")
    return parts


def _verify_part(folder: Path, part: dict[str, Any]) -> None:
    path = folder / part["file"]
    try:
        found = sha256_file(path)
    except OSError as error:
        raise _corrupt(path, error.strerror or "unreadable") from None
    if found != part["sha256"]:
        raise _corrupt(path, f"expected sha256 {part['sha256']}, found {found}")


def _write_part(folder: Path, builder: Builder, start: int, stop: int) -> dict[str, Any]:
    handle, scratch = tempfile.mkstemp(dir=folder, prefix=".part-")
    os.close(handle)
    try:
        options = {"compression": "zstd", "compression_level": 1, "use_dictionary": False}
        with pq.ParquetWriter(scratch, _SCHEMA, **options) as writer:
            rows: list[dict[str, Any]] = []
            for sample in builder.samples(start, stop):
                if sample.prompt_tokens + sample.max_new_tokens > sample.length:
                    raise IntegrityError(f"{sample.task} sample {sample.index} does not fit its length {sample.length}")
                row = {name: getattr(sample, name) for name in _SCHEMA.names if name != "sha256"}
                rows.append({**row, "references": list(sample.references), "sha256": sample.sha256()})
                if len(rows) == _ROWS:
                    writer.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), row_group_size=_ROWS)
                    rows = []
            if rows:
                writer.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), row_group_size=_ROWS)
        file = f"{start:06d}-{stop:06d}.parquet"
        digest = sha256_file(scratch)
        os.replace(scratch, folder / file)
    finally:
        Path(scratch).unlink(missing_ok=True)
    return {"file": file, "start": start, "stop": stop, "sha256": digest}


def _replace(path: Path, text: str) -> None:
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(scratch, path)
