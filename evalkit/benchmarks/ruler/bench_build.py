"""Time how long building RULER samples takes, with a cold sample cache and read again from it.

    python -m evalkit.benchmarks.ruler.bench_build --task vt cwe fwe --out results/ruler_build.csv

The cold time covers everything after the tokenizer is loaded: reading corpora, counting units, fitting, rendering,
compressing and writing. The cached time reads every sample back.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...assets import embedded_model_files
from ...corpora import Corpora
from ...prompts import PromptRenderer
from .samples import TASKS, load

FIELDS = (
    "task", "length", "samples", "cold_seconds", "cached_seconds", "fill_min", "cache_mib", "cpus", "python",
    "tokenizers", "transformers", "command",
)  # fmt: skip


def measure(task: str, length: int, samples: int, tokenizer: Any, chat: bool) -> dict[str, Any]:
    """Return one row of timings for a task, from an empty sample cache in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="ruler-bench-") as root:
        begin = time.perf_counter()
        arguments: dict[str, Any] = {
            "seed": 42, "renderer": PromptRenderer(tokenizer, chat=chat), "corpora": Corpora(), "root": root,
        }  # fmt: skip
        built = load(task, length, samples, **arguments)
        cold = time.perf_counter() - begin
        checksum = built.data_checksum
        begin = time.perf_counter()
        arguments |= {"renderer": PromptRenderer(tokenizer, chat=chat), "corpora": Corpora()}
        cached = load(task, length, samples, **arguments)
        filled = [(sample.prompt_tokens + sample.max_new_tokens) / length for sample in cached]
        again = time.perf_counter() - begin
        if cached.data_checksum != checksum:
            raise RuntimeError(f"{task}: the cache returned other samples")
        size = sum(path.stat().st_size for path in Path(root).rglob("*.parquet"))
    return {
        "task": task,
        "length": length,
        "samples": samples,
        "cold_seconds": round(cold, 2),
        "cached_seconds": round(again, 2),
        "fill_min": round(min(filled), 4),
        "cache_mib": round(size / 2**20, 1),
    }


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark and print (or append to a CSV file) one row a task."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--task", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--tokenizer", help="hub id or local folder; the embedded model's by default")
    parser.add_argument("--raw", action="store_true", help="no chat template")
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    options = parser.parse_args(argv)

    from transformers import AutoTokenizer

    if options.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    else:
        folder, file = embedded_model_files()
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    shared = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "tokenizers": version("tokenizers"),
        "transformers": version("transformers"),
        "command": " ".join(["python -m evalkit.benchmarks.ruler.bench_build", *(argv or sys.argv[1:])]),
    }
    new = options.out is not None and not options.out.exists()
    for task in options.task:
        row = {**measure(task, options.length, options.samples, tokenizer, not options.raw), **shared}
        print(",".join(str(row[field]) for field in FIELDS), flush=True)
        if options.out is not None:
            with options.out.open("a", newline="") as stream:
                writer = csv.DictWriter(stream, FIELDS)
                if new:
                    writer.writeheader()
                    new = False
                writer.writerow(row)


if __name__ == "__main__":
    main()
