"""The results store: one directory a cell, one record a sample, safe against a kill at any moment.

``<out>/cells/<key>/`` holds

* ``cell.json``: identity, settings, status; replaced atomically;
* ``samples.jsonl``: one line a finished sample, appended and synced;
* ``budget/*.parquet``: counts per layer and head, one file a sample while the cell runs, merged into
  ``budget.parquet`` when it is finished;
* ``traceback.txt`` after a failure, ``.lock`` held by the one process that may write.

A sample's Parquet file is complete before its line is written, so a line vouches for both. What a kill can leave
behind is a Parquet file without a line, or a last line without its end; both belong to the sample in flight and are
dropped.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import socket
import time
import traceback
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from .errors import EvalkitError, InputError, IntegrityError, StoreError

FORMAT = 1
RUNNING, FAILED, DONE = "running", "failed", "done"
CELLS, CELL, SAMPLES, BUDGET, TRACEBACK, LOCK = (
    "cells",
    "cell.json",
    "samples.jsonl",
    "budget.parquet",
    "traceback.txt",
    ".lock",
)
PARTS = "budget"
IDENTITY_SECTIONS = ("model", "method", "task", "execution", "data", "versions", "device")
TWIN_FREE = ("method", "execution")
"""Sections that may differ between a sparse cell and its dense twin."""
COUNTS = ("dense", "visited", "computed", "dense_blocks", "visited_blocks", "computed_blocks")
BUDGET_COLUMNS = ("layer", "head", *COUNTS)

SampleKey = tuple[str, int, int]

_log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------------- identity
def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text, before and after a round trip.

    Raises:
        StoreError: ``value`` holds something that JSON cannot, NaN and infinity included.
    """
    options: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    try:
        # Keys that are no strings sort differently once they are; so they become strings first.
        return json.dumps(json.loads(json.dumps(value, **options)), sort_keys=True, **options)
    except (TypeError, ValueError) as exc:
        raise StoreError(f"not storable as JSON: {exc}") from None


def _plain(value: Any) -> Any:
    """``value`` as a JSON round trip gives it, in its own order."""
    canonical_json(value)
    return json.loads(json.dumps(value))


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]


def cell_key(identity: Mapping[str, Any]) -> str:
    """Name of a cell's directory: a hash over everything that can change a number.

    Args:
        identity: the sections :data:`IDENTITY_SECTIONS`.

    Raises:
        StoreError: a section is missing or unknown.
    """
    if set(identity) != set(IDENTITY_SECTIONS):
        wrong = sorted(set(identity) ^ set(IDENTITY_SECTIONS))
        raise StoreError(f"identity: sections {', '.join(wrong)} are missing or unknown")
    return _digest(identity)


def twin_key(identity: Mapping[str, Any]) -> str:
    """Hash shared by a sparse cell and its dense twin: the identity without method and execution."""
    return _digest({name: part for name, part in identity.items() if name not in TWIN_FREE})


def first_difference(left: Any, right: Any, prefix: str = "") -> str:
    """Dotted name of the first value in which two nested mappings differ; empty where they are equal."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for name in sorted({*left, *right}):
            dotted = f"{prefix}.{name}" if prefix else str(name)
            if name not in left or name not in right:
                return dotted
            found = first_difference(left[name], right[name], dotted)
            if found:
                return found
        return ""
    return "" if left == right else prefix


# ----------------------------------------------------------------------------------------------------------- read
@dataclass(frozen=True)
class CellResult:
    """A stored cell, read without locking it.

    Attributes:
        path: the cell's directory.
        key: hash of the identity.
        twin: hash shared with the dense twin.
        label: one line for people.
        status: ``done``, ``failed`` or ``running``.
        live: a process holds the cell's lock.
        overrides: command-line overrides that compose the cell.
        config: the resolved settings.
        identity: what the key hashes.
        expected_samples: number of samples of the whole cell; ``None`` if it was not told.
        records: finished samples in the order they were run.
        summary: what :meth:`CellStore.finish` was given.
        error: last line of the traceback of a failed cell.
    """

    path: Path
    key: str
    twin: str
    label: str
    status: str
    live: bool
    overrides: tuple[str, ...]
    config: Mapping[str, Any]
    identity: Mapping[str, Any]
    expected_samples: int | None
    records: tuple[dict[str, Any], ...] = field(repr=False)
    summary: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def done(self) -> bool:
        """All samples are stored."""
        return self.status == DONE

    @property
    def method(self) -> str:
        """Registry name of the method."""
        return str(self.identity["method"].get("name", ""))

    @property
    def is_dense(self) -> bool:
        """The cell is a dense twin."""
        return self.method == "dense"

    @property
    def state(self) -> str:
        """``done``, ``failed``, ``running``, or ``abandoned`` (partial, and no process works on it)."""
        if self.status == RUNNING:
            return RUNNING if self.live else "abandoned"
        return self.status


def cell_directories(directories: Iterable[str | Path]) -> list[Path]:
    """Cell directories below results directories.

    Args:
        directories: results directories (``out`` of a run), or single cell directories.

    Raises:
        InputError: a directory does not exist or holds no cell.
    """
    found: dict[Path, Path] = {}
    given = [Path(item) for item in directories]
    if not given:
        raise InputError("directory", "", "name at least one results directory")
    for directory in given:
        if not directory.is_dir():
            raise InputError("directory", str(directory), "no such directory")
        if (directory / CELL).is_file():
            cells = [directory]
        else:
            below = directory if directory.name == CELLS else directory / CELLS
            cells = sorted(path for path in below.glob("*") if (path / CELL).exists() or (path / SAMPLES).exists())
        if not cells:
            raise InputError("directory", str(directory), f"holds no cell ({CELLS}/<key>/{CELL}); is it a run's out?")
        for path in cells:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def read_cells(directories: Iterable[str | Path]) -> list[CellResult]:
    """Read every cell below some results directories; nothing is locked or changed.

    Raises:
        InputError: a directory does not exist or holds no cell.
        StoreError: a cell is damaged.
    """
    return [read_cell(path) for path in cell_directories(directories)]


def read_cell(path: Path) -> CellResult:
    """Read one cell.

    A last line without its end is left out where a writer may still be at work, and an error in a finished cell.

    Raises:
        StoreError: the cell is damaged; the message names file and line.
    """
    live = is_locked(path)  # before the status is read: a cell that ends in between is then done, not abandoned
    meta = _read_meta(path)
    done = meta["status"] == DONE
    records, _, _ = _read_records(path / SAMPLES, strict=done)
    if done:
        _check_finished(path, meta, len(records))
    error = _last_line(path / TRACEBACK) if meta["status"] == FAILED else ""
    return CellResult(
        path=path,
        key=meta["key"],
        twin=twin_key(meta["identity"]),
        label=meta["label"],
        status=meta["status"],
        live=live,
        overrides=tuple(meta["overrides"]),
        config=meta["config"],
        identity=meta["identity"],
        expected_samples=meta["expected_samples"],
        records=tuple(records.values()),
        summary=meta.get("summary") or {},
        error=error,
    )


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock of the cell at ``path``."""
    try:
        handle = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks: nobody can hold one
        return False
    finally:
        os.close(handle)
    return False


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _read_meta(path: Path) -> dict[str, Any]:
    """Read and check ``cell.json``."""
    file = path / CELL
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"{file}: missing, though the cell holds samples; remove {path} to run it again") from None
    except (OSError, ValueError) as exc:
        raise StoreError(f"{file}: unreadable ({exc}); remove {path} to run the cell again") from None
    kinds: dict[str, Any] = {
        "key": str,
        "label": str,
        "status": str,
        "overrides": list,
        "config": dict,
        "identity": dict,
        "expected_samples": (int, type(None)),
    }
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise StoreError(f"{file}: not a cell of store format {FORMAT}; remove {path} to run the cell again")
    for name, kind in kinds.items():
        if name not in meta or not isinstance(meta[name], kind):
            raise StoreError(f"{file}: field {name} is missing or of the wrong type; remove {path} to run it again")
    if meta["status"] not in (RUNNING, FAILED, DONE):
        raise StoreError(f"{file}: unknown status {meta['status']!r}")
    key = cell_key(meta["identity"])
    if not key == meta["key"] == path.resolve().name:
        raise StoreError(
            f"{file}: identity hashes to {key}, but it is stored as {meta['key']} in {path.resolve().name}; "
            "the identity was edited or the directory renamed"
        )
    return meta


def _read_records(file: Path, *, strict: bool) -> tuple[dict[SampleKey, dict[str, Any]], int, int]:
    """Read ``samples.jsonl``.

    Returns:
        The records, the bytes that hold whole lines, and the bytes behind them (a line without its end).
    """
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        data = b""
    except OSError as exc:
        raise StoreError(f"{file}: unreadable ({exc})") from None
    whole = data.rfind(b"\n") + 1
    if strict and whole != len(data):
        raise StoreError(
            f"{file}:{data.count(10) + 1}: line without its end in a finished cell; "
            f"remove {file.parent} to run the cell again"
        )
    records: dict[SampleKey, dict[str, Any]] = {}
    lines: dict[SampleKey, int] = {}
    for number, line in enumerate(data[:whole].split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError as exc:
            raise StoreError(f"{file}:{number}: broken record ({exc})") from None
        problem = _problem(record)
        if problem:
            raise StoreError(f"{file}:{number}: broken record ({problem})")
        key = sample_key(record)
        if key in records:
            raise StoreError(f"{file}:{number}: sample {_name(key)} is already on line {lines[key]}")
        records[key], lines[key] = record, number
    return records, whole, len(data) - whole


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _problem(record: Any) -> str:
    """What keeps ``record`` from being one; empty if nothing."""
    if not isinstance(record, dict):
        return "not an object"
    if not isinstance(record.get("task"), str) or not record["task"]:
        return "task must be a name"
    for name in ("length", "index"):
        if not _is_int(record.get(name)):
            return f"{name} must be an integer"
    if not isinstance(record.get("metrics"), dict):
        return "metrics must be an object"
    return ""


def _check_finite(record: Mapping[str, Any]) -> None:
    """JSON has neither NaN nor infinity, and its own error would name neither the number nor the sample."""
    for name, value in _numbers(record):
        if not math.isfinite(value):
            where = f"{record.get('task')}@{record.get('length')}[{record.get('index')}]"
            raise IntegrityError(f"sample {where}: {name} is {value}; a finite number is needed")


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every float in nested values as (dotted name, number)."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _numbers(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for at, part in enumerate(value):
            yield from _numbers(part, f"{name}[{at}]")
    elif isinstance(value, float):
        yield name, value


def sample_key(record: Mapping[str, Any]) -> SampleKey:
    """What tells a record from the others of its cell: (task, length, index)."""
    return record["task"], record["length"], record["index"]


def _name(key: SampleKey) -> str:
    return f"{key[0]}@{key[1]}[{key[2]}]"


def _check_finished(path: Path, meta: Mapping[str, Any], records: int) -> None:
    """A finished cell never changes again; what differs from its own checksums is damaged."""
    if records != meta.get("records"):
        raise StoreError(f"{path / SAMPLES}: {records} records, finished with {meta.get('records')}")
    for name in (SAMPLES, BUDGET):
        expected = (meta.get("sha256") or {}).get(name)
        try:
            found = _sha256(path / name)
        except OSError as exc:
            raise StoreError(f"{path / name}: unreadable ({exc}); remove {path} to run the cell again") from None
        if found != expected:
            raise StoreError(
                f"{path / name}: changed since the cell was finished (sha256 {found[:16]}, expected "
                f"{str(expected)[:16]}); remove {path} to run it again"
            )


# ---------------------------------------------------------------------------------------------------------- write
class CellStore:
    """The one writer of a cell; use :meth:`open`.

    Attributes:
        path: the cell's directory.
        key: its name.
        completed: records of finished samples by (task, length, index).
        notices: what had to be repaired on opening.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self.key = path, path.name
        self.completed: dict[SampleKey, dict[str, Any]] = {}
        self.notices: list[str] = []
        self._lock: int | None = lock
        self._meta: dict[str, Any] = {}
        self._samples: int | None = None
        _OPEN.add(self)

    @classmethod
    def open(
        cls,
        out: str | Path,
        identity: Mapping[str, Any],
        *,
        label: str,
        overrides: Sequence[str],
        cell_config: Mapping[str, Any],
        expected_samples: int | None = None,
    ) -> CellStore:
        """Lock a cell's directory, making it if it is new, and load what it holds.

        Args:
            out: results directory.
            identity: sections :data:`IDENTITY_SECTIONS`; their hash is the key.
            label: one line for people.
            overrides: command-line overrides that compose the cell again.
            cell_config: the resolved settings.
            expected_samples: number of samples of the whole cell.

        Raises:
            StoreError: another process writes to the cell, or what it holds is damaged.
        """
        plain_identity: dict[str, Any] = json.loads(canonical_json(identity))
        path = Path(out) / CELLS / cell_key(plain_identity)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _acquire(path / LOCK)
        except OSError as exc:
            raise StoreError(f"out={str(out)!r}: must be a directory that can be written to ({exc.strerror})") from None
        store = cls(path, lock)
        try:
            settings = {
                "label": label,
                "overrides": list(overrides),
                "expected_samples": expected_samples,
                "config": _plain(cell_config),
            }
            store._load(plain_identity, settings)
        except BaseException:
            store.close()
            raise
        return store

    @property
    def done(self) -> bool:
        """The cell is finished; it takes no more samples."""
        return self._meta.get("status") == DONE

    def append(self, record: Mapping[str, Any], budget_frame: pd.DataFrame) -> None:
        """Store a finished sample; it is on disk when this returns.

        Args:
            record: ``task``, ``length``, ``index``, ``metrics`` and whatever else the sample has, JSON-ready.
            budget_frame: columns :data:`BUDGET_COLUMNS`, one row per layer and head.

        Raises:
            StoreError: the sample is stored already, the cell is finished, or writing failed.
            IntegrityError: a number is NaN or infinite, or the frame does not add up to the record's budget.
        """
        self._require_running()
        _check_finite(record)
        text = canonical_json(record)
        stored: dict[str, Any] = json.loads(text)
        problem = _problem(stored)
        if problem:
            raise StoreError(f"{self.path / SAMPLES}: broken record ({problem})")
        key = sample_key(stored)
        if key in self.completed:
            raise StoreError(f"{self.path / SAMPLES}: sample {_name(key)} is stored already")
        table = _budget_table(budget_frame, stored, _name(key))
        try:
            (self.path / PARTS).mkdir(exist_ok=True)
            _write_parquet(self._part(key), table)
            self._append_line(text.encode() + b"\n")
        except OSError as exc:
            raise StoreError(f"{self.path}: sample {_name(key)} could not be stored ({exc})") from None
        self.completed[key] = stored

    def expect(self, samples: int) -> None:
        """Say how many samples make the cell, where it is known only now: one that stops at a wanted precision."""
        self._require_running()
        self._update(expected_samples=samples)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Merge the budgets and mark the cell done.

        Raises:
            StoreError: samples or budgets are missing or unreadable.
        """
        self._require_running()
        expected = self._meta["expected_samples"]
        if expected is not None and len(self.completed) != expected:
            raise StoreError(f"{self.path / SAMPLES}: {len(self.completed)} samples, {expected} make the cell")
        if not self.completed:
            raise StoreError(f"{self.path / SAMPLES}: no samples")
        plain = json.loads(canonical_json(summary))
        # Sorted, so that the file does not depend on the order in which samples were run.
        tables = [_merge_ready(self._read_part(key), key) for key in sorted(self.completed)]
        try:
            _write_parquet(self.path / BUDGET, pa.concat_tables(tables))
            sums = {name: _sha256(self.path / name) for name in (SAMPLES, BUDGET)}
            self._update(status=DONE, summary=plain, records=len(self.completed), sha256=sums)
        except OSError as exc:
            raise StoreError(f"{self.path}: could not be finished ({exc})") from None
        self._drop_parts()

    def fail(self, exc: BaseException) -> None:
        """Mark the cell failed and keep the traceback; the samples so far stay.

        An interrupt by the user is no failure: the cell stays partial. Never raises, so that ``exc`` is what is seen.
        """
        if self.done or self._lock is None or isinstance(exc, KeyboardInterrupt):
            return
        try:
            text = "".join(traceback.format_exception(exc))
            _replace(self.path / TRACEBACK, text.encode(errors="replace"))
            self._update(status=FAILED)
        except (OSError, EvalkitError) as second:
            _log.warning("%s: the failure could not be stored (%s)", self.path, second)

    def close(self) -> None:
        """Release the lock; the object takes no more samples."""
        for name in ("_samples", "_lock"):
            handle = getattr(self, name)
            if handle is not None:
                setattr(self, name, None)
                os.close(handle)
        _OPEN.discard(self)

    def __enter__(self) -> CellStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if exc is not None and self._meta.get("status") == RUNNING:
            self.fail(exc)
        self.close()

    def _load(self, identity: dict[str, Any], settings: dict[str, Any]) -> None:
        now = _now()
        if not (self.path / CELL).exists() and not (self.path / SAMPLES).exists():
            fresh = {"format": FORMAT, "key": self.key, "twin": twin_key(identity), "status": RUNNING, "created": now}
            self._meta = {**fresh, "identity": identity}
            self._update(**settings)
        else:
            self._meta = _read_meta(self.path)
            if self._meta["identity"] != identity:
                where = first_difference(self._meta["identity"], identity)
                raise StoreError(f"{self.path / CELL}: identity differs from this run's in {where}")
        self.completed, whole, rest = _read_records(self.path / SAMPLES, strict=self.done)
        if self.done:
            _check_finished(self.path, self._meta, len(self.completed))
            self._drop_parts()
            return
        self._open_samples(whole, rest)
        for key in self.completed:
            self._check_part(key)
        if self._meta["status"] == FAILED or any(self._meta[name] != value for name, value in settings.items()):
            self._update(status=RUNNING, **settings)
        (self.path / TRACEBACK).unlink(missing_ok=True)

    def _open_samples(self, whole: int, rest: int) -> None:
        self._samples = os.open(self.path / SAMPLES, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        if rest:
            os.ftruncate(self._samples, whole)
            notice = f"{self.path / SAMPLES}: cut off a half-written last line ({rest} bytes); its sample runs again"
            self.notices.append(notice)
            _log.warning(notice)
        os.fsync(self._samples)
        _sync_directory(self.path)

    def _append_line(self, line: bytes) -> None:
        assert self._samples is not None
        size = os.fstat(self._samples).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._samples, line[written:])
            os.fsync(self._samples)
        except OSError:
            # A full disk took part of the line; the next one must not follow it.
            os.ftruncate(self._samples, size)
            raise

    def _require_running(self) -> None:
        if self._lock is None:
            raise StoreError(f"{self.path}: the store is closed")
        if self._meta["status"] != RUNNING:
            raise StoreError(f"{self.path}: the cell is {self._meta['status']}, it takes no more samples")

    def _update(self, **changes: Any) -> None:
        meta = {**self._meta, **changes, "updated": _now(), "host": socket.gethostname()}
        _replace(self.path / CELL, (json.dumps(meta, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())
        self._meta = meta

    def _part(self, key: SampleKey) -> Path:
        task, length, index = key
        return self.path / PARTS / f"{quote(task, safe='')}@{length}-{index}.parquet"

    def _check_part(self, key: SampleKey) -> None:
        file = self._part(key)
        try:
            pq.read_metadata(file)
        except (OSError, pa.ArrowException) as exc:
            raise self._part_error(file, key, exc) from None

    def _read_part(self, key: SampleKey) -> pa.Table:
        file = self._part(key)
        try:
            return pq.read_table(file)
        except (OSError, pa.ArrowException) as exc:
            raise self._part_error(file, key, exc) from None

    def _part_error(self, file: Path, key: SampleKey, exc: Exception) -> StoreError:
        reason = "missing" if isinstance(exc, FileNotFoundError) else f"unreadable ({_first_line(exc)})"
        return StoreError(
            f"{file}: budget of sample {_name(key)} is {reason}; remove {self.path} to run the cell again"
        )

    def _drop_parts(self) -> None:
        shutil.rmtree(self.path / PARTS, ignore_errors=True)


def _budget_table(frame: pd.DataFrame, record: Mapping[str, Any], name: str) -> pa.Table:
    """Check a sample's budget frame against its record."""
    if set(frame.columns) != set(BUDGET_COLUMNS) or frame.empty:
        raise IntegrityError(f"{name}: budget frame has columns {list(frame.columns)}, expected {list(BUDGET_COLUMNS)}")
    budget = record.get("budget") or {}
    for column in COUNTS:
        total = int(frame[column].sum())
        if column in budget and budget[column] != total:
            raise IntegrityError(f"{name}: budget.{column} is {budget[column]}, its layers and heads add up to {total}")
    types = [(column, pa.int32() if column in ("layer", "head") else pa.int64()) for column in BUDGET_COLUMNS]
    return pa.Table.from_pandas(frame[list(BUDGET_COLUMNS)], schema=pa.schema(types), preserve_index=False)


def _merge_ready(table: pa.Table, key: SampleKey) -> pa.Table:
    """A sample's budget with the columns that tell samples apart in the merged file."""
    rows = table.num_rows
    task, length, index = key
    names = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([task])).cast(pa.string())
    table = table.replace_schema_metadata(None)
    for position, (name, column) in enumerate(
        [("task", names), ("length", pa.array([length] * rows)), ("index", pa.array([index] * rows))]
    ):
        table = table.add_column(position, name, column)
    return table


def _first_line(exc: BaseException) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


# ----------------------------------------------------------------------------------------------------- file system
def _acquire(file: Path, patience: float = 1.0) -> int:
    """Take the exclusive lock, or say who has it."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as exc:
            # A status command holds the lock for an instant when it looks; a writer holds it for long.
            if exc.errno == errno.EWOULDBLOCK and time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(handle)
            reason = f"in use by {holder}" if exc.errno == errno.EWOULDBLOCK else f"cannot be locked ({exc.strerror})"
            raise StoreError(f"{file.parent}: {reason}") from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return handle


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(file: Path, data: bytes) -> None:
    """Write a file so that it is seen whole or not at all, also after a loss of power."""
    temporary = file.with_name(f".{file.name}.tmp")
    with open(temporary, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, file)
    _sync_directory(file.parent)


def _write_parquet(file: Path, table: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    _replace(file, sink.getvalue().to_pybytes())


def _sha256(file: Path) -> str:
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


_OPEN: weakref.WeakSet[CellStore] = weakref.WeakSet()


def _forget_locks() -> None:
    """A forked child must not keep its parent's cells locked after the parent has died."""
    for store in list(_OPEN):
        store.close()


os.register_at_fork(after_in_child=_forget_locks)
