"""``evalkit analyze iou``: proxy masks against the oracle mask of full attention (the CoSA paper's Figure 2).

The oracle keeps, in every row of blocks, the K blocks of largest exact softmax mass; a proxy keeps the first K of its
own ranking. ``IoU = |P and O| / |P or O|`` over all rows of a head, and ``2 K`` less the intersection is the union.
What is held at a time is block-level, [heads, N/128, N/128] and a few tiles of logits, so that 128K fits.
"""

from __future__ import annotations

import sys

import pandas as pd
import torch
from prefill_kernels import PagedKV, block_mass
from torch import Tensor

from ..methods.base import PlanContext
from . import figures, proxies
from .settings import IouAnalysis
from .work import Probe, Prompt, Workbench, layer_line, write_facts, write_table

COUNTS = ("shared", "union", "row_iou", "rows", "blocks", "causal_blocks", "mass", "oracle_mass")
"""Sums over the rows of a head; ``mass`` in rows of attention."""


def run(settings: IouAnalysis, command: str) -> int:
    """Measure, or read what was measured, and write ``iou.csv``, ``iou_heads.parquet`` and the picture.

    Args:
        settings: validated settings.
        command: kept in ``iou.json``.

    Returns:
        Exit code.
    """
    bench = Workbench(settings, "iou", command, [sys.modules[__name__], proxies])
    with bench.parts.locked():
        parts = bench.each(lambda prompt: measure(bench, settings, prompt))
    heads, table = summarise(parts)
    write_table(heads, bench.out / "iou_heads.parquet")
    write_table(table, bench.out / "iou.csv")
    write_facts(bench.facts(), bench.out / "iou.json")
    title = f"{settings.model.name}, {settings.length} tokens, {bench.counted} of {', '.join(settings.tasks)}"
    figures.save(figures.draw_iou(heads, table, title), bench.out / "iou")
    for line in report(table):
        print(line, flush=True)
    return 0


def measure(bench: Workbench, settings: IouAnalysis, prompt: Prompt) -> pd.DataFrame:
    """One prompt: a row for each layer, head, proxy and budget, with the sums :data:`COUNTS`."""
    rows: list[pd.DataFrame] = []

    def look(q: Tensor, kv: PagedKV, context: PlanContext) -> None:
        call = proxies.Call(q, kv, context, settings.block_size, settings.stride)
        rows.append(layer_counts(call, settings))
        layer_line(context.layer, bench.shape[0])

    bench.prefill(prompt, Probe(look))
    return pd.concat(rows, ignore_index=True)


def layer_counts(call: proxies.Call, settings: IouAnalysis) -> pd.DataFrame:
    """All proxies and budgets at one layer; heads go through in slices."""
    mass = block_mass(
        call.q, call.kv, scale=call.context.scale, block_size=call.block_size, backend=call.context.backend
    )
    found: list[pd.DataFrame] = []
    for name in settings.proxies:
        ranking = proxies.rank(name, call)
        forced = ranking.forced if settings.forced else None
        for heads in proxies.head_slices(call.q.shape[1], call.blocks):
            oracle = proxies.places(mass[:, heads])
            own = proxies.places(ranking.score[:, heads], *(proxies.part(x, heads) for x in (ranking.first, forced)))
            for budget in settings.budgets:
                frame = counts(own, oracle, mass[:, heads], budget)
                frame.insert(0, "layer", call.context.layer)
                frame.insert(1, "head", range(heads.start, heads.stop))
                frame.insert(2, "proxy", name)
                frame.insert(3, "budget", budget)
                found.append(frame)
    return pd.concat(found, ignore_index=True)


def kept_blocks(tiles: int, budget: float) -> Tensor:
    """``K_i = max(1, floor(budget (i + 1) + 0.5))`` for tiles i from 0, int64 [tiles]."""
    tile = torch.arange(tiles, dtype=torch.float64)
    return torch.minimum(torch.floor(budget * (tile + 1) + 0.5).clamp(min=1), tile + 1).long()


def counts(own: Tensor, oracle: Tensor, mass: Tensor, budget: float) -> pd.DataFrame:
    """Compare two rankings at one budget.

    Args:
        own, oracle: places int32 [1, H, NQ, NK] as :func:`proxies.places` gives them.
        mass: exact softmax mass of each block, [1, H, NQ, NK].
        budget: share of the causal blocks.

    Returns:
        One row a head, columns :data:`COUNTS`.
    """
    tiles = own.shape[2]
    kept = kept_blocks(tiles, budget).to(own.device)
    chosen = own < kept[:, None]
    best = oracle < kept[:, None]
    shared = (chosen & best).sum(-1)[0]
    union = 2 * kept - shared
    sums = {
        "shared": shared.sum(-1),
        "union": union.sum(-1),
        "row_iou": (shared.double() / union).sum(-1),
        "mass": (mass * chosen).sum((0, 2, 3), dtype=torch.float64),
        "oracle_mass": (mass * best).sum((0, 2, 3), dtype=torch.float64),
    }
    frame = pd.DataFrame({name: values.cpu().numpy() for name, values in sums.items()})
    frame["rows"], frame["blocks"], frame["causal_blocks"] = tiles, int(kept.sum()), tiles * (tiles + 1) // 2
    return frame[list(COUNTS)]


def summarise(parts: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Pool the prompts by head, then take mean and spread over the heads of all layers.

    Returns:
        By layer, head, proxy and budget: ``iou`` (intersection over union of all rows and prompts), ``iou_rows`` (mean
        over rows), ``B`` (realized share of causal blocks), ``mass`` and ``oracle_mass`` (share of all attention).
        By proxy and budget: means over heads, ``iou_sd``, ``iou_p10``, ``iou_p90`` over heads, ``iou_layer_sd`` over
        the means of layers, and ``heads``, their number.
    """
    keys = ["layer", "head", "proxy", "budget"]
    sums = parts.groupby(keys, sort=False)[list(COUNTS)].sum().reset_index()
    tokens = parts.drop_duplicates(["task", "sample"])["prompt_tokens"].sum()
    heads = sums[keys].assign(
        iou=sums["shared"] / sums["union"],
        iou_rows=sums["row_iou"] / sums["rows"],
        B=sums["blocks"] / sums["causal_blocks"],
        mass=sums["mass"] / tokens,
        oracle_mass=sums["oracle_mass"] / tokens,
    )
    grouped = heads.groupby(["proxy", "budget"], sort=False)
    table = grouped[["B", "iou", "iou_rows", "mass", "oracle_mass"]].mean()
    spread = grouped["iou"]
    table["iou_sd"] = spread.std(ddof=1)
    table["iou_p10"], table["iou_p90"] = spread.quantile(0.1), spread.quantile(0.9)
    by_layer = heads.groupby(["proxy", "budget", "layer"], sort=False)["iou"].mean()
    table["iou_layer_sd"] = by_layer.groupby(["proxy", "budget"], sort=False).std(ddof=1)
    table["heads"] = spread.size()
    return heads, table.reset_index()


def report(table: pd.DataFrame) -> list[str]:
    """The table as lines: a proxy a line, a budget a column."""
    wide = table.pivot(index="proxy", columns="budget", values="iou").loc[list(dict.fromkeys(table["proxy"]))]
    # Short prompts round up: a row keeps at least one block.
    realized = table.groupby("budget")["B"].mean()
    lines = ["mean IoU with the oracle over heads, by budget", f"{'':14}" + "".join(f"{b:>8.0%}" for b in wide.columns)]
    lines.append(f"{'realized':14}" + "".join(f"{realized[b]:>8.1%}" for b in wide.columns))
    return lines + [f"{name:14}" + "".join(f"{value:8.3f}" for value in row) for name, row in wide.iterrows()]
