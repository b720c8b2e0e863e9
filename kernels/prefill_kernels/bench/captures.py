"""Files of ``evalkit capture`` with pages, checked as they are read, so that nothing runs on one that is broken."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import BenchError
from .inputs import FORMAT

INTEGERS = (torch.int16, torch.int32)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class CapturedLayer:
    """What one layer of one prompt selected.

    Attributes:
        path: the file.
        model: its name.
        layer: number of the layer, as the file writes it.
        tokens: of the context.
        page_size: P, tokens of a page.
        scale: softmax scaling.
        pages: int32 [N, Hkv, K] on the CPU; an id below 0 selects nothing.
        positions: int32 [N], strictly ascending, within the context.
    """

    path: str
    model: str
    layer: str
    tokens: int
    page_size: int
    scale: float
    pages: Tensor
    positions: Tensor

    def check_selects(self, head: int, queries: int | None) -> None:
        """Raise BenchError unless one of the last queries (None = any) selects a page under a KV head."""
        last = slice(None if queries is None else -queries, None)
        ids, own = self.pages[last, head], self.positions[last, None] // self.page_size
        if not bool(((ids >= 0) & (ids <= own)).any()):
            allowed = "a capture in which a query selects a page, by an id from 0 to that of its own"
            found = (
                f"under KV head {head} nothing is selected in layer.{self.layer}.pages of the last {len(ids)} queries"
            )
            raise BenchError("captures", self.path, f"{allowed}; {found}")

    def tensors(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Q [L, Hq, d] and K, V [L, Hkv, d] of the prompt, of one float dtype; None where the file has none of them.

        Raises:
            BenchError: some of them are missing, do not belong together or are not finite.
        """
        names = [f"layer.{self.layer}.{x}" for x in "qkv"]
        with _opened(self.path) as file:
            held = set(file.keys())
            if not held & set(names):
                return None
            if missing := [name for name in names if name not in held]:
                raise unusable(self.path, ", ".join(names), "together or not at all", f"without {', '.join(missing)}")
            q, k, v = (file.get_tensor(name) for name in names)
        heads = self.pages.shape[1]
        for name, x in zip(names, (q, k, v), strict=True):
            if x.dtype not in FLOATS or x.dtype != q.dtype:
                raise unusable(self.path, name, f"in {_text(FLOATS)}, Q, K and V alike", x.dtype)
            if x.ndim != 3 or x.shape[0] != self.tokens or x.shape[2] != q.shape[2] or 0 in x.shape:
                raise unusable(self.path, name, f"[{self.tokens}, heads, d], one d for Q, K and V", list(x.shape))
            if x.shape[1] != heads if name != names[0] else x.shape[1] % heads:
                wanted = f"of {heads} heads" if name != names[0] else f"of a multiple of {heads} heads"
                raise unusable(self.path, name, f"{wanted}: its pages are of {heads}", x.shape[1])
            if not bool(torch.isfinite(x).all()):
                raise unusable(self.path, name, "of finite numbers", "NaN or infinity")
        return q, k, v


def captured_layers(path: str | Path) -> list[CapturedLayer]:
    """Every layer of a file.

    Raises:
        BenchError: no such file, no pages in it, or contents that no prompt can have left.
    """
    with _opened(path) as file:
        metadata = file.metadata() or {}
        if (kind := metadata.get("format")) != FORMAT:
            raise unusable(path, "format", FORMAT, kind)
        for name in ("model", "scaling"):
            if name not in metadata:
                raise unusable(path, name, "in its metadata", "without")
        scaling = json.loads(metadata["scaling"])
        if not isinstance(scaling, dict):
            raise unusable(path, "scaling", "a JSON object, softmax scaling by layer", scaling)
        if not scaling or f"layer.{next(iter(scaling))}.pages" not in file.keys():  # noqa: SIM118 - not a mapping
            raise BenchError("captures", str(path), "a file of evalkit capture method=pageweaver (it has no pages)")
        tokens, page_size = (_count(path, metadata, name) for name in ("tokens", "page_size"))
        found = []
        for layer, scale in scaling.items():
            if not (type(scale) in (int, float) and math.isfinite(scale) and scale > 0):
                raise unusable(path, f"scaling of layer {layer}", "a number above 0", scale)
            pages, positions = (file.get_tensor(f"layer.{layer}.{name}") for name in ("pages", "positions"))
            _check(path, f"layer.{layer}", pages, positions, tokens)
            where = (str(path), metadata["model"], str(layer), tokens, page_size, float(scale))
            found.append(CapturedLayer(*where, pages.int(), positions.int()))
    return found


def unusable(path: str | Path, name: str, allowed: str, found: object) -> BenchError:
    """What is wrong with a file: ``name`` in it is ``found`` and must be ``allowed``."""
    return BenchError("captures", str(path), f"a capture with {name} {allowed}, not {found}")


def _check(path: str | Path, layer: str, pages: Tensor, positions: Tensor, tokens: int) -> None:
    """Shapes and dtypes of both, and what positions are; ids need not be pages, see :class:`CapturedLayer`."""
    for name, x in ((f"{layer}.pages", pages), (f"{layer}.positions", positions)):
        if x.dtype not in INTEGERS:
            raise unusable(path, name, f"in {_text(INTEGERS)}", x.dtype)
    if pages.ndim != 3 or 0 in pages.shape:
        raise unusable(path, f"{layer}.pages", "[N, Hkv, K], each at least 1", list(pages.shape))
    name = f"{layer}.positions"
    if positions.shape != pages.shape[:1]:
        raise unusable(path, name, f"[N = {len(pages)}], as its pages", list(positions.shape))
    if (low := int(positions.min())) < 0 or (high := int(positions.max())) >= tokens:
        raise unusable(path, name, f"from 0 to {tokens - 1}, the context's", low if low < 0 else high)
    if (steps := positions.int().diff()).numel() and int(steps.min()) < 1:
        at = int((steps < 1).nonzero()[0])
        raise unusable(path, name, "strictly ascending", f"{int(positions[at])} before {int(positions[at + 1])}")


def _count(path: str | Path, metadata: dict[str, str], name: str) -> int:
    value = json.loads(metadata.get(name, "null"))
    if type(value) is not int or value < 1:
        raise unusable(path, name, "an integer of at least 1", value)
    return value


def _text(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[Any]:
    """The file, read on the CPU; whatever reading it raises becomes a BenchError."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise BenchError("captures", str(path), f"reading captures needs the safetensors package ({error})") from None
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        if isinstance(error, BenchError):
            raise
        raise BenchError("captures", str(path), f"a readable capture ({error})") from None
