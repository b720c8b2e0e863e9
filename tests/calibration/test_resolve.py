"""A cell that asks for a calibrated value: the value, or an error that names the command, before anything is loaded."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from evalkit import cli
from evalkit.calibration import resolve
from evalkit.calibration.disjoint import Fingerprints
from evalkit.calibration.file import Calibration, Entry, default_path, fixed_settings, path_of, with_field
from evalkit.calibration.resolve import calibrated, calibration_digest, command
from evalkit.config import Cell, ModelConfig, PerplexityConfig, RopeConfig
from evalkit.errors import InputError
from evalkit.methods import METHODS
from evalkit.methods.cosa import CoSA, Select

MODEL = ModelConfig(name="toy", path="owner/toy", native_context=8192)
COSA = CoSA(stride=4, skip_scale=200.0, budget_target=0.2)


def cell(method=COSA, length=4096, model=MODEL):
    return Cell(model, method, PerplexityConfig(length=length))


def entry(length=4096, target=0.2, value=0.91, **more):
    base = {"kind": "budget", "measure": "B", "reached": target, "measured": [[value, target]]}
    return Entry(**{"length": length, "target": target, "value": value, **base, **more})


def write(path, *entries, method=COSA, model="toy", weights="w"):
    header = {
        "model": {"name": model, "weights": weights},
        "method": fixed_settings(method),
        "knob": "select.p",
        "text": {"corpus": "essays", "sha256": "t", "fingerprints": Fingerprints.of([]).plain()},
    }
    calibration = Calibration(Path(path), header, tuple(entries))
    calibration.write()
    return calibration


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def here():
    """The file that a target is looked up in when none is named."""
    return default_path("toy", COSA)


def refused(some_cell):
    with pytest.raises(InputError) as stop:
        some_cell.validate()
    assert "\n" not in str(stop.value)
    return stop.value


# ------------------------------------------------------------------------------------------------------- the value
def test_the_value_of_length_and_target():
    write(here(), entry(), entry(target=0.3, value=0.95), entry(length=2048, value=0.8))
    for length, target, value in ((4096, 0.2, 0.91), (4096, 0.3, 0.95), (2048, 0.2, 0.8)):
        asked = cell(replace(COSA, budget_target=target), length)
        asked.validate()
        got = calibrated(asked)
        assert got.method == replace(COSA, select=Select(p=value), budget_target=target, calibration=str(here()))
        assert calibrated(got) == got, "a cell that was resolved stays as it is"
    assert calibrated(cell(CoSA())) == cell(CoSA())


def test_the_label_shows_the_value_and_not_where_it_came_from():
    write(here(), entry())
    label = calibrated(cell()).label
    assert "select.p=0.91" in label and "budget_target=0.2" in label and "calibration" not in label
    named = replace(cell(), overrides=(f"method.calibration={here()}",))
    assert f"calibration={here()}" in calibrated(named).label


def test_a_named_file_needs_a_target_only_where_it_has_several():
    method = CoSA(stride=4, skip_scale=200.0, calibration="mine.yaml")
    write("mine.yaml", entry(measure="B_block", value=0.7), entry(length=2048))
    assert calibrated(cell(method)).method.select.p == 0.7
    write("mine.yaml", entry(), entry(target=0.3))
    error = refused(cell(method))
    assert error.field == "method.budget_target" and "budget 0.2, budget 0.3 at 4096 tokens" in str(error)
    assert calibrated(cell(replace(method, budget_target=0.3))).method.select.p == 0.91


def test_a_target_means_the_realized_budget():
    write(here(), entry(measure="B_block"), entry(kind="recall", measure="recall"))
    assert "no value for 4096 tokens and budget 0.2" in str(refused(cell()))


def test_integer_knobs_and_tables():
    method = METHODS.get("streaming")(budget_target=0.2)
    write(default_path("toy", method), entry(value=3), method=method)
    value = calibrated(cell(method)).method.window_blocks
    assert value == 3 and isinstance(value, int)

    Path("t.yaml").write_text("[[0.5, 0.6]]")
    method = replace(COSA, calibration="with-table.yaml")
    write("with-table.yaml", entry(table="t.yaml", value=0.9))
    got = calibrated(cell(method)).method
    assert got.select.p_table == "t.yaml" and got.select.p == CoSA().select.p


def test_the_yarn_factor_of_the_length_belongs_to_the_value():
    rope = RopeConfig(type="yarn", original=4096, factors={4096: 1.0, 8192: 2.0})
    model = replace(MODEL, native_context=4096, rope=rope)
    write(here(), entry(length=8192, rope_factor=2.0))
    assert calibrated(cell(length=8192, model=model)).method.select.p == 0.91
    static = replace(model, rope=replace(rope, static_factor=4.0))
    assert "no value for 8192 tokens" in str(refused(cell(length=8192, model=static)))


# --------------------------------------------------------------------------------------------------- interpolation
@pytest.mark.parametrize(
    "points,value",
    [
        ([[0.90, 0.195], [0.92, 0.205]], 0.91),
        ([[0.92, 0.205], [0.90, 0.195]], 0.91),
        ([[0.90, 0.194], [0.92, 0.204]], 0.912),
        ([[0.90, 0.15], [0.91, 0.1951], [0.915, 0.2049], [0.99, 0.4]], 0.9125),
        ([[0.90, 0.19], [0.92, 0.21]], None),
        ([[0.90, 0.196], [0.92, 0.199]], None),
        ([[0.91, 0.2]], None),
        ([], None),
    ],
)
def test_between_two_measured_values_only_where_none_can_be_off_by_more_than_a_point(points, value):
    write(here(), entry(target=0.5, value=0.99, measured=points))
    if value is None:
        assert "no value for 4096 tokens and budget 0.2" in str(refused(cell()))
    else:
        got = calibrated(cell()).method
        assert got.select.p == pytest.approx(value)
        assert calibration_digest(cell(got))


def test_nothing_lies_between_integers_tables_or_other_budgets():
    points = [[3.0, 0.195], [5.0, 0.205]]
    method = METHODS.get("streaming")(budget_target=0.2)
    write(default_path("toy", method), entry(target=0.5, value=5, measured=points), method=method)
    refused(cell(method))
    for more in ({"table": "t.yaml"}, {"measure": "B_block"}, {"length": 2048}, {"rope_factor": 2.0}):
        write(here(), entry(target=0.5, measured=points, **more))
        refused(cell())


# --------------------------------------------------------------------------------------------------------- refusals
def test_without_a_calibration_the_error_is_the_command():
    error = refused(cell())
    assert error.field == "method.budget_target" and str(here()) in str(error)
    assert (
        "run: evalkit calibrate model=toy method=cosa method.stride=4 method.skip_scale=200 "
        "calibrate.lengths=[4096] calibrate.budgets=[0.2]"
    ) in str(error)


def test_the_command_carries_every_setting_but_the_knob():
    method = replace(COSA, select=Select(p=0.5), order="ascending", calibration="some where.yaml")
    parts = shlex.split(command(cell(method)))
    assert parts[:2] == ["evalkit", "calibrate"]
    assert set(parts[2:]) == {
        "model=toy",
        "method=cosa",
        "method.stride=4",
        "method.skip_scale=200",
        "method.order=ascending",
        "method.calibration=some where.yaml",
        "calibrate.lengths=[4096]",
        "calibrate.budgets=[0.2]",
    }


def test_what_was_made_for_something_else_is_refused():
    write(here(), entry())
    text = here().read_text()
    named = replace(COSA, calibration=str(here()))
    for method, part in (
        (replace(named, stride=8), "method.stride was 4, is 8"),
        (replace(named, select=Select(rule="budget", budget=0.5)), "method.select.budget"),
        (METHODS.get("random")(calibration=str(here()), budget_target=0.2), "a calibration of random (not of cosa)"),
    ):
        assert part in str(refused(cell(method)))
    assert "calibration of model other (not toy)" in str(refused(cell(named, model=replace(MODEL, name="other"))))
    assert "no value for 2048 tokens" in str(refused(cell(named, 2048)))
    for damage, message in (
        ("[", "a file of evalkit calibrate"),
        ("a: 1", "a file of evalkit calibrate"),
        (text.replace("format: 1", "format: 2"), "of format 1"),
        (text.replace("length: 4096", "longth: 4096"), "a file of evalkit calibrate"),
        (text.replace("name: toy", "nome: toy"), "a file of evalkit calibrate"),
    ):
        here().write_text(damage)
        assert message in str(refused(cell(named)))


def test_a_knob_that_was_given_is_not_replaced_unseen():
    method = METHODS.get("streaming")(budget_target=0.2, window_blocks=3)
    error = refused(cell(method))
    assert (error.field, error.value) == ("method.window_blocks", 3)
    assert "8, its default, with method.budget_target=0.2, whose calibrated value takes its place" in str(error)
    Path("t.yaml").write_text("[[0.5, 0.6]]")
    given = replace(COSA, select=Select(p_table="t.yaml"))
    assert "null with method.budget_target=0.2" in str(refused(cell(given)))
    write("mine.yaml", entry())
    named = replace(COSA, calibration="mine.yaml")
    assert refused(cell(replace(named, select=Select(p=0.5)))).field == "method.select.p"
    assert refused(cell(replace(named, select=Select(p_table="t.yaml")))).field == "method.select.p_table"
    write("with-table.yaml", entry(table="t.yaml"))
    got = calibrated(cell(replace(COSA, calibration="with-table.yaml")))
    assert calibrated(got) == got, "its table is the calibration's own"


def test_a_knob_that_cannot_act_is_not_calibrated():
    method = replace(COSA, select=Select(rule="budget", budget=0.3))
    error = refused(cell(method))
    assert (error.field, error.value) == ("method.select.budget", 0.3)
    assert "method.select.p is calibrated, which cannot act beside it; or set method.select.budget alone" in str(error)
    assert "evalkit calibrate" not in str(error)


@pytest.mark.parametrize("target", [0.0, 1.0, -0.1, 2.0, float("nan")])
def test_targets_lie_between_nothing_and_everything(target):
    assert refused(cell(replace(COSA, budget_target=target))).field == "method.budget_target"


def test_a_method_without_a_knob_has_no_target():
    error = refused(cell(METHODS.get("dense")(budget_target=0.5)))
    assert "null: no single knob steers the budget of dense" in str(error)


def test_only_asking_cells_read_files(monkeypatch):
    monkeypatch.setattr(resolve, "calibrated", lambda cell: pytest.fail("read"))
    cell(CoSA()).validate()


# ---------------------------------------------------------------------------------------------------------- digests
def test_the_digest_is_of_what_the_cell_reads():
    first = write(here(), entry(), entry(length=2048))
    digest = calibration_digest(cell())
    write(here(), entry(), entry(length=2048, value=0.5), entry(target=0.3))
    assert calibration_digest(cell()) == digest
    for changed in (entry(value=0.92), entry(reached=0.21), entry(windows=9)):
        write(here(), changed)
        assert calibration_digest(cell()) != digest
    write(here(), entry(), weights="other")
    assert calibration_digest(cell()) != digest
    assert first.entries[0].length == 4096


def test_a_changed_file_is_read_again():
    write(here(), entry())
    assert calibrated(cell()).method.select.p == 0.91
    write(here(), entry(value=0.8123456789))
    assert calibrated(cell()).method.select.p == 0.8123456789


def test_entries_replace_their_like_and_survive_the_file():
    calibration = Calibration(Path("c.yaml"), write("c.yaml").header, ())
    for item in (entry(value=0.1), entry(length=2048), entry(value=0.2), entry(kind="recall", measure="recall")):
        calibration = calibration.with_entry(item)
    calibration.write()
    again = Calibration.read(Path("c.yaml"))
    assert again.entries == calibration.entries and [e.value for e in again.entries] == [0.91, 0.2, 0.91]
    assert not list(Path().glob(".c.yaml*")), "no scratch file is left"


def test_fields_inside_fields():
    assert with_field(COSA, "select.p", 0.5) == replace(COSA, select=Select(p=0.5))
    settings = fixed_settings(COSA)
    assert "p" not in settings["select"] and "budget_target" not in settings and settings["stride"] == 4
    Path("patterns.yaml").write_text("x")
    method = METHODS.get("minference")(table="patterns.yaml")
    assert fixed_settings(method)["table"].startswith("sha256:") and "ratio" not in fixed_settings(method)


# ---------------------------------------------------------------------------------------------------- Llama's presets
@pytest.mark.parametrize("name,at_4k", [("cosa-llama-3.1-8b", 0.40), ("cosa-accurate-llama-3.1-8b", 0.48)])
def test_llama_presets_fail_until_they_are_calibrated(capsys, monkeypatch, name, at_4k):
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    from evalkit.app import schema
    from evalkit.app.calibrate import request_from_config

    arguments = ["run", f"method={name}", "model=llama-3.1-8b-instruct", "task=ruler", "task.length=8192"]
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    file = f"results/calibration/llama-3.1-8b-instruct/{name}.yaml"
    assert f"{file}, which is missing; run: evalkit calibrate preset={name}\n" in error

    schema.register()
    GlobalHydra.instance().clear()
    with initialize_config_module("evalkit.conf", version_base="1.3"):
        request = request_from_config(compose("calibrate", overrides=[f"preset={name}"]))
    request.validate()
    assert request.model.name == "llama-3.1-8b-instruct" and str(request.path) == file
    assert request.method.skip_scale == 200.0, "as the appendix prints it for both"
    targets = request.settings.targets
    assert [t.length for t in targets] == [4096, 8192, 16384, 32768, 65536, 131072] and targets[0].value == at_4k
    assert request.settings.measure == "B_block"


@pytest.mark.parametrize("length,told", [(8192, ""), (1024, " calibrate.lengths=[1024]")])
def test_llama_presets_name_the_command_for_another_model(capsys, length, told):
    arguments = ["run", "method=cosa-llama-3.1-8b", "model=smollm2", "task=ruler", f"task.length={length}"]
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert "needs the calibration results/calibration/smollm2/cosa-llama-3.1-8b.yaml" in error
    assert error.endswith(f"run: evalkit calibrate preset=cosa-llama-3.1-8b model=smollm2{told}")


def test_each_model_has_a_file_of_its_own():
    for model in ("a", "b"):
        assert path_of("results/{model}/x.yaml", model, COSA) == Path(f"results/{model}/x.yaml")
    assert path_of("x.yaml", "a", COSA) == Path("x.yaml") and path_of(None, "a", COSA) == default_path("a", COSA)


def test_the_presets_budgets_are_table_b():
    import csv

    root = Path(__file__).parents[2]
    with open(root / "results" / "paper" / "ruler.csv") as stream:
        rows = [r for r in csv.DictReader(stream) if r["model"].startswith("Llama") and r["length_tokens"] != "avg"]
    labels = {row["method"] for row in rows if "CoSA" in row["method"]}
    assert len(labels) == 2, labels
    for preset in ("cosa-llama-3.1-8b", "cosa-accurate-llama-3.1-8b"):
        budgets = yaml.safe_load((root / "conf" / "preset" / f"{preset}.yaml").read_text())["calibrate"]["budget_at"]
        (label,) = [x for x in labels if (x == "CoSA") == ("accurate" not in preset)]
        printed = {int(r["length_tokens"]): float(r["budget_pct"]) / 100 for r in rows if r["method"] == label}
        assert budgets == pytest.approx(printed)
