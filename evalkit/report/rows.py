"""The numbers of a report: one row per cell and metric, per RULER subtask, and per average over lengths."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pandas as pd

from ..errors import StoreError
from ..store import CellResult, canonical_json
from . import averages, bootstrap, longbench, stats
from .load import Loaded, by_sample
from .names import method_labels, model_label, series_labels, task_label, unique
from .provenance import provenance
from .stats import Estimate

PERCENT = 100.0
REFERENCE_MARK = "[torch]"
"""After a method's name: the torch reference ran calls that a GPU kernel was asked for."""


@dataclass(frozen=True)
class Metric:
    """A measured quantity.

    Attributes:
        name: as tables show it.
        unit: ``%``, ``nats`` or empty.
        higher_is_better: direction.
        digits: decimals shown.
    """

    name: str
    unit: str
    higher_is_better: bool
    digits: int


METRICS = {
    "accuracy": Metric("accuracy", "%", True, 2),
    "first_token": Metric("first answer token", "%", True, 2),
    "unparsed": Metric("no answer found", "%", False, 2),
    "perplexity": Metric("perplexity", "", False, 3),
    "kl": Metric("KL to dense", "nats", False, 4),
    "top1": Metric("top-1 agreement", "%", True, 2),
}

SCORES = {"accuracy": "score", "first_token": "first_token", "unparsed": "unparsed"}
"""Metrics that are means of numbers in [0, 1] over subtasks, and the field of a record they come from."""

BUDGETS = ("B", "B_stage1", "B_cost", "B_block", "B_stage1_block")
"""Ratios of a sample that a cell averages with prompt tokens as weights."""


@dataclass
class Row:
    """One line of the report. Accuracy, agreement and budgets are in percent.

    Attributes:
        level: ``cell``, ``subtask`` (one of a RULER cell's tasks, a category of LongBench-v2) or ``average`` (over
            lengths, or over LongBench-v2's modes).
        group: rows of one group were measured on the same samples and may be compared.
        family: what a group shares with those of other lengths.
        model, method, series, task, length: labels.
        metric: key of :data:`METRICS`.
        value, low, high, n: the number, its 95 % interval, samples.
        difference, difference_low, difference_high: to dense, paired.
        difference_bootstrap_low, difference_bootstrap_high: the difference's interval by a paired percentile bootstrap;
            its draws are those of the twin key, so that they depend on nothing else in the report.
        ratio_low, ratio_high: interval of a perplexity over that of dense, paired; None for other metrics.
        B, B_stage1, B_cost, B_block, B_stage1_block: token-weighted means over samples.
        B_pooled: ratio of sums over all samples.
        layer_min, layer_max: extremes of B over layers and samples.
        fallback_share: share of attention calls a sparse method answered densely.
        warnings: samples that were stored with a warning.
        reference_share: share of a CUDA cell's sparse calls that the torch reference ran although a GPU kernel was
            asked for.
        published: score of the dense model that the paper prints for the same task, where it is known.
        dense: the row is a dense twin's.
        subtask: name of the subtask.
        key: cell keys.
    """

    level: str
    group: str
    family: str
    model: str
    method: str
    series: str
    task: str
    length: str
    metric: str
    value: float
    low: float | None
    high: float | None
    n: int
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    difference_bootstrap_low: float | None = None
    difference_bootstrap_high: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    B: float = float("nan")
    B_stage1: float = float("nan")
    B_cost: float = float("nan")
    B_block: float = float("nan")
    B_stage1_block: float = float("nan")
    B_pooled: float = float("nan")
    layer_min: float = float("nan")
    layer_max: float = float("nan")
    fallback_share: float = 0.0
    warnings: int = 0
    reference_share: float = 0.0
    published: float | None = None
    dense: bool = False
    subtask: str = ""
    key: str = ""

    @property
    def marked_method(self) -> str:
        """The method's label, with a mark where not only GPU kernels ran."""
        return f"{self.method} {REFERENCE_MARK}" if self.reference_share else self.method

    @property
    def suspect(self) -> bool:
        """Something to check before the number is believed."""
        return self.beats_dense or self.below_published or self.reference_share > 0

    @property
    def below_published(self) -> bool:
        """Dense is far below the published score: the intervals of both leave each other out.

        The paper prints no interval: Wilson's for as many samples as ours stands for it.
        """
        if self.published is None or self.high is None:
            return False
        return self.high < PERCENT * stats.wilson(self.published / PERCENT, self.n)[0]

    @property
    def beats_dense(self) -> bool:
        """Sparse is better than dense by more than the interval allows for."""
        if self.difference_low is None or self.difference_high is None or self.metric not in ("accuracy", "perplexity"):
            return False
        return self.difference_low > 0 if METRICS[self.metric].higher_is_better else self.difference_high < 0


@dataclass(frozen=True)
class Work:
    """What a cell's kernel executed beyond the cells of the budget (:meth:`evalkit.methods.Method.work_ratios`).

    Attributes:
        model, method, task, length: labels.
        ratios: token-weighted means over samples, by name.
    """

    model: str
    method: str
    task: str
    length: str
    ratios: dict[str, float]


@dataclass(frozen=True)
class Rows:
    """All rows of a report, and what is to be said about them.

    Attributes:
        rows: sorted for reading.
        notes: one line each.
        provenance: machine, versions and commands behind the rows, one line each.
        work: what methods count beside the budget, a line a cell that has any.
    """

    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    provenance: list[str] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)

    def level(self, *levels: str) -> list[Row]:
        """Rows of some levels."""
        return [row for row in self.rows if row.level in levels]

    def frame(self) -> pd.DataFrame:
        """The rows as a data frame, in full precision."""
        return pd.DataFrame(self.rows, columns=[item.name for item in fields(Row)])


def build_rows(loaded: Loaded) -> Rows:
    """Compute every number of the report.

    Raises:
        StoreError: a record lacks what a report needs.
    """
    names = _Names(loaded.cells)
    rows: list[Row] = []
    for cell in loaded.cells:
        rows += _cell_rows(cell, loaded.twins.get(cell.key), names)
    averaged, notes = _average_rows(loaded, names)
    rows += averaged
    rows += _mode_rows(loaded, names)
    rows.sort(key=_reading_order)
    notes = [*loaded.notes, *notes, *_warning_notes(loaded.cells, names), *_backend_notes(loaded.cells, names)]
    for cell in loaded.cells:
        if longbench.is_longbench(cell):
            label = names.of(cell)
            notes += longbench.unparsed_note(cell, f"{label['model']}, {label['method']}, {label['task']}")
    for row in rows:
        if row.level != "subtask" and row.beats_dense:
            notes.append(f"sparse > dense: check {row.model}, {row.method}, {row.task}, {row.length}, {row.metric}")
    work = [found for cell in loaded.cells if (found := _work(cell, names)) is not None]
    work.sort(key=lambda one: (one.model, one.task, int(one.length), one.method))
    return Rows(rows, notes, provenance(loaded.cells), work)


def _work(cell: CellResult, names: _Names) -> Work | None:
    found = [(record["budget"]["work"]["ratios"], record) for record in cell.records if "work" in record["budget"]]
    if not found:
        return None
    tokens = [float(record["prompt"]["tokens"]) for _, record in found]
    ratios = {name: averages.weighted_mean([ratio[name] for ratio, _ in found], tokens) for name in found[0][0]}
    label = names.of(cell)
    return Work(label["model"], label["method"], label["task"], str(_length(cell)), ratios)


class _Names:
    """Labels of the cells of one report; tasks that read alike but are not are told apart by their twin key."""

    def __init__(self, cells: Sequence[CellResult]) -> None:
        self.methods, self.series = method_labels(cells), series_labels(cells)
        twins: dict[tuple[str, str, int], set[str]] = defaultdict(set)
        for cell in cells:
            twins[self._plain(cell)].add(cell.twin)
        self._alike = {key for key, found in twins.items() if len(found) > 1}

    def of(self, cell: CellResult) -> dict[str, str]:
        task = task_label(cell)
        if self._plain(cell) in self._alike:
            task += f" #{cell.twin[:6]}"
        return {
            "model": model_label(cell),
            "method": self.methods[cell.key],
            "series": self.series[cell.key],
            "task": task,
        }

    @staticmethod
    def _plain(cell: CellResult) -> tuple[str, str, int]:
        return model_label(cell), task_label(cell), _length(cell)


def _length(cell: CellResult) -> int:
    return int(cell.config.get("task", {}).get("length") or cell.records[0]["length"])


# ---------------------------------------------------------------------------------------------------- rows of a cell
def _cell_rows(cell: CellResult, twin: CellResult | None, names: _Names) -> Iterator[Row]:
    common: dict[str, Any] = {
        **names.of(cell),
        "group": cell.twin,
        "family": _family(cell),
        "length": str(_length(cell)),
        "dense": cell.is_dense,
        "key": cell.key,
        "reference_share": PERCENT * reference_share(cell),
    }
    scores = _scores(cell)
    if not scores:
        for metric, estimate, difference, ratio in _loss_metrics(cell, twin):
            relative = {} if ratio is None else {"ratio_low": ratio.low, "ratio_high": ratio.high}
            yield _row("cell", metric, estimate, difference, {**common, **budget(cell.records), **relative})
        return
    for metric in SCORES:
        scores = _scores(cell, metric)
        paired = _scores(twin, metric) if twin is not None else None
        for subtask in ["", *(scores if len(scores) > 1 else ())] if scores else []:
            part = {subtask: scores[subtask]} if subtask else scores
            estimate, difference = _mean_score([(1.0, part, paired, cell.twin)])
            records = [record for record in cell.records if record["task"] in part]
            columns = {**common, **budget(records), "subtask": subtask}
            yield _row("subtask" if subtask else "cell", metric, estimate, difference, columns)
    if longbench.is_longbench(cell):
        yield from _category_rows(cell, twin, common)


def _category_rows(cell: CellResult, twin: CellResult | None, common: Mapping[str, Any]) -> Iterator[Row]:
    """LongBench-v2's accuracy by difficulty and by length."""
    dense = longbench.by_category(twin.records) if twin is not None else {}
    for name, records in longbench.by_category(cell.records).items():
        if records:
            paired = _by_index(dense[name]) if twin is not None else None
            estimate, difference = _mean_score([(1.0, _by_index(records), paired, cell.twin)])
            yield _row("subtask", "accuracy", estimate, difference, {**common, **budget(records), "subtask": name})


def _by_index(records: Sequence[Mapping[str, Any]]) -> Scores:
    return {"": {record["index"]: float(record["metrics"]["score"]) for record in records}}


def _row(level: str, metric: str, estimate: Estimate, difference: Estimate | None, rest: Mapping[str, Any]) -> Row:
    if METRICS[metric].unit == "%":
        estimate = estimate.times(PERCENT)
        difference = None if difference is None else difference.times(PERCENT)
    against: dict[str, Any] = {}
    if difference is not None:
        against = {
            "difference": difference.value,
            "difference_low": difference.low,
            "difference_high": difference.high,
        }
        if difference.bootstrap is not None:
            against["difference_bootstrap_low"], against["difference_bootstrap_high"] = difference.bootstrap
    return Row(
        level=level,
        metric=metric,
        value=estimate.value,
        low=estimate.low,
        high=estimate.high,
        n=estimate.n,
        **against,
        **rest,
    )


Scores = dict[str, dict[int, float]]
"""Scores by subtask and index."""


def _scores(cell: CellResult, metric: str = "accuracy") -> Scores:
    """Scores of an accuracy cell; empty for a cell with a loss, and where some record lacks the metric.

    Raises:
        StoreError: records of both kinds, or of neither.
    """
    kinds = {("score" in record["metrics"], "nll" in record["metrics"]) for record in cell.records}
    if kinds == {(False, True)}:
        return {}
    if kinds != {(True, False)}:
        raise StoreError(f"{cell.path}: records must all have metrics.score, or all metrics.nll")
    field = SCORES[metric]
    if not all(field in record["metrics"] for record in cell.records):
        return {}
    scores: Scores = defaultdict(dict)
    for record in cell.records:
        scores[record["task"]][record["index"]] = float(record["metrics"][field])
    return dict(scores)


def _mean_score(parts: Sequence[tuple[float, Scores, Scores | None, str]]) -> tuple[Estimate, Estimate | None]:
    """Mean score and its paired difference to dense.

    Args:
        parts: (weight, scores, scores of dense, twin key), one a length; within a part every subtask weighs the same.
    """
    strata, differences = [], []
    for weight, scores, dense, twin in parts:
        for name, by_index in scores.items():
            share = weight / len(scores)
            strata.append((share, list(by_index.values())))
            if dense is not None:
                # One of the two may have stopped earlier at its wanted precision. In order, as samples that a resumed
                # run finished in another one are drawn alike.
                shared = sorted(index for index in by_index if index in dense[name])
                if shared:
                    paired = [by_index[index] - dense[name][index] for index in shared]
                    differences.append((share, f"{twin} {name}", paired))
    estimate = stats.mean_score(strata)
    if not differences:
        return estimate, None
    difference = stats.score_difference([(share, paired) for share, _, paired in differences])
    return estimate, replace(difference, bootstrap=bootstrap.score_difference(differences))


def _loss_metrics(
    cell: CellResult, twin: CellResult | None
) -> Iterator[tuple[str, Estimate, Estimate | None, Estimate | None]]:
    """Metric, its value, and for the perplexity its paired difference to dense and its ratio to it."""
    metrics = [record["metrics"] for record in cell.records]
    tokens = [m["tokens"] for m in metrics]
    nll = [m["nll"] for m in metrics]
    difference = ratio = None
    if twin is not None:
        dense, own = by_sample(twin), by_sample(cell)
        pairs = [(own[key]["metrics"], dense[key]["metrics"]) for key in sorted(own) if key in dense]
        paired = (
            [mine["nll"] for mine, _ in pairs],
            [base["nll"] for _, base in pairs],
            [mine["tokens"] for mine, _ in pairs],
        )
        resampled = bootstrap.perplexity_difference(*paired, seed=cell.twin)
        difference = replace(stats.perplexity_difference(*paired), bootstrap=resampled)
        ratio = stats.perplexity_ratio(*paired)
    yield "perplexity", stats.perplexity(nll, tokens), difference, ratio
    if all("kl" in m for m in metrics):
        yield "kl", stats.divergence([m["kl"] for m in metrics], tokens), None, None
    if all("top1" in m for m in metrics):
        yield "top1", stats.agreement([m["top1"] for m in metrics], tokens), None, None


def budget(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Budget columns over samples, in percent.

    Raises:
        StoreError: a record has no budget.
    """
    try:
        parts = [record["budget"] for record in records]
        tokens = [float(record["prompt"]["tokens"]) for record in records]
        found: dict[str, Any] = {
            name: PERCENT * averages.weighted_mean([part[name] for part in parts], tokens) for name in BUDGETS
        }
        found["B_pooled"] = PERCENT * sum(part["computed"] for part in parts) / sum(part["dense"] for part in parts)
        found["layer_min"] = PERCENT * min(part["layer_min"] for part in parts)
        found["layer_max"] = PERCENT * max(part["layer_max"] for part in parts)
        shares = [part["fallback_share"] for part in parts]
        found["fallback_share"] = PERCENT * averages.weighted_mean(shares, [1.0] * len(shares))
    except KeyError as exc:
        first = records[0]
        raise StoreError(f"records of {first['task']}@{first['length']} lack {exc.args[0]}") from None
    found["warnings"] = sum(bool(record.get("warnings")) for record in records)
    return found


# -------------------------------------------------------------------------------------------- averages over lengths
def _family(cell: CellResult) -> str:
    """What cells share that differ in length only, whatever their method."""
    identity, config = cell.identity, cell.config
    model = {name: value for name, value in identity["model"].items() if name != "rope_factor"}
    task = {name: value for name, value in identity["task"].items() if name != "length"}
    shared = [model, model_label(cell), task, identity["versions"], identity["device"], identity["data"].get("weights")]
    return _short_hash([*shared, config.get("model", {}).get("rope")])


def _short_hash(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]


def _average_rows(loaded: Loaded, names: _Names) -> tuple[list[Row], list[str]]:
    """Averages over RULER lengths, for each method that ran at more than one."""
    runs: dict[tuple[str, str], dict[int, list[CellResult]]] = defaultdict(lambda: defaultdict(list))
    for cell in loaded.cells:
        if _scores(cell):
            how = canonical_json([cell.identity["method"], cell.identity["execution"]])
            runs[_family(cell), how][_length(cell)].append(cell)
    rows, notes = [], []
    wanted: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for (family, _), by_length in runs.items():
        if len(by_length) > 1:
            wanted[family].add(tuple(sorted(by_length)))
    for (family, _), by_length in runs.items():
        if len(by_length) < 2:
            continue
        if any(len(cells) > 1 for cells in by_length.values()):
            first = next(cells for cells in by_length.values() if len(cells) > 1)
            notes.append(f"no average over lengths: several runs of {first[0].label}")
            continue
        cells = {length: found[0] for length, found in sorted(by_length.items())}
        # Dense is averaged over the lengths of each sparse run too, so that its row can stand beside them.
        own = tuple(cells)
        for lengths in sorted(wanted[family]):
            if lengths == own or (next(iter(cells.values())).is_dense and set(lengths) <= set(own)):
                chosen = {length: cells[length] for length in lengths}
                for metric in SCORES:
                    if all(_scores(cell, metric) for cell in chosen.values()):
                        rows.append(_average(chosen, metric, loaded, names))
    return rows, notes


def _average(cells: Mapping[int, CellResult], metric: str, loaded: Loaded, names: _Names) -> Row:
    first = next(iter(cells.values()))
    weight = 1 / len(cells)
    parts = []
    for cell in cells.values():
        twin = loaded.twins.get(cell.key)
        parts.append((weight, _scores(cell, metric), _scores(twin, metric) if twin is not None else None, cell.twin))
    estimate, difference = _mean_score(parts)
    by_length = {length: budget(cell.records) for length, cell in cells.items()}
    weighted = (*BUDGETS, "B_pooled")
    columns: dict[str, Any] = {
        name: averages.budget_over_lengths({length: found[name] for length, found in by_length.items()})
        for name in weighted
    }
    found = list(by_length.values())
    labels = names.of(first)
    family = _family(first)
    row = _row(
        "average",
        metric,
        estimate,
        difference,
        {
            **labels,
            **columns,
            "task": labels["task"].partition(" #")[0],
            "layer_min": min(part["layer_min"] for part in found),
            "layer_max": max(part["layer_max"] for part in found),
            "fallback_share": averages.weighted_mean([part["fallback_share"] for part in found], [1.0] * len(found)),
            "warnings": sum(part["warnings"] for part in found),
            "reference_share": PERCENT * max(reference_share(cell) for cell in cells.values()),
            "group": _short_hash([family, list(cells)]),
            "family": family,
            "length": f"mean of {', '.join(str(length) for length in cells)}",
            "dense": first.is_dense,
            "key": " ".join(cell.key for cell in cells.values()),
        },
    )
    scores = {length: _mean_score([(1.0, _scores(cell, metric), None, "")])[0].value for length, cell in cells.items()}
    row.value = PERCENT * averages.accuracy_over_lengths(scores)
    return row


# ---------------------------------------------------------------------------------------- LongBench-v2's two modes
def _mode_rows(loaded: Loaded, names: _Names) -> list[Row]:
    """The mean of LongBench-v2 without and with CoT, for runs that differ in nothing else.

    Within a mode every question weighs the same, so easy and hard weigh by their counts.
    """
    runs: dict[str, dict[str, list[CellResult]]] = defaultdict(lambda: defaultdict(list))
    for cell in loaded.cells:
        mode = longbench.mode(cell)
        if mode is not None:
            runs[_beyond_mode(cell)][mode].append(cell)
    rows = []
    for modes in runs.values():
        # The dense run of each pair comes in a group of its own; several runs of one mode cannot be told apart here.
        if sorted(modes) == ["cot", "no_cot"] and all(len(cells) == 1 for cells in modes.values()):
            rows.append(_mode_row(modes["no_cot"][0], modes["cot"][0], loaded, names))
    return rows


def _beyond_mode(cell: CellResult) -> str:
    """What two runs share that differ in LongBench-v2's mode only."""
    identity = cell.identity
    task = {name: value for name, value in identity["task"].items() if name not in ("mode", "length", "truncate_at")}
    generation = task.pop("generation", None) or {}
    model = {name: value for name, value in identity["model"].items() if name not in ("thinking", "rope_factor")}
    questions = [(record["item"]["id"], record["item"]["answer"]) for record in cell.records]
    shared = [model, model_label(cell), task, generation.get("seed"), sorted(questions), longbench.is_small(cell)]
    rest = [identity["method"], identity["execution"], identity["versions"], identity["device"]]
    return _short_hash([*shared, *rest, identity["data"].get("weights")])


def _mode_row(no_cot: CellResult, cot: CellResult, loaded: Loaded, names: _Names) -> Row:
    cells = (no_cot, cot)
    parts = []
    for cell in cells:
        twin = loaded.twins.get(cell.key)
        paired = _by_index(twin.records) if twin is not None else None
        parts.append((0.5, _by_index(cell.records), paired, cell.twin))
    estimate, difference = _mean_score(parts)
    data = ", self-made set" if longbench.is_small(no_cot) else ""
    dense = [loaded.twins.get(cell.key, cell).key for cell in cells]
    columns = {
        **names.of(no_cot),
        **budget([*no_cot.records, *cot.records]),
        "task": f"longbench_v2 (mean of w/o and w/ CoT{data})",
        "length": str(_length(no_cot)),
        "group": _short_hash(dense),
        "family": _short_hash([*dense, "modes"]),
        "dense": no_cot.is_dense,
        "reference_share": PERCENT * max(reference_share(cell) for cell in cells),
        "key": " ".join(cell.key for cell in cells),
    }
    return _row("average", "accuracy", estimate, difference, columns)


# ----------------------------------------------------------------------------------------------------------- order
def _reading_order(row: Row) -> tuple[Any, ...]:
    """Groups together, short lengths first, averages last; within a metric dense first, then by falling budget."""
    length = int(row.length) if row.length.isdigit() else 10**12
    where = (row.model, row.task.split()[0], row.level == "subtask", length, row.length, row.task, row.group)
    return *where, list(METRICS).index(row.metric), row.subtask, not row.dense, -row.B, row.method


def reference_share(cell: CellResult) -> float:
    """Share of a CUDA cell's sparse calls that the torch reference ran although a GPU kernel was asked for.

    ``auto`` asks for one. Zero for cells on a CPU, cells that asked for torch, and records that do not tell.
    """
    asked = cell.config.get("execution", {}).get("backend")
    if asked == "torch" or cell.identity["device"].get("type") != "cuda":
        return 0.0
    calls = _backend_calls(cell)
    return calls["torch"] / calls.total() if calls else 0.0


def _backend_calls(cell: CellResult) -> Counter[str]:
    """Sparse calls by the backend that executed them, over all samples; not the calls of what planned them."""
    calls: Counter[str] = Counter()
    for record in cell.records:
        found = record.get("backends") or {}
        calls.update({name: count for name, count in found.items() if ":" not in name})
    return calls


def _backend_notes(cells: Sequence[CellResult], names: _Names) -> list[str]:
    notes = []
    for cell in cells:
        if not reference_share(cell):
            continue
        label, calls = names.of(cell), _backend_calls(cell)
        where = f"{label['model']}, {label['method']}, {label['task']} at {_length(cell)}"
        asked = cell.config["execution"].get("backend")
        ran = ", ".join(f"{count} by {name}" for name, count in sorted(calls.items()))
        notes.append(f"{REFERENCE_MARK} backend={asked} on CUDA, but not only GPU kernels ran: {where}: {ran}")
    return notes


def _warning_notes(cells: Sequence[CellResult], names: _Names) -> list[str]:
    notes = []
    for cell in cells:
        counts = Counter(text for record in cell.records for text in unique(record.get("warnings") or ()))
        label = names.of(cell)
        for text, count in counts.items():
            where = f"{label['model']}, {label['method']}, {label['task']} at {_length(cell)}"
            notes.append(f"warning in {count} of {len(cell.records)} samples of {where}: {text}")
    return notes
