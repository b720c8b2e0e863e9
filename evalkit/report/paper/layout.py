"""The paper's tables with our numbers beside its own: Tables 1, 2, 3 and B."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..names import unique
from ..stats import LEVEL, Estimate, holm_adjusted, two_sided_p, wilson
from .measured import QUESTIONS, Block, Measure, Measured, Table, over_difficulties, over_lengths
from .published import LONG, METHODS, VARIANTS, Number, Published, fitting_runs

PUBLISHED, MEASURED, DIFFERENCE = "published", "measured", "difference"
DENSE, BASE = "Dense", "Base"
OVERLAP, APART = "~", "!"
"""After a difference: the intervals of both numbers overlap, or not."""
CHANGED = "†"
"""After "measured": settings were changed of the preset that the row was made with."""
HEADERS = {
    "no_cot_easy": "w/o CoT Easy",
    "no_cot_hard": "w/o CoT Hard",
    "cot_easy": "w/ CoT Easy",
    "cot_hard": "w/ CoT Hard",
}
COMPONENTS = {
    "Base": ("x", "", "x", "", ""),
    "+KAP": ("", "x", "x", "", ""),
    "+IKS": ("", "x", "x", "x", ""),
    "+IKS descending": ("", "x", "x", "x", ""),
    "+RMP": ("", "x", "x", "x", "x"),
}
"""Table 3's check marks: binary mask, KAP's mask, mask skip, in-kernel skip, remapping."""


@dataclass
class Cell:
    """One field of a table.

    Attributes:
        text: what it shows.
        value: the number that is ranked; None where it is not.
        rank: 1 for the best of its column, 2 for the second best, 0 for all others.
        mark: shown behind the text.
    """

    text: str = "-"
    value: float | None = None
    rank: int = 0
    mark: str = ""


@dataclass(frozen=True)
class Sheet:
    """One table for reading.

    Attributes:
        number: ``1``, ``2``, ``3`` or ``B``.
        title: heading.
        headers: of the columns.
        rows: fields by row.
        remarks: what to know of it, one line each.
    """

    number: str
    title: str
    headers: list[str]
    rows: list[list[Cell]]
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Pair:
    """A printed number beside ours.

    Attributes:
        table, model, data, method, column: where it stands.
        published, measured: the two; either may be missing.
        questions: number of questions behind the printed one; None where it is not known.
        to_dense: paired difference of ours to our dense run, points.
        to_base: paired difference of ours to our "Base", points.
        published_runs: fewest runs that the printed row fits; None where none does or the table does not tell.
    """

    table: str
    model: str
    data: str
    method: str
    column: str
    published: Number | None
    measured: Measure | None
    questions: int | None = None
    to_dense: Estimate | None = None
    to_base: Estimate | None = None
    published_runs: int | None = None

    @property
    def difference(self) -> float | None:
        """Measured minus published accuracy, points."""
        if self.published is None or self.measured is None:
            return None
        return self.measured.estimate.value - self.published.accuracy

    @property
    def budget_difference(self) -> float | None:
        """Measured minus published budget in whole blocks, points."""
        if self.published is None or self.published.budget is None or self.measured is None:
            return None
        return self.measured.B_block - self.published.budget

    @property
    def overlap(self) -> bool | None:
        """Whether the 95 % intervals of both overlap.

        The paper prints none: Wilson's for the number of questions, and for as many samples as ours where that is not
        known.
        """
        if self.published is None or self.measured is None:
            return None
        ours = self.measured.estimate
        if ours.low is None or ours.high is None:
            return None
        low, high = wilson(self.published.accuracy / 100, self.questions or ours.n)
        return 100 * low <= ours.high and ours.low <= 100 * high


Maker = Callable[[Block, str, Table, Published], tuple[list[Sheet], list[Pair]]]


def sheets(measured: Measured, published: Published) -> tuple[list[Sheet], list[Pair]]:
    """All tables that the measured cells have something for, and the pairs behind them."""
    found: list[Sheet] = []
    pairs: list[Pair] = []
    for block, table in sorted(measured.tables.items(), key=lambda item: (item[0].benchmark != "ruler", item[0].title)):
        model = "" if block.data else block.paper
        makers: list[Maker] = [_ruler] if block.benchmark == "ruler" else [_longbench, _ablation]
        for maker in makers:
            made, behind = maker(block, model, table, published)
            found += made
            pairs += behind
    found.sort(key=lambda sheet: "123B".index(sheet.number))
    return found, pairs


# ------------------------------------------------------------------------------------------------- Tables 1 and B
def _ruler(block: Block, model: str, table: Table, published: Published) -> tuple[list[Sheet], list[Pair]]:
    printed = published.ruler.get(model, {})
    ours = {name: table.get(name, {}) for name in METHODS}
    lengths = sorted(
        {int(n) for row in ours.values() for n in row} | {int(n) for n in printed.get(DENSE, {}) if n != "avg"}
    )
    shared = [n for n in lengths if all(n in row for row in ours.values() if row)]
    if not any(ours.values()):
        return [], []
    pairs: dict[str, dict[str, Pair]] = {}
    for name, row in ours.items():
        average = over_lengths(row, shared)
        columns: dict[str, tuple[Number | None, Measure | None]] = {
            str(n): (printed.get(name, {}).get(n), row.get(n)) for n in lengths
        }
        # Over the lengths that were measured, so that printed and measured rows average the same.
        over = shared or [int(n) for n in printed.get(name, {}) if n != "avg"]
        columns["avg"] = (published.ruler_average(model, name, tuple(over)), average)
        dense: dict[str, Measure | None] = {str(n): ours[DENSE].get(n) for n in lengths}
        dense["avg"] = over_lengths(ours[DENSE], shared)
        if row or name in printed:
            pairs[name] = {c: _pair("1/B", block, name, c, *both, dense=dense[c]) for c, both in columns.items()}
    averaged = [f"Avg. is over {', '.join(_length(n) for n in shared)} in all rows."] if shared != lengths else []
    keys = [str(n) for n in lengths]
    narrow = {name: row for name, row in pairs.items() if name != "CoSA-accurate"}
    heads = [*(_length(n) for n in lengths), "Avg."]
    names = dict(zip([*keys, "avg"], heads, strict=True))
    remarks = [*_remarks(narrow), *averaged, *_winners(narrow, names)]
    one = Sheet("1", f"Table 1: RULER, {block.title}", ["Method", "", *heads, "B %"], [], remarks)
    one.rows.extend(_lines(narrow, [*keys, "avg"], budgets=["avg"]))
    remarks = [*_remarks(pairs), *averaged, *_winners(pairs, names)]
    wide = Sheet("B", f"Table B: RULER by length, {block.title}", ["Method", ""], [], remarks)
    for head in heads:
        wide.headers.extend((f"{head} Acc", f"{head} B %"))
    wide.rows.extend(_lines(pairs, [*keys, "avg"], budgets=[*keys, "avg"], interleave=True))
    return [one, wide], [pair for row in pairs.values() for pair in row.values()]


def _length(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


# -------------------------------------------------------------------------------------------------------- Table 2
def _longbench(block: Block, model: str, table: Table, published: Published) -> tuple[list[Sheet], list[Pair]]:
    printed = published.longbench.get(model, {})
    ours = {name: table.get(name, {}) for name in METHODS if name != "CoSA-accurate"}
    if not any(ours.values()):
        return [], []
    pairs: dict[str, dict[str, Pair]] = {}
    averages = {name: over_difficulties(row) for name, row in ours.items()}
    for name, row in ours.items():
        if not row and name not in printed:
            continue
        numbers = printed.get(name, {})
        runs = fitting_runs((numbers[c].accuracy, _questions(c)) for c in LONG) if numbers else None
        pairs[name] = {}
        for column in (*LONG, "avg"):
            mine = averages[name] if column == "avg" else row.get(column)
            base = averages[DENSE] if column == "avg" else ours[DENSE].get(column)
            pair = _pair("2", block, name, column, numbers.get(column), mine, base, _questions(column), runs)
            pairs[name][column] = pair
    remarks = _remarks(pairs)
    by_runs: dict[int | None, list[str]] = {}
    for name, columns in pairs.items():
        if name in printed:
            by_runs.setdefault(columns["avg"].published_runs, []).append(name)
    for runs, names in sorted(by_runs.items(), key=lambda item: -(item[0] or 0)):
        what = "no count of 1, 2 or 4 runs" if runs is None else f"{runs} run{'s' * (runs > 1)}"
        remarks.append(
            f"The printed percentages of {', '.join(names)} fit {what} over 192 easy and 311 hard questions."
        )
    remarks += _winners(pairs, {**HEADERS, "avg": "Avg."})
    sheet = Sheet(
        "2", f"Table 2: LongBench-v2, {block.title}", ["Method", "", *HEADERS.values(), "Avg.", "B %"], [], remarks
    )
    sheet.rows.extend(_lines(pairs, [*LONG, "avg"], budgets=["avg"]))
    return [sheet], [pair for row in pairs.values() for pair in row.values()]


def _questions(column: str) -> int:
    return QUESTIONS.get(column.rpartition("_")[2], sum(QUESTIONS.values()))


# -------------------------------------------------------------------------------------------------------- Table 3
def _ablation(block: Block, model: str, table: Table, published: Published) -> tuple[list[Sheet], list[Pair]]:
    printed = published.ablation.get(model, {})
    columns = ("no_cot_easy", "no_cot_hard")
    ours = {name: over_difficulties(table.get(name, {}), columns) for name in VARIANTS}
    if ours[BASE] is None and all(ours[name] is None for name in ("+KAP", "+IKS", "+IKS descending")):
        return [], []
    dense = over_difficulties(table.get(DENSE, {}), columns)
    pairs: dict[str, dict[str, Pair]] = {}
    for name, mine in ours.items():
        if mine is not None or name in printed:
            number = printed.get(name)
            runs = fitting_runs([(number.accuracy, _questions("avg"))]) if number else None
            pair = _pair("3", block, name, "avg", number, mine, dense, _questions("avg"), runs, base=ours[BASE])
            pairs[name] = {"avg": pair}
    headers = ["Variant", "M01", "MKAP", "MS", "IKS", "RMP", "", "Avg.", "B %"]
    sheet = Sheet("3", f"Table 3: ablation, LongBench-v2 w/o CoT, {block.title}", headers, [], _remarks(pairs))
    base = pairs.get(BASE, {}).get("avg")
    for name, row in pairs.items():
        pair = row["avg"]
        for kind in (PUBLISHED, MEASURED, DIFFERENCE):
            texts = _ablation_texts(kind, pair, base)
            if texts is not None and texts[0].text != "-":
                first = [name, *COMPONENTS[name]] if not _same(sheet, name) else [""] * 6
                sheet.rows.append([*(Cell(text) for text in first), _kind(kind, [pair]), *texts])
    _rank(sheet.rows, kind_at=6, columns={7: True, 8: False})
    sheet.remarks.extend([*_gain_of_remapping(ours), *_winners(pairs, {"avg": "Avg."})])
    return [sheet], [pair for row in pairs.values() for pair in row.values()]


def _same(sheet: Sheet, name: str) -> bool:
    return any(row[0].text == name for row in sheet.rows)


def _ablation_texts(kind: str, pair: Pair, base: Pair | None) -> tuple[Cell, Cell] | None:
    if kind == DIFFERENCE:
        return _difference(pair)
    if kind == PUBLISHED:
        if pair.published is None or pair.published.budget is None:
            return None
        accuracy, spent = pair.published.accuracy, pair.published.budget
        other = None if base is None or base.published is None else base.published
        against = None if other is None or other.budget is None else (accuracy - other.accuracy, spent - other.budget)
    else:
        if pair.measured is None:
            return None
        accuracy, spent = pair.measured.estimate.value, pair.measured.B_block
        mine = None if base is None or pair.to_base is None else base.measured  # of other settings: no difference
        against = None if mine is None else (accuracy - mine.estimate.value, spent - mine.B_block)
    shown = against is not None and pair.method != BASE
    digits = 0 if kind == PUBLISHED else 1
    tails = (f" ({against[0]:+.2f})", f" ({against[1]:+.{digits}f})") if shown and against is not None else ("", "")
    return (
        Cell(f"{accuracy:.2f}{tails[0]}", round(accuracy, 2)),
        Cell(f"{spent:.{digits}f}{tails[1]}", round(spent, digits)),
    )


def _gain_of_remapping(ours: Mapping[str, Measure | None]) -> list[str]:
    remapped = ours["+RMP"]
    fixed = {name: found for name in ("+IKS", "+IKS descending") if (found := ours[name]) is not None}
    if remapped is None or not fixed:
        return []
    better = max(fixed, key=lambda name: (fixed[name].estimate.value, -fixed[name].B_block))
    gain = remapped.minus(fixed[better])
    if gain is None:
        why = remapped.unlike(fixed[better])
        return [f"No gain of remapping is quoted: {better}, the better fixed order, has {why}."]
    spent = remapped.B_block - fixed[better].B_block
    both = "" if len(fixed) == 2 else ", the only fixed order measured"
    return [f"Measured gain of remapping against {better}{both}: {signed(gain)} points, budget {spent:+.1f} points."]


# --------------------------------------------------------------------------------------------------------- shared
def _pair(
    table: str,
    block: Block,
    method: str,
    column: str,
    number: Number | None,
    mine: Measure | None,
    dense: Measure | None = None,
    questions: int | None = None,
    runs: int | None = None,
    base: Measure | None = None,
) -> Pair:
    to_dense = mine.minus(dense) if mine is not None and dense is not None and method != DENSE else None
    to_base = mine.minus(base) if mine is not None and base is not None and method != BASE else None
    return Pair(table, block.model, block.data, method, column, number, mine, questions, to_dense, to_base, runs)


def _lines(
    pairs: Mapping[str, Mapping[str, Pair]], columns: Sequence[str], budgets: Sequence[str], *, interleave: bool = False
) -> list[list[Cell]]:
    """Three rows a method: published, measured and their difference; best and second best of each column marked."""
    rows: list[list[Cell]] = []
    higher: dict[int, bool] = {}
    for name, row in pairs.items():
        first = name
        for kind in (PUBLISHED, MEASURED, DIFFERENCE):
            accuracies = {column: _accuracy(kind, row[column]) for column in columns}
            spent = {column: _budget(kind, row[column]) for column in budgets}
            if all(cell.text == "-" for cell in accuracies.values()):
                continue
            order = [(accuracies[c], True) for c in columns] + [(spent[c], False) for c in budgets]
            if interleave:
                order = [both for c in columns for both in ((accuracies[c], True), (spent[c], False))]
            higher = {i + 2: up for i, (_, up) in enumerate(order)}
            rows.append([Cell(first), _kind(kind, row.values()), *(cell for cell, _ in order)])
            first = ""
    _rank(rows, kind_at=1, columns=higher)
    return rows


def _kind(kind: str, pairs: Iterable[Pair]) -> Cell:
    changed = kind == MEASURED and any(pair.measured is not None and pair.measured.differs for pair in pairs)
    return Cell(kind, mark=CHANGED if changed else "")


def _accuracy(kind: str, pair: Pair) -> Cell:
    if kind == PUBLISHED:
        return Cell() if pair.published is None else Cell(f"{pair.published.accuracy:.2f}", pair.published.accuracy)
    if kind == MEASURED:
        if pair.measured is None:
            return Cell()
        value = pair.measured.estimate.value
        return Cell(f"{value:.2f}", round(value, 2))
    return _difference(pair)[0]


def _budget(kind: str, pair: Pair) -> Cell:
    if kind == PUBLISHED:
        budget = None if pair.published is None else pair.published.budget
        return Cell() if budget is None else Cell(f"{budget:.0f}", budget)
    if kind == MEASURED:
        return (
            Cell() if pair.measured is None else Cell(f"{pair.measured.B_block:.1f}", round(pair.measured.B_block, 1))
        )
    return _difference(pair)[1]


def _difference(pair: Pair) -> tuple[Cell, Cell]:
    accuracy, spent = pair.difference, pair.budget_difference
    mark = {True: f" {OVERLAP}", False: f" {APART}", None: ""}[pair.overlap]
    return (
        Cell() if accuracy is None else Cell(f"{accuracy:+.2f}{mark}"),
        Cell() if spent is None else Cell(f"{spent:+.1f}"),
    )


def _rank(rows: Sequence[Sequence[Cell]], kind_at: int, columns: Mapping[int, bool]) -> None:
    """Mark the best and second best of each column, among published and among measured rows, dense aside."""
    method = ""
    groups: dict[str, list[Sequence[Cell]]] = {PUBLISHED: [], MEASURED: []}
    for row in rows:
        method = row[0].text or method
        kind = row[kind_at].text
        if method != DENSE and kind in groups:
            groups[kind].append(row)
    for members in groups.values():
        for column, higher in columns.items():
            values = sorted({row[column].value for row in members if row[column].value is not None}, reverse=higher)  # type: ignore[type-var]
            if len(members) < 2:
                continue
            for row in members:
                value = row[column].value
                row[column].rank = values.index(value) + 1 if value is not None and value in values[:2] else 0


def _winners(pairs: Mapping[str, Mapping[str, Pair]], columns: Mapping[str, str]) -> list[str]:
    """Which measured bests are shown to be best: paired tests against every other method, Holm over the whole table.

    Args:
        pairs: by method and column.
        columns: headings by column.
    """
    found: dict[str, tuple[str, list[str]]] = {}
    p_values: dict[tuple[str, str], float] = {}
    for column, heading in columns.items():
        mine = {name: row[column].measured for name, row in pairs.items() if name != DENSE and column in row}
        ours = {name: measure for name, measure in mine.items() if measure is not None}
        if len(ours) < 2:
            continue
        best = max(ours, key=lambda name: ours[name].estimate.value)
        tested = []
        for name, measure in ours.items():
            difference = None if name == best else ours[best].minus(measure)
            if difference is not None:
                p_values[heading, name] = two_sided_p(difference)
                tested.append(name)
        if tested:
            found[heading] = (best, tested)
    if not p_values:
        return []
    corrected = dict(zip(p_values, holm_adjusted(list(p_values.values())), strict=True))
    said = []
    for heading, (best, tested) in found.items():
        beaten = [name for name in tested if corrected[heading, name] <= 1 - LEVEL]
        level = [name for name in tested if name not in beaten]
        parts = [f"better than {', '.join(beaten)}"] if beaten else []
        parts += [f"not shown to be better than {', '.join(level)}"] if level else []
        said.append(f"{heading}: {best} {' and '.join(parts)}")
    counted = f"{len(p_values)} comparison{'s' * (len(p_values) != 1)}"
    return [f"Best measured, paired tests at 95 % corrected for {counted} (Holm). {'; '.join(said)}."]


def _remarks(pairs: Mapping[str, Mapping[str, Pair]]) -> list[str]:
    """How the measured rows differ from what the paper ran."""
    found = []
    for name, row in pairs.items():
        own = [pair.measured for pair in row.values() if pair.measured is not None]
        notes = unique(note for part in own for note in part.notes)
        if own:
            what = ", ".join(sorted({f"{part.decoding}, {part.runs} run{'s' * (part.runs > 1)}" for part in own}))
            found.append(f"{name}: {what}{'; ' if notes else ''}{', '.join(notes)}.")
    return found + _unpaired(pairs)


def _unpaired(pairs: Mapping[str, Mapping[str, Pair]]) -> list[str]:
    """Where a measured number has no paired difference to the measured dense one, or to Base, and why."""
    columns: dict[tuple[str, str, str], list[str]] = {}
    for name, row in pairs.items():
        for column, pair in row.items():
            for reference, difference in ((DENSE, pair.to_dense), (BASE, pair.to_base)):
                other = pairs[reference][column].measured if column in pairs.get(reference, {}) else None
                if pair.measured is not None and other is not None and difference is None and name != reference:
                    why = pair.measured.unlike(other)
                    columns.setdefault((name, reference, why), []).append(HEADERS.get(column, column))
    return [
        f"{name}: no paired difference to {reference} at {', '.join(found)}, which has {why}."
        for (name, reference, why), found in columns.items()
    ]


def signed(estimate: Estimate | None) -> str:
    """A paired difference with its interval, or a dash."""
    if estimate is None:
        return "-"
    interval = "" if estimate.low is None else f" [{estimate.low:+.2f}, {estimate.high:+.2f}]"
    return f"{estimate.value:+.2f}{interval}"
