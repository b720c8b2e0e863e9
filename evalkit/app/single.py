"""A command that composes one config with Hydra and does one piece of work with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..errors import InputError, near_matches
from . import schema
from .explain import CONFIG_ERRORS, explain


def run_single(
    command: str, config_name: str, names: Sequence[str], argv: Sequence[str], work: Callable[[DictConfig], int]
) -> int:
    """Compose the config and hand it to ``work``.

    Args:
        command: as typed, for Hydra's own messages.
        config_name: file of ``conf/``.
        names: top-level names that an override may begin with.
        argv: overrides and Hydra's flags.
        work: called with the composed config, unless Hydra was only asked to show it.

    Returns:
        Exit code: what ``work`` returns, 2 for bad input, 130 where it was interrupted.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, and one line is printed
    composed: list[DictConfig] = []
    application = hydra.main(config_path="pkg://evalkit.conf", config_name=config_name, version_base="1.3")
    before, sys.argv = sys.argv, [command, *argv]
    try:
        schema.register()
        _check_names(argv, names)
        application(composed.append)()  # nothing runs inside Hydra: it would print its own lines around an error
        return work(composed[0]) if composed else 0
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


def require_given(cfg: DictConfig) -> None:
    """Raise InputError naming the first setting that has no value."""
    for missing in sorted(OmegaConf.missing_keys(cfg)):
        if not str(missing).startswith("hydra"):
            raise InputError(str(missing), "???", f"must be given: {missing}=<value>")


def section(cfg: DictConfig, name: str) -> dict[str, Any]:
    """One group of the config as plain values."""
    try:
        found = OmegaConf.to_container(cfg[name], resolve=True)
    except OmegaConfBaseException as exc:
        raise InputError(name, "...", str(exc).splitlines()[0]) from None
    assert isinstance(found, Mapping)
    return {str(key): value for key, value in found.items()}


def _check_names(argv: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a misspelt first name before Hydra complains of what it was meant to choose."""
    for item in argv:
        key, equals, value = item.partition("=")
        name = key.split(".")[0]
        if equals and not key.startswith(("-", "+", "~", "hydra")) and name not in names:
            raise InputError(key, value, near_matches(name, names))
