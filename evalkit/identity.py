"""Everything that can change a number, gathered into a cell's identity."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import prefill_kernels
import torch
from prefill_kernels.bench.rows import checkout_commit

from .assets import sha256_file
from .calibration.resolve import calibration_digest
from .config import Cell, PerplexityConfig

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "lm-eval", "numpy")
NOT_NUMERIC = (
    "report",
    "analysis",
    "app",
    "bench",
    "capture.py",
    "capture_settings.py",
    "cli.py",
    "status.py",
    "timing.py",
)
"""Parts of the harness that cannot change a measured number."""


SOURCES = (".py", ".cu", ".cuh", ".h", ".cpp", ".yaml")
"""Endings of files that compute: Python, kernels that are compiled when they are first used, and lm-eval's tasks."""


@cache
def code_digest() -> str:
    """Digest over the sources that compute numbers: kernels, methods, model, benchmarks, tasks, budget."""
    digest = hashlib.sha256()
    for name, file in sources():
        digest.update(f"{name}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def sources() -> Iterator[tuple[str, Path]]:
    """Files behind :func:`code_digest` by the name they are hashed under."""
    for root in (Path(__file__).parent, Path(prefill_kernels.__file__).parent, Path(str(files("evalkit.tasks")))):
        for file in sorted(file for file in root.rglob("*") if file.suffix in SOURCES):
            name = file.relative_to(root)
            if name.parts[0] not in NOT_NUMERIC and name.parts[0] not in ("conf", "tasks"):
                yield f"{root.name}/{name.as_posix()}", file


def versions() -> dict[str, str]:
    """Versions of the packages that compute, and the digest of our own code."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return {**found, "code": code_digest()}


def device_facts(device: torch.device) -> dict[str, str]:
    """The device as far as it decides how numbers round."""
    if device.type == "cuda":
        return {"type": "cuda", "name": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    return {"type": "cpu", "name": torch.backends.cpu.get_cpu_capability()}


def provenance(device: torch.device) -> dict[str, str | None]:
    """What is worth knowing of a run and changes no number: the machine's name and the commit of the checkout."""
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {"machine": machine, "commit": _commit()}


def _processor() -> str:
    cores = torch.get_num_threads()
    name = torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or platform.machine()
    return f"{name}, {cores} threads"


def _commit() -> str | None:
    """Commit of the checkout this package lies in, marked when its sources have changes; else ``$EVALKIT_COMMIT``."""
    found = checkout_commit()
    return os.environ.get("EVALKIT_COMMIT") if found == "unknown" else found


def named_files(method: Any) -> dict[str, str]:
    """Files that the settings of a method name, by field."""
    found = {}
    for dotted in getattr(method, "file_fields", ()):
        value = functools.reduce(getattr, dotted.split("."), method)
        if value is not None:
            found[dotted] = str(value)
    return found


def _file_digests(cell: Cell) -> dict[str, str]:
    """What the method's files hold, by field. A file's name is a label; of a calibration the cell reads one entry."""
    return {
        dotted: calibration_digest(cell) if dotted == "calibration" else sha256_file(Path(name).expanduser())
        for dotted, name in named_files(cell.method).items()
    }


def cell_identity(
    cell: Cell, *, device: torch.device, dtype: torch.dtype, backend: str, data: dict[str, str]
) -> dict[str, Any]:
    """Identity sections of a cell, as the store hashes them.

    Args:
        cell: validated cell.
        device, dtype, backend: what the ``auto`` settings resolved to.
        data: checksums of weights, tokenizer, prompt template and samples.
    """
    settings = cell.as_dict()
    for dotted, digest in _file_digests(cell).items():
        *path, last = dotted.split(".")
        functools.reduce(lambda node, part: node[part], path, settings["method"])[last] = f"sha256:{digest}"
    model = {key: value for key, value in settings["model"].items() if key not in ("name", "recommended")}
    execution = {key: value for key, value in settings["execution"].items() if key not in ("device", "backend", "seed")}
    # Paths of local texts are labels: the samples' checksums say what was read.
    task = {key: value for key, value in settings["task"].items() if key != "data"}
    if not isinstance(cell.task, PerplexityConfig):
        sampling = cell.task.generation.resolve(cell.model)
        drawn = {"sampling": "greedy", "seed": None} if sampling is None else {"sampling": asdict(sampling)}
        task["generation"] = {**task["generation"], **drawn}
    return {
        "model": {
            **model,
            "dtype": str(dtype).removeprefix("torch."),
            "rope_factor": cell.model.rope_factor(cell.task.length),
        },
        "method": settings["method"],
        "task": {**task, "seed_of_run": settings["execution"]["seed"]},
        "execution": {**execution, "backend": backend},
        "data": data,
        "versions": versions(),
        "device": device_facts(device),
    }
