"""Budget by layer and head of a cell, from its stored counts."""

from __future__ import annotations

import base64

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ...errors import StoreError
from ...store import BUDGET, CellResult
from ..load import by_sample
from .schema import Budget


def by_head(cell: CellResult) -> NDArray[np.float64]:
    """B by layer and head: mean over samples weighted by prompt tokens, as a cell's B is.

    Args:
        cell: a finished cell.

    Returns:
        [layers, heads], in [0, 1]. Every head has as many dense cells as the others, so the mean over all is B.

    Raises:
        StoreError: the budgets are of other samples than the records, or do not cover every head.
    """
    columns = ["task", "length", "index", "layer", "head", "dense", "computed"]
    table = pq.read_table(cell.path / BUDGET, columns=columns, read_dictionary=["task"])
    tasks = table["task"].combine_chunks()
    names = [str(name) for name in tasks.dictionary.to_pylist()]
    numbers = {name: table[name].to_numpy() for name in columns[1:]}
    codes = tasks.indices.to_numpy()
    # A sample's rows lie together: it starts where one of its three names changes.
    changes = np.zeros(len(codes), dtype=bool)
    changes[:1] = True
    for column in (codes, numbers["length"], numbers["index"]):
        changes[1:] |= column[1:] != column[:-1]
    starts = np.flatnonzero(changes)
    records = by_sample(cell)
    found = [(names[codes[at]], int(numbers["length"][at]), int(numbers["index"][at])) for at in starts]
    layers, heads = (int(numbers[name].max()) + 1 for name in ("layer", "head"))
    if set(found) != set(records) or len(codes) != len(found) * layers * heads or len(found) != len(records):
        raise StoreError(f"{cell.path / BUDGET}: budgets do not cover the cell's samples, layers and heads")
    tokens = np.array([float(records[key]["prompt"]["tokens"]) for key in found])
    weights = np.repeat(tokens / tokens.sum(), np.diff([*starts, len(codes)]))
    place = numbers["layer"] * heads + numbers["head"]
    share = weights * numbers["computed"] / numbers["dense"]
    sums = np.bincount(place, weights=share, minlength=layers * heads).astype(np.float64)
    return sums.reshape(layers, heads)


def pack(shares: NDArray[np.float64]) -> Budget:
    """A budget as the page holds it.

    Args:
        shares: [layers, heads], in [0, 1].
    """
    percent = np.rint(100 * shares).clip(0, 100).astype(np.uint8)
    return {
        "layers": [round(100 * float(value), 2) for value in shares.mean(axis=1)],
        "heads": shares.shape[1],
        "map": base64.b64encode(percent.tobytes()).decode(),
    }
