"""Run by the store's tests: writes a cell and is killed on the way, or kills itself at a chosen place."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import synthetic

from evalkit import store as store_module
from evalkit.store import CellStore

SAMPLES = 40


def main(out: str, place: str = "", at: int = SAMPLES) -> None:
    """Go on with the cell under ``out``; ``place`` names where the process ends itself, after ``at`` samples."""
    settings = synthetic.config(limit=SAMPLES)
    with CellStore.open(
        Path(out),
        synthetic.identity(settings),
        label=synthetic.label(settings),
        overrides=synthetic.overrides(settings),
        cell_config=settings,
        expected_samples=SAMPLES,
    ) as store:
        if store.done:
            print("finished", flush=True)
            return
        for record, frame in synthetic.perplexity_records(limit=SAMPLES, damage=0.1, share=0.4):
            key = (record["task"], record["length"], record["index"])
            if key in store.completed:
                continue
            if len(store.completed) == at:
                arm(place)
            store.append(record, frame)
            print(record["index"], flush=True)
        arm(place)
        store.finish({"mean": 1.0})
    print("finished", flush=True)


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_a_line(self: CellStore, line: bytes) -> None:
    assert self._samples is not None
    os.write(self._samples, line[: len(line) // 2])
    die()


PLACES = {
    "before parquet": (store_module, "_write_parquet", die),
    "between parquet and line": (CellStore, "_append_line", die),
    "half a line": (CellStore, "_append_line", half_a_line),
    "half a rename": (os, "replace", die),
    "before done": (CellStore, "_update", die),
    "before clean-up": (CellStore, "_drop_parts", die),
}


def arm(place: str) -> None:
    """Make the process end itself when it comes to ``place``."""
    if place:
        owner, name, action = PLACES[place]
        setattr(owner, name, action)


if __name__ == "__main__":
    main(sys.argv[1])
