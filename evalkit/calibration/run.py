"""``evalkit calibrate``: search each target, write each value as soon as it is found."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from prefill_kernels import resolve_backend

from ..config import ExecutionConfig, ModelConfig, method_name
from ..corpora import Corpora
from ..errors import InputError, StoreError
from ..identity import versions
from ..methods.base import Knob, Method
from ..models.loading import Source, load_model, load_tokenizer, locate, resolve_device, resolve_dtype
from .disjoint import Fingerprints
from .file import (
    Calibration,
    Entry,
    check_free,
    check_turns,
    fixed_settings,
    knob_of,
    path_of,
    with_field,
    write_yaml,
)
from .measure import Spent, Workbench, table_at
from .search import Axis, solve
from .settings import CLOSE, CalibrateConfig, Target
from .texts import CalibrationText, CalibrationTexts

RECALL_OF_HEADS = Knob("recall", 0.3, 0.9999, scale="tail")
"""What is searched for a table: the recall that every head has."""


@dataclass(frozen=True)
class Request:
    """One invocation.

    Attributes:
        model: the model.
        method: the method; ``method.calibration`` names the file to write.
        settings: what is searched.
        execution: how prefills run.
    """

    model: ModelConfig
    method: Method
    settings: CalibrateConfig
    execution: ExecutionConfig

    @property
    def bare(self) -> Method:
        """The method without what calibration is to give it."""
        return dataclasses.replace(self.method, calibration=None, budget_target=None)

    @property
    def path(self) -> Path:
        """The file to write."""
        return path_of(self.method.calibration, self.model.name, self.bare)

    @property
    def left_out(self) -> list[int]:
        """Lengths of ``calibrate.budget_at`` beyond the model, where it holds others too: a table of a longer model."""
        beyond = sorted(length for length in self.settings.budget_at if length > self.model.max_length)
        return [] if self.settings.lengths or len(beyond) == len(self.settings.budget_at) else beyond

    def supported(self) -> Request:
        """The request without the lengths that are left out."""
        kept = {n: budget for n, budget in self.settings.budget_at.items() if n not in self.left_out}
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, budget_at=kept))

    def validate(self) -> Knob:
        """Find every bad value before anything is loaded; return the knob.

        Raises:
            InputError: the first value that cannot be used.
        """
        self.model.validate()
        self.settings.validate()
        self.execution.validate()
        method = self.bare
        knob = knob_of(method, "method", method_name(method))
        check_turns(method, knob)
        check_free(method, knob, "evalkit calibrate", {})
        method.validate()
        if self.method.budget_target is not None:
            raise InputError("method.budget_target", self.method.budget_target, "null here: give calibrate.budgets")
        if self.settings.per_head and knob.table_field is None:
            raise InputError("calibrate.per_head", True, f"false: {method_name(method)} has no table of its heads")
        chunk = self.execution.chunk_size
        if chunk is not None and (method.chunk_problem is not None or chunk % method.block_size):
            raise InputError(
                "execution.chunk_size", chunk, f"null, or a multiple of {method.block_size} where chunks fit"
            )
        for target in self.settings.targets:
            self.model.rope_factor(target.length)
        return knob


def calibrate(request: Request) -> int:
    """Reach every target; those in the file already are not searched again.

    Returns:
        0, or 1 where a target cannot be reached within a point.

    Raises:
        InputError, MissingAsset: a setting or file is wrong; nothing was run.
        StoreError: another process writes to the same file.
    """
    if request.left_out:
        beyond, model = ", ".join(map(str, request.left_out)), request.model
        print(f"left out: {beyond} tokens; {model.name} supports at most {model.max_length}", flush=True)
        request = request.supported()
    knob = request.validate()
    torch.manual_seed(request.execution.seed)
    if request.execution.threads is not None:
        torch.set_num_threads(request.execution.threads)
    device = resolve_device(request.execution.device)
    dtype = resolve_dtype(request.model.dtype, device)
    source = locate(request.model)
    tokenizer = load_tokenizer(source, request.model)
    texts = CalibrationTexts(request.settings, tokenizer, bos=request.model.perplexity_bos, corpora=Corpora())
    lengths = sorted({target.length for target in request.settings.targets})
    windows = {length: texts.windows(length) for length in lengths}
    header = _header(request, source, windows, texts.checksum, knob)
    backend = resolve_backend(request.execution.backend, device, dtype)
    run = {"device": device.type, "dtype": str(dtype).removeprefix("torch."), "backend": backend}
    job = _Job(request, knob, _existing(request.path, header), windows, {**versions(), **run})
    with _work_folder(request.path, [header["model"], header["method"], texts.checksum, job.made_by]) as folder:
        loaded: tuple[float, Any] | None = None
        for length in lengths:
            todo = [t for t in request.settings.targets if t.length == length and not job.has(t)]
            if not todo:
                continue
            factor = request.model.rope_factor(length)
            if loaded is None or loaded[0] != factor:
                loaded = None  # frees the other one's memory first
                loaded = factor, load_model(request.model, source, length, device, dtype).model
            bench = Workbench(loaded[1], request.execution, folder)
            request.bare.check_model(loaded[1].config.num_hidden_layers, loaded[1].config.num_attention_heads)
            for target in todo:
                job.search(target, bench)
    return job.close()


class _Job:
    def __init__(
        self,
        request: Request,
        knob: Knob,
        file: Calibration,
        windows: dict[int, CalibrationText],
        made_by: dict[str, str],
    ) -> None:
        self.request, self.knob, self.file, self.windows, self.made_by = request, knob, file, windows, made_by
        self.missed: list[str] = []

    def has(self, target: Target) -> bool:
        """Whether the file holds the target, found on the same windows."""
        wanted = self._key(target)
        spans = _characters(self.windows[target.length])
        found = any(e.key == wanted and e.characters == spans for e in self.file.entries)
        if found:
            print(f"{_name(target, self._measure(target))}: in {self.file.path}", flush=True)
        return found

    def search(self, target: Target, bench: Workbench) -> None:
        """Search one target and write what is found."""
        settings, method = self.request.settings, self.request.bare
        windows = self.windows[target.length].ids
        measure, tables = self._measure(target), self._tables(target, bench) if settings.per_head else None
        axis = Axis(RECALL_OF_HEADS if tables else self.knob, target.length)
        spent: dict[float, Spent] = {}

        def variant(value: float) -> Method:
            if tables is not None:
                assert self.knob.table_field is not None
                return with_field(method, self.knob.table_field, str(tables(value)))
            return with_field(method, self.knob.field, int(value) if self.knob.integer else value)

        def measured(value: float) -> float:
            spent[value] = bench.measure(variant(value), windows, recall=target.kind == "recall")
            reached = spent[value].means()[measure]
            what = "recall of each head" if tables else f"method.{self.knob.field}"
            print(f"    {what} {value:.6g}: {measure} {reached:.4f}", flush=True)
            return reached

        print(f"{_name(target, measure)}, {len(windows)} windows", flush=True)
        found = solve(measured, axis, target.value, settings.tolerance, settings.steps)
        if abs(found.reached - target.value) > CLOSE:
            nearest = f"{found.reached:.4f} at {found.value:.6g}"
            self.missed.append(f"{_name(target, measure)}: not within a point; the nearest is {nearest}")
            print(f"  {self.missed[-1]}", flush=True)
            return
        interval = spent[found.value].interval(measure)
        entry = Entry(
            length=target.length,
            kind=target.kind,
            target=target.value,
            measure=measure,
            reached=round(found.reached, 6),
            value=int(found.value) if self.knob.integer and tables is None else found.value,
            table=self._keep_table(target, measure, tables(found.value)) if tables else None,
            rope_factor=self.request.model.rope_factor(target.length),
            windows=len(windows),
            interval=None if interval is None else round(interval, 6),
            achieved={name: round(x, 6) for name, x in spent[found.value].means().items()},
            measured=[[value, round(reached, 6)] for value, reached in found.tried.items()],
            characters=_characters(self.windows[target.length]),
            made_by=self.made_by,
        )
        self.file = self.file.with_entry(entry)
        self.file.write()
        scatter = "" if interval is None else f" (+- {interval:.4f}, 95 %, between windows)"
        print(f"  {_name(target, measure)}: reached {entry.reached:.4f}{scatter} with {entry.value:.6g}", flush=True)
        if interval is not None and interval > CLOSE:
            print(f"  other text may be off by more than a point: raise calibrate.windows ({len(windows)})", flush=True)

    def close(self) -> int:
        """Say what was missed, last; the exit code."""
        if self.file.entries:
            print(f"written: {self.file.path}", flush=True)
        for line in self.missed:
            print(f"FAILED {line}", flush=True)
        return 1 if self.missed else 0

    def _tables(self, target: Target, bench: Workbench) -> Any:
        """What makes the table file of a recall."""
        axis = Axis(self.knob, target.length)
        print(f"{_name(target, self._measure(target))}: recall of each head on the dense model", flush=True)
        curves = bench.curves(self.request.bare, axis, self.windows[target.length].ids)

        def table(recall: float) -> Path:
            values = table_at(curves, axis, recall)
            digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]
            file = bench.folder / f"table-{digest}.json"
            if not file.exists():
                scratch = file.with_suffix(f".{os.getpid()}")
                scratch.write_text(json.dumps({"values": values}))
                os.replace(scratch, file)
            return file

        return table

    def _keep_table(self, target: Target, measure: str, file: Path) -> str:
        """Copy the table that was chosen beside the calibration; its name."""
        path = self.file.path
        name = f"{path.stem}-{target.length}-{measure}-{target.value:g}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_yaml(path.parent / name, json.loads(file.read_text()))
        return name

    def _measure(self, target: Target) -> str:
        return "recall" if target.kind == "recall" else self.request.settings.measure

    def _key(self, target: Target) -> tuple[int, str, str, float, bool]:
        return target.length, target.kind, self._measure(target), target.value, self.request.settings.per_head


def _name(target: Target, measure: str) -> str:
    return f"{target.length} tokens, {measure} {target.value:g}"


def _characters(text: CalibrationText) -> list[list[int]]:
    return [[span.start, span.stop] for span in text.spans]


def _header(
    request: Request, source: Source, windows: dict[int, CalibrationText], checksum: str, knob: Knob
) -> dict[str, Any]:
    prints = Fingerprints.of([])
    for text in windows.values():
        prints = prints | text.fingerprints
    return {
        "model": {"name": request.model.name, "weights": source.checksum},
        "method": fixed_settings(request.bare),
        "knob": knob.field,
        "text": {"corpus": Path(request.settings.text).name, "sha256": checksum, "fingerprints": prints.plain()},
    }


def _existing(path: Path, header: dict[str, Any]) -> Calibration:
    """The file as it is, with the new text's fingerprints joined to its own.

    Raises:
        InputError: it is for another model, method, settings or text.
    """
    if not path.exists():
        return Calibration(path, header, ())
    old = Calibration.read(path)
    for part in ("model", "method", "knob"):
        if old.header[part] != header[part]:
            raise InputError(
                "method.calibration", str(path), f"a file of the same {part} ({old.header[part]}), or another file"
            )
    texts = old.header["text"], header["text"]
    if texts[0]["sha256"] != texts[1]["sha256"]:
        raise InputError("calibrate.text", header["text"]["corpus"], f"the text of {path} ({texts[0]['corpus']})")
    first, second = (Fingerprints.from_plain(text["fingerprints"], str(path)) for text in texts)
    joined = {**header, "text": {**header["text"], "fingerprints": (first | second).plain()}}
    return Calibration(path, joined, old.entries)


@contextmanager
def _work_folder(path: Path, identity: list[Any]) -> Iterator[Path]:
    """Folder of the measurements, named by everything that can change one; locked."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    folder = path.with_name(f"{path.stem}.work") / digest
    folder.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f"{path.stem}.work") / ".lock", "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(f"{path}: another process is calibrating it") from None
        yield folder
