"""Attention over whole columns and whole diagonals, token by token (MInference's vertical-slash pattern).

Query i attends to key j <= i where j is a listed column or i - j a listed offset. A pair that is both is one cell: it
is attended to and counted once. A plan may instead ask for whole windows (below): the same products without the mask.

The kernel walks a tile of query rows in steps of :data:`STEP` keys. A diagonal crosses a tile of M rows in M
consecutive keys; those ranges, merged where a step could not jump the gap, are the tile's *windows*, computed as dense
products under a token mask. In coordinates relative to the tile's last row the windows of a head are the same for
every tile, so they are found once a head (:func:`slash_index`). Columns that lie in no window of a tile are gathered,
STEP at a time, into further products (MInference, Algorithms 4 and 5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .backends import choose_backend, triton_refusal
from .capabilities import provides
from .checks import check_operands, check_table
from .paged import PagedKV
from .plans import TileStats

STEP = 64
"""Keys of one product of the kernel."""

FAR = 1 << 29
"""An offset beyond every sequence."""

_MAX_LOGITS = 1 << 25
"""Most logits held at once by the reference backend (128 MiB of float32)."""


@dataclass(frozen=True)
class VerticalSlashPlan:
    """Columns and diagonals of each query head, for a whole prompt.

    Attributes:
        columns: int32 [B, Hq, V], key positions, ascending, then -1.
        slashes: int32 [B, Hq, S], offsets query - key, ascending, then -1.
        block_size: M, rows of a query tile and the unit of the block counts; 64 or 128.
        length: number of queries and of keys.
        whole_windows: attend to every causal key of the windows that are computed, as a kernel without masks does.
    """

    columns: Tensor
    slashes: Tensor
    block_size: int
    length: int
    whole_windows: bool = False

    @property
    def tiles(self) -> int:
        """Number of query tiles."""
        return math.ceil(self.length / self.block_size)

    def check(self) -> None:
        """Raise ValueError unless both lists are ascending, unique, in range and front-packed.

        Reads the plan back to the host: for tests and for checking a new method, not for the fast path.
        """
        if self.block_size not in (64, 128):
            raise ValueError(f"block_size={self.block_size}: must be 64 or 128")
        if self.columns.shape[:2] != self.slashes.shape[:2]:
            raise ValueError(f"columns {tuple(self.columns.shape)}, slashes {tuple(self.slashes.shape)}: [B, Hq, ...]")
        for name, lists in (("columns", self.columns), ("slashes", self.slashes)):
            before, after = lists[..., :-1], lists[..., 1:]
            if bool(((after >= 0) & (after <= before)).any()) or bool(((before < 0) & (after >= 0)).any()):
                raise ValueError(f"{name}: must ascend without repetition, -1 only at the end")
            if bool((lists >= self.length).any()) or bool((lists < -1).any()):
                raise ValueError(f"{name}: must lie in 0 .. {self.length - 1}")


@dataclass(frozen=True)
class SlashRanges:
    """The diagonals of each head, joined to ranges; lines are [B * Hq].

    A key's *distance* is counted back from the last row of a tile: last row - key. An offset s spans the distances
    s .. s + M - 1 of any tile. Spans are joined where the gap between them is shorter than a step.

    Attributes:
        member: bool [lines, L], whether an offset is listed.
        below: int32 [lines, L + 1], number of listed offsets below each offset.
        offsets: int32 [lines, S + 1], listed offsets, ascending, then :data:`FAR`.
        start: int32 [lines, S + 1], first offset of the range that each belongs to.
        before: int32 [lines, S + 1], windows of the ranges before that one.
    """

    member: Tensor
    below: Tensor
    offsets: Tensor
    start: Tensor
    before: Tensor


@dataclass(frozen=True)
class SlashIndex:
    """Each range cut into windows of STEP keys from its near end, so that windows never overlap; lines are [B * Hq].

    Attributes:
        windows: int32 [lines, W], distance at which each window begins (its key nearest the tile's end) times two,
            plus one where every pair of the window is on a listed diagonal; ascending. What follows the windows of a
            line is not to be read.
        window_count: int32 [lines, tiles], windows that reach a key at or after 0.
        covered: bool [lines, L + M], whether a distance lies in a window.
    """

    windows: Tensor
    window_count: Tensor
    covered: Tensor


@provides(physical_skip=True)
def vertical_slash_attention(
    q: Tensor, kv: PagedKV, plan: VerticalSlashPlan, *, scale: float, backend: str = "auto"
) -> tuple[Tensor, TileStats]:
    """Attend to the listed columns and diagonals exactly, each causal pair once (MInference, Algorithm 2, last lines).

    A query without any listed key gives zeros. Cells are the attended pairs; ``masked_cells`` are the other causal
    pairs of the windows, whose products are computed all the same. Blocks are what the kernel executes: steps of a tile
    (its windows, and its gathered columns by :data:`STEP`) times STEP / M, rounded up; with every diagonal listed that
    is the number of causal blocks.

    Args:
        q: [B, Hq, L, d].
        kv: keys and values of the same positions; Hkv divides Hq.
        plan: columns and diagonals.
        scale: softmax scaling of the model.
        backend: see :func:`prefill_kernels.resolve_backend`.

    Returns:
        Output [B, Hq, L, d] in the dtype of ``q`` and the :class:`TileStats`; the reference backend accumulates in
        float32, or in float64 when ``q`` is.

    Raises:
        ValueError: shapes of ``q``, ``kv`` and ``plan`` do not belong together, or ``scale`` is not finite and above 0.
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    if q.shape[2] != plan.length or kv.kv_len != plan.length:
        raise ValueError(f"q_len={q.shape[2]}, kv_len={kv.kv_len}: the plan is for {plan.length}")
    check_operands(q, kv, scale=scale, block_size=plan.block_size)
    for name, lists in (("plan.columns", plan.columns), ("plan.slashes", plan.slashes)):
        if lists.shape[:2] != q.shape[:2]:
            raise ValueError(f"{name} {tuple(lists.shape)}: must lead with [B, Hq] = {tuple(q.shape[:2])}")
        check_table(name, lists, (*q.shape[:2], lists.shape[-1]), torch.int32, q.device)
    refusals = {"triton": triton_refusal("triton_vertical_slash", q, kv, plan)}
    if choose_backend("attention", backend, q.device, refusals) == "triton":
        from .triton_vertical_slash import vertical_slash_triton

        return vertical_slash_triton(q, kv, plan, scale)
    return _attend_torch(q, kv, plan, scale)


def _attend_torch(q: Tensor, kv: PagedKV, plan: VerticalSlashPlan, scale: float) -> tuple[Tensor, TileStats]:
    """Masked softmax attention, some tiles at a time."""
    batch, heads, length, dim = q.shape
    kv_heads, size = kv.num_kv_heads, plan.block_size
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys, values = (x.to(compute) for x in kv.gather())
    member = members(plan.slashes, length).unflatten(0, (batch, heads))
    is_column = members(plan.columns, length).unflatten(0, (batch, heads))
    # Row r of this view is the mask of query L - 1 - r by diagonals; offsets below 0 lie in the zeros, which is
    # what makes it causal.
    reversed_members = torch.cat([member.flip(-1), member.new_zeros(batch, heads, length - 1)], -1)
    by_diagonal = reversed_members.unfold(-1, length, 1)
    covered = slash_index(plan).covered.unflatten(0, (batch, heads))

    out = torch.empty(batch, length, heads, dim, dtype=q.dtype, device=q.device).transpose(1, 2)
    cells: list[Tensor] = []
    masked: list[Tensor] = []
    position = torch.arange(length, device=q.device)
    rows_at_once = max(1, _MAX_LOGITS // (batch * heads * length) // size) * size
    for start in range(0, length, rows_at_once):
        stop = min(start + rows_at_once, length)
        rows = position[start:stop]
        mask = by_diagonal[:, :, length - 1 - rows, :stop]
        distance = ((rows // size + 1) * size - 1)[:, None] - position[:stop]
        windows = covered.gather(-1, distance.clamp(0).flatten().expand(batch, heads, -1)).view_as(mask)
        windows &= position[:stop] <= rows[:, None]
        mask |= is_column[:, :, None, :stop]
        mask &= position[:stop] <= rows[:, None]
        if plan.whole_windows:
            mask |= windows
        grouped = q[:, :, start:stop].to(compute).reshape(batch, kv_heads, -1, dim)
        logits = grouped @ keys[:, :, :stop].mT * scale
        logits = logits.view(batch, heads, stop - start, stop).masked_fill_(~mask, float("-inf"))
        weights = (logits - logits.amax(-1, keepdim=True).clamp(min=torch.finfo(compute).min)).exp_()
        total = weights.sum(-1, keepdim=True)
        mixed = (weights.view(batch, kv_heads, -1, stop) @ values[:, :, :stop]).view(batch, heads, stop - start, dim)
        # A query without any key has a zero denominator: its output is zero, not 0/0.
        out[:, :, start:stop] = (mixed / total.masked_fill(total == 0, 1.0)).to(q.dtype)
        for counts, pairs in ((cells, mask), (masked, windows & ~mask)):
            per_row = torch.nn.functional.pad(pairs.sum(-1), (0, -(stop - start) % size))
            counts.append(per_row.unflatten(-1, (-1, size)).sum(-1))
    cell_counts = torch.cat(cells, -1)
    blocks = executed_blocks(plan)
    return out, TileStats(cell_counts, cell_counts, blocks, blocks, masked_cells=torch.cat(masked, -1))


def executed_blocks(plan: VerticalSlashPlan) -> Tensor:
    """Blocks of each tile as :func:`vertical_slash_attention` counts them, int64 [B, Hq, tiles]."""
    index = slash_index(plan)
    columns = plan.columns.flatten(0, 1).long()
    lines, width = columns.shape
    ends = torch.arange(1, plan.tiles + 1, device=columns.device) * plan.block_size - 1
    gathered = []
    for some in ends.split(max(1, _MAX_LOGITS // (4 * max(1, lines * width)))):
        distance = some[:, None] - columns[:, None, :]
        held = index.covered.gather(1, distance.clamp(0, index.covered.shape[1] - 1).flatten(1)).view_as(distance)
        gathered.append(((columns[:, None, :] >= 0) & (distance >= 0) & ~held).sum(-1))
    steps = index.window_count + -(-torch.cat(gathered, -1) // STEP)
    return (-(-steps * STEP // plan.block_size)).view(*plan.columns.shape[:2], plan.tiles)


def members(lists: Tensor, length: int) -> Tensor:
    """Positions of -1 padded lists [B, Hq, n] as flags, bool [B * Hq, length]."""
    flat = lists.flatten(0, 1).long()
    flags = torch.zeros(flat.shape[0], length + 1, dtype=torch.bool, device=flat.device)
    return flags.scatter_(1, torch.where(flat >= 0, flat, length), True)[:, :length]


def slash_ranges(plan: VerticalSlashPlan) -> SlashRanges:
    """Join the spans of each head's diagonals (MInference, Algorithm 4, for all tiles at once).

    Elementwise operations and scans alone: nothing is read back.
    """
    apart = plan.block_size + STEP
    offsets = torch.nn.functional.pad(plan.slashes.flatten(0, 1), (0, 1), value=-1)
    listed = offsets >= 0
    offsets = torch.where(listed, offsets, FAR)
    gap = torch.nn.functional.pad(offsets.diff(dim=-1), (1, 1), value=FAR)
    begins, ends = listed & (gap[:, :-1] >= apart), listed & (gap[:, 1:] >= apart)
    start = torch.where(begins, offsets, -1).cummax(-1).values
    windows = torch.where(ends, (offsets + plan.block_size - start + STEP - 1) // STEP, 0)
    before = windows.cumsum(-1, dtype=torch.int32) - windows
    member = members(plan.slashes, plan.length)
    below = torch.nn.functional.pad(member.cumsum(-1, dtype=torch.int32), (1, 0))
    return SlashRanges(member, below, offsets, start, before)


def slash_index(plan: VerticalSlashPlan, ranges: SlashRanges | None = None) -> SlashIndex:
    """Cut the ranges of each head into windows; the reference for the kernel that does it on the GPU."""
    size, length = plan.block_size, plan.length
    ranges = slash_ranges(plan) if ranges is None else ranges
    place = torch.arange(length + size, device=ranges.below.device).expand(ranges.below.shape[0], -1)

    def at(x: Tensor, where: Tensor) -> Tensor:
        return x.gather(1, where.clamp(min=0, max=x.shape[1] - 1)).long()

    def near(distance: Tensor) -> tuple[Tensor, Tensor]:
        """Number of the last listed offset at or before a distance (-1: none), and whether a range holds it."""
        number = at(ranges.below, distance + 1) - 1
        last, following = at(ranges.offsets, number), at(ranges.offsets, number + 1)
        inside = (distance - last < size) | (following - last < size + STEP)
        return number, (number >= 0) & inside

    number, inside = near(place)
    start = at(ranges.start, number)
    step = (place - start).clamp(min=0) // STEP
    covered = (number >= 0) & near(start + step * STEP)[1]

    # Rows and keys of a window differ by place - M + 1 .. place + STEP - 1.
    held = at(ranges.below, place + STEP) - at(ranges.below, place - size + 1)
    packed = 2 * place + (held == size + STEP - 1)
    is_window = inside & ((place - start) % STEP == 0)
    width = (length + size) // STEP + 1
    slot = torch.where(is_window, at(ranges.before, number) + step, width)
    windows = torch.full((len(place), width + 1), -1, dtype=torch.int32, device=place.device)
    windows.scatter_(1, slot, packed.int())

    end = torch.arange(1, plan.tiles + 1, device=place.device).expand(len(place), -1) * size - 1
    # A tile ends inside a range, or after the last window of one.
    last_step = (at(ranges.offsets, at(number, end)) + size - 1 - at(start, end)) // STEP
    reached = at(ranges.before, at(number, end)) + 1 + torch.where(at(covered, end) > 0, at(step, end), last_step)
    window_count = torch.where(at(number, end) >= 0, reached, 0).int()
    return SlashIndex(windows[:, :width], window_count, covered)
