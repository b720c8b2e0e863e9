"""Capture the attention inputs of a model on real text, for ``evalkit bench attention inputs=<file>``."""

from __future__ import annotations

from pathlib import Path

import torch

from ..attention import Session
from ..benchmarks.perplexity import build_windows, ids_sha256
from ..capture import Recorder, save
from ..corpora import Corpora
from ..errors import InputError
from ..methods.dense import Dense
from ..models.loading import load_model, load_tokenizer, locate, resolve_device, resolve_dtype
from .settings import CaptureSettings

SPREAD = 3
"""Layers that are captured when none is named, early to late."""


def launch(settings: CaptureSettings, command: str) -> Path:
    """Run the model and write the file.

    Args:
        settings: validated settings.
        command: kept in the file.

    Raises:
        InputError: a layer the model does not have, a corpus too short, or a file that cannot be written.
    """
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.model.dtype, device)
    source = locate(settings.model)
    tokenizer = load_tokenizer(source, settings.model)
    (ids,) = build_windows(settings.window, tokenizer, bos=settings.model.perplexity_bos, corpora=Corpora()).ids
    loaded = load_model(settings.model, source, settings.length, device, dtype)
    count = loaded.model.config.num_hidden_layers
    layers = settings.layers or spread(count)
    if max(layers) >= count:
        raise InputError("layers", list(layers), f"below {count}, the layers of {settings.model.name}")
    recorder = Recorder(Dense(), layers)
    with Session(loaded.model, recorder) as session:
        session.prefill(torch.tensor(ids), keep_from=len(ids) - 1)
        session.account()
    path = Path(settings.out or f"captures/{settings.model.name}-{settings.length}.safetensors").expanduser()
    facts = {
        "tokens": len(ids),
        "layers": list(layers),
        "dtype": str(dtype).removeprefix("torch."),
        "weights": source.checksum,
        "corpus": settings.corpus,
        "prompt_sha256": ids_sha256(ids),
        "command": command,
    }
    save(recorder.captures, path, model=settings.model.name, metadata=facts)
    print(f"wrote {path}: {path.stat().st_size / 2**20:.1f} MiB, layers {', '.join(map(str, layers))}", flush=True)
    return path


def spread(layers: int, wanted: int = SPREAD) -> tuple[int, ...]:
    """``wanted`` of the layers 0 .. layers - 1: near the ends, and evenly between."""
    if layers <= wanted:
        return tuple(range(layers))
    return tuple(round((layers - 1) * (i + 0.5) / wanted) for i in range(wanted))
