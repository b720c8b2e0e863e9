"""Made-up cells, written through the store itself."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from evalkit.store import CellResult, CellStore, cell_key, twin_key

LAYERS, HEADS = 3, 2
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'>&lt;\u2028<!--"
"""Ends a script, starts others, and sets what a test can see."""
VERSIONS = {"torch": "2", "code": "abc"}


def config(
    method: str = "cosa",
    *,
    p: float = 0.95,
    order: str = "hrm_first",
    skip_scale: float = -1.0,
    task: str = "perplexity",
    length: int = 2048,
    limit: int = 4,
    tasks: Sequence[str] = ("niah_multikey_1", "vt"),
    model: str = "tiny",
    page_size: int = 64,
) -> dict[str, Any]:
    """Resolved settings as ``Cell.as_dict`` gives them, sections model, method, task, execution."""
    knobs: dict[str, Any] = {"name": "dense", "block_size": 128}
    if method != "dense":
        select = {"rule": "top_p", "p": p, "budget": None}
        knobs = {"name": method, "block_size": 128, "select": select, "order": order, "skip_scale": skip_scale}
    if task == "ruler":
        settings = {"name": "ruler", "tasks": list(tasks), "length": length, "limit": limit, "seed": 42}
    else:
        settings = {"name": "perplexity", "corpus": "essays", "length": length, "limit": limit, "score": "last_quarter"}
    return {
        "model": {"name": model, "path": f"org/{model}", "native_context": 131072, "rope": {"type": "none"}},
        "method": knobs,
        "task": settings,
        "execution": {"backend": "torch", "page_size": page_size, "chunk_size": None},
    }


def identity(settings: Mapping[str, Any], data: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Identity of a cell with these settings."""
    model = {key: value for key, value in settings["model"].items() if key != "name"}
    rest = {"data": data or {"samples": "s0", "weights": "w0"}, "versions": VERSIONS, "device": {"type": "cpu"}}
    return {**{name: settings[name] for name in ("method", "task", "execution")}, "model": model, **rest}


def label(settings: Mapping[str, Any]) -> str:
    method, task = settings["method"], settings["task"]
    knobs = [f"select.p={method['select']['p']:g}"] if "select" in method else []
    return " ".join([settings["model"]["name"], method["name"], *knobs, f"{task['name']}@{task['length']}"])


def overrides(settings: Mapping[str, Any]) -> tuple[str, ...]:
    method, task = settings["method"], settings["task"]
    extra = [f"method.select.p={method['select']['p']:g}"] if "select" in method else []
    names = [f"{section}={settings[section]['name']}" for section in ("model", "method", "task")]
    return (*names, *extra, f"task.length={task['length']}", f"task.limit={task['limit']}")


def frame(length: int, share: float, shift: float = 0.0) -> pd.DataFrame:
    """Budget per layer and head: ``share`` of the dense cells, layers ``shift`` apart."""
    layer, head = np.indices((LAYERS, HEADS)).reshape(2, -1)
    dense = length * (length + 1) // 2
    computed = np.clip(dense * (share + shift * (layer - 1)), 1, dense).astype(np.int64)
    blocks = -(-length // 128)
    dense_blocks = blocks * (blocks + 1) // 2
    columns = {
        "layer": layer.astype(np.int32),
        "head": head.astype(np.int32),
        "dense": dense,
        "visited": np.minimum(computed + (dense - computed) // 4, dense),
        "computed": computed,
        "dense_blocks": dense_blocks,
        "visited_blocks": dense_blocks,
        "computed_blocks": np.maximum(computed * dense_blocks // dense, 1),
    }
    return pd.DataFrame({name: np.broadcast_to(column, layer.shape) for name, column in columns.items()})


def record(
    task: str,
    length: int,
    index: int,
    metrics: Mapping[str, float],
    *,
    share: float = 1.0,
    tokens: int | None = None,
    fallback: float = 0.0,
    warnings: Sequence[str] = (),
) -> tuple[dict[str, Any], pd.DataFrame]:
    """A sample's record and its budget frame."""
    tokens = length if tokens is None else tokens
    budget = frame(tokens, share)
    total = {name: int(budget[name].sum()) for name in budget.columns[2:]}
    layers = budget.groupby("layer")[["computed", "dense"]].sum()
    ratio = layers["computed"] / layers["dense"]
    estimator = 0.0 if share == 1.0 else 1 / 128
    return {
        "task": task,
        "length": length,
        "index": index,
        "metrics": dict(metrics),
        "output": None,
        "references": [],
        "prompt": {"sha256": hashlib.sha256(f"{task}/{length}/{index}".encode()).hexdigest(), "tokens": tokens},
        "budget": {
            **total,
            "estimator": estimator,
            "B": total["computed"] / total["dense"],
            "B_stage1": total["visited"] / total["dense"],
            "B_cost": (total["visited"] + total["computed"]) / (2 * total["dense"]) + estimator,
            "B_block": total["computed_blocks"] / total["dense_blocks"],
            "B_stage1_block": total["visited_blocks"] / total["dense_blocks"],
            "layer_min": float(ratio.min()),
            "layer_max": float(ratio.max()),
            "fallback_share": fallback,
        },
        "calls": {"expected": LAYERS, "sparse": LAYERS, "fallback": 0, "decode": 0},
        "seconds": {"prefill": 0.1, "total": 0.2},
        "peak_bytes": 1,
        "warnings": list(warnings),
    }, budget


def perplexity_records(
    *, length: int = 2048, limit: int = 4, damage: float = 0.0, share: float = 1.0, seed: int = 0, **more: Any
) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Windows whose loss differs from window to window by far more than ``damage`` (nats a token) changes it."""
    rng = np.random.default_rng(seed)
    base = rng.normal(2.75, 0.2, limit)
    noise = np.random.default_rng([seed, int(share * 1e6)]).normal(0.0, 0.1, limit) * damage
    for index in range(limit):
        scored = length // 4
        kl = abs(damage + noise[index]) * 0.8
        metrics = {"nll": scored * (base[index] + damage + noise[index]), "tokens": scored}
        metrics |= {"kl": kl, "top1": 1.0 - min(kl, 0.9) / 2}
        yield record("perplexity", length, index, metrics, share=share, **more)


def ruler_records(
    scores: Mapping[str, Sequence[float]], *, length: int = 4096, share: float = 1.0, **more: Any
) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """One record a score; ``scores`` by subtask."""
    for name, values in scores.items():
        for index, score in enumerate(values):
            yield record(name, length, index, {"score": score}, share=share, **more)


def write_cell(
    out: Path,
    settings: Mapping[str, Any],
    records: Iterator[tuple[dict[str, Any], pd.DataFrame]],
    *,
    end: Callable[[CellStore], object] = lambda store: store.finish({}),
    expected: int | None = None,
    data: Mapping[str, str] | None = None,
    given_overrides: Sequence[str] | None = None,
) -> Path:
    """Write a cell through the store and end it with ``end``; returns its directory."""
    items = list(records)
    with CellStore.open(
        out,
        identity(settings, data),
        label=label(settings),
        overrides=overrides(settings) if given_overrides is None else given_overrides,
        cell_config=settings,
        expected_samples=len(items) if expected is None else expected,
    ) as store:
        for item in items:
            store.append(*item)
        end(store)
    return store.path


def perplexity_cell(out: Path, method: str = "cosa", *, damage: float = 0.0, share: float = 1.0, **more: Any) -> Path:
    """A perplexity cell; ``more`` goes to :func:`config`."""
    settings = config(method, **more)
    task = settings["task"]
    items = perplexity_records(length=task["length"], limit=task["limit"], damage=damage, share=share)
    return write_cell(out, settings, items)


def ruler_cell(
    out: Path,
    method: str,
    scores: Mapping[str, Sequence[float]],
    *,
    length: int = 4096,
    share: float = 1.0,
    **more: Any,
) -> Path:
    """A RULER cell; ``more`` goes to :func:`config`."""
    limit = len(next(iter(scores.values())))
    settings = config(method, task="ruler", length=length, limit=limit, tasks=tuple(scores), **more)
    return write_cell(out, settings, ruler_records(scores, length=length, share=share))


def edit_meta(cell: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit a cell's ``cell.json`` by hand, as a user might."""
    meta = json.loads((cell / "cell.json").read_text())
    with contextlib.suppress(KeyError):
        change(meta)
    (cell / "cell.json").write_text(json.dumps(meta))


def cell_results(number: int, *, group: int = 500, samples: int = 2, hostile: str = "") -> list[CellResult]:
    """Many finished cells in memory, no store behind them: groups of one dense and ``group - 1`` sparse cells each.

    Args:
        number: cells.
        group: cells that share samples.
        samples: records a cell.
        hostile: put into the labels that a user can choose.
    """
    rng = np.random.default_rng(0)
    base, _ = record("perplexity", 2048, 0, {"nll": 1.0, "tokens": 512}, share=0.5)
    found = []
    for at in range(number):
        length = 2048 * (1 + at // group)
        place = at % group
        settings = config("dense" if place == 0 else ("cosa", "xattention", "minference")[place % 3], length=length)
        share = 1.0 if place == 0 else 0.1 + 0.85 * place / group
        if place:
            settings["method"]["select"]["p"] = place / group
        settings["model"]["name"] = f"tiny{hostile}"
        made = identity(settings)
        records = []
        for index in range(samples):
            damage = 0.0 if place == 0 else 0.3 * (1 - share) ** 2 + float(rng.normal(0, 0.002))
            digest = hashlib.sha256(f"{length}/{index}".encode()).hexdigest()
            budget = {**base["budget"], "B": share, "B_stage1": share, "B_cost": min(1.0, share + 0.01)}
            records.append(
                {
                    **base,
                    "length": length,
                    "index": index,
                    "metrics": {"nll": 512 * (2.7 + 0.1 * index + damage), "tokens": 512, "kl": abs(damage)},
                    "prompt": {"sha256": digest, "tokens": length},
                    "budget": budget,
                    "seconds": {"prefill": 0.02 + 0.1 * share, "total": 0.2},
                }
            )
        key = cell_key(made)
        found.append(
            CellResult(
                path=Path("/nonexistent") / key,
                key=key,
                twin=twin_key(made),
                label=label(settings) + hostile,
                status="done",
                live=False,
                overrides=(*overrides(settings), *([f"method.note={hostile}"] if hostile else [])),
                config=settings,
                identity=made,
                expected_samples=samples,
                records=tuple(records),
            )
        )
    return found
