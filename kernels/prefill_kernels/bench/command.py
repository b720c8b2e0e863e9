"""From settings to a run: a command line made of a settings class, and the checks that come before any work."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import shlex
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from .. import timing
from ..backends import triton_problem
from .config import AttentionBench, BenchError, BenchSettings, KernelBench, PageBench, WrongResult
from .measure import Bench
from .rows import Rows, checkout_commit, default_out

T = TypeVar("T", bound=BenchSettings)


def add_options(parser: argparse.ArgumentParser, cls: type[BenchSettings]) -> None:
    """Give a parser one option a field of a settings class; lists are separated by spaces."""
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        many = typing.get_origin(hints[item.name]) is tuple
        kind = typing.get_args(hints[item.name])[0] if many else _plain(hints[item.name])
        default = item.default
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        options: dict[str, Any] = {"nargs": "*"} if many else {}
        name = f"--{item.name.replace('_', '-')}"
        parser.add_argument(name, type=kind, default=default, help=f"(default: {shown})", metavar="X", **options)


def settings_from(cls: type[T], options: argparse.Namespace) -> T:
    """Settings from parsed options, validated.

    Raises:
        BenchError: the first value that cannot be used.
    """
    given: dict[str, Any] = {item.name: getattr(options, item.name) for item in dataclasses.fields(cls)}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    settings = cls(**given)
    settings.validate()
    return settings


def launch(settings: KernelBench | AttentionBench | PageBench, command: str) -> Path:
    """Run a benchmark on the CUDA device; ``fp8_error_only`` runs on a CPU where there is none.

    Args:
        settings: validated settings.
        command: the command that reproduces the rows.

    Returns:
        The file that was appended to.

    Raises:
        BenchError: no CUDA device, no Triton, or a file that cannot be used.
        WrongResult: a kernel does not compute what it should; nothing was timed of it.
    """
    if isinstance(settings, PageBench) and settings.fp8_error_only:
        return _fp8_error(settings, command)
    bench = device_bench(settings, command)
    if isinstance(settings, KernelBench):
        from .kernel import run as run_kernel

        run_kernel(settings, bench)
    elif isinstance(settings, PageBench):
        from .pages import run as run_pages

        run_pages(settings, bench)
    else:
        from .attention import run as run_attention

        run_attention(settings, bench)
    return bench.rows.path


def _fp8_error(settings: PageBench, command: str) -> Path:
    """The rows of :mod:`.fp8_error` alone; files are read first, so that a bad one leaves no file of rows."""
    from . import fp8_error

    settings.check_files()
    layers = fp8_error.measurable(settings.captures, settings.queries)
    cuda = torch.cuda.is_available()
    rows = open_rows(settings, command, device=None if cuda else "cpu")
    fp8_error.run(layers, rows, torch.device("cuda" if cuda else "cpu"), settings.queries)
    return rows.path


def device_bench(settings: BenchSettings, command: str) -> Bench:
    """What measures attention on the CUDA device.

    Raises:
        BenchError: no CUDA device, no Triton, or a file that cannot be used.
    """
    rows = open_rows(settings, command)
    timed = functools.partial(timing.medians, least=settings.repeats)
    if isinstance(settings, PageBench):
        timed = functools.partial(timed, budget_ms=settings.budget_ms)
    bench = Bench(rows, torch.device("cuda"), timed)
    if (problem := triton_problem()) is not None:
        raise BenchError("backend", bench.backend, f"triton or hopper: {problem}")
    return bench


def open_rows(settings: BenchSettings, command: str, device: str | None = None) -> Rows:
    """Check the machine, then the files to read, and open the one to write.

    Args:
        settings: validated.
        command: the command that reproduces them.
        device: what they are measured on; None = the CUDA device, which there must be.

    Raises:
        BenchError: no CUDA device, or a file that cannot be used.
    """
    if device is None and not torch.cuda.is_available():
        raise BenchError("device", "cpu", "a CUDA device is needed; torch finds none here")
    settings.check_files()
    device = device or torch.cuda.get_device_name()
    out = Path(settings.out).expanduser() if settings.out else default_out(device)
    return Rows(out, command, settings.commit or checkout_commit(), device)


def _plain(hint: Any) -> Callable[[str], Any]:
    """``X`` of ``X | None``."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    return _truth if hint is bool else typing.cast("Callable[[str], Any]", hint)


def _truth(text: str) -> bool:
    """``bool`` would take any text for true."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def main_with(
    prog: str, classes: dict[str, type[BenchSettings]], run: Callable[[Any, str], object], argv: Sequence[str]
) -> int:
    """A command with one sub-command a settings class; bad input is one line and exit code 2.

    Args:
        prog: how the command is called.
        classes: settings class by sub-command.
        run: called with the settings and the command as text.
        argv: arguments without the program's name.
    """
    parser = argparse.ArgumentParser(prog=prog)
    commands = parser.add_subparsers(dest="name", required=True)
    for name, cls in classes.items():
        text = inspect.cleandoc(cls.__doc__ or "")
        sub = commands.add_parser(
            name, help=text.splitlines()[0], description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add_options(sub, cls)
    options = parser.parse_args(argv)
    try:
        run(settings_from(classes[options.name], options), shlex.join([*prog.split(), *argv]))
    except BenchError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except WrongResult as error:
        print(f"{prog}: wrong result, nothing was timed of it: {error}", file=sys.stderr)
        return 1
    return 0
