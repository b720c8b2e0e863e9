"""What each method preset asks of its kernel, and Table A of the CoSA paper, from what kernels and methods declare."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from prefill_kernels import Capabilities, kernels
from tabulate import tabulate

from ..config import build
from ..errors import IntegrityError
from . import METHODS
from .base import Method

FLAGS = {
    "logical_skip": "mask skip, logical",
    "physical_skip": "mask skip, physical",
    "in_kernel_skip": "in-kernel skip",
    "page_remap": "page remap",
}

BLOCK_KERNEL = "block_attention"
KERNEL_OF = {
    "dense": "dense_attention",
    "minference": "vertical_slash_attention",
    "pageweaver": "page_attention",
}
"""Kernels of the methods that do not run on :func:`prefill_kernels.block_attention`."""

TABLE_A = (
    ("MIT-BSA", "logical_skip_attention", None),
    ("FlashPrefill", BLOCK_KERNEL, "flashprefill"),
    ("BLASST", BLOCK_KERNEL, "blasst"),
    ("SpargeAttn", BLOCK_KERNEL, "spargeattn"),
    ("OSK", BLOCK_KERNEL, None),
)
"""Rows of Table A: the kernel, and the method whose share of it is meant; None = all that the kernel can do."""


@dataclass(frozen=True)
class Row:
    """One line of a table of capabilities."""

    name: str
    can: Capabilities
    knob: str = ""
    chunks: bool = False


def table_a() -> list[Row]:
    """Table A: how each backend leaves work out.

    Raises:
        IntegrityError: a method asks for what its kernel does not declare.
    """
    known = kernels()
    rows = []
    for name, kernel, method in TABLE_A:
        if kernel in known:
            can = known[kernel] if method is None else _asked(METHODS.get(method)(), known[kernel], kernel)
            rows.append(Row(name, can))
    return rows


def presets() -> list[Row]:
    """Every preset of ``conf/method``, with what its settings ask of the kernel that runs it."""
    known = kernels()
    rows = []
    for name, method in preset_methods().items():
        kernel = KERNEL_OF.get(method.name, BLOCK_KERNEL)
        knob = method.knob.field if method.knob else ""
        rows.append(Row(name, _asked(method, known[kernel], kernel), knob, method.chunk_problem is None))
    return rows


def preset_methods() -> dict[str, Method]:
    """The method of each preset by the preset's name, composed and not validated: a calibration may be missing."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    from ..app import schema, sweeper

    schema.register()
    sweeper.register()
    names = sorted(file.name.removesuffix(".yaml") for file in (files("evalkit.conf") / "method").iterdir())
    found: dict[str, Method] = {}
    GlobalHydra.instance().clear()
    with initialize_config_module("evalkit.conf", version_base="1.3"):
        for name in names:
            config = compose("config", overrides=[f"method={name}", "task=perplexity"])
            settings = OmegaConf.to_container(config.method, resolve=True)
            assert isinstance(settings, dict)
            found[name] = build(METHODS.get(str(settings.pop("name"))), settings, "method")  # type: ignore[arg-type]
    return found


def print_methods(*, only_table_a: bool) -> int:
    """Print the presets, or Table A; returns the exit code."""
    rows = table_a() if only_table_a else presets()
    header = ["backend" if only_table_a else "method preset", *FLAGS.values()]
    lines = [[row.name, *("x" if getattr(row.can, flag) else "" for flag in FLAGS)] for row in rows]
    if not only_table_a:
        header += ["knob", "chunks"]
        lines = [[*line, row.knob, "x" if row.chunks else ""] for line, row in zip(lines, rows, strict=True)]
    print(tabulate(lines, header, tablefmt="github"))
    return 0


def _asked(method: Method, can: Capabilities, kernel: str) -> Capabilities:
    asked = method.features
    if not asked <= can:
        raise IntegrityError(f"method {method.name} asks for {asked}, {kernel} declares {can}")
    return asked
