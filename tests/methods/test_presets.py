"""Methods by name without Hydra: the presets as Hydra composes them, and settings behind a name."""

from __future__ import annotations

import re

import pytest

from evalkit.config import table_named
from evalkit.errors import InputError
from evalkit.methods import METHODS, catalog, presets
from evalkit.methods.cosa import CoSA, Select
from evalkit.methods.presets import described, from_text, preset
from evalkit.methods.xattention import XAttention


def test_presets_are_those_that_hydra_composes():
    composed = catalog.preset_methods()
    assert presets.names() == sorted(composed)
    assert {name: preset(name) for name in composed} == composed
    assert preset("cosa-iks") != preset("cosa"), "values of the presets it is made of, and its own"


def test_without_presets_the_defaults_are_left(monkeypatch):
    monkeypatch.setattr(presets, "_preset_files", dict)
    assert presets.names() == sorted(METHODS)
    assert preset("minference") == METHODS.get("minference")()


def test_settings_behind_a_name():
    assert from_text("xattention") == XAttention()
    assert from_text("xattention:stride=16:threshold=0.95") == XAttention(stride=16, threshold=0.95)
    assert from_text("cosa:select.rule=budget:select.budget=0.2:force_sink_diagonal=true") == CoSA(
        select=Select(rule="budget", budget=0.2), force_sink_diagonal=True
    )
    assert from_text("minference-adaptive:adaptive_budget=null").adaptive_budget is None
    whole = from_text("blasst:skip_scale=2")
    assert isinstance(whole.skip_scale, float) and isinstance(from_text("random:seed=3").seed, int)


WRONG = {
    "xatention": "variants='xatention': did you mean xattention",
    "xattention:stride": "variants='xattention:stride': method='stride': setting=value behind the preset",
    "xattention:stide=8": "method.stide='8': unknown setting; did you mean stride",
    "xattention:stride=8.5": "method.stride='8.5': a number (int)",
    "xattention:threshold=high": "method.threshold='high': a number (float)",
    "xattention:threshold=2": "method.threshold=2.0: above 0, at most 1",
    "cosa:select=top_p": "method.select='top_p': unknown setting",
    "cosa:select.q=1": "method.select.q='1': unknown setting; known: budget, p, p_table, rule",
    "cosa:stride.p=1": "method.stride.p='1': unknown setting",
    "cosa:force_sink_diagonal=yes": "true or false",
    "xattention:budget_target=0.2": "give the calibrated value itself",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_cannot_be_used_is_named(text):
    with pytest.raises(InputError, match=re.escape(WRONG[text])) as error:
        from_text(text, "variants")
    assert error.value.field == "variants" and error.value.value == text


def test_description_shows_what_acts():
    assert described(from_text("xattention")) == "stride=8 threshold=0.9"
    assert described(from_text("flexprefill")) == "gamma=0.95 tau=0.1 min_budget=1024"
    assert described(from_text("flexprefill:tau=0")) == "gamma=0.95 tau=0 min_budget=1024"
    assert described(from_text("blasst:order=descending")) == "order=descending skip_scale=1000"
    assert described(from_text("minference")).startswith("block_size=64 vertical_size=1000 slash_size=6096 ratio=1 ")
    cosa = described(from_text("cosa:select.rule=budget:select.budget=0.2"))
    assert cosa == "proxy=kap stride=8 select.rule=budget select.budget=0.2 order=hrm_first share=query_head"
    assert "skip_scale=500" in described(from_text("cosa:skip_scale=500"))
    assert "select.p=0.95" in described(from_text("cosa"))


def test_files_for_one_model_are_found(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text("[[0.9]]")
    assert table_named(from_text(f"xattention:threshold_table={path}")) == "threshold_table"
    assert table_named(from_text(f"cosa:select.p_table={path}")) == "select.p_table"
    assert table_named(from_text("cosa")) is None
