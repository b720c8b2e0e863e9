"""Whole calibrations: targets reached, resumed, merged, and used by cells."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

from evalkit.attention import Session
from evalkit.calibration import measure, run
from evalkit.calibration.file import Calibration
from evalkit.calibration.measure import CurveProbe, RecallProbe, Spent, table_at
from evalkit.calibration.run import calibrate
from evalkit.calibration.search import Axis
from evalkit.calibration.texts import CalibrationTexts
from evalkit.corpora import Corpora
from evalkit.errors import InputError, IntegrityError, StoreError
from evalkit.methods import METHODS
from evalkit.methods.base import Knob
from evalkit.methods.cosa import CoSA, Select
from evalkit.methods.tables import load_table
from evalkit.models.loading import load_model, load_tokenizer, locate
from evalkit.runner import run_cell
from evalkit.store import read_cells

COSA = CoSA(block_size=64)


def only_cell(out):
    (cell,) = read_cells([out])
    return cell


def mean_budget(cell):
    return float(np.mean([record["budget"]["B"] for record in cell.records]))


def entries(request):
    return Calibration.read(request.path).entries


# ------------------------------------------------------------------------------------------------------ the search
@pytest.mark.parametrize("name", ["cosa", "xattention", "oracle_topk", "random", "blasst", "flexprefill", "minference"])
def test_every_kind_of_knob_reaches_its_target(fake_runs, request_for, name):
    request = request_for(METHODS.get(name)(), budgets=(0.3, 0.7), tolerance=0.002)
    assert calibrate(request) == 0
    for entry, target in zip(entries(request), (0.3, 0.7), strict=True):
        assert entry.target == target and abs(entry.reached - target) <= 0.002
        assert entry.achieved["B"] == pytest.approx(entry.reached) and len(entry.measured) <= 12
    assert [e.value for e in entries(request)] == sorted(
        (e.value for e in entries(request)), reverse=not request.method.knob.rises
    )
    assert fake_runs.count == 3 * len({value for e in entries(request) for value, _ in e.measured})


def test_another_measure_is_what_is_reached(fake_runs, request_for):
    request = request_for(measure="B_cost", budgets=(0.6,), tolerance=0.002)
    assert calibrate(request) == 0
    (entry,) = entries(request)
    assert abs(entry.achieved["B_cost"] - 0.6) <= 0.002 and entry.measure == "B_cost"
    assert entry.achieved["B"] == pytest.approx(entry.achieved["B_cost"] - 0.08)


def test_recall_is_a_target_too(fake_runs, request_for):
    request = request_for(recalls=(0.6,), tolerance=0.002)
    assert calibrate(request) == 0
    (entry,) = entries(request)
    assert abs(entry.achieved["recall"] - 0.6) <= 0.002 and (entry.kind, entry.measure) == ("recall", "recall")


def test_each_length_may_have_a_target_of_its_own(fake_runs, request_for):
    request = request_for(budget_at={256: 0.5, 512: 0.4})
    assert calibrate(request) == 0
    assert [(e.length, e.target) for e in entries(request)] == [(256, 0.5), (512, 0.4)]


def test_of_a_table_of_budgets_the_lengths_that_a_model_supports(fake_runs, request_for, capsys):
    """A preset made for a longer model; lengths that are asked for by themselves are not left out."""
    request = request_for(budget_at={256: 0.5, 4096: 0.4, 8192: 0.3})
    assert calibrate(request) == 0
    assert capsys.readouterr().out.startswith("left out: 4096, 8192 tokens; tiny supports at most 2048\n")
    assert [(e.length, e.target) for e in entries(request)] == [(256, 0.5)]
    assert calibrate(request_for(budget_at={256: 0.5, 4096: 0.4}, lengths=(256,))) == 0
    assert "left out" not in capsys.readouterr().out
    for settings in ({"budget_at": {4096: 0.4}}, {"budget_at": {256: 0.5}, "lengths": (4096,)}):
        with pytest.raises(InputError, match="tiny supports at most 2048"):
            calibrate(request_for(**settings))


def test_other_lengths_than_a_table_has_take_its_budgets(request_for):
    table = {512: 0.5, 1024: 0.4, 2048: 0.3}
    asked = request_for(budget_at=table, lengths=(256, 512, 700, 1024, 1500, 2048)).settings
    asked.validate()
    assert [t.value for t in asked.targets] == [0.5, 0.5, 0.5, 0.4, 0.4, 0.3]
    both = replace(asked, lengths=(256,), budgets=(0.9,))  # budgets of their own: the table comes on top
    assert [(t.length, t.value) for t in both.targets] == [(256, 0.9), *table.items()]


def test_an_unreachable_target_fails_and_the_others_are_written(request_for, capsys):
    """With 4 blocks of 64 a window of 1 keeps 7 of 10 blocks, 4 of them halves: nothing below that can be had."""
    cells = 4 * 64 * 65 // 2 + 3 * 64 * 64
    smallest = cells / (256 * 257 // 2)
    request = request_for(METHODS.get("streaming")(block_size=64), budgets=(round(smallest, 3), 0.05))
    assert calibrate(request) == 1
    out = capsys.readouterr().out
    assert f"FAILED 256 tokens, B 0.05: not within a point; the nearest is {smallest:.4f} at 1" in out
    (entry,) = entries(request)
    assert entry.value == 1 and isinstance(entry.value, int) and entry.reached == pytest.approx(smallest, abs=1e-6)


def test_the_scatter_between_windows_is_kept_and_a_large_one_is_told(fake_runs, request_for, capsys):
    assert Spent([{"B": 0.1}, {"B": 0.3}]).interval("B") == pytest.approx(12.7062 * 0.141421 / 2**0.5, rel=1e-4)
    assert Spent([{"B": 0.1}]).interval("B") is None and Spent([{"B": 0.1}, {"B": 0.3}]).means() == {"B": 0.2}
    request = request_for()
    calibrate(request)
    assert 0 < entries(request)[0].interval < 0.01 and "raise calibrate.windows" not in capsys.readouterr().out
    fake_runs.scatter = 1e-2
    calibrate(request_for(replace(COSA, stride=4)))
    assert "raise calibrate.windows (3)" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------- resume
def test_nothing_measured_is_measured_again_after_a_kill(fake_runs, request_for):
    request = request_for(budgets=(0.5, 0.35), tolerance=0.001)
    assert calibrate(request) == 0
    whole, want = fake_runs.count, request.path.read_text()
    assert whole > 15
    for file in request.path.parent.glob("*.work/*/*"):
        file.unlink()
    request.path.unlink()

    fake_runs.count = 0
    for allowed in (2, 7, 8):
        fake_runs.allowed = allowed
        with pytest.raises(KeyboardInterrupt):
            calibrate(request)
        assert fake_runs.count == allowed, "each goes on where the one before stopped"
        (journal,) = request.path.parent.glob("*.work/*/measurements.jsonl")
        with open(journal, "a") as stream:
            stream.write('{"key": "cut sho')
    fake_runs.allowed = 10**9
    assert calibrate(request) == 0
    assert fake_runs.count == whole and request.path.read_text() == want
    assert calibrate(request) == 0
    assert fake_runs.count == whole and request.path.read_text() == want, "what is there is not searched again"


def test_measurements_belong_to_their_settings(fake_runs, request_for, tmp_path):
    calibrate(request_for(replace(COSA, calibration="a.yaml")))
    first = fake_runs.count
    calibrate(request_for(replace(COSA, stride=4, calibration="b.yaml")))
    assert fake_runs.count == 2 * first
    (tmp_path / "a.yaml").unlink()
    calibrate(request_for(replace(COSA, calibration="a.yaml")))
    assert fake_runs.count == 2 * first, "the file is written again from what was measured"


def test_targets_are_added_to_a_file(fake_runs, request_for):
    first = request_for(budgets=(0.5,))
    calibrate(first)
    calibrate(request_for(budgets=(0.5, 0.4)))
    assert [e.target for e in entries(first)] == [0.4, 0.5]
    calibrate(request_for(budgets=(0.5,), windows=4))
    assert [e.windows for e in entries(first)] == [3, 4], "on other windows a target is searched again"
    before = Calibration.read(first.path).header["text"]["fingerprints"]
    calibrate(request_for(lengths=(512,), budgets=(0.5,)))
    assert [(e.length, e.target) for e in entries(first)] == [(256, 0.4), (256, 0.5), (512, 0.5)]
    assert len(Calibration.read(first.path).header["text"]["fingerprints"]["hashes"]) > len(before["hashes"])


def test_a_file_for_other_settings_is_not_overwritten(fake_runs, request_for, corpus, tmp_path):
    file = "cal.yaml"
    calibrate(request_for(replace(COSA, calibration=file)))
    for method in (replace(COSA, stride=4, calibration=file), METHODS.get("random")(calibration=file)):
        with pytest.raises(InputError, match="method.calibration='cal.yaml': a file of the same method"):
            calibrate(request_for(method))
    other = tmp_path / "other.txt"
    other.write_text(corpus.read_text()[5:])
    with pytest.raises(InputError, match="calibrate.text='other.txt': the text of cal.yaml"):
        calibrate(request_for(replace(COSA, calibration=file), text=str(other)))


def test_two_writers_do_not_meet(request_for):
    request = request_for()
    with run._work_folder(request.path, []), pytest.raises(StoreError, match="another process"):
        calibrate(request)


# ------------------------------------------------------------------------------------------------- used by cells
def test_a_cell_on_other_windows_spends_the_target(request_for, cell_for, with_target):
    request = request_for(budgets=(0.5,), windows=6)
    assert calibrate(request) == 0
    (entry,) = entries(request)
    run_cell(cell_for(with_target(0.5), limit=6))
    cell = only_cell(cell_for().out)
    assert cell.config["method"]["select"]["p"] == entry.value, "the value is in the cell's settings"
    assert abs(mean_budget(cell) - 0.5) <= 0.03, "random weights scatter more from window to window than a model"


def test_a_changed_calibration_is_another_cell(fake_runs, request_for, cell_for, with_target):
    request = request_for()
    calibrate(request)
    cell = cell_for(with_target(0.5))
    run_cell(cell)
    first = only_cell(cell.out)
    calibrate(request_for(lengths=(512,)))
    run_cell(cell)
    assert only_cell(cell.out).key == first.key, "another length of the file is no part of this cell"
    assert first.identity["method"]["calibration"].startswith("sha256:")
    content = yaml.safe_load(request.path.read_text())
    content["entries"][0]["value"] += 1e-6
    request.path.write_text(yaml.safe_dump(content))
    run_cell(cell)
    cells = read_cells([cell.out])
    assert len(cells) == 2 and len({c.twin for c in cells}) == 1, "both have one dense twin"
    assert len({c.identity["method"]["select"]["p"] for c in cells}) == 2
    content["entries"][0]["reached"] += 1e-6
    request.path.write_text(yaml.safe_dump(content))
    run_cell(cell)
    assert len(read_cells([cell.out])) == 3, "whatever the cell reads of the file counts, used or not"


def test_a_files_name_is_a_label(fake_runs, request_for, cell_for, tmp_path):
    calibrate(request_for(replace(COSA, calibration="a.yaml")))
    run_cell(cell_for(replace(COSA, calibration="a.yaml")))
    (tmp_path / "a.yaml").rename(tmp_path / "b.yaml")
    run_cell(cell_for(replace(COSA, calibration="b.yaml")))
    only_cell(cell_for().out)


def test_samples_that_hold_calibration_text_fail_before_the_model_is_loaded(
    fake_runs, request_for, cell_for, with_target, model_config, corpus, tmp_path, monkeypatch
):
    short = tmp_path / "short.txt"
    short.write_text(corpus.read_text()[:2600])
    calibrate(request_for(text=str(short), windows=1))
    tokens = load_tokenizer(locate(model_config), model_config)(short.read_text(), add_special_tokens=False)
    every = len(tokens["input_ids"]) // 256
    assert 3 <= every <= 8
    run_cell(cell_for(with_target(0.5), limit=every // 2, corpus=str(short)))
    monkeypatch.setattr("evalkit.runner.load_model", lambda *args: pytest.fail("loaded"))
    with pytest.raises(IntegrityError, match=r"window \d+: tokens .* was calibrated on"):
        run_cell(cell_for(with_target(0.5), limit=every, corpus=str(short)))


def test_other_weights_are_refused(fake_runs, request_for, cell_for, with_target):
    request = request_for()
    calibrate(request)
    content = yaml.safe_load(request.path.read_text())
    content["model"]["weights"] = "0" * 64
    request.path.write_text(yaml.safe_dump(content))
    with pytest.raises(InputError, match="calibration of these weights.*run: evalkit calibrate model=tiny method=cosa"):
        run_cell(cell_for(with_target(0.5)))


# ---------------------------------------------------------------------------------------------------- recall, tables
@pytest.fixture
def loaded(model_config):
    return load_model(model_config, locate(model_config), 256, torch.device("cpu"), torch.float32).model


@pytest.fixture
def window(request_for, model_config):
    tokenizer = load_tokenizer(locate(model_config), model_config)
    return CalibrationTexts(request_for().settings, tokenizer, bos=False, corpora=Corpora()).windows(256).ids[0]


def literal_recall(model, method, ids):
    """Mass of listed blocks by layer and head, summed entry by entry in float64 from the layers' own queries."""
    seen = []

    class Spy(CoSA):
        def plan(self, q, kv, context):
            plan = super().plan(q, kv, context)
            k = kv.gather()[0].double().repeat_interleave(q.shape[1] // kv.num_kv_heads, 1)
            future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
            weights = (q.double() @ k.mT * context.scale).masked_fill(future, -torch.inf).softmax(-1)[0]
            for head in range(q.shape[1]):
                total = 0.0
                for t in range(plan.order.shape[2]):
                    for j in plan.order[0, head, t, : plan.count[0, head, t]].tolist():
                        total += float(weights[head, t * 64 : (t + 1) * 64, j * 64 : (j + 1) * 64].sum())
                seen.append(total / q.shape[2])
            return plan

    with Session(model, Spy(block_size=method.block_size, select=method.select)) as session:
        session.prefill(torch.tensor(ids), keep_from=len(ids) - 1)
    return np.array(seen)


def test_recall_is_the_mass_of_the_listed_blocks(loaded, window):
    method = replace(COSA, select=Select(p=0.6))
    probe = RecallProbe(method)
    with Session(loaded, probe) as session:  # type: ignore[arg-type]
        session.prefill(torch.tensor(window), keep_from=255)
        session.account()
    want = literal_recall(loaded, method, window)
    assert probe.recall() == pytest.approx(want.mean(), abs=1e-5) and want.mean() < 0.99


def test_recall_needs_whole_blocks(request_for):
    request = request_for(METHODS.get("minference")(vertical_size=40, slash_size=60), recalls=(0.9,))
    with pytest.raises(InputError, match="calibrate.recalls='minference': a method that lists whole blocks"):
        calibrate(request)


def test_curves_are_the_recall_of_each_head_on_dense_states(loaded, window):
    axis = Axis(CoSA.knob, 256)  # type: ignore[arg-type]
    probe = CurveProbe(COSA, axis, 2)
    with Session(loaded, probe) as session:  # type: ignore[arg-type]
        session.prefill(torch.tensor(window), keep_from=255)
        assert session.account().calls["dense"] == 2
    curves = probe.recalls()
    assert curves.shape == (2, 4, measure.GRID)
    # The first layer's states are the same in a sparse run, so its recall can be had from one.
    for place in (0, 2):
        method = replace(COSA, select=Select(p=axis.value(measure.places()[place])))
        assert curves[0, :, place] == pytest.approx(literal_recall(loaded, method, window)[:4], abs=1e-5)
    assert np.diff(curves, axis=-1).min() > -1e-6


def test_a_table_gives_each_head_the_value_of_one_recall():
    axis = Axis(Knob("p", 0.0, 1.0), 1)
    grid = measure.places()
    curves = np.stack([np.stack([grid, grid**2]), np.stack([np.full_like(grid, 0.9), grid * 0.5])])
    table = table_at(curves, axis, 0.64)
    assert table[0][0] == pytest.approx(0.64) and table[0][1] == pytest.approx(0.8, abs=2e-3)
    assert table[1] == [0.0, 1.0], "reached everywhere, and nowhere"


def test_a_table_for_each_layer_and_head(request_for, cell_for, with_target, monkeypatch):
    monkeypatch.setattr(measure, "GRID", 6)
    request = request_for(per_head=True, budgets=(0.55,), windows=2)
    assert calibrate(request) == 0
    (entry,) = entries(request)
    file = request.path.parent / entry.table
    table = load_table(str(file), "t", above=0, at_most=1)
    assert (table.layers, table.heads) == (2, 4) and len({v for row in table.values for v in row}) > 4
    cell = cell_for(with_target(0.55))
    run_cell(cell)
    stored = only_cell(cell.out)
    assert stored.config["method"]["select"]["p_table"] == str(file.relative_to(file.parents[2]))
    assert stored.identity["method"]["select"]["p_table"].startswith("sha256:")
    assert abs(mean_budget(stored) - 0.55) <= 0.05
    file.write_text(json.dumps({"values": [[0.9] * 4] * 2}))
    run_cell(cell)
    assert len(read_cells([cell.out])) == 2, "a changed table is another cell"


# ------------------------------------------------------------------------------------------------- bad requests
@pytest.mark.parametrize(
    "method,settings,field",
    [
        (METHODS.get("dense")(), {}, "method"),
        (CoSA(budget_target=0.5), {}, "method.budget_target"),
        (CoSA(select=Select(p_table="x")), {}, "method.select.p_table"),
        (CoSA(select=Select(rule="budget", budget=0.3)), {}, "method.select.budget"),
        (CoSA(select=Select(p=0.5)), {}, "method.select.p"),
        (CoSA(stride=0), {}, "method.stride"),
        (METHODS.get("random")(), {"per_head": True}, "calibrate.per_head"),
        (CoSA(), {"lengths": (4096,)}, "task.length"),
        (CoSA(), {"windows": 400}, "calibrate.windows"),
        (CoSA(), {"lengths": ()}, "calibrate.lengths"),
        (CoSA(), {"budgets": ()}, "calibrate.budgets"),
        (CoSA(), {"budgets": (1.0,)}, "calibrate.budgets"),
        (CoSA(), {"recalls": (0.0,)}, "calibrate.recalls"),
        (CoSA(), {"measure": "b"}, "calibrate.measure"),
        (CoSA(), {"text": "novels"}, "calibrate.text"),
        (CoSA(), {"tolerance": 0.02}, "calibrate.tolerance"),
        (CoSA(), {"steps": 1}, "calibrate.steps"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_bad_requests_are_refused_before_the_model_is_loaded(request_for, monkeypatch, method, settings, field):
    monkeypatch.setattr(run, "load_model", lambda *a: pytest.fail("loaded"))
    with pytest.raises(InputError) as stop:
        calibrate(request_for(method, **settings))
    assert stop.value.field == field
