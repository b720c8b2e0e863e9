"""Capture the attention inputs of a model on real text, and what a method selects there, for benchmarks to replay.

The model runs densely, whatever is recorded: a selection is that of the model's own hidden states, as it would be in
the first layer that a method changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from prefill_kernels.bench.page_inputs import Overlap, overlap
from prefill_kernels.bench.rows import checkout_commit

from ..attention import Session
from ..benchmarks.perplexity import build_windows, ids_sha256
from ..capture import LayerCapture, Recorder, held, save
from ..capture_settings import CaptureConfig
from ..config import ModelConfig, method_name, plain
from ..corpora import Corpora
from ..errors import InputError, IntegrityError
from ..identity import code_digest
from ..methods.base import Method
from ..methods.dense import Dense
from ..methods.presets import calibrated
from ..models.loading import (
    Source,
    load_config,
    load_model,
    load_tokenizer,
    locate,
    resolve_device,
    resolve_dtype,
)

SPREAD = 3
"""Layers that are captured when none is named, early to late."""


@dataclass(frozen=True)
class Request:
    """What is run and recorded.

    Attributes:
        model: the model; its ``dtype`` is that of Q, K and V in the file.
        capture: lengths, layers and what is kept.
        method: whose selections are recorded beside; None = no one's.
    """

    model: ModelConfig
    capture: CaptureConfig
    method: Method | None = None

    def validate(self) -> None:
        """Raise InputError on the first value that cannot be used."""
        self.model.validate()
        if self.method is not None:
            self.method.validate()
            calibrated(self.method, None)
            if not self.method.recordable:
                raise InputError("method", method_name(self.method), "a method that selects blocks or pages")
        self.capture.validate(self.model, selects=self.method is not None)


@dataclass(frozen=True)
class _Prefill:
    """One length: its window, the layers that are kept, and the file they go to."""

    length: int
    ids: list[int]
    layers: tuple[int, ...]
    path: Path
    asked: dict[str, Any]


def launch(request: Request, command: str) -> list[Path]:
    """Run the model at each length and write the files; one that holds the same already is kept.

    Args:
        request: validated.
        command: kept in the files.

    Raises:
        InputError: a layer the model does not have, a corpus too short, a method that selects neither blocks nor
            pages, a file that cannot be written, or one that holds another capture.
        IntegrityError: selected pages that no selector makes of real text.
    """
    settings = request.capture
    device = resolve_device(settings.device, "capture.device")
    dtype = resolve_dtype(request.model.dtype, device)
    source = locate(request.model)
    code = code_digest()
    prefills = list(_prefills(request, source, device, dtype))
    there = [held(one.path, one.asked, code) for one in prefills]  # all are looked at before the model is loaded
    for one, kept in zip(prefills, there, strict=True):
        if kept:
            print(f"kept {one.path}, which the same request wrote", flush=True)
            continue
        loaded = load_model(request.model, source, one.length, device, dtype)
        recorder = record(request, loaded.model, one.layers, one.ids)
        facts = {
            **one.asked,
            "rope": loaded.rope,
            "corpus": settings.corpus,
            "code": code,
            "commit": checkout_commit(),
            "command": command,
        }
        facts |= _plausible(one.path.name, recorder.captures)
        save(recorder.captures, one.path, model=request.model.name, metadata=facts)
        size, layers = one.path.stat().st_size / 2**20, ", ".join(map(str, one.layers))
        print(f"wrote {one.path}: {size:.1f} MiB, layers {layers}", flush=True)
    return [one.path for one in prefills]


def _prefills(request: Request, source: Source, device: torch.device, dtype: torch.dtype) -> Iterator[_Prefill]:
    """Each length, with all that decides what is recorded of it."""
    settings, model = request.capture, request.model
    tokenizer, corpora = load_tokenizer(source, model), Corpora()
    for length, named in settings.wanted.items():
        (ids,) = build_windows(settings.window(length), tokenizer, bos=model.perplexity_bos, corpora=corpora).ids
        layers = named or spread(load_config(source, model).num_hidden_layers)
        asked: dict[str, Any] = {
            "tokens": len(ids),
            "layers": list(layers),
            "tensors": settings.tensors,
            "queries": settings.queries,
            "dtype": str(dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "weights": source.checksum,
            "yarn": [model.rope_factor(length), model.rope.original or model.native_context],
            "prompt_sha256": ids_sha256(ids),
            "method": None,
        }
        if request.method is not None:
            asked["method"] = {"name": method_name(request.method), **plain(request.method)}
        path = Path(settings.out).expanduser() / f"{model.name}-{length}.safetensors"
        yield _Prefill(length, ids, layers, path, asked)


def record(request: Request, model: Any, layers: tuple[int, ...], ids: list[int]) -> Recorder:
    """Prefill one prompt densely and keep what the request asks for.

    Raises:
        InputError: a layer the model does not have, or a method that selects neither blocks nor pages.
    """
    settings, count = request.capture, model.config.num_hidden_layers
    if max(layers) >= count:
        raise InputError("capture.layers", list(layers), f"below {count}, the layers of {request.model.name}")
    recorder = Recorder(
        Dense(),
        layers,
        tensors=settings.tensors,
        selections=request.method is not None,
        watched=request.method,
        queries=settings.queries,
    )
    with Session(model, recorder) as session:
        session.prefill(torch.tensor(ids), keep_from=len(ids) - 1)
        session.account()
    kept = recorder.captures.values()
    if request.method is not None and not all(item.order or item.pages for item in kept):
        raise InputError("method", method_name(request.method), "a method that selects blocks or pages")
    return recorder


def _plausible(name: str, captures: dict[int, LayerCapture]) -> dict[str, Any]:
    """Overlap of the captured pages by layer, for the metadata; it is printed and checked.

    Raises:
        IntegrityError: an empty or a constant selection, or a union outside of what its members allow.
    """
    found: dict[str, Any] = {}
    for layer, kept in sorted(captures.items()):
        if not kept.pages:
            continue
        pages, positions = kept.selected_pages()
        measured = overlap(pages, positions, kept.page_size)
        print(f"{name} layer {layer}: {measured.text}", flush=True)
        check_overlap(f"{name}, layer {layer}", measured, pages.shape[-1], int(positions[-1]) // kept.page_size + 1)
        found[str(layer)] = {"mean_support": measured.support, "mean_union": measured.union}
    return {"overlap": found} if found else {}


def check_overlap(what: str, measured: Overlap, top_k: int, pages: int) -> None:
    """Raise IntegrityError unless a selection may be that of a real run.

    Args:
        what: named in the error.
        measured: its overlap.
        top_k: pages a query.
        pages: pages that the last query may select.
    """
    support, union = measured.support, measured.union
    if not 1 <= support <= top_k:
        raise IntegrityError(f"{what}: queries select {support:.2f} pages on average, expected 1 to {top_k}")
    if not support - 1e-6 <= union <= min(8 * support, pages) + 1e-6:
        raise IntegrityError(f"{what}: unions of eight hold {union:.2f} pages, their members {support:.2f} each")
    if pages > 2 * top_k and measured.distinct <= top_k:
        raise IntegrityError(f"{what}: all queries together select {measured.distinct} of {pages} pages")


def spread(layers: int, wanted: int = SPREAD) -> tuple[int, ...]:
    """``wanted`` of the layers 0 .. layers - 1: near the ends, and evenly between."""
    if layers <= wanted:
        return tuple(range(layers))
    return tuple(round((layers - 1) * (i + 0.5) / wanted) for i in range(wanted))
