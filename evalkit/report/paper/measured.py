"""Finished cells as the numbers of the paper's tables: runs of several seeds as one, lengths and modes averaged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...store import TWIN_FREE, CellResult, canonical_json
from .. import averages, longbench, stats
from ..names import model_label, unique
from ..rows import PERCENT, budget
from ..stats import Estimate
from .published import LONG, METHODS, MODELS, VARIANTS
from .rows import ROWS, Standing, Variant, choose, standing, variant, why_not

NOWHERE = "in no table of the paper"
RULER_TASKS = 13
LONGBENCH_PRESET = {"length": 131072, "truncate_at": 120000}
"""Settings of Table 2's presets (conf/task/longbench-v2.yaml) that decide which text a model sees."""
QUESTIONS = averages.LONGBENCH_V2_COUNTS
Scores = dict[tuple[str, int], float]
"""Mean score over runs by (subtask or difficulty, index)."""


@dataclass(frozen=True)
class Block:
    """What one table is made for.

    Attributes:
        benchmark: ``ruler`` or ``longbench_v2``.
        model: name of the model.
        data: what was read where it is not the benchmark's own, else empty.
    """

    benchmark: str
    model: str
    data: str = ""

    @property
    def paper(self) -> str:
        """The paper's name of the model; empty for a model that it has not."""
        return MODELS.get(self.model, "")

    @property
    def title(self) -> str:
        """For headings."""
        return f"{self.model}, {self.data}" if self.data else self.model


@dataclass(frozen=True)
class Measure:
    """One number of a table.

    Attributes:
        scores: behind it, by (stratum, index).
        weights: of the strata; they add up to 1.
        records: behind it, of all runs.
        B_block, B: in percent; over lengths weighted by length.
        runs: seeds that were averaged.
        decoding: ``greedy`` or ``sampled``.
        notes: how it differs from the printed setting.
        differs: of them, what was changed of the preset that the row was made with.
        setting: all that a cell shares with its dense twin but the seed of its sampling, by dotted name.
    """

    scores: Scores
    weights: Mapping[str, float]
    records: Sequence[Mapping[str, Any]] = field(repr=False)
    B_block: float
    B: float
    runs: int
    decoding: str = "greedy"
    notes: tuple[str, ...] = ()
    setting: Mapping[str, str] = field(default_factory=dict, repr=False)
    differs: tuple[str, ...] = ()

    @cached_property
    def estimate(self) -> Estimate:
        """Accuracy in percent with its interval."""
        return stats.mean_score(self._strata()).times(PERCENT)

    def minus(self, base: Measure) -> Estimate | None:
        """Paired difference in points; None where the two do not differ in the method alone."""
        if self.unlike(base):
            return None
        strata = [
            (weight, [self.scores[key] - base.scores[key] for key in keys]) for weight, keys in self._keys() if keys
        ]
        return stats.score_difference(strata).times(PERCENT)

    def unlike(self, base: Measure) -> str:
        """What forbids pairing: settings that differ (method aside), or other samples; empty where nothing does."""
        names = sorted({*self.setting, *base.setting})
        differing = [name.partition("@")[0] for name in names if self.setting.get(name) != base.setting.get(name)]
        other = unique(".".join(name.split(".")[:3]) for name in differing)
        if other:
            return f"other {', '.join(other)}"
        same = self.scores.keys() == base.scores.keys() and self.weights == base.weights
        return "" if same else "other samples"

    def _keys(self) -> list[tuple[float, list[tuple[str, int]]]]:
        return [(weight, sorted(key for key in self.scores if key[0] == name)) for name, weight in self.weights.items()]

    def _strata(self) -> list[tuple[float, list[float]]]:
        return [(weight, [self.scores[key] for key in keys]) for weight, keys in self._keys()]


Column = int | str
"""Length of RULER, or mode of LongBench-v2."""
Place = tuple[Block, Variant, Column]
Table = dict[str, dict[Column, Measure]]
"""Measures by row of the paper and column."""


@dataclass(frozen=True)
class Measured:
    """Everything that finished cells say about the paper's tables.

    Attributes:
        tables: by block.
        notes: cells that are in no table, one line each.
    """

    tables: dict[Block, Table]
    notes: list[str]


def measure(cells: Iterable[CellResult]) -> Measured:
    """Sort finished cells into tables.

    A row shows one preset with one set of knobs, see :func:`.rows.choose`. Cells that differ only in the seed of their
    sampling are runs of one number. Of several candidates that are left for one place the one is taken whose settings
    most methods of the column share, then most of the block, then the one with the most samples: a sparse number stands
    beside the dense one of its own settings. The others are noted.
    """
    blocks: dict[Block, dict[Variant, dict[Column, list[CellResult]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    notes: list[str] = []
    for cell in cells:
        where = place_of(cell)
        if where is None:
            notes.append(f"{NOWHERE}: {cell.label}")
        else:
            blocks[where[0]][variant(cell)][where[1]].append(cell)
    shown: dict[Block, dict[str, Variant]] = {}
    places: dict[Place, dict[str, list[CellResult]]] = defaultdict(lambda: defaultdict(list))
    for block, variants in blocks.items():
        shown[block] = _chosen(block, variants)
        for found, columns in variants.items():
            for column, own in columns.items():
                rows = rows_of(block, column)
                if any(shown[block].get(row) == found for row in rows):
                    for cell in own:
                        places[block, found, column][_settings(cell)].append(cell)
                else:
                    why = why_not(found, shown[block], rows, block.paper)
                    notes += [f"{NOWHERE}: {cell.label} ({why})" for cell in own]
    rank = _ranking(places)
    tables: dict[Block, Table] = defaultdict(lambda: defaultdict(dict))
    for place, candidates in places.items():
        block, found, column = place
        best, *others = sorted(candidates.values(), key=lambda runs: rank(place, runs))
        notes += [f"another run of the same place is shown: {runs[0].label}" for runs in others]
        for row in rows_of(block, column):
            if shown[block].get(row) == found:
                tables[block][row] |= _measures(column, best, standing(row, found, block.paper))
    return Measured({block: dict(table) for block, table in tables.items()}, unique(notes))


def rows_of(block: Block, column: Column) -> tuple[str, ...]:
    """The paper's rows that have a column."""
    if block.benchmark == "ruler":
        return tuple(METHODS)
    both = tuple(name for name in METHODS if name != "CoSA-accurate")
    return (*both, *VARIANTS) if column == "no_cot" else both


def _chosen(block: Block, variants: Mapping[Variant, Iterable[Column]]) -> dict[str, Variant]:
    """What each row of a block shows."""
    found = {}
    for row in ROWS:
        columns = {one: [column for column in own if row in rows_of(block, column)] for one, own in variants.items()}
        chosen = choose(row, {one: own for one, own in columns.items() if own}, block.paper)
        if chosen is not None:
            found[row] = chosen
    return found


def _measures(column: Column, runs: Sequence[CellResult], stands: Standing) -> dict[Column, Measure]:
    """The numbers of a row that some runs have, by column of the table."""
    if column in ("no_cot", "cot"):
        return {f"{column}_{name}": found for name, found in _difficulties(runs, stands).items()}
    return {column: _measure(runs, _by_subtask(runs), stands, _ruler_notes(runs))}


def _ranking(
    places: Mapping[Place, Mapping[str, list[CellResult]]],
) -> Callable[[Place, list[CellResult]], tuple[Any, ...]]:
    """Order in which the candidates of a place are taken, the same for all methods of a column."""
    methods: dict[tuple[Block, Column, str], set[Variant]] = defaultdict(set)
    covered: dict[tuple[Block, str], set[tuple[Variant, Column]]] = defaultdict(set)
    samples: dict[tuple[Block, str], int] = defaultdict(int)
    for (block, method, column), variants in places.items():
        for runs in variants.values():
            family = _family(runs[0])
            methods[block, column, _twin_settings(runs[0])].add(method)
            covered[block, family].add((method, column))
            samples[block, family] += sum(len(cell.records) for cell in runs)

    def rank(place: Place, runs: list[CellResult]) -> tuple[Any, ...]:
        block, _, column = place
        twin, family = _twin_settings(runs[0]), _family(runs[0])
        return (
            -len(methods[block, column, twin]),
            -len(covered[block, family]),
            -samples[block, family],
            family,
            -len(runs[0].records),
            twin,
            -len(runs),
            runs[0].key,
        )

    return rank


def place_of(cell: CellResult) -> tuple[Block, Column] | None:
    """Block and column that a cell has a number for; None for a cell that no table has a column for."""
    task = cell.config.get("task", {})
    if task.get("name") == "ruler":
        return Block("ruler", model_label(cell)), int(task["length"])
    if task.get("name") != "longbench_v2" or task.get("mode") not in ("direct", "cot"):
        return None
    data = longbench.other_data(cell)
    reasons = task["mode"] == "cot" or bool(cell.config.get("model", {}).get("thinking"))
    return Block("longbench_v2", model_label(cell), data), "cot" if reasons else "no_cot"


def _settings(cell: CellResult) -> str:
    """Everything of a cell's identity but the seed of its sampling."""
    return canonical_json(_without_seed(cell))


def _twin_settings(cell: CellResult) -> str:
    """:func:`_settings` that a dense twin shares."""
    return canonical_json({name: part for name, part in _without_seed(cell).items() if name not in TWIN_FREE})


def _family(cell: CellResult) -> str:
    """:func:`_twin_settings` without what the columns of a block differ in, and without the number of samples."""
    identity = {name: dict(part) for name, part in _without_seed(cell).items() if name not in TWIN_FREE}
    for name in ("rope_factor", "thinking"):
        identity["model"].pop(name, None)
    for name in ("length", "mode", "limit", "precision"):
        identity["task"].pop(name, None)
    identity["task"]["generation"] = _decoding_of(cell)
    identity.get("data", {}).pop("samples", None)
    return canonical_json(identity)


def _without_seed(cell: CellResult) -> dict[str, dict[str, Any]]:
    identity = {name: dict(part) for name, part in cell.identity.items()}
    generation = identity["task"].get("generation")
    if isinstance(generation, Mapping):
        identity["task"]["generation"] = {name: value for name, value in generation.items() if name != "seed"}
    return identity


def _shared_setting(cell: CellResult) -> dict[str, str]:
    """:attr:`Measure.setting` of a cell."""
    shared = {name: part for name, part in _without_seed(cell).items() if name not in TWIN_FREE}
    return dict(_leaves(shared))


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _leaves(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, str(node)


def _decoding_of(cell: CellResult) -> str:
    generation = cell.config.get("task", {}).get("generation") or {}
    return "greedy" if generation.get("sampling", "greedy") == "greedy" else "sampled"


def _measure(
    runs: Sequence[CellResult], groups: Mapping[str, list[dict[str, Any]]], stands: Standing, more: Iterable[str]
) -> Measure:
    """One number over equally weighted groups of records."""
    weights = dict.fromkeys(groups, 1 / len(groups))
    records = [record for group in groups.values() for record in group]
    spent = budget(records)
    scores, decoding, shared = _mean_over_runs(groups), _decoding_of(runs[0]), _shared_setting(runs[0])
    notes, differs = (*stands.named, *stands.differs, *more), stands.differs
    return Measure(scores, weights, records, spent["B_block"], spent["B"], len(runs), decoding, notes, shared, differs)


def _mean_over_runs(groups: Mapping[str, Iterable[Mapping[str, Any]]]) -> Scores:
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for name, records in groups.items():
        for record in records:
            found[name, int(record["index"])].append(float(record["metrics"]["score"]))
    return {key: sum(values) / len(values) for key, values in found.items()}


def _by_subtask(runs: Sequence[CellResult]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for cell in runs:
        for record in cell.records:
            groups[record["task"]].append(record)
    return dict(groups)


def _difficulties(runs: Sequence[CellResult], stands: Standing) -> dict[str, Measure]:
    """Measures of one mode by difficulty."""
    found = {}
    for name, whole in QUESTIONS.items():
        records = [record for cell in runs for record in cell.records if record["item"]["difficulty"] == name]
        if records:
            count = len({record["index"] for record in records})
            notes = [
                *_other_text(runs[0]),
                *([] if count == whole else [f"{count} of {whole} {name} questions"]),
            ]
            found[name] = _measure(runs, {name: records}, stands, notes)
    return found


def _other_text(cell: CellResult) -> list[str]:
    """Settings by which a LongBench-v2 cell sees other text than Table 2's presets."""
    task = cell.config["task"]
    return [
        f"task.{name}={task[name]} (the paper's preset: {usual})"
        for name, usual in LONGBENCH_PRESET.items()
        if task.get(name, usual) != usual
    ]


def _ruler_notes(runs: Sequence[CellResult]) -> list[str]:
    tasks = len({record["task"] for record in runs[0].records})
    return [] if tasks == RULER_TASKS else [f"{tasks} of {RULER_TASKS} tasks"]


# --------------------------------------------------------------------------------------------------------- averages
def over_lengths(row: Mapping[int | str, Measure], lengths: Sequence[int]) -> Measure | None:
    """RULER's average: lengths weigh the same in accuracy, and by their tokens in budget."""
    if not lengths or not all(length in row for length in lengths):
        return None
    parts = {length: row[length] for length in lengths}
    scores = {(f"{name}@{n}", index): v for n, part in parts.items() for (name, index), v in part.scores.items()}
    weights = {f"{name}@{n}": w / len(parts) for n, part in parts.items() for name, w in part.weights.items()}
    return Measure(
        scores,
        weights,
        [record for part in parts.values() for record in part.records],
        averages.budget_over_lengths({length: part.B_block for length, part in parts.items()}),
        averages.budget_over_lengths({length: part.B for length, part in parts.items()}),
        min(part.runs for part in parts.values()),
        _decoding(parts.values()),
        tuple(unique(note for part in parts.values() for note in part.notes)),
        _settings_of(parts),
        tuple(unique(note for part in parts.values() for note in part.differs)),
    )


def over_difficulties(row: Mapping[int | str, Measure], columns: Sequence[str] = LONG) -> Measure | None:
    """LongBench-v2's average: in a mode, easy and hard by their numbers of questions; then the modes weigh the same."""
    if not all(column in row for column in columns):
        return None
    modes = unique(column.rpartition("_")[0] for column in columns)
    scores: Scores = {}
    weights: dict[str, float] = {}
    for mode in modes:
        parts = {column: row[column] for column in columns if column.startswith(f"{mode}_")}
        total = sum(len(part.scores) for part in parts.values())
        for column, part in parts.items():
            scores |= {(column, index): value for (_, index), value in part.scores.items()}
            weights[column] = len(part.scores) / total / len(modes)
    parts = {column: row[column] for column in columns}
    records = [record for part in parts.values() for record in part.records]
    spent = budget(records)
    notes = tuple(unique(note for part in parts.values() for note in part.notes))
    differs = tuple(unique(note for part in parts.values() for note in part.differs))
    runs = min(part.runs for part in parts.values())
    decoding = _decoding(parts.values())
    shared = _settings_of(parts)
    return Measure(scores, weights, records, spent["B_block"], spent["B"], runs, decoding, notes, shared, differs)


def _settings_of(parts: Mapping[Any, Measure]) -> dict[str, str]:
    return {f"{name}@{column}": value for column, part in parts.items() for name, value in part.setting.items()}


def _decoding(parts: Iterable[Measure]) -> str:
    return " and ".join(sorted({part.decoding for part in parts}))
