"""``evalkit search-patterns``: search one layer after the other, keep each at once, write the table at the end."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from prefill_kernels import PagedKV, resolve_backend
from torch import Tensor
from transformers import PreTrainedModel

from ..attention import Session
from ..config import ExecutionConfig, ModelConfig, plain
from ..corpora import Corpora
from ..errors import InputError, StoreError
from ..identity import versions
from ..methods.base import PlanContext
from ..methods.head_patterns import table_text
from ..models.loading import load_model, load_tokenizer, locate, resolve_device, resolve_dtype
from .pattern_settings import PatternSearchConfig
from .patterns import LayerResult, Probe, choose, search_layer
from .settings import CalibrateConfig
from .texts import CalibrationText, CalibrationTexts

FOLDER = Path("results/patterns")
"""Where tables are written when no file is named."""


@dataclass(frozen=True)
class PatternRequest:
    """One invocation.

    Attributes:
        model: the model.
        settings: what is searched.
        execution: how prefills run.
        out: the table to write; None for the default.
    """

    model: ModelConfig
    settings: PatternSearchConfig
    execution: ExecutionConfig
    out: str | None = None

    @property
    def path(self) -> Path:
        """The table to write."""
        if self.out is not None:
            return Path(self.out).expanduser()
        return FOLDER / f"{self.model.name}-{self.settings.length}.yaml"

    def validate(self) -> None:
        """Raise InputError on the first value that cannot be used; nothing is loaded."""
        self.model.validate()
        self.settings.validate()
        self.execution.validate()
        if self.execution.chunk_size is not None:
            raise InputError("execution.chunk_size", self.execution.chunk_size, "null: patterns show in whole prompts")
        if self.path.suffix not in (".yaml", ".yml"):
            raise InputError("out", str(self.path), "a file ending in .yaml")
        if self.settings.length > self.model.max_length:
            raise InputError(
                "search.length", self.settings.length, f"at most {self.model.max_length} for model {self.model.name}"
            )


def search_patterns(request: PatternRequest) -> Path:
    """Search every layer that is not in the journal yet, then write the table.

    Returns:
        The table's path.

    Raises:
        InputError, MissingAsset: a setting or file is wrong; nothing was run.
        StoreError: another process writes to the same table.
    """
    request.validate()
    torch.manual_seed(request.execution.seed)
    if request.execution.threads is not None:
        torch.set_num_threads(request.execution.threads)
    device = resolve_device(request.execution.device)
    dtype = resolve_dtype(request.model.dtype, device)
    source = locate(request.model)
    text = _windows(request, load_tokenizer(source, request.model))
    backend = resolve_backend(request.execution.backend, device, dtype)
    facts = {
        "model": {"name": request.model.name, "weights": source.checksum},
        "search": plain(request.settings),
        "text": {
            "corpus": Path(request.settings.text).name,
            "sha256": text.checksum,
            "characters": [[span.start, span.stop] for span in text.spans],
            "fingerprints": text.fingerprints.plain(),
        },
        "made_by": {
            **versions(),
            "device": device.type,
            "dtype": str(dtype).removeprefix("torch."),
            "backend": backend,
        },
    }
    with _journal(request.path, facts) as journal:
        layers = journal.layers
        if layers is None or len(journal.results) < layers * len(text.ids):
            model = load_model(request.model, source, request.settings.length, device, dtype).model
            journal.begin(model.config.num_hidden_layers)
            _run(request, model, text, journal)
        results = [[journal.results[w, layer] for layer in range(journal.layers or 0)] for w in range(len(text.ids))]
        heads, found = choose(results, request.settings.step)
        content = table_text(heads, {**facts, "result": found})
        scratch = request.path.with_name(f".{request.path.name}.{os.getpid()}")
        scratch.write_text(content, encoding="utf-8")
        os.replace(scratch, request.path)
        journal.remove()
    counts = ", ".join(f"{name} {count}" for name, count in sorted(found["heads"].items()))
    error = found["relative_error"]["chosen"]
    print(f"written: {request.path} (heads: {counts}; relative error of the outputs {error:.4f})", flush=True)
    return request.path


class Journal:
    """Results of the layers searched so far, one JSON line each, on disk before the next layer begins.

    Args:
        path: the file.
        identity: digest of everything that can change a result.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self.path, self.identity = path, identity
        self.layers: int | None = None
        self.results: dict[tuple[int, int], LayerResult] = {}
        for line in self._whole_lines():
            if line["identity"] != identity:
                raise InputError("out", str(path), "no journal of another search; delete it or name another table")
            self.layers = line["layers"]
            if "result" in line:
                self.results[line["window"], line["layer"]] = LayerResult.from_plain(line["result"])

    def begin(self, layers: int) -> None:
        """Note the number of layers."""
        if self.layers is None:
            self.layers = layers
            self._append({})

    def add(self, window: int, layer: int, result: LayerResult) -> None:
        """Keep a layer's result."""
        self.results[window, layer] = result
        self._append({"window": window, "layer": layer, "result": result.plain()})

    def remove(self) -> None:
        """Delete the file: the table holds what it led to."""
        self.path.unlink(missing_ok=True)

    def _append(self, line: Mapping[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"identity": self.identity, "layers": self.layers, **line}) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _whole_lines(self) -> list[dict[str, Any]]:
        """Lines of the file; one that a kill cut short belongs to the layer in flight and is searched again."""
        if not self.path.exists():
            return []
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            with open(self.path, "r+b") as stream:
                stream.truncate(whole)
        return [json.loads(line) for line in data[:whole].splitlines()]


def _run(request: PatternRequest, model: PreTrainedModel, text: CalibrationText, journal: Journal) -> None:
    layers = model.config.num_hidden_layers
    for number, ids in enumerate(text.ids):
        missing = [layer for layer in range(layers) if (number, layer) not in journal.results]
        if not missing:
            continue

        def visit(q: Tensor, kv: PagedKV, context: PlanContext, window: int = number) -> None:
            if (window, context.layer) in journal.results:
                return
            begin = time.monotonic()
            result = search_layer(q, kv, request.settings, scale=context.scale, backend=context.backend)
            journal.add(window, context.layer, result)
            seconds = time.monotonic() - begin
            where = f"window {window + 1} of {len(text.ids)}, layer {context.layer + 1} of {layers}"
            print(f"    {where}: {seconds:.1f} s", flush=True)

        session = Session(
            model,
            Probe(visit=visit),
            backend=request.execution.backend,
            page_size=request.execution.page_size,
            page_shuffle=request.execution.page_shuffle,
        )
        with session:
            session.prefill(torch.tensor(ids), keep_from=len(ids) - 1)
            session.account()


def _windows(request: PatternRequest, tokenizer: Any) -> CalibrationText:
    """Calibration windows, from the second half of the text as for every other calibration."""
    settings = request.settings
    source = CalibrateConfig(text=settings.text, text_field=settings.text_field, windows=settings.windows)
    texts = CalibrationTexts(source, tokenizer, bos=request.model.perplexity_bos, corpora=Corpora())
    try:
        return texts.windows(settings.length)
    except InputError as error:
        name = error.field.replace("calibrate.", "search.", 1)
        raise InputError(name, error.value, error.allowed) from None


@contextmanager
def _journal(table: Path, facts: Mapping[str, Any]) -> Iterator[Journal]:
    """The journal beside a table, locked."""
    identity = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    table.parent.mkdir(parents=True, exist_ok=True)
    path = table.with_name(f"{table.stem}.partial.jsonl")
    lock = table.with_name(f".{table.stem}.lock")
    with open(lock, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(f"{table}: another process is searching for it") from None
        yield Journal(path, identity)
    lock.unlink(missing_ok=True)
