"""Record what a real run's attention calls see and select: Q, K and V after RoPE, lists of blocks, pages of queries.

A :class:`Recorder` stands in for a method in a :class:`~evalkit.attention.Session`; it asks that method for every plan
and keeps what it is told to of the layers it is told to. :func:`save` writes one safetensors file.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from prefill_kernels import BlockPlan, Capabilities, PagedKV, PagePlan, TileStats
from prefill_kernels.bench.inputs import FORMAT
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import InputError
from .methods.base import Method, Plan, PlanContext


@dataclass
class LayerCapture:
    """One layer of one prompt.

    Attributes:
        scaling: softmax scaling.
        q: chunks of [L, Hq, d].
        k, v: [L, Hkv, d] of the whole prompt so far.
        order, count: for each chunk, a block plan's lists, [Hq, NQ, K] and [Hq, NQ] in int32.
        pages: for each chunk, a page plan's pages, int32 [N, Hkv, K].
        positions: for each chunk, absolute positions of those queries, int32 [N].
        page_size: tokens of a page; 0 without pages.
    """

    scaling: float
    q: list[Tensor] = field(default_factory=list)
    k: Tensor | None = None
    v: Tensor | None = None
    order: list[Tensor] = field(default_factory=list)
    count: list[Tensor] = field(default_factory=list)
    pages: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    page_size: int = 0

    def selected_pages(self) -> tuple[Tensor, Tensor]:
        """Pages of all chunks, int32 [N, Hkv, K] with -1 where a chunk has fewer, and positions int32 [N]."""
        width = max(pages.shape[-1] for pages in self.pages)
        padded = [torch.nn.functional.pad(pages, (0, width - pages.shape[-1]), value=-1) for pages in self.pages]
        return torch.cat(padded), torch.cat(self.positions)


class Recorder(Method):
    """A method that plans as another does and keeps what it saw, on the CPU.

    Args:
        method: the method that plans.
        layers: layers to keep.
        tensors: keep Q, K and V.
        selections: keep the lists of block plans and the pages of page plans.
        watched: a method whose selections are kept in place of those of ``method``. It is asked and not followed: with
            a dense ``method`` the model goes on as it would have without a selection.
        queries: keep the pages of the prompt's last queries alone; None = of all.

    Attributes:
        captures: what was kept, by layer.
    """

    def __init__(
        self,
        method: Method,
        layers: Collection[int],
        *,
        tensors: bool = True,
        selections: bool = False,
        watched: Method | None = None,
        queries: int | None = None,
    ) -> None:
        super().__init__(method.block_size, method.calibration, method.budget_target)
        self.method, self.layers = method, frozenset(layers)
        self.tensors, self.selections = tensors, selections
        self.watched, self.queries = watched, queries
        self.captures: dict[int, LayerCapture] = {}
        # Class variables of a method; whoever asks, asks the instance.
        self.name, self.chunkable = method.name, method.chunkable  # type: ignore[misc]
        self.knob, self.file_fields = method.knob, method.file_fields  # type: ignore[misc]

    def validate(self) -> None:
        """Check the fields of the methods."""
        self.method.validate()
        if self.watched is not None:
            self.watched.validate()

    def inert(self) -> dict[str, str]:
        """The method's."""
        return self.method.inert()

    def check_model(self, layers: int, heads: int) -> None:
        """Check the tables of the methods."""
        self.method.check_model(layers, heads)
        if self.watched is not None:
            self.watched.check_model(layers, heads)

    def check_device(self, device: torch.device, dtype: torch.dtype, backend: str, page_size: int) -> None:
        """Check the method that attends; the watched one only selects."""
        self.method.check_device(device, dtype, backend, page_size)

    @property
    def chunk_problem(self) -> str | None:
        """That of either method."""
        watched = None if self.watched is None else self.watched.chunk_problem
        return self.method.chunk_problem or watched

    @property
    def features(self) -> Capabilities:
        """The method's."""
        return self.method.features

    @property
    def recordable(self) -> bool:
        """The method's."""
        return self.method.recordable

    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> Plan:
        """The method's plan; what it was made from is kept. A prompt's first chunk replaces an earlier prompt."""
        plan = self.method.plan(q, kv, context)
        if context.layer in self.layers:
            if context.q_offset == 0:
                self.captures[context.layer] = LayerCapture(context.scale)
            kept = self.captures[context.layer]
            if self.tensors:
                self._keep(kept, q, kv)
            if self.selections:
                self._keep_selection(kept, plan if self.watched is None else self.watched.plan(q, kv, context), context)
        return plan

    def _keep(self, kept: LayerCapture, q: Tensor, kv: PagedKV) -> None:
        kept.q.append(q[0].transpose(0, 1).cpu())
        k, v = kv.gather()
        # Copies: the views point into pages that the next prompt reuses.
        kept.k, kept.v = (x[0].transpose(0, 1).to("cpu", copy=True) for x in (k, v))

    def _keep_selection(self, kept: LayerCapture, plan: Plan, context: PlanContext) -> None:
        if isinstance(plan, BlockPlan):
            kept.order.append(plan.order[0].cpu())
            kept.count.append(plan.count[0].cpu())
        elif isinstance(plan, PagePlan):
            begin = 0 if self.queries is None else context.prompt_len - self.queries - context.q_offset
            rows = slice(max(0, begin), None)
            kept.page_size = plan.page_size
            kept.pages.append(plan.pages[0, rows].cpu())
            kept.positions.append(plan.positions[rows].cpu())

    def estimator_cells(self, q_offset: int, q_len: int) -> int:
        """The method's."""
        return self.method.estimator_cells(q_offset, q_len)

    def kernel_backend(self, backend: str) -> str:
        """The method's."""
        return self.method.kernel_backend(backend)

    def work(self, stats: TileStats) -> dict[str, int | Tensor]:
        """The method's."""
        return self.method.work(stats)

    def work_ratios(self, total: Mapping[str, int]) -> dict[str, float]:
        """The method's."""
        return self.method.work_ratios(total)

    def warnings(self, prompt_len: int) -> list[str]:
        """The method's."""
        return self.method.warnings(prompt_len)


def save(captures: Mapping[int, LayerCapture], path: Path, *, model: str, metadata: Mapping[str, Any]) -> None:
    """Write captures to one safetensors file.

    Tensors are ``layer.<n>.q`` [L, Hq, d], ``.k`` and ``.v`` [L, Hkv, d]; where selections were kept, of block plans
    ``.order`` [Hq, NQ, K] (-1 padded) and ``.count`` [Hq, NQ], of page plans ``.pages`` [N, Hkv, K] (int16, int32 where
    a sequence has more pages than that holds; -1 padded) and ``.positions`` int32 [N]. Metadata: ``format``, ``model``,
    ``scaling`` (JSON, by layer), with pages ``page_size``, and what is given here, each value as JSON.

    Raises:
        InputError: nothing was captured, or the file cannot be written.
    """
    if not captures:
        raise InputError("capture.layers", [], "layers that the run has; none was captured")
    tensors: dict[str, Tensor] = {}
    facts = dict(metadata)
    for layer, kept in sorted(captures.items()):
        name = f"layer.{layer}"
        if kept.k is not None and kept.v is not None:
            tensors |= {f"{name}.q": torch.cat(kept.q), f"{name}.k": kept.k, f"{name}.v": kept.v}
        if kept.order:
            width = max(order.shape[-1] for order in kept.order)
            padded = [torch.nn.functional.pad(o, (0, width - o.shape[-1]), value=-1) for o in kept.order]
            tensors |= {f"{name}.order": torch.cat(padded, 1), f"{name}.count": torch.cat(kept.count, 1)}
        if kept.pages:
            pages, positions = kept.selected_pages()
            small = int(pages.max()) <= torch.iinfo(torch.int16).max
            pages = pages.to(torch.int16 if small else torch.int32)
            tensors |= {f"{name}.pages": pages, f"{name}.positions": positions}
            facts["page_size"] = kept.page_size
    scaling = {str(layer): kept.scaling for layer, kept in sorted(captures.items())}
    described = {key: json.dumps(value) for key, value in facts.items()}
    scratch = path.with_name(f".{path.name}.{os.getpid()}")  # a file that is there is whole
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(plain, scratch, {**described, "format": FORMAT, "model": model, "scaling": json.dumps(scaling)})
        os.replace(scratch, path)
    except (OSError, SafetensorError) as error:  # the latter is that of safetensors' own writing
        raise InputError("capture.out", str(path), f"a file that can be written to ({error})") from None
    finally:
        scratch.unlink(missing_ok=True)


def held(path: Path, request: Mapping[str, Any], code: str) -> bool:
    """Whether a file holds what a request would record again, so that it need not be.

    Args:
        path: of the file, which need not be there.
        request: all that decides what is recorded, by its name in the file's metadata.
        code: digest of the code; what other code recorded is recorded again.

    Raises:
        InputError: there is another capture, or a file that is none: it is not written over.
    """
    if not path.exists():
        return False
    allowed = "another directory, or that file removed first: it"
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
        found = {name: json.loads(metadata[name]) for name in request if name in metadata}
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError("capture.out", str(path), f"{allowed} cannot be read ({error})") from None
    wanted = json.loads(json.dumps(request))
    other = [name for name in wanted if name not in found or found[name] != wanted[name]]
    if metadata.get("format") != FORMAT or other:
        told = "; ".join(
            f"{name} {json.dumps(found[name])}, not {json.dumps(wanted[name])}" for name in other if name in found
        )
        raise InputError("capture.out", str(path), f"{allowed} holds another capture ({told or 'of another format'})")
    return bool(metadata.get("code") == json.dumps(code))


def require_writable(folder: Path) -> None:
    """Raise InputError unless files can be made in a directory, which need not be there yet; leaves nothing behind."""
    made: list[Path] = []
    try:
        made = [one for one in (folder, *folder.parents) if not one.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError("capture.out", str(folder), f"a directory that can be written to ({error.strerror})") from None
    finally:
        for one in made:
            with contextlib.suppress(OSError):
                one.rmdir()
