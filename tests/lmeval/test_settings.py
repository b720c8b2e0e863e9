"""lm-eval's flat model arguments: what they reach, and what is refused before anything is loaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from evalkit.errors import InputError, MissingAsset
from evalkit.lmeval.settings import _refuse_calibration, settings

SMALL = {"pretrained": "smollm2"}


def test_knobs_are_found_by_their_own_names():
    found = settings(
        {**SMALL, "method": "cosa", "p": 0.9, "skip_scale": 2000, "stride": 4, "force_sink_diagonal": True}
    )
    method = found.cell.method
    assert (method.select.p, method.skip_scale, method.stride, method.force_sink_diagonal) == (0.9, 2000.0, 4, True)
    assert settings({**SMALL, "method": "cosa", "select.p": 0.7}).cell.method.select.p == 0.7
    assert settings({**SMALL, "method": "cosa", "order": "ascending"}).cell.method.order == "ascending"


def test_a_knob_whose_name_is_an_arguments_is_named_in_full():
    cell = settings({**SMALL, "method": "pageweaver", "page_size": 32, "method.page_size": 64, "regroup": 64}).cell
    assert (cell.execution.page_size, cell.method.page_size, cell.method.regroup) == (32, 64, "64")


def test_a_preset_keeps_what_is_not_given():
    method = settings({**SMALL, "method": "cosa-qwen3-8b", "p": 0.5}).cell.method
    assert (method.select.p, method.skip_scale) == (0.5, 2000.0)


def test_defaults():
    found = settings({**SMALL, "batch_size": 1, "device": "cuda:0", "max_batch_size": None})
    assert type(found.cell.method).__name__ == "Dense"
    assert found.cell.task.length == found.cell.model.native_context == 8192
    assert (found.max_gen_toks, found.add_bos_token, found.think_end_token, found.seed) == (256, None, None, 0)
    assert found.cell.execution.device == "auto"


def test_a_model_that_is_told_to_think_has_an_end_of_it():
    for thinking, given, end in ((True, None, "</think>"), (True, "STOP", "STOP"), (False, None, None)):
        asked = {"pretrained": "qwen3-8b", "enable_thinking": thinking, "think_end_token": given}
        assert settings(asked).think_end_token == end


def test_execution_and_model_arguments():
    found = settings(
        {**SMALL, "dtype": "float16", "backend": "torch", "page_size": 128, "chunk_size": 256, "device": "cpu"}
    )
    execution = found.cell.execution
    assert (execution.backend, execution.page_size, execution.chunk_size, execution.device) == (
        "torch",
        128,
        256,
        "cpu",
    )
    assert found.cell.model.dtype == "float16"


def test_rope_follows_max_length():
    for length, factor in ((32768, 1.0), (40000, 2.0), (131072, 4.0)):
        cell = settings({"pretrained": "Qwen/Qwen3-8B", "max_length": length}).cell
        assert cell.model.name == "qwen3-8b" and cell.model.rope_factor(cell.task.length) == factor
    with pytest.raises(InputError, match="131072") as stop:
        settings({"pretrained": "qwen3-8b", "max_length": 131073})
    assert stop.value.field == "max_length"


def test_a_local_directory_is_as_long_as_its_config_says(small_model):
    cell = settings({"pretrained": small_model}).cell
    assert cell.model.path == small_model and cell.task.length == 2048
    assert settings({"pretrained": small_model, "max_length": 1000}).cell.task.length == 1000


@pytest.mark.parametrize(
    ("arguments", "field", "says"),
    [
        ({"delta": 2000}, "delta", "skip_scale"),
        ({"method": "cosa", "skipscale": 1}, "skipscale", "skip_scale"),
        ({"method": "dense", "p": 0.9}, "p", "method dense"),
        ({"method": "coza"}, "method", "cosa"),
        ({"method": "cosa", "p": 1.5}, "select.p", "1.5"),
        ({"batch_size": 8}, "batch_size", "one unpadded sequence"),
        ({"batch_size": "auto:4"}, "batch_size", "one unpadded sequence"),
        ({"device": "cuda:1"}, "device", "CUDA_VISIBLE_DEVICES"),
        ({"chunk_size": 100}, "chunk_size", "128"),
        ({"dtype": "float8"}, "dtype", "float8"),
        ({"max_length": 0}, "max_length", "at least 1"),
        ({"max_length": 10000}, "max_length", "8192"),
        ({"max_gen_toks": "many"}, "max_gen_toks", "integer"),
        ({"add_bos_token": "yes"}, "add_bos_token", "true or false"),
        ({"seed": -1}, "seed", "at least 0"),
        ({"think_end_token": 151668}, "think_end_token", "</think>"),
        ({"pretrained": None}, "pretrained", "local directory"),
    ],
)
def test_bad_arguments_are_refused_by_their_own_names(arguments, field, says):
    with pytest.raises(InputError) as stop:
        settings({**SMALL, **arguments})
    assert stop.value.field == field and says in str(stop.value) and "\n" not in str(stop.value)


def test_a_value_of_the_wrong_type_names_the_setting():
    with pytest.raises(InputError, match=r"method\.select\.p.*Float"):
        settings({**SMALL, "method": "cosa", "p": "high"})


@pytest.mark.parametrize("name", ["calibration", "budget_target"])
def test_calibrated_values_are_refused(name):
    with pytest.raises(InputError, match="one length") as stop:
        _refuse_calibration(SimpleNamespace(**{"calibration": None, name: "some.yaml"}))
    assert stop.value.field == name
    _refuse_calibration(SimpleNamespace(calibration=None, budget_target=None))


def test_a_model_that_cannot_be_had_says_so(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MissingAsset, match=r"nobody/nothing.*smollm2"):
        settings({"pretrained": "nobody/nothing"})
