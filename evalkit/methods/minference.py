"""MInference (Jiang et al. 2024): a fixed sparse pattern for each head, its indices estimated from the prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from prefill_kernels import BlockPlan, HeadwisePlan, PagedKV, VerticalSlashPlan, causal_cells
from prefill_kernels.vertical_slash_select import (
    FORCED_COLUMNS,
    FORCED_SLASHES,
    block_sparse_lists,
    constant,
    pooled_pairs,
    top_positions,
    vertical_slash_scores,
)
from torch import Tensor

from ..errors import InputError, near_matches
from .base import Knob, Method, PlanContext
from .head_patterns import HeadPattern, PatternTable, load_patterns

LEAST_COLUMNS, LEAST_SLASHES = 30, 50
"""Smallest sizes of a vertical-slash head; smaller ones are raised to them."""
EXECUTIONS = ("token", "block")
MADE_FOR = ("block_size", "last_q", "execution")
"""Settings that a searched table's sizes were found under, and hold for."""
COLUMN_SHARE, SLASH_SHARE = 0.2, 0.8
"""How ``adaptive_budget`` is divided between columns and slashes."""


@dataclass(frozen=True)
class MInference(Method):
    """Vertical-slash, A-shape and block-sparse heads.

    Attributes:
        block_size: query tile, and block of block-sparse heads; the paper's is 64.
        vertical_size, slash_size: columns and diagonals of every head, where there is no table.
        adaptive_budget: sizes that grow with the prompt instead: 0.2 of this share of its length as columns and 0.8 of
            it as diagonals; 1 keeps every diagonal. None = the sizes above.
        table: file with a pattern for each layer and head (see :mod:`evalkit.methods.head_patterns`), made by
            ``evalkit search-patterns``; None = every head is vertical-slash.
        ratio: multiplies every size, of a table too.
        last_q: last queries that columns and diagonals are estimated from.
        execution: ``token`` attends to the chosen columns and diagonals exactly; ``block`` to every causal key of the
            windows that are computed for them, which is what a kernel without masks does.
    """

    name: ClassVar[str] = "minference"
    chunkable: ClassVar[bool] = False
    #: From the least sizes to a default that covers a prompt of 128K whole.
    knob: ClassVar[Knob | None] = Knob("ratio", 0.01, 32.0, scale="log")
    file_fields: ClassVar[tuple[str, ...]] = ("calibration", "table")

    block_size: int = 64
    vertical_size: int = 1000
    slash_size: int = 6096
    adaptive_budget: float | None = None
    table: str | None = None
    ratio: float = 1.0
    last_q: int = 64
    execution: str = "token"

    def validate(self) -> None:
        """Check every field; a table is read."""
        if self.block_size not in (64, 128):
            raise InputError("method.block_size", self.block_size, "64 or 128 tokens")
        for name in ("vertical_size", "slash_size"):
            if getattr(self, name) < 1:
                raise InputError(f"method.{name}", getattr(self, name), "1 or more")
        if self.adaptive_budget is not None:
            if not 0 < self.adaptive_budget <= 1:
                raise InputError(
                    "method.adaptive_budget", self.adaptive_budget, "above 0, at most 1 (1 keeps everything), or null"
                )
        if not (math.isfinite(self.ratio) and self.ratio > 0):
            raise InputError("method.ratio", self.ratio, "above 0")
        if not 1 <= self.last_q <= 128:
            raise InputError("method.last_q", self.last_q, "1 to 128")
        if self.execution not in EXECUTIONS:
            raise InputError("method.execution", self.execution, near_matches(self.execution, EXECUTIONS))
        super().validate()
        if table := self._table():
            for name in MADE_FOR:
                made = table.search.get(name, getattr(self, name))
                if made != getattr(self, name):
                    raise InputError(f"method.{name}", getattr(self, name), f"{made}, of which {self.table} was made")

    def inert(self) -> dict[str, str]:
        """Sizes of every head: a table has its own, and those that grow with the prompt replace the fixed ones."""
        if self.table is not None:
            return dict.fromkeys(("adaptive_budget", "vertical_size", "slash_size"), "table")
        if self.adaptive_budget is not None:
            return dict.fromkeys(("vertical_size", "slash_size"), "adaptive_budget")
        return {}

    def check_model(self, layers: int, heads: int) -> None:
        """The table must have the model's layers and query heads."""
        if table := self._table():
            table.check_model("method.table", layers, heads)

    @property
    def recordable(self) -> bool:
        """Columns and diagonals are not; a table can have heads of blocks."""
        return self.table is not None

    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> VerticalSlashPlan | BlockPlan | HeadwisePlan:
        """Algorithms 2 and 3, index part."""
        return pattern_plan(
            q,
            kv,
            self.patterns(context.layer, q.shape[1], q.shape[2]),
            block_size=self.block_size,
            scale=context.scale,
            last_q=self.last_q,
            whole_windows=self.execution == "block",
            backend=context.backend,
        )

    def patterns(self, layer: int, heads: int, length: int) -> tuple[HeadPattern, ...]:
        """Patterns of one layer's heads with the sizes that hold for a prompt of ``length`` tokens."""
        if table := self._table():
            chosen = table.heads[layer]
        elif self.adaptive_budget is None:
            chosen = (HeadPattern("vertical_slash", (self.vertical_size, self.slash_size)),) * heads
        elif self.adaptive_budget == 1:
            # Every diagonal holds every column.
            chosen = (HeadPattern("vertical_slash", (LEAST_COLUMNS, length)),) * heads
        else:
            sizes = (int(share * self.adaptive_budget * length) for share in (COLUMN_SHARE, SLASH_SHARE))
            chosen = (HeadPattern("vertical_slash", tuple(sizes)),) * heads
        return tuple(fitted(pattern, length, self.block_size, self.ratio) for pattern in chosen)

    def estimator_cells(self, q_offset: int, q_len: int) -> int:
        """Causal pairs of the last queries, or of pooled blocks; a table gives the mean over its heads."""
        last = min(self.last_q, q_len)
        each = {
            "vertical_slash": causal_cells(q_len - last, last),
            "a_shape": 0,
            "block_sparse": pooled_pairs(q_len, self.block_size),
        }
        table = self._table()
        if table is None:
            return each["vertical_slash"]
        names = [pattern.name for layer in table.heads for pattern in layer]
        return round(sum(each[name] for name in names) / len(names))

    def warnings(self, prompt_len: int) -> list[str]:
        """Report sizes that leave nothing out of a prompt of this length."""
        if self.table is not None or self.adaptive_budget is not None:
            return []
        if self.slash_size * self.ratio < prompt_len:
            return []
        return [f"slash_size x ratio = {self.slash_size * self.ratio:g} covers every diagonal of N={prompt_len}: dense"]

    def _table(self) -> PatternTable | None:
        return load_patterns(self.table, "method.table") if self.table is not None else None


def fitted(pattern: HeadPattern, length: int, block_size: int, ratio: float = 1.0) -> HeadPattern:
    """A pattern with its sizes times ``ratio``, raised to the least and cut to what a prompt has."""
    sizes = tuple(int(size * ratio) for size in pattern.sizes)
    if pattern.name == "vertical_slash":
        least, most = (LEAST_COLUMNS, LEAST_SLASHES), (length, length)
    elif pattern.name == "a_shape":
        least, most = (0, 1), (length, length)
    else:
        least, most = (1, 1), (math.ceil(length / block_size),) * 2
    return HeadPattern(pattern.name, tuple(min(max(s, a), b) for s, a, b in zip(sizes, least, most, strict=False)))


def pattern_plan(
    q: Tensor,
    kv: PagedKV,
    patterns: Sequence[HeadPattern],
    *,
    block_size: int,
    scale: float,
    last_q: int = 64,
    whole_windows: bool = False,
    backend: str = "auto",
) -> VerticalSlashPlan | BlockPlan | HeadwisePlan:
    """Plan every head of a layer by its pattern.

    An A-shape head is columns and diagonals too, those of its initial tokens and of its window.

    Args:
        q: [B, Hq, L, d].
        kv: keys of the same positions.
        patterns: one for each query head, fitted to the prompt's length.
        block_size: query tile, and block of block-sparse heads.
        scale: softmax scaling of the model.
        last_q: last queries that columns and diagonals are estimated from.
        whole_windows: see :class:`prefill_kernels.VerticalSlashPlan`.
        backend: see :func:`prefill_kernels.resolve_backend`.
    """
    of = {name: [h for h, p in enumerate(patterns) if p.name == name] for name in {p.name for p in patterns}}
    parts: list[VerticalSlashPlan | BlockPlan] = []
    lines: list[tuple[list[int], Tensor, Tensor]] = []
    length = q.shape[2]
    if estimated := of.get("vertical_slash"):
        scores = vertical_slash_scores(q, kv, estimated, scale=scale, last_q=last_q, backend=backend)
        sizes = [patterns[h].sizes for h in estimated]
        columns = top_positions(scores[0], [size[0] for size in sizes], forced=FORCED_COLUMNS)
        slashes = top_positions(scores[1], [size[1] for size in sizes], forced=FORCED_SLASHES)
        lines.append((estimated, columns, slashes))
    if shaped := of.get("a_shape"):
        sizes = [patterns[h].sizes for h in shaped]
        first, window = (_ranges(tuple(size[i] for size in sizes), q.device) for i in (0, 1))
        lines.append((shaped, first.expand(q.shape[0], -1, -1), window.expand(q.shape[0], -1, -1)))
    if lines:
        columns = _spread([(heads, mine) for heads, mine, _ in lines], len(patterns))
        slashes = _spread([(heads, mine) for heads, _, mine in lines], len(patterns))
        parts.append(VerticalSlashPlan(columns, slashes, block_size, length, whole_windows))
    if sparse := of.get("block_sparse"):
        top_k = [patterns[h].sizes[0] for h in sparse]
        order, count = block_sparse_lists(q, kv, sparse, top_k, block_size=block_size, scale=scale)
        order = _spread([(sparse, order)], len(patterns))
        count = _spread([(sparse, count)], len(patterns), padding=0)
        parts.append(BlockPlan(order, count, block_size, 0, length, length, length))
    return parts[0] if len(parts) == 1 else HeadwisePlan(tuple(parts))


def _spread(lists: list[tuple[list[int], Tensor]], heads: int, padding: int = -1) -> Tensor:
    """Lists of some heads each, [B, n, ..., width], as lists of all heads, padded to one width."""
    if len(lists) == 1 and len(lists[0][0]) == heads:
        return lists[0][1]
    like = lists[0][1]
    width = max(x.shape[-1] for _, x in lists)
    out = like.new_full((like.shape[0], heads, *like.shape[2:-1], width), padding)
    for mine, x in lists:
        padded = torch.nn.functional.pad(x, (0, width - x.shape[-1]), value=padding)
        out.index_copy_(1, constant(x.device, tuple(mine)), padded)
    return out


@lru_cache(maxsize=256)
def _ranges(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """0 .. size - 1 for each size, then -1; int32 [1, len(sizes), max size]."""
    place = torch.arange(max(sizes), dtype=torch.int32, device=device)
    return torch.where(place < constant(device, sizes)[:, None], place, -1)[None]
