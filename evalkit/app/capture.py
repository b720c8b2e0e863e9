"""The Hydra application behind ``evalkit capture``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from ..capture_settings import CaptureConfig
from ..config import ModelConfig, build, methods_registry
from ..errors import InputError, near_matches
from .single import require_given, run_single, section

LAYERS_AT = re.compile(r"\+{0,2}capture\.layers_at(?:\.([^=]*))?=(.*)", re.DOTALL)
TOP_LEVEL = ("model", "method", "set", "capture")

HELP = """usage: evalkit capture [model=<name>] [method=<name>] [capture.lengths=[<tokens>]] [key=value ...]
       evalkit capture set=<name>

Run a model densely over real text and record its attention inputs, Q, K and V after RoPE, of some layers; with a method
also what it would select there. One file a length: <out>/<model>-<length>.safetensors. A file that is there is kept
where the same request wrote it, and refused where it holds another capture.

  sets    {sets}

Settings: capture.layers capture.layers_at capture.tensors capture.queries capture.corpus capture.device capture.out
  capture.layers_at={{8192:[2,20],32768:[20]}}   layers by length
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
    return run_single(
        "evalkit capture",
        "capture",
        TOP_LEVEL,
        [with_lengths(item) for item in argv],
        lambda cfg: _capture(cfg, command),
    )


def _capture(cfg: DictConfig, command: str) -> int:
    from ..bench.capture import launch

    request = request_from_config(cfg)
    check_run(request)
    launch(request, command)
    return 0


def with_lengths(item: str) -> str:
    """An argument for ``capture.layers_at``, with or without a plus or a length, as Hydra takes it; others unchanged.

    Its keys are in no schema: Hydra asks for a plus there, and takes what follows a dot for text.

    Raises:
        InputError: anything but layers by length.
    """
    match = LAYERS_AT.fullmatch(item)
    if match is None:
        return item
    length, value = match.groups()
    text = value if length is None else f"{{{length}:{value}}}"
    given: Any = None  # also what cannot be parsed
    try:
        given = OverridesParser.create().parse_override(f"++capture.layers_at={text}").value()
    except HydraException:
        pass
    if not isinstance(given, dict) or not all(type(key) is int and _numbers(layers) for key, layers in given.items()):
        raise InputError("capture.layers_at", text, "layers by length, {<tokens>:[<layer>,<layer>],<tokens>:[<layer>]}")
    return f"++capture.layers_at={text}"


def _numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def check_run(request: Any) -> None:
    """Check what the settings alone do not tell, before weights are loaded.

    Args:
        request: a validated :class:`evalkit.bench.capture.Request`.

    Raises:
        InputError: files cannot be written, a layer that the model does not have, or a model of an unsupported type.
        MissingAsset: no such model.
    """
    from ..attention import check_supported
    from ..capture import require_writable
    from ..models import loading

    require_writable(Path(request.capture.out).expanduser())
    if any(request.capture.wanted.values()):
        settings = loading.load_config(loading.locate(request.model), request.model)
        check_supported(settings)
        request.capture.check_model(settings.num_hidden_layers, request.model.name)


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
