"""The Hydra application behind ``evalkit search-patterns``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..config import ExecutionConfig, ModelConfig, build
from ..errors import InputError, near_matches
from . import schema
from .explain import CONFIG_ERRORS, explain

TOP_LEVEL = ("model", "search", "execution", "out")

HELP = """usage: evalkit search-patterns [model=<name>] [search.length=<tokens>] [key=value ...]

Find the sparse pattern of each layer and head of a model for MInference: of candidates that cost the same in the
kernel, the one whose output is nearest to dense attention on calibration text. Writes a table and goes on where an
interrupted search stopped, layer by layer.

Settings: search.windows search.text search.initial search.local (the A-shape that sets the cost) search.columns
  search.block_size execution.device execution.backend
  out=<file>      the table to write (default: results/patterns/<model>-<length>.yaml)
  --cfg job       print the composed config and run nothing

Then: evalkit run method=minference method.table=<file> ...

Exit code: 0 table written, 1 the search failed, 2 bad input (nothing was run), 130 interrupted."""


def run(argv: Sequence[str]) -> int:
    """Run the application.

    Args:
        argv: arguments after ``evalkit search-patterns``.

    Returns:
        Exit code.
    """
    if {"-h", "--help"} & set(argv):
        print(HELP)
        return 0
    from ..calibration.pattern_run import search_patterns

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, and one line is printed
    composed: list[DictConfig] = []
    application = hydra.main(config_path="pkg://evalkit.conf", config_name="search_patterns", version_base="1.3")
    before, sys.argv = sys.argv, ["evalkit search-patterns", *argv]
    try:
        schema.register()
        _check_names(argv)
        application(composed.append)()
        if composed:  # nothing is composed where Hydra only informs
            search_patterns(request_from_config(composed[0]))
    except InputError as exc:
        print(f"evalkit: {' '.join(str(exc).split())}", file=sys.stderr, flush=True)
        return 2
    except CONFIG_ERRORS as exc:
        print(f"evalkit: {explain(exc)}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", flush=True)
        return 130
    finally:
        sys.argv = before
    return 0


def request_from_config(cfg: DictConfig) -> Any:
    """The composed config as a :class:`evalkit.calibration.pattern_run.PatternRequest`, not yet validated."""
    from ..calibration.pattern_run import PatternRequest
    from ..calibration.pattern_settings import PatternSearchConfig

    for missing in sorted(OmegaConf.missing_keys(cfg)):
        if not str(missing).startswith("hydra"):
            raise InputError(str(missing), "???", f"must be given: {missing}=<value>")
    return PatternRequest(
        build(ModelConfig, _section(cfg, "model"), "model"),
        build(PatternSearchConfig, _section(cfg, "search"), "search"),
        build(ExecutionConfig, _section(cfg, "execution"), "execution"),
        None if cfg.out is None else str(cfg.out),
    )


def _section(cfg: DictConfig, name: str) -> dict[str, Any]:
    try:
        found = OmegaConf.to_container(cfg[name], resolve=True)
    except OmegaConfBaseException as exc:
        raise InputError(name, "...", str(exc).splitlines()[0]) from None
    assert isinstance(found, Mapping)
    return {str(key): value for key, value in found.items()}


def _check_names(argv: Sequence[str]) -> None:
    """Refuse a misspelt first name before Hydra complains of a key that it does not know."""
    for item in argv:
        key, equals, value = item.partition("=")
        name = key.split(".")[0]
        if equals and not key.startswith(("-", "+", "~", "hydra")) and name not in TOP_LEVEL:
            raise InputError(key, value, near_matches(name, TOP_LEVEL))
