"""``evalkit analyze rowmax``: where the largest logit of each query row lies (the CoSA paper's Figure 3).

A row's maximum lies in the sink (block 0), on the diagonal (the row's own block) or elsewhere. The rows of the first
tile are left out of the shares: sink and diagonal are one block there. A fixed visiting order meets the maximum early
only where it lies at that order's end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch
from prefill_kernels import PagedKV, block_mass
from torch import Tensor

from ..errors import InputError
from ..methods.base import PlanContext
from . import figures
from .settings import RowmaxAnalysis
from .work import Probe, Prompt, Workbench, layer_line, write_facts, write_table

MAX_LOGITS = 1 << 26
"""Most logits held at once (256 MiB of float32)."""
PLACES = ("sink", "diagonal", "elsewhere")
COUNTS = (*PLACES, "rows", "max_blocks", "causal_blocks", "tiles")


def run(settings: RowmaxAnalysis, command: str) -> int:
    """Measure, or read what was measured, and write ``rowmax.csv``, the maps of the shown heads and the picture.

    Args:
        settings: validated settings.
        command: kept in ``rowmax.json``.

    Returns:
        Exit code.

    Raises:
        InputError: a head that the model does not have.
    """
    bench = Workbench(settings, "rowmax", command, [sys.modules[__name__]])
    with bench.parts.locked():
        if settings.shown:
            _check_heads(settings, bench)
        parts = bench.each(lambda prompt: measure(bench, settings, prompt))
        table = summarise(parts)
        shown = settings.shown_heads or representative(table)
        name = f"map-{bench.prompts[0].name}-" + "-".join(f"{layer}.{head}" for layer, head in shown)
        maps = bench.parts.get(name, lambda: measure_maps(bench, settings, bench.prompts[0], shown))
    write_table(table, bench.out / "rowmax.csv")
    write_table(maps, bench.out / "rowmax_maps.parquet")
    write_facts({**bench.facts(), "shown": [list(pair) for pair in shown]}, bench.out / "rowmax.json")
    title = f"{settings.model.name}, {bench.prompts[0].name}, {len(bench.prompts[0].ids)} tokens"
    figures.save(figures.draw_rowmax(table, maps, shown, settings.block_size, title), bench.out / "rowmax")
    for line in report(table, shown):
        print(line, flush=True)
    return 0


def _check_heads(settings: RowmaxAnalysis, bench: Workbench) -> None:
    layers, heads = bench.shape
    for text, (layer, head) in zip(settings.shown, settings.shown_heads, strict=True):
        if layer >= layers or head >= heads:
            raise InputError("shown", text, f"layers below {layers} and heads below {heads}, as this model has")


def row_maxima(q: Tensor, kv: PagedKV, block_size: int) -> Iterator[tuple[int, Tensor]]:
    """Key position of each row's largest causal logit, a query head at a time; ties to the first key.

    No more than :data:`MAX_LOGITS` logits exist at once. The softmax scaling changes no place.

    Args:
        q: [1, Hq, L, d] of the whole prompt.
        kv: keys of the same positions.
        block_size: rows that go through together are multiples of it.

    Yields:
        Query head, and int64 [L].
    """
    length, keys = q.shape[2], kv.gather()[0]
    group = q.shape[1] // kv.num_kv_heads
    position = torch.arange(length, device=q.device)
    step = max(1, MAX_LOGITS // (block_size * length)) * block_size
    for head in range(q.shape[1]):
        key = keys[0, head // group].float()
        found = torch.empty(length, dtype=torch.int64, device=q.device)
        for begin in range(0, length, step):
            end = min(length, begin + step)
            logits = q[0, head, begin:end].float() @ key[:end].mT
            logits.masked_fill_(position[:end] > position[begin:end, None], float("-inf"))
            found[begin:end] = logits.argmax(-1)
        yield head, found


def head_counts(where: Tensor, block_size: int) -> dict[str, int]:
    """Counts :data:`COUNTS` of one head.

    Args:
        where: int64 [L], key position of each row's maximum.
        block_size: of tiles and key blocks.
    """
    length = len(where)
    tiles = math.ceil(length / block_size)
    tile = torch.arange(length, device=where.device) // block_size
    block = where // block_size
    later = tile > 0
    sink, diagonal = (block == 0) & later, (block == tile) & later
    holders = torch.bincount(tile * tiles + block, minlength=tiles * tiles) > 0
    rows = int(later.sum())
    at_sink, at_diagonal = int(sink.sum()), int(diagonal.sum())
    return {
        "sink": at_sink,
        "diagonal": at_diagonal,
        "elsewhere": rows - at_sink - at_diagonal,
        "rows": rows,
        "max_blocks": int(holders.sum()),
        "causal_blocks": tiles * (tiles + 1) // 2,
        "tiles": tiles,
    }


def measure(bench: Workbench, settings: RowmaxAnalysis, prompt: Prompt) -> pd.DataFrame:
    """One prompt: a row for each layer and head, with the counts :data:`COUNTS`."""
    rows: list[dict[str, int]] = []

    def look(q: Tensor, kv: PagedKV, context: PlanContext) -> None:
        for head, where in row_maxima(q, kv, settings.block_size):
            rows.append({"layer": context.layer, "head": head, **head_counts(where, settings.block_size)})
        layer_line(context.layer, bench.shape[0])

    bench.prefill(prompt, Probe(look))
    return pd.DataFrame(rows)


def measure_maps(
    bench: Workbench, settings: RowmaxAnalysis, prompt: Prompt, shown: list[tuple[int, int]]
) -> pd.DataFrame:
    """Block masses and row maxima of some heads, in one long table.

    Columns ``layer``, ``head``, ``kind``, ``row``, ``key``, ``value``: of kind ``mass`` the attention that a row of
    tile ``row`` gives to key block ``key``, mean over its rows; of kind ``max`` the key of row ``row``'s maximum.
    """
    frames: list[pd.DataFrame] = []

    def look(q: Tensor, kv: PagedKV, context: PlanContext) -> None:
        wanted = [head for layer, head in shown if layer == context.layer]
        if not wanted:
            return
        mass = block_mass(
            q, kv, scale=context.scale, block_size=settings.block_size, backend=context.backend
        )[0]  # fmt: skip
        starts = torch.arange(mass.shape[1], device=q.device) * settings.block_size
        rows = (q.shape[2] - starts).clamp(max=settings.block_size)
        for head, where in row_maxima(q, kv, settings.block_size):
            if head not in wanted:
                continue
            tile, block = np.tril_indices(mass.shape[1])
            value = (mass[head] / rows[:, None]).double().cpu().numpy()[tile, block]
            shared = {"layer": context.layer, "head": head}
            frames.append(pd.DataFrame({**shared, "kind": "mass", "row": tile, "key": block, "value": value}))
            dots = {"kind": "max", "row": np.arange(len(where)), "key": where.cpu().numpy(), "value": 1.0}
            frames.append(pd.DataFrame({**shared, **dots}))

    bench.prefill(prompt, Probe(look))
    return pd.concat(frames, ignore_index=True)


def summarise(parts: pd.DataFrame) -> pd.DataFrame:
    """Pool the prompts by head.

    Returns:
        By layer and head: the shares ``sink``, ``diagonal``, ``elsewhere`` of the rows behind the first tile,
        ``max_blocks``, the share of causal blocks that hold at least one row maximum, and ``blocks_a_tile``, their mean
        number in a tile.
    """
    sums = parts.groupby(["layer", "head"])[list(COUNTS)].sum().reset_index()
    shares = {name: sums[name] / sums["rows"] for name in PLACES}
    return sums[["layer", "head"]].assign(
        **shares,
        max_blocks=sums["max_blocks"] / sums["causal_blocks"],
        blocks_a_tile=sums["max_blocks"] / sums["tiles"],
    )


def representative(table: pd.DataFrame) -> list[tuple[int, int]]:
    """The head with the largest share of row maxima in each place: sink, diagonal, elsewhere; no head twice."""
    found: list[tuple[int, int]] = []
    for name in PLACES:
        for row in table.sort_values(name, ascending=False, kind="stable").itertuples():
            pair = (int(row.layer), int(row.head))  # type: ignore[arg-type]
            if pair not in found:
                found.append(pair)
                break
    return found


def report(table: pd.DataFrame, shown: list[tuple[int, int]]) -> list[str]:
    """Means over all heads, and the shown heads, as lines."""
    lines = [f"{'row maxima':18}{'sink':>8}{'diagonal':>10}{'elsewhere':>11}{'blocks with one':>17}{'a tile':>8}"]
    named = [(f"mean of {len(table)} heads", table.drop(columns=["layer", "head"]).mean())]
    for layer, head in shown:
        rows = table[(table["layer"] == layer) & (table["head"] == head)]
        named.append((f"layer {layer} head {head}", rows.iloc[0]))
    for name, row in named:
        lines.append(
            f"{name:18}{row['sink']:8.1%}{row['diagonal']:10.1%}{row['elsewhere']:11.1%}{row['max_blocks']:17.1%}"
            f"{row['blocks_a_tile']:8.1f}"
        )
    return lines
