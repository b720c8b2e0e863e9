"""The Hydra application behind ``evalkit capture``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from omegaconf import DictConfig

from ..capture_settings import CaptureConfig
from ..config import ModelConfig, build, methods_registry
from ..errors import InputError, near_matches
from .single import require_given, run_single, section

TOP_LEVEL = ("model", "method", "set", "capture")

HELP = """usage: evalkit capture [model=<name>] [method=<name>] [capture.lengths=[<tokens>]] [key=value ...]
       evalkit capture set=<name>

Run a model densely over real text and record its attention inputs, Q, K and V after RoPE, of some layers; with a method
also what it would select there. One file a length: <out>/<model>-<length>.safetensors.

  sets    {sets}

Settings: capture.layers capture.layers_at capture.tensors capture.queries capture.corpus capture.device capture.out
  --cfg job     print the composed config and run nothing

Then: evalkit bench attention inputs=<file>, or evalkit bench pageweaver 'captures=[<file>,...]'.

Exit code: 0 files written, 1 a selection is not plausible, 2 bad input (nothing was run), 130 interrupted."""


def run(argv: Sequence[str]) -> int:
    """Run the application.

    Args:
        argv: arguments after ``evalkit capture``.

    Returns:
        Exit code.
    """
    if {"-h", "--help"} & set(argv):
        sets = sorted(item.name.removesuffix(".yaml") for item in (files("evalkit.conf") / "set").iterdir())
        print(HELP.format(sets=", ".join(sets)))
        return 0
    command = shlex.join(["evalkit", "capture", *argv])
    return run_single("evalkit capture", "capture", TOP_LEVEL, argv, lambda cfg: _capture(cfg, command))


def _capture(cfg: DictConfig, command: str) -> int:
    from ..bench.capture import launch

    launch(request_from_config(cfg), command)
    return 0


def request_from_config(cfg: DictConfig) -> Any:
    """The composed config as a validated :class:`evalkit.bench.capture.Request`."""
    from ..bench.capture import Request

    require_given(cfg)
    method = None
    if cfg.get("method") is not None:
        values = section(cfg, "method")
        name = str(values.pop("name"))
        registry = methods_registry()
        if name not in registry:
            raise InputError("method.name", name, near_matches(name, registry))
        method = build(registry.get(name), values, "method")
    request = Request(
        build(ModelConfig, section(cfg, "model"), "model"),
        build(CaptureConfig, section(cfg, "capture"), "capture"),
        method,
    )
    request.validate()
    return request
