"""The console command ``evalkit``. Imports are made by the sub-command that needs them, so that help is quick."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from .errors import EvalkitError, InputError

DISTRIBUTION = "sparse-prefill-evalkit"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; ``None`` = those of the process.

    Returns:
        Exit code: 0 fine, 1 something failed, 2 bad input, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["run"]:
            from .app.main import run

            return run(arguments[1:])
        if arguments[:1] == ["calibrate"]:
            from .app.calibrate import run as calibrate

            return calibrate(arguments[1:])
        if arguments[:1] == ["search-patterns"]:
            from .app.search_patterns import run as search_patterns

            return search_patterns(arguments[1:])
        return _other(arguments)
    except EvalkitError as exc:
        print(f"evalkit: {' '.join(str(exc).split())}", file=sys.stderr)
        return 2 if isinstance(exc, InputError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe is gone (| head); nothing is left to say and nobody to hear it
        return 0


def _other(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    # After a flag of ours: Hydra's arguments are not ours to parse.
    if options.command in ("run", "calibrate", "search-patterns"):
        raise InputError("command", options.command, f"must come first: evalkit {options.command} ...")
    if options.command == "report":
        from .report import write_report

        write_report(options.directories, options.out, formats=tuple(options.format))
        return 0
    if options.command == "methods":
        from .methods.catalog import print_methods

        return print_methods(only_table_a=options.table_a)
    from .status import print_status

    return print_status(options.directories)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="evalkit", description="Accuracy of sparse prefill against the budget it really spends.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("run", help="run cells: model x method x task; -m sweeps (evalkit run --help)", add_help=False)
    calibrate = "find the value of a method's knob that reaches a budget (evalkit calibrate --help)"
    commands.add_parser("calibrate", help=calibrate, add_help=False)
    commands.add_parser(
        "search-patterns", help="find MInference's pattern of each head (search-patterns --help)", add_help=False
    )
    report = commands.add_parser("report", help="tables and plots of finished cells, beside their dense twins")
    _directories(report)
    report.add_argument("--out", type=Path, default=None, metavar="DIR", help="where to write (default: first DIR)")
    report.add_argument(
        "--format",
        type=_names,
        action="extend",
        default=[],
        metavar="NAME[,NAME]",
        help="only these: markdown, csv, latex, png, svg, html (default: all)",
    )
    status = commands.add_parser("status", help="done, failed and partial cells of result directories")
    _directories(status)
    methods = commands.add_parser("methods", help="method presets and what they ask of the kernel that runs them")
    methods.add_argument(
        "--table-a", action="store_true", help="Table A of the CoSA paper, from the kernels' own flags"
    )
    return parser


class _Parser(argparse.ArgumentParser):
    """Errors in the one-line form of the other commands."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _directories(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="results directory of evalkit run")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
