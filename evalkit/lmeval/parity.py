"""Is dense through the harness's model the same as lm-eval's own Hugging Face model, and does it cost more?

    python -m evalkit.lmeval.parity --out results/lm_eval_parity.csv

The same requests go to both: log-likelihoods of four continuations of a context, rolling log-likelihoods and greedy
generation, on the embedded texts. Wall time and processor time are the shortest of the repeats, after one request of
warm-up, with both models in one process by turns; peak memory is that of a process with one model, working memory the
part above the loaded model.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefill_kernels.bench.rows import checkout_commit

KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
MODELS = ("hf", "evalkit")
FIELDS = (
    "kind", "model", "requests", "context_tokens", "wall_seconds", "cpu_seconds", "peak_mib", "working_mib",
    "equal_scores", "max_abs_difference", "wall_to_hf", "cpu_to_hf", "peak_to_hf", "dtype", "device", "threads",
    "torch", "transformers", "lm_eval", "commit", "command",
)  # fmt: skip
MIB = 2**20


def requests(kind: str, tokenizer: Any, count: int, length: int) -> list[Any]:
    """Requests of one kind over the embedded essays.

    Args:
        kind: one of :data:`KINDS`.
        tokenizer: cuts contexts of ``length`` tokens.
        count: documents; a log-likelihood document has four continuations.
        length: tokens of a context.
    """
    from lm_eval.api.instance import Instance

    from ..corpora import Corpora

    ids = tokenizer(Corpora().essays_text[: count * length * 12], verbose=False).input_ids
    texts = [tokenizer.decode(ids[i * length : (i + 1) * length]).strip() for i in range(count)]
    found = []
    for i, text in enumerate(texts):
        following = tokenizer.decode(ids[(i + 1) * length : (i + 1) * length + 8])
        arguments: list[tuple[Any, ...]]
        if kind == "loglikelihood":
            arguments = [(text, f" {end.strip()}") for end in (following, "a word", "the end of it all.", "7")]
        elif kind == "generate_until":
            arguments = [(text, {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False})]
        else:
            arguments = [(text,)]
        found += [Instance(kind, {}, item, j, metadata=("parity", i, 1)) for j, item in enumerate(arguments)]  # type: ignore[arg-type]
    return found


def load(model: str, threads: int, length: int) -> Any:
    """One of the two models over the embedded weights, in float32 on the CPU unless there is a GPU."""
    import torch

    from .model import SparsePrefillLM
    from .settings import settings

    torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if model == "evalkit":
        return SparsePrefillLM(pretrained="smollm2", method="dense", dtype="float32", max_length=length, device=device)
    from lm_eval.models.huggingface import HFLM

    from ..models.loading import locate

    location = locate(settings({"pretrained": "smollm2"}).cell.model).location
    return HFLM(pretrained=location, revision=None, dtype="float32", batch_size=1, max_length=length, device=device)


def memory(kind: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Results and peak memory of one model on one kind of request; the process holds nothing else."""
    import torch

    lm = load(model, options.threads, 2 * options.length)
    asked = requests(kind, lm.tokenizer, options.count, options.length)
    loaded = _peak(torch)
    results = getattr(lm, kind)(asked, disable_tqdm=True)
    return {
        "results": [list(item) if isinstance(item, tuple) else item for item in results],
        "peak": _peak(torch),
        "loaded": loaded,
        "requests": len(asked),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def times(kind: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Wall and processor time of both models in one process, by turns: a busy machine slows both alike."""
    both = {model: load(model, options.threads, 2 * options.length) for model in MODELS}
    asked = requests(kind, both["hf"].tokenizer, options.count, options.length)
    walls: dict[str, list[float]] = {model: [] for model in MODELS}
    cpus: dict[str, list[float]] = {model: [] for model in MODELS}
    for lm in both.values():
        getattr(lm, kind)(asked[:1], disable_tqdm=True)
    for _ in range(options.repeats):
        for model, lm in both.items():
            wall, cpu = time.perf_counter(), time.process_time()
            getattr(lm, kind)(asked, disable_tqdm=True)
            walls[model].append(time.perf_counter() - wall)
            cpus[model].append(time.process_time() - cpu)
    return {model: {"wall": min(walls[model]), "cpu": min(cpus[model])} for model in MODELS}


def _peak(torch: Any) -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compare(kind: str, mine: Sequence[Any], other: Sequence[Any]) -> tuple[bool, float]:
    """Whether two models' results give the same scores, and the largest difference of log-likelihoods.

    Scores are the texts; which of a document's four continuations is the most likely, and which are greedy.
    """
    if kind == "generate_until":
        return list(mine) == list(other), 0.0
    if kind == "loglikelihood_rolling":
        return True, max(abs(a - b) for a, b in zip(mine, other, strict=True))
    equal = [bool(a[1]) for a in mine] == [bool(b[1]) for b in other]
    for first in range(0, len(mine), 4):
        choices = [max(range(4), key=lambda i, r=result: r[first + i][0]) for result in (mine, other)]  # type: ignore[misc]
        equal &= choices[0] == choices[1]
    return equal, max(abs(a[0] - b[0]) for a, b in zip(mine, other, strict=True))


def _run(kind: str, what: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "evalkit.lmeval.parity", "--worker", kind, what, *_shared(options)]
    # Freed blocks go back to the system at once, so that a peak counts what is in use and not what malloc keeps.
    exact = {} if what == "times" else {"MALLOC_MMAP_THRESHOLD_": "65536"}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **exact}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _shared(options: argparse.Namespace) -> list[str]:
    names = ("count", "length", "repeats", "threads")
    return [text for name in names for text in (f"--{name}", str(getattr(options, name)))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; 1 if scores differ or log-likelihoods by more than the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kind", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--count", type=int, default=4, help="documents")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a context")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=2e-3, help="of a log-likelihood, nats a 1000 scored tokens")
    parser.add_argument("--out", type=Path, help="CSV file to write")
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "WHAT"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        kind, what = options.worker
        print(json.dumps(times(kind, options) if what == "times" else memory(kind, what, options)))
        return 0
    given = list(sys.argv[1:] if argv is None else argv)
    rows, bad = [], False
    for kind in options.kind:
        found = {model: _run(kind, model, options) for model in MODELS}
        for model, measured in _run(kind, "times", options).items():
            found[model] |= measured
        equal, difference = compare(kind, found["evalkit"]["results"], found["hf"]["results"])
        scored = options.length if kind == "loglikelihood_rolling" else 16
        bad |= not equal or difference > options.tolerance * max(1.0, scored / 1000)
        for model, one in found.items():
            rows.append(
                {
                    "kind": kind,
                    "model": model,
                    "requests": one["requests"],
                    "context_tokens": options.length,
                    "wall_seconds": round(one["wall"], 2),
                    "cpu_seconds": round(one["cpu"], 2),
                    "peak_mib": round(one["peak"] / MIB),
                    "working_mib": round((one["peak"] - one["loaded"]) / MIB),
                    "equal_scores": equal,
                    "max_abs_difference": f"{difference:.2e}",
                    "wall_to_hf": round(one["wall"] / found["hf"]["wall"], 3),
                    "cpu_to_hf": round(one["cpu"] / found["hf"]["cpu"], 3),
                    "peak_to_hf": round(one["peak"] / found["hf"]["peak"], 3),
                    "dtype": "float32",
                    "device": one["device"],
                    "threads": options.threads,
                    "torch": version("torch"),
                    "transformers": version("transformers"),
                    "lm_eval": version("lm-eval"),
                    "commit": checkout_commit(),
                    "command": " ".join(["python -m evalkit.lmeval.parity", *given]),
                }
            )
            print(",".join(str(rows[-1][name]) for name in FIELDS), flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
