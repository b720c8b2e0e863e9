"""The Hydra application behind ``evalkit calibrate``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..config import ExecutionConfig, ModelConfig, build, methods_registry
from ..errors import InputError, near_matches
from . import schema
from .explain import CONFIG_ERRORS, explain

TOP_LEVEL = ("model", "method", "preset", "calibrate", "execution")

HELP = """usage: evalkit calibrate method=<name> calibrate.lengths=[<tokens>] calibrate.budgets=[<B>] [key=value ...]
       evalkit calibrate preset=<name>

Find the value of a method's knob that reaches a budget (or a recall of attention mass: calibrate.recalls) at each
length, on the second half of a text, and write it with where it comes from. What was measured before a kill is not
measured again.

  presets {presets}

Settings: calibrate.measure=B|B_block|... calibrate.per_head=true calibrate.windows calibrate.text calibrate.tolerance
  method.calibration=<file>   the file to write (default: results/calibration/<model>-<method>-<settings>.yaml)
  --cfg job                   print the composed config and run nothing

Then: evalkit run method=<name> method.budget_target=<B> ..., or method.calibration=<file>.

Exit code: 0 all targets reached, 1 one cannot be reached within a point, 2 bad input (nothing run), 130 interrupted."""


def run(argv: Sequence[str]) -> int:
    """Run the application.

    Args:
        argv: arguments after ``evalkit calibrate``.

    Returns:
        Exit code.
    """
    if {"-h", "--help"} & set(argv):
        presets = sorted(item.name.removesuffix(".yaml") for item in (files("evalkit.conf") / "preset").iterdir())
        print(HELP.format(presets=", ".join(presets)))
        return 0
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, and one line is printed
    composed: list[DictConfig] = []
    application = hydra.main(config_path="pkg://evalkit.conf", config_name="calibrate", version_base="1.3")
    before, sys.argv = sys.argv, ["evalkit calibrate", *argv]
    try:
        schema.register()
        _check_names(argv)
        application(composed.append)()  # nothing runs inside Hydra: it would print its own lines around an error
        return _calibrate(composed[0]) if composed else 0
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


def _calibrate(cfg: DictConfig) -> int:
    from ..calibration.run import calibrate

    return calibrate(request_from_config(cfg))


def request_from_config(cfg: DictConfig) -> Any:
    """The composed config as a :class:`evalkit.calibration.run.Request`, not yet validated."""
    from ..calibration.run import Request
    from ..calibration.settings import CalibrateConfig

    for missing in sorted(OmegaConf.missing_keys(cfg)):
        if not str(missing).startswith("hydra"):
            raise InputError(str(missing), "???", f"must be given: {missing}=<value>")
    method = _section(cfg, "method")
    name = str(method.pop("name"))
    registry = methods_registry()
    if name not in registry:
        raise InputError("method.name", name, near_matches(name, registry))
    return Request(
        build(ModelConfig, _section(cfg, "model"), "model"),
        build(registry.get(name), method, "method"),
        build(CalibrateConfig, _section(cfg, "calibrate"), "calibrate"),
        build(ExecutionConfig, _section(cfg, "execution"), "execution"),
    )


def _section(cfg: DictConfig, name: str) -> dict[str, Any]:
    try:
        found = OmegaConf.to_container(cfg[name], resolve=True)
    except OmegaConfBaseException as exc:
        raise InputError(name, "...", str(exc).splitlines()[0]) from None
    assert isinstance(found, Mapping)
    return {str(key): value for key, value in found.items()}


def _check_names(argv: Sequence[str]) -> None:
    """Refuse a misspelt first name before Hydra asks for the group that it was meant to choose."""
    for item in argv:
        key, equals, value = item.partition("=")
        name = key.split(".")[0]
        if equals and not key.startswith(("-", "+", "~", "hydra")) and name not in TOP_LEVEL:
            raise InputError(key, value, near_matches(name, TOP_LEVEL))
