"""The Hydra application behind ``evalkit bench``: composes and checks settings, then calls what measures."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from prefill_kernels.bench.config import BenchError, WrongResult

from ..config import build
from ..errors import EvalkitError, InputError, near_matches
from . import schema
from .explain import CONFIG_ERRORS, explain
from .main import arguments

BENCHES = {
    "kernel": ("prefill_kernels.bench.config:KernelBench", "prefill_kernels.bench.command:launch"),
    "attention": ("evalkit.bench.settings:MethodsBench", "evalkit.bench.attention:launch"),
    "ttft": ("evalkit.bench.settings:TtftBench", "evalkit.bench.ttft:launch"),
    "pageweaver": ("prefill_kernels.bench.config:PageBench", "prefill_kernels.bench.command:launch"),
    "pageweaver-model": ("evalkit.bench.settings:PageModelBench", "evalkit.bench.pageweaver_model:launch"),
}
"""Settings class and what runs it, by the name in ``schema/bench``."""

HELP = """usage: evalkit bench <name> [key=value ...]

Measure on a CUDA device and append one number a row to a CSV file (out=, default results/<device>/benchmarks.csv);
evalkit report --bench <file> makes tables and figures of it. A list is written [a,b]. Methods are named by preset, with
settings behind it: "variants=[fa2,xattention,'xattention:stride=16:threshold=0.95']".

{benches}

  --cfg job             print the settings and run nothing
  --config-dir DIR      add a directory with bench/<name>.yaml files of your own

Where hydra is not installed: python -m prefill_kernels.bench kernel|pageweaver,
python -m evalkit.bench attention|ttft|pageweaver-model.

Exit code: 0 done, 1 a result was wrong, 2 bad input (nothing was run), 130 interrupted."""


_composed: list[DictConfig] = []
# Only composes: what is raised inside Hydra's job is printed by Hydra too.
compose = hydra.main(config_path="pkg://evalkit.conf", config_name="bench", version_base="1.3")(_composed.append)


def launch(cfg: DictConfig, command: str) -> None:
    """Run one composed config.

    Args:
        cfg: the composed config.
        command: the command that reproduces it.

    Raises:
        InputError: a value that cannot be used, or no CUDA device.
        EvalkitError: a kernel does not compute what it should.
    """
    container = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(container, dict)
    plain: dict[str, Any] = {str(key): value for key, value in container.items()}
    settings_class, runner = BENCHES[str(plain.pop("name"))]
    try:
        settings = build(_load(settings_class), plain, "bench")
        settings.validate()
        _load(runner)(settings, command)
    except BenchError as error:
        raise InputError(error.field, error.value, error.allowed) from None
    except WrongResult as error:
        raise EvalkitError(f"wrong result, nothing was timed of it: {error}") from None


def run(argv: Sequence[str]) -> int:
    """Run the application.

    Args:
        argv: arguments after ``evalkit bench``.

    Returns:
        Exit code.
    """
    if not argv or {"-h", "--help"} & set(argv):
        print(HELP.format(benches=_benches()))
        return 0 if argv else 2
    name, rest = argv[0], list(argv[1:])
    if name.startswith("-") or "=" in name:
        raise InputError("bench", name, f"its name comes first; {near_matches(name, BENCHES)}")
    if get_args_parser().parse_args(rest).multirun:
        raise InputError("bench", "-m", "one benchmark at a time; lists are written lengths=[4096,8192]")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, and this module prints one line
    register()
    _composed.clear()
    try:
        with arguments("evalkit bench", [f"bench={name}", *rest]):
            compose()
        for cfg in _composed:  # none where only the settings were asked for
            launch(cfg, shlex.join(["evalkit", "bench", name, *rest]))
    except CONFIG_ERRORS as exc:
        print(f"evalkit: {explain(exc)}", file=sys.stderr, flush=True)
        return 2
    return 0


def register() -> None:
    """Store the schemas of the benchmarks in Hydra's ConfigStore; may be called again."""
    schema.register()
    store = ConfigStore.instance()
    for name, (settings_class, _) in BENCHES.items():
        node = schema.schema_for(_load(settings_class), name=name)
        store.store(group="schema/bench", name=name, node=node, provider=schema.PROVIDER)


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _benches() -> str:
    lines = []
    for item in sorted((files("evalkit.conf") / "bench").iterdir(), key=lambda item: item.name):
        first = next(line for line in item.read_text().splitlines() if line.startswith("# ") and "@" not in line)
        lines.append(f"  {item.name.removesuffix('.yaml'):<17}{first.removeprefix('# ')}")
    return "\n".join(lines)
