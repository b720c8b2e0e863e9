"""`evalkit run method=...` composes the block-selection baselines and names what is wrong with a setting."""

import pytest
from transformers import LlamaConfig

KNOBS = {
    "xattention": ("method.threshold=0.8", "threshold", 0.8),
    "flexprefill": ("method.gamma=0.9", "gamma", 0.9),
    "flashprefill": ("method.alpha=0.18", "alpha", 0.18),
    "spargeattn": ("method.pv_threshold=null", "pv_threshold", None),
}


@pytest.mark.parametrize("name", list(KNOBS))
def test_one_cell(application, name):
    override, field, value = KNOBS[name]
    assert application(f"method={name}", "task=perplexity", override) == 0
    (cell,) = application.cells
    assert cell.method.name == name and getattr(cell.method, field) == value


def test_a_missing_table_and_a_bad_stride_are_named(application, capsys):
    assert application("method=xattention", "task=perplexity", "method.threshold_table=none.yaml") != 0
    assert "method.threshold_table='none.yaml'" in capsys.readouterr().err
    assert application("-m", "method=xattention", "task=perplexity", "method.stride=8,5") != 0
    assert "method.stride=5: one of 4, 8, 16" in capsys.readouterr().err


@pytest.mark.parametrize("extra", [[], ["--dry-run"]])
def test_a_table_of_another_shape_is_refused_where_the_models_config_is_at_hand(application, capsys, tmp_path, extra):
    LlamaConfig(num_hidden_layers=2, num_attention_heads=4).save_pretrained(tmp_path)  # no weights
    (tmp_path / "t.json").write_text("[[0.9, 0.8]]")
    model = ["model=smollm2", "model.package=null", f"model.path={tmp_path}"]
    table = f"method.threshold_table={tmp_path / 't.json'}"
    assert application("method=xattention", "task=perplexity", *model, table, *extra) != 0
    assert "2 layers x 4 query heads, as this model has (it is 1 x 2)" in capsys.readouterr().err
    assert application.cells == []


@pytest.mark.parametrize("name", ["flexprefill", "spargeattn"])
def test_chunks_are_refused_before_anything_runs(application, capsys, name):
    assert application(f"method={name}", "task=perplexity", "execution.chunk_size=1024") != 0
    assert "execution.chunk_size=1024" in capsys.readouterr().err and application.cells == []
