"""Our cells beside the paper's numbers: what stands where, averages, marks, intervals, and what must not be mixed."""

from __future__ import annotations

import csv
import io
import re
import shutil
from pathlib import Path

import pytest
import synthetic

from evalkit import cli
from evalkit.errors import EvalkitError, InputError
from evalkit.report import below, stats
from evalkit.report.load import load
from evalkit.report.paper import write_paper
from evalkit.report.paper.layout import sheets
from evalkit.report.paper.measured import Block, measure
from evalkit.report.paper.published import LONG, fitting_runs, read

PAPER = Path(__file__).parents[2] / "results" / "paper"
SKIP = {"cosa-base": 3.0, "cosa-kap": 4.0, "cosa-iks": 5.0, "cosa-iks-descending": 6.0, "cosa-qwen3-8b": 7.0}
"""Something that makes the identities of made-up presets differ."""


@pytest.fixture
def published():
    return read(PAPER)


class Cells:
    def __init__(self, out: Path) -> None:
        self.out = out

    def ruler(self, preset, scores, length=4096, *, share=0.3, model="qwen3-8b", extra=(), seed=None, p=0.95):
        kind = "dense" if preset == "dense" else preset.partition("-")[0]
        limit = len(next(iter(scores.values())))
        knobs = {} if kind == "dense" else {"skip_scale": SKIP.get(preset, 8.0)}
        made = synthetic.config(
            kind, task="ruler", length=length, limit=limit, tasks=tuple(scores), model=model, p=p, **knobs
        )
        if seed is not None:
            made["task"]["generation"] = {"sampling": "recommended", "seed": seed}
        records = synthetic.ruler_records(scores, length=length, share=1.0 if kind == "dense" else share)
        given = (f"model={model}", f"method={preset}", "task=ruler", *extra)
        synthetic.write_cell(self.out, made, records, given_overrides=given)

    def longbench(
        self,
        preset,
        easy,
        hard,
        *,
        share=0.3,
        mode="direct",
        thinking=False,
        seed=0,
        data="zai-org/LongBench-v2",
        small=False,
        truncate_at=120000,
        ids="q{}",
    ):
        kind = "dense" if preset == "dense" else preset.partition("-")[0]
        knobs = {} if kind == "dense" else {"skip_scale": SKIP.get(preset, 8.0)}
        made = synthetic.config(kind, task="ruler", length=131072, model="qwen3-8b", **knobs)
        made["model"]["thinking"] = thinking
        made["task"] = {"name": "longbench_v2", "mode": mode, "data": data, "length": 131072}
        made["task"]["truncate_at"] = truncate_at
        made["task"]["generation"] = {"sampling": "recommended", "seed": seed}
        records = []
        for difficulty, scores in (("easy", easy), ("hard", hard)):
            for score in scores:
                record, frame = synthetic.record(
                    f"longbench_v2_{'small_' if small else ''}{mode}",
                    131072,
                    len(records),
                    {"score": float(score)},
                    share=1.0 if kind == "dense" else share,
                    tokens=1024,
                )
                record["item"] = {"difficulty": difficulty, "length": "short", "id": ids.format(len(records))}
                records.append((record, frame))
        given = ("model=qwen3-8b", f"method={preset}", "task=longbench-v2")
        synthetic.write_cell(self.out, made, iter(records), given_overrides=given)

    def tables(self, published):
        return sheets(measure(load([self.out]).cells), published)


@pytest.fixture
def cells(tmp_path):
    return Cells(tmp_path / "runs")


def pair(pairs, **wanted):
    (found,) = [p for p in pairs if all(getattr(p, name) == value for name, value in wanted.items())]
    return found


def sheet(found, number):
    (one,) = [item for item in found if item.number == number]
    return one


def lines(one):
    """Rows as (method, kind, texts), the method repeated where the table leaves it out."""
    name, found = "", []
    width = 6 if one.number == "3" else 1
    for row in one.rows:
        name = row[0].text or name
        found.append((name, row[width].text, row[width + 1 :]))
    return found


# --------------------------------------------------------------------------------------------------------- published
def test_printed_averages_follow_the_rules_and_subsets_are_averaged_alike(published):
    lengths = tuple(4096 * 2**i for i in range(6))
    assert published.ruler_average("Qwen3-8B", "CoSA", lengths).accuracy == 88.65
    some = published.ruler_average("Qwen3-8B", "CoSA", (4096, 8192))
    assert some.accuracy == pytest.approx((95.25 + 94.25) / 2) and some.budget == pytest.approx((36 + 2 * 35) / 3)
    assert published.ruler_average("Qwen3-8B", "CoSA", (2048, 4096)) is None
    assert published.ruler_average("smollm2", "CoSA", lengths) is None


def test_runs_that_printed_percentages_fit(published):
    """Dense and CoSA of Table 2 are means of four runs; the baselines are one run."""
    for rows in published.longbench.values():
        for name, columns in rows.items():
            pairs = [(columns[c].accuracy, 192 if "easy" in c else 311) for c in LONG]
            assert fitting_runs(pairs) == (4 if name in ("Dense", "CoSA") else 1), name
    assert (
        fitting_runs([(50.0, 192)]) == 1 and fitting_runs([(50.13, 192)]) == 4 and fitting_runs([(50.05, 192)]) is None
    )


def test_the_numbers_are_found_from_anywhere(tmp_path, cells, monkeypatch, console):
    cells.ruler("dense", {"vt": [1.0, 0.0]})
    monkeypatch.chdir(tmp_path)
    assert write_paper([cells.out], console=console)
    monkeypatch.setattr("evalkit.report.paper.published.CHECKOUT", tmp_path / "none")
    with pytest.raises(InputError, match="--published names their folder"):
        write_paper([cells.out], console=console)


def test_unreadable_numbers_are_one_line(tmp_path, cells):
    with pytest.raises(InputError, match="No such file") as stop:
        read(tmp_path)
    assert stop.value.field == "published"
    shutil.copytree(PAPER, tmp_path / "paper")
    file = tmp_path / "paper" / "ruler.csv"
    file.write_text(file.read_text().replace("95.46", "n/a", 1))
    with pytest.raises(InputError, match=r"ruler\.csv:2.*accuracy_pct must be a number, not 'n/a'"):
        read(tmp_path / "paper")
    file.write_text("model,method\n")
    with pytest.raises(InputError, match="length_tokens"):
        read(tmp_path / "paper")


# ------------------------------------------------------------------------------------------------------ Tables 1 and B
TASKS = {f"task{i}": [1.0, 1.0, 0.0, 1.0] for i in range(13)}


def ruler(cells):
    for length in (4096, 8192):
        cells.ruler("dense", TASKS, length)
        cells.ruler("cosa-qwen3-8b", {**TASKS, "task0": [0.0] * 4}, length, share=0.25)
        cells.ruler("xattention", {**TASKS, "task0": [0.0] * 4, "task1": [0.0] * 4}, length, share=0.5)


def test_table_1(cells, published):
    ruler(cells)
    found, pairs = cells.tables(published)
    one = sheet(found, "1")
    assert one.headers == ["Method", "", "4K", "8K", "16K", "32K", "64K", "128K", "Avg.", "B %"]
    rows = {(name, kind): [cell.text for cell in row] for name, kind, row in lines(one)}
    assert rows["Dense", "published"][:2] == ["95.46", "94.20"] and rows["Dense", "published"][-1] == "100"
    value = 100 * 0.75 * 12 / 13
    mine = pair(pairs, method="CoSA", column="4096")
    assert mine.measured.estimate.value == pytest.approx(value)
    assert rows["CoSA", "measured"][:3] == [f"{value:.2f}"] * 2 + ["-"]
    assert rows["CoSA", "difference"][0] == f"{value - 95.25:+.2f} !"
    assert mine.to_dense.value == pytest.approx(-75 / 13) and mine.to_dense.low < -75 / 13 < mine.to_dense.high
    average = pair(pairs, method="CoSA", column="avg")
    assert average.published.accuracy == pytest.approx((95.25 + 94.25) / 2)  # over what was measured
    assert "Avg. is over 4K, 8K in all rows." in one.remarks
    assert average.budget_difference == pytest.approx(average.measured.B_block - (36 + 2 * 35) / 3)
    assert average.measured.B_block == pytest.approx(
        (
            pair(pairs, method="CoSA", column="4096").measured.B_block
            + 2 * pair(pairs, method="CoSA", column="8192").measured.B_block
        )
        / 3
    )
    assert ("MInf", "published") in rows and ("MInf", "measured") not in rows
    assert "CoSA-accurate" not in {name for name, _ in rows}
    assert "CoSA-accurate" in {name for name, _, _ in lines(sheet(found, "B"))}


def test_best_and_second_best_are_marked_among_sparse_rows_printed_and_measured_apart(cells, published):
    ruler(cells)
    found, _ = cells.tables(published)
    ranks = {(name, kind): [cell.rank for cell in row] for name, kind, row in lines(sheet(found, "1"))}
    assert [ranks[name, "published"][0] for name in ("Dense", "MInf", "Flex", "XAttn", "CoSA")] == [0, 0, 2, 0, 1]
    assert [ranks[name, "measured"][0] for name in ("Dense", "XAttn", "CoSA")] == [0, 2, 1]
    assert [ranks[name, "measured"][-1] for name in ("Dense", "XAttn", "CoSA")] == [0, 2, 1]  # the smaller budget
    assert ranks["CoSA", "measured"][2] == 0 and set(ranks["CoSA", "difference"]) == {0}
    wide = {(name, kind): row for name, kind, row in lines(sheet(found, "B"))}
    assert [cell.rank for cell in wide["CoSA", "published"][:2]] == [2, 1]  # behind CoSA-accurate's 95.46, at 36 %
    assert (
        wide["CoSA", "measured"][1].text
        == f"{pair(cells.tables(published)[1], method='CoSA', column='4096').measured.B_block:.1f}"
    )


def test_overlap_compares_both_intervals(cells, published):
    cells.ruler("dense", {name: [1.0] * 4 for name in TASKS})
    cells.ruler("cosa-qwen3-8b", {**{name: [1.0] * 4 for name in TASKS}, "task0": [0.0, 0.0, 1.0, 0.0]})
    found, pairs = cells.tables(published)
    mine = pair(pairs, method="CoSA", column="4096")
    ours, printed = mine.measured.estimate, stats.wilson(0.9525, 52)
    assert mine.overlap and ours.low < 100 * printed[1] and 100 * printed[0] < ours.high
    texts = {(name, kind): row[0].text for name, kind, row in lines(sheet(found, "1"))}
    assert texts["CoSA", "difference"].endswith(" ~")


def test_what_differs_from_the_papers_setting_is_said(cells, published):
    cells.ruler("dense", {"vt": [1.0, 0.0]})
    cells.ruler("cosa-qwen3-8b", {"vt": [1.0, 0.0]}, extra=("method.select.p=0.9",))
    found, pairs = cells.tables(published)
    assert pair(pairs, method="CoSA", column="4096").measured.notes == ("method.select.p=0.9", "1 of 13 tasks")
    assert "CoSA: greedy, 1 run; method.select.p=0.9, 1 of 13 tasks." in sheet(found, "1").remarks


def test_the_preset_at_its_own_values_stands_before_one_with_changed_settings(cells, published):
    """However many cells the other has; and the other is told of."""
    for length in (4096, 8192, 16384):
        cells.ruler("dense", {"vt": [1.0, 0.0]}, length)
        cells.ruler("cosa-qwen3-8b", {"vt": [0.0, 0.0]}, length, p=0.9, extra=("method.select.p=0.9",))
    cells.ruler("cosa-qwen3-8b", {"vt": [1.0, 0.0]}, 4096, extra=("method.select.p=0.95",))  # the preset's own p
    found, pairs = cells.tables(published)
    mine = {column: pair(pairs, method="CoSA", column=column).measured for column in ("4096", "8192")}
    assert mine["4096"].estimate.value == 50 and mine["4096"].differs == () and mine["8192"] is None
    notes = measure(load([cells.out]).cells).notes
    assert len(notes) == 3
    assert all(line.startswith("in no table") and line.endswith("(CoSA shows cosa-qwen3-8b)") for line in notes)


def test_a_row_with_changed_settings_is_marked_in_every_form(cells, tmp_path, capsys):
    cells.ruler("dense", {"vt": [1.0, 0.0]})
    cells.ruler("cosa-qwen3-8b", {"vt": [1.0, 0.0]}, p=0.9, extra=("method.select.p=0.9",))
    cells.ruler("xattention", {"vt": [1.0, 0.0]})
    out = tmp_path / "report"
    assert cli.main(["report", str(cells.out), "--paper", "--published", str(PAPER), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "CoSA: greedy, 1 run; method.select.p=0.9, 1 of 13 tasks." in printed
    for text, mark in (
        (printed, "measured †"),
        ((out / "paper.md").read_text(), "measured †"),
        ((out / "paper.tex").read_text(), r"measured$^\dagger$"),
    ):
        assert text.count(mark) == 2  # Tables 1 and B
    assert "% CoSA: greedy, 1 run; method.select.p=0.9" in (out / "paper.tex").read_text()


@pytest.mark.parametrize(
    ("model", "own", "other"),
    [
        ("llama-3.1-8b-instruct", "cosa-llama-3.1-8b", "cosa-qwen3-8b"),
        ("qwen3-8b", "cosa-qwen3-8b", "cosa-llama-3.1-8b"),
    ],
)
def test_a_preset_for_another_model_stands_beside_no_printed_number(cells, published, model, own, other):
    cells.ruler("dense", {"vt": [1.0, 0.0]}, model=model)
    cells.ruler(other, {"vt": [0.0, 0.0]}, model=model)
    found, pairs = cells.tables(published)
    assert pair(pairs, method="CoSA", column="4096").measured is None
    (note,) = measure(load([cells.out]).cells).notes
    assert re.fullmatch(rf"in no table of the paper: .* \(preset {re.escape(other)} is for .*\)", note)
    cells.ruler(own, {"vt": [1.0, 0.0]}, model=model, p=0.5)
    found, pairs = cells.tables(published)
    assert pair(pairs, method="CoSA", column="4096").measured.estimate.value == 50


def test_seeds_are_runs_of_one_number_and_the_larger_of_two_candidates_is_shown(cells, published):
    for seed, score in ((0, 1.0), (1, 0.0), (2, 0.0), (3, 0.0)):
        cells.ruler("dense", {"vt": [1.0, 1.0]}, seed=seed)
        cells.ruler("cosa-qwen3-8b", {"vt": [1.0, score]}, seed=seed)
    cells.ruler("dense", {"vt": [1.0]})
    cells.ruler("cosa-qwen3-8b", {"vt": [0.0]})
    measured = measure(load([cells.out]).cells)
    mine = measured.tables[Block("ruler", "qwen3-8b")]["CoSA"][4096]
    assert mine.runs == 4 and mine.decoding == "sampled"
    assert mine.estimate.value == pytest.approx(62.5) and mine.estimate.n == 2
    assert len([note for note in measured.notes if "another run of the same place" in note]) == 2


def test_a_difference_is_paired_with_the_dense_run_of_its_own_settings(cells, published):
    """Each once greedy and once sampled, with as many samples: dense and sparse of one table are of one kind."""
    lengths = tuple(1024 * 2**i for i in range(8))
    for length in lengths:
        for seed, score in ((None, 1.0), (0, 0.0)):
            cells.ruler("dense", {"vt": [1.0, score]}, length, seed=seed)
            cells.ruler("cosa-qwen3-8b", {"vt": [0.0, score]}, length, seed=seed)
    found, pairs = cells.tables(published)
    assert len({p.measured.decoding for p in pairs if p.measured is not None}) == 1
    assert all(pair(pairs, method="CoSA", column=str(n)).to_dense.value == -50 for n in lengths)
    assert not [line for one in found for line in one.remarks if "no paired difference" in line]


def test_without_a_dense_run_of_its_settings_on_show_there_is_no_difference(cells, published):
    """Two methods of different settings: one dense run is shown, and the other method's difference is left out."""
    for preset, seed in (("cosa-qwen3-8b", None), ("xattention", 0)):
        cells.ruler("dense", {"vt": [1.0, 1.0]}, seed=seed)
        cells.ruler(preset, {"vt": [1.0, 0.0]}, seed=seed)
    found, pairs = cells.tables(published)
    mine = {name: pair(pairs, method=name, column="4096") for name in ("Dense", "CoSA", "XAttn")}
    alike = {name for name in ("CoSA", "XAttn") if mine[name].measured.decoding == mine["Dense"].measured.decoding}
    assert len(alike) == 1
    assert all((mine[name].to_dense is not None) == (name in alike) for name in ("CoSA", "XAttn"))
    (other,) = {"CoSA", "XAttn"} - alike
    (line,) = [line for line in sheet(found, "1").remarks if "no paired difference" in line]
    assert line.startswith(f"{other}: no paired difference to Dense at 4096, avg, which has other task.generation")


def test_a_model_that_the_paper_has_not_stands_alone(cells, published):
    cells.ruler("dense", {"vt": [1.0, 0.0]}, 1024, model="smollm2")
    cells.ruler("cosa-qwen3-8b", {"vt": [1.0, 0.0]}, 1024, model="smollm2")
    found, pairs = cells.tables(published)
    assert sheet(found, "1").headers[2:] == ["1K", "Avg.", "B %"]
    assert {kind for _, kind, _ in lines(sheet(found, "1"))} == {"measured"}
    assert all(p.published is None and p.difference is None and p.overlap is None for p in pairs)


# ----------------------------------------------------------------------------------------------------- Tables 2 and 3
def longbench(cells):
    for thinking in (False, True):
        cells.longbench("dense", [1, 1, 0, 0], [1, 0], thinking=thinking)
        cells.longbench("cosa-qwen3-8b", [1, 0, 0, 0], [1, int(thinking)], thinking=thinking, share=0.15)


def test_table_2_averages_difficulties_by_their_counts_and_then_the_modes(cells, published):
    longbench(cells)
    found, pairs = cells.tables(published)
    two = sheet(found, "2")
    rows = {(name, kind): [cell.text for cell in row] for name, kind, row in lines(two)}
    no_cot, cot = (25 * 4 + 50 * 2) / 6, (25 * 4 + 100 * 2) / 6
    assert rows["CoSA", "measured"][:5] == ["25.00", "50.00", "25.00", "100.00", f"{(no_cot + cot) / 2:.2f}"]
    assert rows["CoSA", "published"] == ["37.24", "31.11", "45.83", "35.69", "36.51", "15"]
    assert pair(pairs, table="2", method="CoSA", column="avg").to_dense.value == pytest.approx(
        ((no_cot - (50 * 4 + 50 * 2) / 6) + (cot - (50 * 4 + 50 * 2) / 6)) / 2
    )
    assert "CoSA: sampled, 1 run; 4 of 192 easy questions, 2 of 311 hard questions." in two.remarks
    assert "The printed percentages of Dense, CoSA fit 4 runs over 192 easy and 311 hard questions." in two.remarks
    assert "The printed percentages of MInf, Flex, XAttn fit 1 run over 192 easy and 311 hard questions." in two.remarks


def test_one_mode_alone_has_no_average(cells, published):
    cells.longbench("dense", [1, 0], [1])
    found, pairs = cells.tables(published)
    assert pair(pairs, table="2", method="Dense", column="avg").measured is None
    assert pair(pairs, table="2", method="Dense", column="no_cot_easy").measured.estimate.value == 50


def test_the_two_stage_mode_is_with_cot_and_log_likelihoods_are_in_no_table(cells, published):
    for mode in ("cot", "loglikelihood"):
        cells.longbench("dense", [1, 0], [1], mode=mode)
    measured = measure(load([cells.out]).cells)
    (table,) = measured.tables.values()
    assert set(table["Dense"]) == {"cot_easy", "cot_hard"}
    assert len(measured.notes) == 1 and measured.notes[0].startswith("in no table of the paper")


@pytest.mark.parametrize("data", ["small", "a/renamed/copy.jsonl"])
def test_the_self_made_set_is_never_beside_printed_numbers(cells, published, data):
    cells.longbench("dense", [1, 0], [1])
    cells.longbench("dense", [1, 1], [1], data=data, small=True)
    found, pairs = cells.tables(published)
    titles = {one.title for one in found}
    assert titles == {"Table 2: LongBench-v2, qwen3-8b", "Table 2: LongBench-v2, qwen3-8b, self-made set"}
    for p in pairs:
        assert (p.published is None) == (p.data == "self-made set")
        if p.method == "Dense" and p.column == "no_cot_easy":
            assert p.measured.estimate.value == (100 if p.data else 50)


@pytest.mark.parametrize(("data", "title"), [("/data/renamed.jsonl", "renamed.jsonl"), ("me/copy", "me/copy")])
def test_other_data_stands_in_a_block_of_its_own(cells, published, data, title):
    cells.longbench("dense", [1, 0], [1])
    cells.longbench("dense", [1, 1], [1], data=data)
    found, pairs = cells.tables(published)
    assert {one.title for one in found} == {
        "Table 2: LongBench-v2, qwen3-8b",
        f"Table 2: LongBench-v2, qwen3-8b, {title}",
    }
    assert all((p.published is None) == (p.data == title) for p in pairs)
    (cell,) = (cell for cell in load([cells.out]).cells if cell.config["task"]["data"] == data)
    assert below._published(cell, published) is None


@pytest.mark.parametrize(("ids", "own"), [("{:024x}", ""), ("q{}", "data.json")])
def test_a_whole_local_copy_with_published_ids_is_the_published_set(cells, published, ids, own):
    cells.longbench("dense", [1] * 192, [0] * 311, data="/data/data.json", ids=ids)
    (block,) = measure(load([cells.out]).cells).tables
    assert block.data == own


def test_other_text_than_the_papers_preset_is_said(cells, published):
    cells.longbench("dense", [1, 0], [1], truncate_at=4096)
    found, _ = cells.tables(published)
    (line,) = [line for line in sheet(found, "2").remarks if line.startswith("Dense: sampled")]
    assert "task.truncate_at=4096 (the paper's preset: 120000)" in line


def ablation(cells):
    longbench(cells)
    for preset, easy, share in (
        ("cosa-base", [1, 0, 0, 0], 0.22),
        ("cosa-kap", [1, 1, 0, 0], 0.2),
        ("cosa-iks", [0, 0, 0, 0], 0.16),
        ("cosa-iks-descending", [1, 0, 0, 1], 0.155),
    ):
        cells.longbench(preset, easy, [0, 1], share=share)


def test_table_3_shows_differences_to_base_and_the_gain_against_the_better_fixed_order(cells, published):
    ablation(cells)
    found, pairs = cells.tables(published)
    three = sheet(found, "3")
    rows = {(name, kind): [cell.text for cell in row] for name, kind, row in lines(three)}
    assert rows["Base", "published"] == ["32.71", "22"]
    assert rows["+KAP", "published"] == ["33.27 (+0.56)", "20 (-2)"]
    assert rows["+RMP", "published"] == ["33.45 (+0.74)", "15 (-7)"]
    base, kap = (pair(pairs, table="3", method=name).measured for name in ("Base", "+KAP"))
    assert rows["Base", "measured"] == [f"{100 * 2 / 6:.2f}", f"{base.B_block:.1f}"]
    assert rows["+KAP", "measured"] == ["50.00 (+16.67)", f"{kap.B_block:.1f} ({kap.B_block - base.B_block:+.1f})"]
    assert ("+IKS descending", "published") not in rows and ("+IKS descending", "difference") not in rows
    to_base = pair(pairs, table="3", method="+KAP").to_base
    assert to_base.value == pytest.approx(100 / 6) and to_base.low < to_base.value < to_base.high
    # CoSA's own cell is the last row; it lost to the better fixed order, and the table says against which.
    assert rows["+RMP", "measured"][0] == "33.33 (+0.00)"
    (gain,) = [line for line in three.remarks if line.startswith("Measured gain")]
    assert gain.startswith("Measured gain of remapping against +IKS descending: -16.67 [")
    assert three.rows[0][1].text == "x" and [cell.text for cell in three.rows[3][1:6]] == ["", "x", "x", "", ""]


def test_differences_to_base_are_left_out_where_its_settings_are_others(cells, published):
    """In the tables as in the CSV file, with the reason."""
    cells.longbench("dense", [1, 1, 0, 0], [1, 0])
    cells.longbench("cosa-base", [1, 0, 0, 0], [0, 1], share=0.22)
    cells.longbench("cosa-kap", [1, 1, 0, 0], [0, 1], share=0.2)
    for preset in ("dense", "cosa-iks", "cosa-qwen3-8b"):
        cells.longbench(preset, [1, 1, 0, 0], [0, 1], share=0.16, truncate_at=4096)
    found, pairs = cells.tables(published)
    three = sheet(found, "3")
    rows = {(name, kind): [cell.text for cell in row] for name, kind, row in lines(three)}
    for name, like in (("+KAP", True), ("+IKS", False), ("+RMP", False)):
        assert (pair(pairs, table="3", method=name).to_base is not None) == like
        assert all(("(" in text) == like for text in rows[name, "measured"])
        remark = [line for line in three.remarks if line.startswith(f"{name}: no paired difference to Base")]
        assert len(remark) == (not like) and all("other task.truncate_at" in line for line in remark)


def test_no_gain_of_remapping_is_quoted_between_other_settings(cells, published):
    for truncate_at, preset in ((120000, "cosa-iks"), (4096, "cosa-qwen3-8b")):
        cells.longbench("dense", [1, 1], [1, 0], truncate_at=truncate_at)
        cells.longbench(preset, [1, 0], [1, 0], truncate_at=truncate_at)
    found, _ = cells.tables(published)
    (line,) = [line for line in sheet(found, "3").remarks if "gain of remapping" in line]
    assert line.startswith("No gain of remapping is quoted: +IKS, the better fixed order, has other task.truncate_at")


# -------------------------------------------------------------------------------------------------------------- files
def test_files_and_command(cells, tmp_path, capsys):
    ruler(cells)
    ablation(cells)
    out = tmp_path / "report"
    assert cli.main(["report", str(cells.out), "--paper", "--published", str(PAPER), "--out", str(out)]) == 0
    assert {file.name for file in out.iterdir()} == {"paper.md", "paper.csv", "paper.tex"}
    printed = capsys.readouterr().out
    assert "Table 1: RULER, qwen3-8b" in printed and "Table 3: ablation" in printed and "wrote " in printed
    text = (out / "paper.md").read_text()
    assert "| CoSA     | published  |    **95.25** |" in text and "<u>" in text and "## Intervals" in text
    assert r"\textbf{95.25}" in (out / "paper.tex").read_text() and r"\underline" in (out / "paper.tex").read_text()
    rows = list(csv.DictReader(io.StringIO((out / "paper.csv").read_text())))
    (row,) = [r for r in rows if (r["table"], r["method"], r["column"]) == ("1/B", "CoSA", "4096")]
    assert float(row["difference"]) == pytest.approx(float(row["measured"]) - float(row["published"]))
    assert float(row["B_difference"]) == pytest.approx(float(row["measured_B_block"]) - 36)
    assert row["intervals_overlap"] == "False" and float(row["to_dense"]) < 0 and row["runs"] == "1"
    assert {r["published_runs"] for r in rows if r["table"] == "2" and r["method"] == "CoSA"} == {"4"}


def test_cells_of_no_row_are_told_of(cells, published):
    """A bare method, and an ablation's variant on RULER or with a chain of thought."""
    longbench(cells)
    cells.longbench("cosa", [1, 0, 0, 0], [1, 0])
    cells.longbench("cosa-base", [1, 0, 0, 0], [1, 0], thinking=True)
    cells.ruler("dense", {"vt": [1.0]})
    cells.ruler("cosa-kap", {"vt": [1.0]})
    notes = measure(load([cells.out]).cells).notes
    assert sorted(re.search(r"method=(\S+) is the preset of none of its rows", note)[1] for note in notes) == [
        "cosa",
        "cosa-base",
        "cosa-kap",
    ]


def test_what_cannot_be_reported_is_refused(cells, tmp_path, console):
    with pytest.raises(InputError, match="with --paper"):
        write_paper([cells.out], published=PAPER, formats=["png"], console=console)
    synthetic.perplexity_cell(cells.out, "dense")
    with pytest.raises(InputError, match="no RULER or LongBench-v2 cell"):
        write_paper([cells.out], published=PAPER, console=console)
    cells.ruler("cosa-qwen3-8b", {"vt": [1.0]})
    with pytest.raises(EvalkitError, match="no finished dense twin"):
        write_paper([cells.out], published=PAPER, console=console)
    assert not list(tmp_path.glob("**/paper.*"))
