"""Which preset stands in a row of the paper's tables: that of the row's model, at its own values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from evalkit.report.paper.published import LLAMA, METHODS, NOT_AS_PRINTED, OF_ONE_MODEL, QWEN, SETTINGS, VARIANTS
from evalkit.report.paper.rows import ROWS, Variant, choose, standing, why_not

ROOT = Path(__file__).parents[2]
SWEEPS = sorted((ROOT / "conf" / "sweep").glob("paper_*.yaml"))


def made(preset, **changes):
    return Variant(preset, tuple((name.replace("__", "."), str(value)) for name, value in sorted(changes.items())))


def chosen(row, model, *variants, columns=1):
    return choose(row, {found: range(columns) for found in variants}, model)


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_the_cells_of_a_papers_sweep_are_the_rows_of_its_model_as_they_were_made(file):
    number, name = re.fullmatch(r"paper_table(.)_(.*)", file.stem).groups()
    model = {"qwen3": QWEN, "llama": LLAMA}[name]
    rows = {**METHODS, **VARIANTS} if number == "3" else METHODS
    for grid in yaml.safe_load(file.read_text())["hydra"]["sweeper"]["grids"]:
        given = dict(item.split("=", 1) for item in grid)
        changes = {key.removeprefix("method."): text for key, text in given.items() if key.startswith("method.")}
        for preset in given["method"].split(","):
            found = Variant(preset, tuple(sorted(changes.items())))
            own = [row for row in rows if preset in ROWS[row]]
            assert own and all(standing(row, found, model).refused == "" for row in own)
            assert all(standing(row, found, model).differs == () for row in own)
            assert {key: float(text) for key, text in changes.items()} == SETTINGS.get((model, preset), {})
            for row in own:
                others = [Variant(other) for other in ROWS[row] if other != preset]
                others += [Variant(preset, (*found.changes, ("stride", "4")))]
                equal = {"cosa-rmp", "cosa-qwen3-8b"} if model == QWEN else {preset}
                assert chosen(row, model, *others, found, columns=1).preset in {preset, *equal}
                assert not standing(row, chosen(row, model, *others, found), model).differs


def test_every_row_has_one_preset_of_each_model():
    for row in ROWS:
        for model in (QWEN, LLAMA):
            wanted = {preset: SETTINGS.get((model, preset), {}) for preset in ROWS[row]}
            found = [made(preset, **settings) for preset, settings in wanted.items()]
            own = {one.preset for one in found if standing(row, one, model) == standing("Dense", made("dense"), model)}
            assert len(own - {"cosa-rmp"}) == 1 or own == {"cosa-rmp"}, (row, model, own)
    assert set(OF_ONE_MODEL) | {name for names in NOT_AS_PRINTED.values() for name in names} <= {
        preset for presets in ROWS.values() for preset in presets
    }


@pytest.mark.parametrize(
    ("row", "model", "others", "wins"),
    [
        ("CoSA", LLAMA, ["cosa-qwen3-8b", "cosa-rmp"], "cosa-llama-3.1-8b"),
        ("CoSA", QWEN, ["cosa-llama-3.1-8b"], "cosa-qwen3-8b"),
        ("CoSA-accurate", LLAMA, ["cosa-accurate-qwen3-8b"], "cosa-accurate-llama-3.1-8b"),
        ("MInf", LLAMA, ["minference-block", "minference"], "minference-llama-3.1-8b"),
        ("MInf", QWEN, ["minference", "minference-llama-3.1-8b"], "minference-block"),
        ("+RMP", LLAMA, ["cosa-rmp", "cosa-qwen3-8b"], "cosa-llama-3.1-8b"),
        ("+RMP", QWEN, ["cosa-llama-3.1-8b"], "cosa-rmp"),
    ],
)
def test_the_preset_of_the_tables_model_wins_however_much_else_was_run(row, model, others, wins):
    found = {made(name): range(6) for name in others} | {made(wins): range(1)} | {made(wins, stride=4): range(6)}
    assert choose(row, found, model) == made(wins)


def test_a_preset_of_another_model_is_never_shown():
    for row, model, preset in (
        ("CoSA", LLAMA, "cosa-qwen3-8b"),
        ("CoSA", QWEN, "cosa-llama-3.1-8b"),
        ("MInf", QWEN, "minference-llama-3.1-8b"),
        ("+RMP", LLAMA, "cosa-rmp"),
        ("Base", LLAMA, "cosa-base"),
    ):
        other = {QWEN: LLAMA, LLAMA: QWEN}[model]
        for found in (made(preset), made(preset, stride=4)):
            assert chosen(row, model, found) is None
            assert why_not(found, {}, [row], model) == f"preset {preset} is for {other}"
    # The ablation of Llama is that of Qwen3 at budgets of its own.
    assert chosen("Base", LLAMA, made("cosa-base", budget_target=0.35)) == made("cosa-base", budget_target=0.35)


def test_changed_settings_stand_only_alone_and_are_named():
    changed, less = made("cosa-qwen3-8b", select__p=0.9, stride=4), made("cosa-qwen3-8b", select__p=0.8)
    assert choose("CoSA", {changed: range(2), less: range(1)}, QWEN) == changed  # more columns
    assert choose("CoSA", {changed: range(1), less: range(1)}, QWEN) == less  # fewer changes
    assert standing("CoSA", less, QWEN).differs == ("method.select.p=0.8",)
    block = made("minference-block")
    assert chosen("MInf", LLAMA, block) == block
    assert standing("MInf", block, LLAMA).differs == ("preset minference-block",)
    target = made("cosa-base", budget_target=0.3)
    assert standing("Base", target, LLAMA).differs == ("method.budget_target=0.3",)


def test_a_model_that_the_paper_has_not_takes_any_preset_and_names_it():
    both = made("cosa-llama-3.1-8b"), made("cosa-qwen3-8b")
    assert chosen("CoSA", "", *both) == both[1] and chosen("CoSA", "", both[0]) == both[0]
    assert chosen("CoSA", "", both[0], made("cosa-qwen3-8b", stride=4)) == both[0]
    found = standing("CoSA", both[0], "")
    assert (found.named, found.differs) == (("preset cosa-llama-3.1-8b",), ())
    assert standing("XAttn", made("xattention"), "").named == ()
    assert why_not(made("cosa"), {}, METHODS, "") == "method=cosa is the preset of none of its rows"
