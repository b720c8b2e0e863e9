"""The console command ``evalkit``. Imports are made by the sub-command that needs them, so that help is quick."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from .errors import EvalkitError, InputError

DISTRIBUTION = "sparse-prefill-evalkit"

HYDRA_COMMANDS = {
    "run": (".app.main", "run cells: model x method x task; -m sweeps"),
    "calibrate": (".app.calibrate", "find the value of a method's knob that reaches a budget"),
    "search-patterns": (".app.search_patterns", "find MInference's pattern of each head"),
    "capture": (".app.capture", "record what a real run's attention sees, and what a method selects there"),
    "bench": (".app.bench", "benchmarks on a CUDA device"),
    "analyze": (".app.analyze", "analyses behind figures: iou, rowmax, remap, frontier, heads"),
}
"""Commands whose arguments are Hydra's: the module whose ``run`` takes them, and a line of help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; ``None`` = those of the process.

    Returns:
        Exit code: 0 fine, 1 something failed, 2 bad input, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] and arguments[0] in HYDRA_COMMANDS:
            module, _ = HYDRA_COMMANDS[arguments[0]]
            return int(importlib.import_module(module, __package__).run(arguments[1:]))
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
    if options.command in HYDRA_COMMANDS:  # only reached as "evalkit --flag run": those arguments are Hydra's
        raise InputError("command", options.command, f"must come first: evalkit {options.command} ...")
    if options.command == "report":
        if options.bench is not None:
            return _report_bench(options)
        if not options.directories:
            _parser().error("the following arguments are required: DIR (before --html), or --bench [FILE]")
        if options.paper:
            from .report.paper import write_paper

            write_paper(options.directories, options.out, published=options.published, formats=tuple(options.format))
            return 0
        from .report import write_report

        html = options.html
        if html == "":
            html = (options.out or options.directories[0]) / "report.html"
        write_report(options.directories, options.out, formats=tuple(options.format), html=html)
        return 0
    if options.command == "methods":
        from .methods.catalog import print_methods

        return print_methods(only_table_a=options.table_a)
    if options.command == "validate":
        return _validate(options.file)
    from .status import print_status

    return print_status(options.directories)


def _validate(file: Path) -> int:
    from .benchmarks.longbench_v2.data import SHOWN_PROBLEMS, validate_file

    lines, problems = validate_file(file)
    if not problems:
        print("\n".join([f"{file}: valid LongBench-v2 records", *(f"  {line}" for line in lines)]))
        return 0
    for problem in problems[:SHOWN_PROBLEMS]:
        print(f"evalkit: {file}: {problem}", file=sys.stderr)
    if len(problems) > SHOWN_PROBLEMS:
        print(f"evalkit: {file}: and {len(problems) - SHOWN_PROBLEMS} more", file=sys.stderr)
    return 2


def _report_bench(options: argparse.Namespace) -> int:
    if options.directories:
        raise InputError("bench", options.bench, "a benchmark file or results directories, one of the two")
    if options.html is not None:
        raise InputError("html", options.html, "the page shows finished cells, not benchmarks")
    from .report.bench import write_benchmarks

    write_benchmarks(options.bench or None, options.out, formats=tuple(options.format))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="evalkit", description="Accuracy of sparse prefill against the budget it really spends.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in HYDRA_COMMANDS.items():
        commands.add_parser(name, help=f"{text} (evalkit {name} --help)", add_help=False)
    report = commands.add_parser("report", help="tables and plots of finished cells, beside their dense twins")
    _directories(report, "*")
    report.add_argument(
        "--bench",
        nargs="?",
        const="",
        default=None,
        metavar="FILE",
        help="tables and figures of a benchmark file instead (default: results/h200/benchmarks.csv)",
    )
    report.add_argument(
        "--paper",
        action="store_true",
        help="Tables 1, 2, 3 and B of the CoSA paper instead, printed numbers beside ours",
    )
    report.add_argument(
        "--published", type=Path, default=None, metavar="DIR", help="the printed numbers (default: results/paper)"
    )
    report.add_argument("--out", type=Path, default=None, metavar="DIR", help="where to write (default: first DIR)")
    report.add_argument(
        "--format",
        type=_names,
        action="extend",
        default=[],
        metavar="NAME[,NAME]",
        help="only these: markdown, csv, latex, png, svg, pdf, html (default: all); for --bench markdown, png, svg; "
        "for --paper markdown, csv, latex",
    )
    report.add_argument(
        "--html",
        nargs="?",
        const="",
        default=None,
        metavar="FILE",
        help="the interactive page, to FILE (default: report.html in the place of --out), and only what --format names",
    )
    validate = commands.add_parser("validate", help="check a file of LongBench-v2 records; names every bad one")
    validate.add_argument("file", type=Path, metavar="FILE", help="a .json list of records, or .jsonl with one a line")
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


def _directories(parser: argparse.ArgumentParser, nargs: str = "+") -> None:
    parser.add_argument("directories", nargs=nargs, type=Path, metavar="DIR", help="results directory of evalkit run")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
