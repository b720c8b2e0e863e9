"""Benchmark files as tables and figures: ``evalkit report --bench [FILE]``.

A file holds one number a row, oldest first. The newest run of each (bench, variant, tokens, setting, metric) counts.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prefill_kernels.bench.config import DENSE
from prefill_kernels.bench.rows import COLUMNS
from rich.console import Console
from tabulate import tabulate

from ..errors import InputError, near_matches
from .names import unique

FILES = {
    "markdown": "benchmarks.md",
    "speedup": "speedup",
    "jumping": "jumping",
    "stages": "stages",
    "ttft": "ttft",
    "methods": "methods",
}
FORMATS = ("markdown", "png", "svg")
USUAL = "results/h200/benchmarks.csv"
OLDER = {"speedup_dense": "speedup_cudnn", "share_of_dense": "share_of_cudnn_rate"}
"""What earlier versions called a metric when cuDNN was the fastest dense kernel they measured."""
DASH = "-"


@dataclass
class Point:
    """One thing that was measured: its metrics by name.

    Attributes:
        bench, variant, tokens, setting: what it is.
        metrics: numbers by metric.
        commits: of the code that was measured; more than one where metrics are of several runs.
    """

    bench: str
    variant: str
    tokens: int
    setting: str
    metrics: dict[str, float] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Benchmarks:
    """The newest numbers of a file.

    Attributes:
        points: in the order of their first row.
        device: the one device they were measured on.
        origins: versions and commands, one line each.
    """

    points: list[Point]
    device: str
    origins: list[str]

    def of(self, bench: str, *variants: str) -> list[Point]:
        """Points of a bench and some variants."""
        return [point for point in self.points if point.bench == bench and point.variant in variants]

    def ratio(self, point: Point, metric: str) -> float | None:
        """``speedup_fa2``, ``speedup_dense`` or ``share_of_dense`` of a point: stored, or made of the dense rows."""
        for name in (metric, OLDER.get(metric, "")):
            if name in point.metrics:
                return point.metrics[name]
        base = self._dense(point)
        ms = point.metrics.get("ms")
        if ms is None or "fa2" not in base:
            return None
        if metric == "speedup_fa2":
            return base["fa2"].metrics["ms"] / ms
        fastest = min(base.values(), key=lambda dense: dense.metrics["ms"])
        if metric == "speedup_dense":
            return fastest.metrics["ms"] / ms
        rate, peak = point.metrics.get("tflops"), fastest.metrics.get("tflops")
        return rate / peak if rate is not None and peak else None

    def ttft_speedup(self, point: Point) -> float | None:
        """Over FA2 at the same length: stored, or made of its row where it was measured in another process."""
        if "speedup_fa2" in point.metrics or "ttft" not in point.metrics:
            return point.metrics.get("speedup_fa2")
        base = [other.metrics.get("ttft") for other in self.of("ttft", "fa2") if other.tokens == point.tokens]
        return base[0] / point.metrics["ttft"] if base and base[0] else None

    def _dense(self, point: Point) -> dict[str, Point]:
        """Dense points on the same inputs; those of the kernels' own bench where the point's has none."""
        settings = {other.setting for other in self.points if other.variant == "fa2"}
        own = next((name for name in settings if point.setting.startswith(name.removesuffix("dense") or "\0")), "dense")
        for bench in (point.bench, "kernel"):
            found = {
                other.variant: other
                for other in self.of(bench, *DENSE)
                if other.tokens == point.tokens and other.setting == own and "ms" in other.metrics
            }
            if "fa2" in found:
                return found
        return {}


def read(path: Path) -> Benchmarks:
    """Read a benchmark file.

    Raises:
        InputError: no such file, missing columns, a value that is no number, no row, or rows of several devices.
    """
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise InputError("bench", str(path), f"a CSV file with columns {', '.join(missing)} too")
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError("bench", str(path), f"a readable CSV file of evalkit bench ({reason})") from None
    points: dict[tuple[str, str, int, str], Point] = {}
    newest: dict[tuple[tuple[str, str, int, str], str], dict[str, str]] = {}
    for line, row in rows:
        if any(row[name] is None for name in COLUMNS):
            raise InputError("bench", f"{path}:{line}", f"{len(COLUMNS)} fields a line")
        tokens, value = _number(path, line, row, "tokens", int), _number(path, line, row, "value", float)
        key = (row["bench"], row["variant"], int(tokens), row["setting"])
        points.setdefault(key, Point(*key)).metrics[row["metric"]] = value
        newest[key, row["metric"]] = row
    if not points:
        raise InputError("bench", str(path), "a file with at least one row below the header")
    devices = unique(row["device"] for _, row in rows)
    if len(devices) > 1:
        raise InputError("bench", str(path), f"rows of one device; it holds {', '.join(devices)}")
    for (key, metric), row in list(newest.items()):
        if any(metric == older and name in points[key].metrics for name, older in OLDER.items()):
            del points[key].metrics[metric], newest[key, metric]
            continue
        points[key].commits = unique([*points[key].commits, row["commit"]])
    origins = unique(
        f"`{row['command']}` at commit {row['commit']} (torch {row['torch']}, Triton {row['triton']})"
        for row in newest.values()
    )
    return Benchmarks(list(points.values()), devices[0], origins)


def _number(path: Path, line: int, row: dict[str, str], name: str, kind: Callable[[str], float]) -> float:
    try:
        value = kind(row[name])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError("bench", f"{path}:{line}", f"{name} must be a number, not {row[name]!r}")
    return value


# ------------------------------------------------------------------------------------------------------------ tables
@dataclass(frozen=True)
class Table:
    """One table of the report.

    Attributes:
        title: heading.
        headers: of the columns.
        rows: text by row.
    """

    title: str
    headers: tuple[str, ...]
    rows: list[list[str]]


SPEED = ("ms", "TF/s", "% of dense peak", "over FA2", "over fastest dense", "B_stage1 %", "B %", "also", "commit")
METHODS = (
    "ms", "plan ms", "attention ms", "TF/s", "% of dense peak", "over FA2", "over fastest dense", "B_stage1 %", "B %",
    "B_block %", "plan GiB", "also", "commit",
)  # fmt: skip
PAGES = (
    "ms", "regroup ms", "union ms", "attention ms", "preparation %", "mean union", "useful %", "TF/s", "useful TF/s",
    "gain %", "95 %", "over FlashInfer", "over its fp8", "error", "also", "commit",
)  # fmt: skip
PAGES_MODEL = (
    "prefill s", "tokens/s", "over original %", "95 %", "over FlashInfer %", "95 % of that", "over replanned %",
    "peak GiB", "commit",
)  # fmt: skip
TTFT = ("TTFT s", "TF/s", "over FA2", "over fastest dense", "loss s", "peak GiB", "B_stage1 %", "B %", "commit")

ALSO: dict[str, tuple[str, float, str]] = {
    "vote_cost": ("vote costs {} %", 100, "1"),
    "gain_of_jumping": ("logical / jumping {}", 1, "2"),
    "kap_select_share": ("proxy and selection {} %", 100, "1"),
    "skipped_over_live": ("skipped / live block {}", 1, "2"),
    "skipped_over_voting": ("with the vote on {}", 1, "2"),
    "host_ms": ("host {} ms", 1, "2"),
    "graph_ms": ("CUDA graph {} ms", 1, "3"),
    "host_plan_ms": ("plan {} ms of the host, not in ms", 1, "1"),
    "mean_halves": ("halves {}", 1, "2"),
    "mean_imbalance": ("imbalance {}", 1, "2"),
    "break_even_preparation": ("gain gone at {} % preparation", 100, "1"),
    "break_even_attention_speed": ("gain gone with the attention {} times as fast", 1, "1"),
    "break_even_native_tflops": ("lead gone with FlashInfer at {} useful TF/s", 1, "0"),
    "break_even_native_preparation": ("lead gone at {} % of its time as preparation", 100, "1"),
    "regrouped": ("beyond the bitmaps: not regrouped", 1, "0"),
    "quantization_err": ("quantising KV {}", 1, "3"),
    "partials": ("partials {} GiB", 1, "2"),
    "reduction_ms": ("reduction {} ms", 1, "3"),
    "union_reduction": ("zero gain at {} % fewer pages", 100, "1"),
    "query_err": ("rounding Q alone {}", 1, "3"),
    "worst_head_err": ("worst head {}", 1, "3"),
}
"""Metrics of the column "also": text, factor, digits."""

EXPLANATION = (
    "Medians of device time. TF/s count executed products: QK and PV of computed blocks, QK of skipped ones, sampled "
    "pairs of the proxy, the causal half of the square for dense attention. The dense peak is the rate of the fastest "
    "dense kernel measured on the same inputs. B counts whole blocks; of methods it counts cells, B_block whole blocks."
)


def tables(benchmarks: Benchmarks) -> list[Table]:
    """The tables of a report: kernels, the whole call (synthetic and captured inputs), skipped blocks, TTFT."""
    captured = [point for point in benchmarks.of("attention", "fa2") if point.setting != "dense"]
    names = tuple(point.setting.removesuffix("dense") for point in captured)

    def attention(of_captures: bool) -> list[Point]:
        chosen = [point for point in benchmarks.points if point.bench == "attention" and not is_method(point)]
        return [point for point in chosen if bool(names and point.setting.startswith(names)) == of_captures]

    groups = {
        "Kernel": [point for point in benchmarks.points if point.bench in ("ceiling", "kernel")],
        "Whole call and its stages": attention(False),
        "Whole call on captured inputs, mean over layers": attention(True),
        "Cost of a skipped block": [point for point in benchmarks.points if point.bench == "skip"],
    }
    found = [
        Table(title, ("variant", "setting", "tokens", *SPEED), [_speed_row(benchmarks, point) for point in points])
        for title, points in groups.items()
        if points
    ]
    methods = [point for point in benchmarks.points if is_method(point)]
    if methods:
        rows = [_method_row(benchmarks, point) for point in methods]
        title = "Methods, whole call with the selection, mean over inputs or captured layers"
        found.append(Table(title, ("variant", "setting", "tokens", *METHODS), rows))
    pages = [point for point in benchmarks.points if point.bench == "pageweaver"]
    if pages:
        title = "PageWeaver, complete call on given page ids"
        found.append(Table(title, ("variant", "setting", "tokens", *PAGES), [_pages_row(point) for point in pages]))
    models = [point for point in benchmarks.points if point.bench == "pageweaver-model"]
    if models:
        title, rows = "PageWeaver, whole-model prefill", [_pages_model_row(point) for point in models]
        found.append(Table(title, ("variant", "setting", "tokens", *PAGES_MODEL), rows))
    ttft = [point for point in benchmarks.points if point.bench == "ttft"]
    if ttft:
        rows = [_ttft_row(benchmarks, point) for point in ttft]
        found.append(Table("Time to first token", ("variant", "setting", "tokens", *TTFT), rows))
    return found


def _speed_row(benchmarks: Benchmarks, point: Point) -> list[str]:
    metrics = point.metrics
    ratios = {name: benchmarks.ratio(point, name) for name in ("share_of_dense", "speedup_fa2", "speedup_dense")}
    if point.variant in ("kap", "select", "matmul"):  # a stage or a bare product is no attention call
        ratios["speedup_fa2"] = ratios["speedup_dense"] = None
    return [
        point.variant,
        point.setting,
        str(point.tokens),
        _text(metrics.get("ms"), 3),
        _text(metrics.get("tflops"), 0),
        _text(ratios["share_of_dense"], 0, 100),
        _text(ratios["speedup_fa2"], 2),
        _text(ratios["speedup_dense"], 2),
        _text(metrics.get("B_stage1_block"), 1, 100),
        _text(metrics.get("B_block"), 1, 100),
        _also(metrics),
        ", ".join(point.commits),
    ]


def is_method(point: Point) -> bool:
    """Whether a point is the whole call of a method, with its stages as metrics."""
    return point.bench == "attention" and "plan_ms" in point.metrics


def _method_row(benchmarks: Benchmarks, point: Point) -> list[str]:
    metrics = point.metrics
    return [
        point.variant,
        point.setting,
        str(point.tokens),
        *(_text(metrics.get(name), 3) for name in ("ms", "plan_ms", "attention_ms")),
        _text(metrics.get("tflops"), 0),
        _text(benchmarks.ratio(point, "share_of_dense"), 0, 100),
        *(_text(benchmarks.ratio(point, name), 2) for name in ("speedup_fa2", "speedup_dense")),
        *(_text(metrics.get(name), 1, 100) for name in ("B_stage1", "B", "B_block")),
        _text(metrics.get("plan_memory"), 2),
        _also(metrics),
        ", ".join(point.commits),
    ]


def _also(metrics: Mapping[str, float]) -> str:
    """What is worth saying besides the columns."""
    found = [
        text.format(_text(metrics[name], int(digits), factor))
        for name, (text, factor, digits) in ALSO.items()
        if name in metrics
    ]
    return ", ".join(found) or DASH


def _pages_row(point: Point) -> list[str]:
    metrics = point.metrics
    return [
        point.variant,
        point.setting,
        str(point.tokens) if point.tokens else DASH,
        *(_text(metrics.get(name), 3) for name in ("ms", "regroup_ms", "union_ms", "attention_ms")),
        _text(metrics.get("preparation_share"), 1, 100),
        _text(metrics.get("mean_union"), 1),
        _text(metrics.get("useful_share"), 1, 100),
        *(_text(metrics.get(name), 0) for name in ("tflops", "useful_tflops")),
        _text(metrics.get("gain"), 2, 100),
        _interval(metrics, "gain"),
        *(_text(metrics.get(name), 2) for name in ("speedup_flashinfer", "speedup_flashinfer_fp8")),
        _text(metrics.get("rel_err"), 4),
        _also(metrics),
        ", ".join(point.commits),
    ]


def _pages_model_row(point: Point) -> list[str]:
    metrics = point.metrics
    gains = ("throughput_gain", "throughput_over_flashinfer", "throughput_over_flashinfer_replan")
    return [
        point.variant,
        point.setting,
        str(point.tokens),
        _text(metrics.get("prefill"), 3),
        _text(metrics.get("throughput"), 0),
        _text(metrics.get(gains[0]), 2, 100),
        _interval(metrics, gains[0]),
        _text(metrics.get(gains[1]), 2, 100),
        _interval(metrics, gains[1]),
        _text(metrics.get(gains[2]), 2, 100),
        _text(metrics.get("peak_memory"), 1),
        ", ".join(point.commits),
    ]


def _ttft_row(benchmarks: Benchmarks, point: Point) -> list[str]:
    metrics = point.metrics
    return [
        point.variant,
        point.setting,
        str(point.tokens),
        _text(metrics.get("ttft"), 3),
        _text(metrics.get("tflops"), 0),
        _text(benchmarks.ttft_speedup(point), 2),
        _text(metrics.get("speedup_dense"), 2),
        _text(metrics.get("loss"), 3),
        _text(metrics.get("peak_memory"), 1),
        _text(metrics.get("B_stage1_block"), 1, 100),
        _text(metrics.get("B_block"), 1, 100),
        ", ".join(point.commits),
    ]


def _text(value: float | None, digits: int, factor: float = 1.0) -> str:
    # The z: what rounds to zero has no sign.
    return DASH if value is None else f"{value * factor:z.{digits}f}"


def _interval(metrics: Mapping[str, float], name: str) -> str:
    """The interval of a gain, in percent."""
    ends = [metrics.get(f"{name}_{end}") for end in ("low", "high")]
    return DASH if None in ends else " to ".join(_text(end, 2, 100) for end in ends)


def grid(table: Table, style: str) -> str:
    """A table as text in one of tabulate's styles."""
    align = ["left" if name in ("variant", "setting", "also", "commit") else "right" for name in table.headers]
    return tabulate(table.rows, headers=table.headers, tablefmt=style, colalign=align, disable_numparse=True)


def markdown(benchmarks: Benchmarks) -> str:
    """Every table, then where the numbers come from."""
    parts = [f"# Benchmarks on {benchmarks.device}", EXPLANATION]
    for table in tables(benchmarks):
        parts += [f"## {table.title}", grid(table, "pipe")]
    parts += ["## How it was measured", "\n".join(f"- {line}" for line in benchmarks.origins)]
    return "\n\n".join(parts) + "\n"


# ------------------------------------------------------------------------------------------------------------- files
def write_benchmarks(
    file: str | Path | None,
    out: str | Path | None = None,
    *,
    formats: Sequence[str] = (),
    console: Console | None = None,
) -> list[Path]:
    """Print the tables of a benchmark file and write them, with the figures, to files.

    Args:
        file: the file; None = :data:`USUAL`.
        out: directory to write to; None = the file's.
        formats: of :data:`FORMATS` (or ``md``); empty = all.
        console: where to print.

    Returns:
        The files written; a figure whose rows the file does not hold is left out.

    Raises:
        InputError: the file or a format cannot be used, or ``out`` cannot be written to.
    """
    from . import speed  # matplotlib loads slowly

    wanted = {"markdown" if name == "md" else name for name in formats} or set(FORMATS)
    for name in sorted(wanted):
        if name not in FORMATS:
            raise InputError("format", name, f"for --bench, {near_matches(name, FORMATS)}")
    path = Path(file or USUAL)
    benchmarks = read(path)
    console = console or Console(highlight=False)
    for table in tables(benchmarks):
        console.print(f"{table.title}\n{grid(table, 'simple')}\n", markup=False, soft_wrap=True)
    contents: dict[str, bytes] = {}
    if "markdown" in wanted:
        contents[FILES["markdown"]] = markdown(benchmarks).encode()
    for name, figure in speed.figures(benchmarks).items():
        contents |= {f"{FILES[name]}.{kind}": speed.render(figure, kind) for kind in sorted(wanted - {"markdown"})}
    return _write(contents, Path(out) if out is not None else path.parent, console)


def _write(contents: dict[str, bytes], target: Path, console: Console) -> list[Path]:
    written = []
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (target / name).write_bytes(content)
            written.append(target / name)
    except OSError as error:
        raise InputError("out", str(target), f"must be a directory that can be written to ({error.strerror})") from None
    for path in written:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    return written


def by_setting(points: Iterable[Point]) -> dict[str, list[Point]]:
    """Points by setting, each in order of length."""
    groups: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        groups[point.setting].append(point)
    return {setting: sorted(found, key=lambda point: point.tokens) for setting, found in groups.items()}
