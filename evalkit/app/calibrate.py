"""The Hydra application behind ``evalkit calibrate``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from omegaconf import DictConfig

from ..config import ExecutionConfig, ModelConfig, build, methods_registry
from ..errors import InputError, near_matches
from .single import require_given, run_single, section

TOP_LEVEL = ("model", "method", "preset", "calibrate", "execution")

HELP = """usage: evalkit calibrate method=<name> calibrate.lengths=[<tokens>] calibrate.budgets=[<B>] [key=value ...]
       evalkit calibrate preset=<name> [model=<name>] [calibrate.lengths=[<tokens>]]

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
    return run_single("evalkit calibrate", "calibrate", TOP_LEVEL, argv, _calibrate)


def _calibrate(cfg: DictConfig) -> int:
    from ..calibration.run import calibrate

    return calibrate(request_from_config(cfg))


def request_from_config(cfg: DictConfig) -> Any:
    """The composed config as a :class:`evalkit.calibration.run.Request`, not yet validated."""
    from ..calibration.run import Request
    from ..calibration.settings import CalibrateConfig

    require_given(cfg)
    method = section(cfg, "method")
    name = str(method.pop("name"))
    registry = methods_registry()
    if name not in registry:
        raise InputError("method.name", name, near_matches(name, registry))
    return Request(
        build(ModelConfig, section(cfg, "model"), "model"),
        build(registry.get(name), method, "method"),
        build(CalibrateConfig, section(cfg, "calibrate"), "calibrate"),
        build(ExecutionConfig, section(cfg, "execution"), "execution"),
    )
