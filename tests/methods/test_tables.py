"""Tables of one number a layer and head: files, errors that name the place, and their use in CoSA."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
import torch
import yaml
from kernel_cases import paged, tensors
from transformers import LlamaConfig, LlamaForCausalLM

from evalkit.attention import Session
from evalkit.errors import InputError
from evalkit.methods import PlanContext
from evalkit.methods.cosa import CoSA, Select
from evalkit.methods.tables import load_table, table_from

VALUES = [[0.5, 0.9], [1.0, 1e-05], [0.25, 0.75]]


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_yaml_and_json_files(tmp_path, suffix, wrap):
    content = {"values": VALUES, "model": "toy"} if wrap else VALUES
    file = tmp_path / f"table.{suffix}"
    file.write_text(json.dumps(content) if suffix == "json" else yaml.safe_dump(content))
    table = load_table(str(file), "method.t", above=0, at_most=1)
    assert table.values == tuple(map(tuple, VALUES)) and (table.layers, table.heads) == (3, 2)
    row = table.row(1, torch.device("cpu"))
    assert row.dtype == torch.float64 and row.tolist() == VALUES[1]
    assert load_table(str(file), "method.t", above=0, at_most=1) is table
    file.write_text(json.dumps([[0.1]]))
    assert load_table(str(file), "method.t").values == ((0.1,),), "a changed file is read again"


@pytest.mark.parametrize(
    "rows,message",
    [
        (None, "a table"),
        ([], "a table"),
        ([[]], "a table"),
        ([0.5, 0.5], "a table"),
        ("text", "a table"),
        ([[0.5, 0.5], [0.5]], r"layer 1 \(1\) as in layer 0 \(2\)"),
        ([[0.5], [0.0]], "layer 1, head 0 is 0.0"),
        ([[1.01]], "layer 0, head 0 is 1.01"),
        ([[0.5, float("nan")]], "layer 0, head 1 is nan"),
        ([[True]], "layer 0, head 0 is True"),
        ([["0.5"]], "layer 0, head 0 is '0.5'"),
    ],
)
def test_what_is_no_table_is_refused(rows, message):
    with pytest.raises(InputError, match=message) as stop:
        table_from(rows, "file", "method.t", above=0, at_most=1)
    assert stop.value.field == "method.t"


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(InputError, match="method.t=.*readable table file"):
        load_table(str(tmp_path / "none.yaml"), "method.t")
    for name in ("broken.yaml", "broken.json"):
        (tmp_path / name).write_text("[[0.5, ")
        with pytest.raises(InputError, match="YAML or JSON table"):
            load_table(str(tmp_path / name), "method.t")


# -------------------------------------------------------------------------------------------------------- in CoSA
def table_file(tmp_path, values) -> str:
    file = tmp_path / "p.yaml"
    file.write_text(yaml.safe_dump(values))
    return str(file)


def test_cosa_takes_each_heads_own_p(tmp_path):
    values = [[0.9] * 6, [0.2, 0.9, 1.0, 0.5, 0.7, 0.4]]
    method = CoSA(block_size=64, select=Select(p_table=table_file(tmp_path, values)))
    method.validate()
    q, k, v = tensors(600, 6, 2, 16, block=64, uneven=False)
    kv = paged(k, v, 32)
    for layer, row in enumerate(values):
        context = PlanContext(layer, 0, 600, 0.25, "torch")
        plan = method.plan(q, kv, context)
        plan.check()
        for head, p in enumerate(row):
            alone = CoSA(block_size=64, select=Select(p=p)).plan(q, kv, context)
            assert torch.equal(plan.order[:, head], alone.order[:, head])
    assert pickle.loads(pickle.dumps(method)) == method


def test_a_table_of_another_shape_fails_before_the_first_call(tmp_path):
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config)
    method = CoSA(select=Select(p_table=table_file(tmp_path, [[0.5, 0.5]] * 2)))
    Session(model, method)
    for shape in ([[0.5, 0.5]] * 3, [[0.5]] * 2):
        other = replace(method, select=Select(p_table=table_file(tmp_path, shape)))
        with pytest.raises(InputError, match=r"method.select.p_table=.*2 layers x 2 query heads"):
            Session(model, other)


def test_a_table_belongs_to_top_p():
    with pytest.raises(InputError, match="method.select.p_table='x': null unless method.select.rule=top_p"):
        CoSA(select=Select(rule="budget", budget=0.5, p_table="x")).validate()
