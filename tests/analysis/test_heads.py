from __future__ import annotations

import pandas as pd
import pytest
import torch
from prefill_kernels import BlockPlan, DensePlan, dense_attention
from prefill_kernels.bench.config import BenchError

from evalkit.analysis import heads, work
from evalkit.analysis.heads import head_sums, summarise
from evalkit.analysis.settings import HeadsAnalysis
from evalkit.attention import Session
from evalkit.bench.settings import MethodsBench, TtftBench
from evalkit.calibration.disjoint import Fingerprints
from evalkit.calibration.file import Calibration, Entry, fixed_settings, path_of
from evalkit.errors import InputError
from evalkit.methods.cosa import CoSA, Select
from evalkit.methods.presets import from_text, preset
from evalkit.methods.streaming import Streaming


def test_error_and_budget_of_a_planted_plan(call_inputs):
    q, kv, context = call_inputs(length=256)
    dense = dense_attention(q, *kv.gather(), scale=context.scale)
    # Head 0 leaves out block 0 for tile 3; the others keep everything.
    order = torch.full((1, 4, 4, 4), -1, dtype=torch.int32)
    for tile in range(4):
        order[:, :, tile, : tile + 1] = torch.arange(tile + 1)
    order[0, 0, 3] = torch.tensor([1, 2, 3, -1])
    plan = BlockPlan(order, (order >= 0).sum(-1).int(), 64, 0, 256, 256, 256)
    frame = head_sums(plan, Streaming(64), q, kv, context, dense)
    assert frame["dense"].tolist() == [256 * 257 // 2] * 4 and frame["dense_blocks"].tolist() == [10] * 4
    assert frame["computed"].tolist() == [256 * 257 // 2 - 64 * 64] + [256 * 257 // 2] * 3
    assert frame["computed_blocks"].tolist() == [9, 10, 10, 10]
    k, v = (x.repeat_interleave(2, 1)[0, 0] for x in kv.gather())
    logits = q[0, 0] @ k.T * context.scale
    logits.masked_fill_(torch.ones(256, 256).triu(1).bool(), -torch.inf)
    logits[192:, :64] = -torch.inf
    expected = (logits.softmax(-1) @ v - dense[0, 0]).double().square().sum()
    assert frame["square_error"][0] == pytest.approx(float(expected), rel=1e-4)
    assert frame["square_error"][1:].max() < 1e-8
    assert frame["square_norm"].tolist() == pytest.approx(dense[0].double().square().sum((1, 2)).tolist())
    fallback = head_sums(DensePlan("fallback"), Streaming(64), q, kv, context, dense)
    assert (fallback["computed"] == fallback["dense"]).all() and (fallback["square_error"] == 0).all()


def test_prompts_are_pooled_as_sums():
    rows = [("m", 0, 0, 10, 8, 4, 4, 2, 1.0, 4.0), ("m", 0, 0, 30, 30, 30, 12, 12, 8.0, 32.0)]
    table = summarise(pd.DataFrame(rows, columns=["method", "layer", "head", *heads.SUMS]))
    (row,) = table.to_dict("records")
    assert row["B"] == pytest.approx(34 / 40) and row["B_stage1"] == pytest.approx(38 / 40)
    assert row["B_block"] == pytest.approx(14 / 16) and row["error"] == pytest.approx((9 / 36) ** 0.5)


@pytest.mark.parametrize("states", ["dense", "own"])
def test_whole_analysis(settings_for, states, capsys):
    methods = ("cosa:select.p=0.6:block_size=64", "streaming:window_blocks=2:block_size=64")
    settings = settings_for(HeadsAnalysis, methods=methods, states=states, samples=1)
    assert heads.run(settings, "evalkit analyze heads") == 0
    table = pd.read_csv("out/heads.csv")
    assert len(table) == 2 * 2 * 4 and (table["error"] > 0).all() and table["B"].between(0.05, 0.99).all()
    assert "worst" in capsys.readouterr().out
    # Budgets of a run of its own: in the first layer the inputs are the same, later ones only with own states.
    bench = heads.Workbench(settings, "check", "c", [heads])
    with Session(bench.model, CoSA(64, select=Select(p=0.6))) as session:
        session.prefill(torch.tensor(bench.prompts[0].ids), keep_from=0)
        frame = session.account().budget.frame()
    mine = table[table["method"] == methods[0]].reset_index(drop=True)
    match = (mine["B"] - frame["computed"] / frame["dense"]).abs() < 1e-7
    assert match[frame["layer"] == 0].all()
    assert match.all() == (states == "own")


# ------------------------------------------------------------------------------------------------------ calibrations
PRESET = "cosa-llama-3.1-8b"


def calibrate(weights, value=0.7, length=640):
    """The file that the preset asks for."""
    method = preset(PRESET)
    header = {
        "model": {"name": "tiny", "weights": weights},
        "method": fixed_settings(method),
        "knob": "select.p",
        "text": {"corpus": "essays", "sha256": "t", "fingerprints": Fingerprints.of([]).plain()},
    }
    entry = Entry(length, "budget", 0.4, "B", 0.4, value)
    Calibration(path_of(method.calibration, "tiny", method), header, (entry,)).write()


def test_a_preset_without_its_calibration_is_refused(settings_for):
    with pytest.raises(
        InputError, match=f"needs the calibration results/calibration/tiny/{PRESET}.yaml, which is missing"
    ) as error:
        settings_for(HeadsAnalysis, methods=(PRESET,))
    assert error.value.field == "methods" and error.value.value == PRESET
    assert f"run: evalkit calibrate preset={PRESET} model=tiny" in error.value.allowed
    assert "calibrate.lengths=[640]" in error.value.allowed


def test_a_calibrated_preset_takes_the_value_of_model_and_length(settings_for):
    calibrate("w")
    settings = settings_for(HeadsAnalysis, methods=(PRESET, "cosa"))
    built = settings.built()
    assert built[PRESET].select.p == 0.7 and built[PRESET].skip_scale == 200.0
    assert built["cosa"] == preset("cosa")
    first = heads.identity(built)
    calibrate("w", value=0.8)
    second = heads.identity(settings.built())
    assert first["cosa"] == second["cosa"] and first[PRESET] != second[PRESET], "another value is another part"
    with pytest.raises(InputError, match="has no value for 512 tokens"):
        settings_for(HeadsAnalysis, methods=(PRESET,), length=512)


def test_a_calibration_of_other_weights_is_refused_before_they_are_loaded(settings_for, monkeypatch):
    monkeypatch.setattr(work, "load_model", None)
    calibrate("others")
    with pytest.raises(InputError, match=f"^methods='{PRESET}': .*a calibration of these weights"):
        heads.run(settings_for(HeadsAnalysis, methods=(PRESET,)), "c")


def test_a_table_of_another_content_is_another_part(tmp_path, settings_for):
    file = tmp_path / "table.yaml"
    contents = []
    for threshold in (0.8, 0.9):
        file.write_text(str([[threshold] * 4] * 2))
        contents.append(
            heads.identity(settings_for(HeadsAnalysis, methods=(f"xattention:threshold_table={file}",)).built())
        )
    assert contents[0] != contents[1]


@pytest.mark.parametrize("text", ["cosa-llama-3.1-8b", "cosa-llama-3.1-8b:skip_scale=100"])
def test_where_there_is_no_model_a_preset_of_a_calibration_is_refused(text):
    with pytest.raises(InputError, match="method.calibration=.*: no preset that a model's calibration sets") as error:
        from_text(text, "variants")
    assert "select.p=..." in error.value.allowed
    for make in (TtftBench, MethodsBench):
        with pytest.raises(BenchError, match="no preset that a model's calibration sets"):
            make(variants=(text,)).methods()
