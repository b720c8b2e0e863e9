"""MInference: what its settings and tables make of a prompt, and what it costs."""

from __future__ import annotations

import json
from dataclasses import replace

import literal_vertical_slash as literal
import pytest
import torch
from kernel_cases import paged, tensors
from prefill_kernels import BlockPlan, HeadwisePlan, VerticalSlashPlan, causal_cells, dense_attention, sparse_attention
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from evalkit.attention import Session
from evalkit.budget import BudgetMeter
from evalkit.errors import InputError
from evalkit.methods.base import PlanContext
from evalkit.methods.head_patterns import HeadPattern, load_patterns, table_text
from evalkit.methods.minference import MInference, fitted, pattern_plan

LENGTH, HEADS, KV_HEADS, SCALE = 260, 4, 2, 0.25
CONTEXT = PlanContext(layer=0, q_offset=0, prompt_len=LENGTH, scale=SCALE, backend="torch")
BASE = MInference(vertical_size=40, slash_size=120)
SIZES = {"vertical_size": 1000, "slash_size": 6096}  # the defaults: what takes their place refuses others
MIXED = [
    HeadPattern("vertical_slash", (35, 110)),
    HeadPattern("a_shape", (4, 50)),
    HeadPattern("block_sparse", (2,)),
    HeadPattern("vertical_slash", (50, 60)),
]


def inputs(seed: int = 4):
    q, k, v = tensors(LENGTH, HEADS, KV_HEADS, 16, block=16, seed=seed)
    return q, k, v, paged(k, v, 32)


def as_lists(lists):
    return [[x for x in row if x >= 0] for row in lists[0].tolist()]


def literal_lists(q, k, head, columns, slashes, scale=SCALE, last_q=64):
    kv_head = head // (HEADS // KV_HEADS)
    mass = literal.last_query_mass(q[0, head : head + 1], k[0, kv_head : kv_head + 1], scale, last_q)
    return (
        literal.largest(mass[0][0].tolist(), columns, 30),
        literal.largest(mass[1][0].tolist(), slashes, 100),
    )


def write(path, layers):
    path.write_text(table_text(layers, {"model": "toy"}))
    return str(path)


# ------------------------------------------------------------------------------------------------------- the plan
@pytest.mark.parametrize(
    "change,sizes",
    [
        ({}, (40, 120)),
        ({"vertical_size": 70}, (70, 120)),
        ({"slash_size": 180}, (40, 180)),
        ({"ratio": 1.5}, (60, 180)),
        ({"ratio": 0.01}, (30, 50)),  # least sizes
        ({"ratio": 100.0}, (LENGTH, LENGTH)),
        ({"adaptive_budget": 0.7, **SIZES}, (36, 145)),  # int(0.2 * 0.7 * 260), int(0.8 * 0.7 * 260)
        ({"adaptive_budget": 1.0, **SIZES}, (30, LENGTH)),
        ({"block_size": 128}, (40, 120)),
        ({"last_q": 20}, (40, 120)),
    ],
    ids=str,
)
def test_each_knob_reaches_the_plan(change, sizes):
    method = replace(BASE, **change)
    method.validate()
    q, k, _, kv = inputs()
    plan = method.plan(q, kv, CONTEXT)
    assert isinstance(plan, VerticalSlashPlan)
    plan.check()
    assert (plan.block_size, plan.length) == (method.block_size, LENGTH)
    columns, slashes = as_lists(plan.columns), as_lists(plan.slashes)
    for h in range(HEADS):
        assert (columns[h], slashes[h]) == literal_lists(q, k, h, *sizes, last_q=method.last_q)


def test_block_execution_attends_to_more_for_the_same_work():
    q, _, v, kv = inputs()
    spent = []
    for execution in ("token", "block"):
        plan = replace(BASE, execution=execution).plan(q, kv, CONTEXT)
        assert isinstance(plan, VerticalSlashPlan) and plan.whole_windows == (execution == "block")
        spent.append(sparse_attention(q, kv, plan, scale=SCALE)[1])
    assert (spent[0].computed_cells < spent[1].computed_cells).any()
    assert torch.equal(spent[0].computed_blocks, spent[1].computed_blocks)
    mixed = pattern_plan(q, kv, MIXED, block_size=64, scale=SCALE, whole_windows=True)
    assert isinstance(mixed, HeadwisePlan) and mixed.parts[0].whole_windows


def test_forced_positions_and_the_modules_scaling():
    q, k, _, kv = inputs()
    plan = BASE.plan(q, kv, CONTEXT)
    other = BASE.plan(q, kv, replace(CONTEXT, scale=3.0))
    assert not torch.equal(plan.columns, other.columns)
    for p in (plan, other):
        for columns, slashes in zip(as_lists(p.columns), as_lists(p.slashes), strict=True):
            assert columns[:30] == list(range(30)) and slashes[:100] == list(range(100))
    assert as_lists(other.columns)[1] == literal_lists(q, k, 1, 40, 120, scale=3.0)[0]


def test_defaults_are_the_published_ones():
    method = MInference()
    assert (method.vertical_size, method.slash_size, method.last_q, method.block_size) == (1000, 6096, 64, 64)
    assert not method.chunkable
    assert method.patterns(0, 2, 131072) == (HeadPattern("vertical_slash", (1000, 6096)),) * 2
    adaptive = MInference(adaptive_budget=0.3).patterns(0, 1, 100000)[0]
    assert adaptive.sizes == (6000, 24000)  # 0.06 L and 0.24 L
    assert "covers every diagonal" in method.warnings(4096)[0] and method.warnings(8192) == []


def test_each_head_follows_its_own_pattern():
    q, k, v, kv = inputs()
    plan = pattern_plan(q, kv, MIXED, block_size=64, scale=SCALE)
    assert isinstance(plan, HeadwisePlan)
    plan.check()
    lines, blocks = plan.parts
    assert isinstance(lines, VerticalSlashPlan) and isinstance(blocks, BlockPlan)
    columns, slashes = as_lists(lines.columns), as_lists(lines.slashes)
    assert (columns[0], slashes[0]) == literal_lists(q, k, 0, 35, 110)
    assert (columns[1], slashes[1]) == (list(range(4)), list(range(50)))
    assert (columns[2], slashes[2]) == ([], [])
    assert (columns[3], slashes[3]) == literal_lists(q, k, 3, 50, 60)
    want = literal.pooled_blocks(q[0, 2:3], k[0, 1:2], 64, 2, SCALE)[0]
    assert [[j for j in row if j >= 0] for row in blocks.order[0, 2].tolist()] == want
    assert int(blocks.count[0, [0, 1, 3]].sum()) == 0
    out, _ = sparse_attention(q, kv, plan, scale=SCALE)
    # An A-shape head sees its first 4 tokens and a window of 50, its own token among them.
    for i in (0, 3, 49, 50, 51, 200, 259):
        keys = sorted({*range(min(4, i + 1)), *range(max(0, i - 49), i + 1)})
        weights = (q[0, 1, i].double() @ k[0, 0, keys].double().T * SCALE).softmax(-1)
        torch.testing.assert_close(out[0, 1, i].double(), weights @ v[0, 0, keys].double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vertical_slash", "a_shape", "block_sparse"])
def test_one_pattern_alone_needs_no_headwise_plan(name):
    q, _, _, kv = inputs()
    pattern = next(p for p in MIXED if p.name == name)
    plan = pattern_plan(q, kv, [pattern] * HEADS, block_size=64, scale=SCALE)
    plan.check()
    assert isinstance(plan, BlockPlan if name == "block_sparse" else VerticalSlashPlan)


def test_a_planted_structure_is_kept_and_the_output_stays_near_dense():
    """A sink, a vertical line and a diagonal carry all attention: a tenth of the cells gives the dense output."""
    length, dim, offset, line = 600, 64, 333, 250
    g = torch.Generator().manual_seed(0)
    codes = torch.randn(length + offset, dim - 2, generator=g)
    codes /= codes.norm(dim=-1, keepdim=True)
    q = torch.zeros(1, 3, length, dim)
    k = torch.zeros(1, 1, length, dim)
    q[..., :-2], k[..., :-2] = 40 * codes[:length], 2 * codes[offset : offset + length]
    q[..., -2:] = 10.0
    k[0, 0, line, -2] = k[0, 0, 0, -1] = 7.5
    v = torch.randn(1, 1, length, dim, generator=g)
    kv = paged(k, v, 64)
    dense = dense_attention(q, k, v, scale=1.0)
    method = MInference(vertical_size=31, slash_size=101)
    context = replace(CONTEXT, prompt_len=length, scale=1.0)
    plan = method.plan(q, kv, context)
    assert as_lists(plan.columns)[0] == [*range(30), line]
    assert as_lists(plan.slashes)[0] == [*range(100), offset]
    out, _ = sparse_attention(q, kv, plan, scale=1.0)
    late = slice(offset, length)
    assert (out - dense)[:, :, late].norm() < 0.02 * dense[:, :, late].norm()
    without = pattern_plan(q, kv, [HeadPattern("a_shape", (31, 101))] * 3, block_size=64, scale=1.0)
    out, _ = sparse_attention(q, kv, without, scale=1.0)
    assert (out - dense)[:, :, late].norm() > 0.3 * dense[:, :, late].norm()


# -------------------------------------------------------------------------------------------------------- budget
@pytest.mark.parametrize("patterns", [[MIXED[0]] * HEADS, [MIXED[1]] * HEADS, [MIXED[2]] * HEADS, MIXED], ids=str)
def test_density_equals_a_brute_force_mask(patterns):
    q, _, _, kv = inputs()
    plan = pattern_plan(q, kv, patterns, block_size=64, scale=SCALE)
    _, stats = sparse_attention(q, kv, plan, scale=SCALE)
    meter = BudgetMeter(1, HEADS, 64)
    meter.add_sparse(0, 0, LENGTH, stats, 5)
    frame = meter.read().frame()
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    for h in range(HEADS):
        mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
        for part in plan.parts if isinstance(plan, HeadwisePlan) else (plan,):
            if isinstance(part, VerticalSlashPlan):
                for i in range(LENGTH):
                    for j in literal.keys_of(i, as_lists(part.columns)[h], as_lists(part.slashes)[h]):
                        mask[i, j] = True
            else:
                for t, row in enumerate(part.order[0, h].tolist()):
                    for j in (x for x in row if x >= 0):
                        mask[t * 64 : (t + 1) * 64, j * 64 : (j + 1) * 64] = True
        assert frame["computed"][h] == frame["visited"][h] == int((mask & causal).sum())
    record = meter.read().record()
    assert 0 < record["B"] < 1 and 0 < record["B_block"] <= 1


@pytest.mark.parametrize(
    "name,made,other", [("execution", "token", "block"), ("block_size", 64, 128), ("last_q", 64, 32)]
)
def test_a_searched_table_holds_for_what_it_was_searched_with(tmp_path, name, made, other):
    search = {"block_size": 64, "last_q": 64, "execution": "token"}
    path = tmp_path / "t.yaml"
    path.write_text(table_text([MIXED], {"search": search}))
    MInference(table=str(path)).validate()
    with pytest.raises(InputError, match=f"method.{name}={other!r}: {made}, of which .*t.yaml was made"):
        MInference(table=str(path), **{name: other}).validate()


def test_both_executions_cost_the_same_products():
    """Token execution masks what block execution attends to: B differs, the work does not."""
    q, _, _, kv = inputs()
    records = []
    for whole in (False, True):
        plan = pattern_plan(q, kv, MIXED, block_size=64, scale=SCALE, whole_windows=whole)
        meter = BudgetMeter(1, HEADS, 64)
        meter.add_sparse(0, 0, LENGTH, sparse_attention(q, kv, plan, scale=SCALE)[1], 5)
        records.append(meter.read().record())
    token, block = records
    assert token["B"] < block["B"] and token["masked"] > 0 and block["masked"] == 0
    assert token["B_cost"] == pytest.approx(block["B_cost"], rel=1e-12)
    assert token["B_cost"] == pytest.approx(token["B"] + token["masked"] + token["estimator"])
    assert token["B_block"] == block["B_block"]


def test_estimator_cells():
    length = 300
    whole = MInference()
    pairs = sum(i + 1 for i in range(length - 64, length))
    assert whole.estimator_cells(0, length) == pairs == causal_cells(length - 64, 64)
    assert whole.estimator_cells(0, 10) == 55 and replace(whole, last_q=1).estimator_cells(0, length) == length
    assert MInference().estimator_cells(0, 131072) == pytest.approx(64 * 131072, rel=1e-3)


def test_estimator_cells_of_a_table_are_the_mean_of_its_heads(tmp_path):
    method = MInference(table=write(tmp_path / "t.yaml", [MIXED, MIXED]))
    each = causal_cells(300 - 64, 64), 0, 5 * 6 // 2, causal_cells(300 - 64, 64)
    assert method.estimator_cells(0, 300) == round(sum(each) / 4)


# --------------------------------------------------------------------------------------------------------- models
def small_model(kind: str):
    config_class, model_class = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[
        kind
    ]
    torch.manual_seed(2)
    config = config_class(
        vocab_size=89, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=1024, initializer_range=0.2,
        attn_implementation="sdpa",
    )  # fmt: skip
    return model_class(config).eval()


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_table_that_keeps_everything_is_dense_and_one_that_does_not_is_not(kind, tmp_path):
    model = small_model(kind)
    ids = torch.randint(0, 89, (301,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        own = model(ids[None]).logits[0]
    everything = [
        HeadPattern("vertical_slash", (0, 301)),
        HeadPattern("a_shape", (0, 301)),
        HeadPattern("block_sparse", (5,)),
        HeadPattern("a_shape", (301, 1)),
    ]
    spent = []
    for name, layers in (("all", [everything, everything[::-1]]), ("some", [MIXED, MIXED[::-1]])):
        method = MInference(table=write(tmp_path / f"{name}.yaml", layers))
        with Session(model, method, page_size=32, page_shuffle=3) as session:
            got = session.logits(session.prefill(ids, keep_from=0))
            account = session.account()
        spent.append(((got - own).abs().max(), account.budget.record()["B"]))
        assert account.calls["sparse"] == 2
    assert spent[0][0] <= 1e-4 and spent[0][1] == 1.0
    assert spent[1][0] > 1e-2 and spent[1][1] < 0.7


def test_what_does_not_fit_a_model_is_refused_before_it_runs(tmp_path):
    model = small_model("qwen3")
    with pytest.raises(InputError, match="method.table=.*2 layers x 4 query heads for this model .*it has 1 x 4"):
        Session(model, MInference(table=write(tmp_path / "t.yaml", [MIXED])))
    with pytest.raises(InputError, match="plans from the whole prompt"):
        Session(model, MInference(), chunk_size=128)


# -------------------------------------------------------------------------------------------------------- tables
def test_a_table_names_the_pattern_of_each_layer_and_head(tmp_path):
    path = write(tmp_path / "t.yaml", [MIXED, MIXED[::-1]])
    assert load_patterns(path, "method.table").heads == (tuple(MIXED), tuple(MIXED[::-1]))
    method = MInference(table=path, ratio=2.0)
    method.validate()
    method.check_model(2, 4)
    assert method.patterns(1, 4, 1000) == (
        HeadPattern("vertical_slash", (100, 120)),
        HeadPattern("block_sparse", (4,)),
        HeadPattern("a_shape", (8, 100)),
        HeadPattern("vertical_slash", (70, 220)),
    )
    for shape in ((3, 4), (2, 8)):
        with pytest.raises(
            InputError, match=rf"method.table='.*t.yaml': a table of {shape[0]} layers x {shape[1]} .*2 x 4"
        ):
            method.check_model(*shape)


def test_published_configurations_are_read(tmp_path):
    layer = {
        "1": ["stream_llm", 100, 800, 0.9],
        "0": ["vertical_and_slash", 3500, 100, 0.67],
        "2": ["block_sparse", 1000, 6096, 0.5],
    }
    path = tmp_path / "published.json"
    path.write_text(json.dumps([layer, layer]))
    table = load_patterns(str(path), "method.table")
    row = (
        HeadPattern("vertical_slash", (3500, 100)),
        HeadPattern("a_shape", (100, 800)),
        HeadPattern("block_sparse", (100,)),
    )
    assert table.heads == (row, row)
    assert table.counts()[row[0]] == 2


def test_a_changed_table_is_read_again(tmp_path):
    path = tmp_path / "t.yaml"
    write(path, [MIXED])
    assert load_patterns(str(path), "f").heads[0][1].sizes == (4, 50)
    write(path, [[*MIXED, MIXED[0]]])
    assert len(load_patterns(str(path), "f").heads[0]) == 5


@pytest.mark.parametrize(
    "text,said",
    [
        (None, "a readable table file"),
        ("{a: [", "a YAML or JSON table"),
        ("{}", "a table: patterns"),
        ("patterns: []", "a table: patterns"),
        ("patterns: [3]", r"a list with one pattern for each head \(layer 0\)"),
        ("patterns: [[[a_shape, 1, 2]], [[a_shape, 1, 2], [a_shape, 1, 2]]]", r"layer 1 \(2\) as in layer 0 \(1\)"),
        ("patterns: [[[a_shap, 1, 2]]]", "layer 0, head 0 is 'a_shap'.*did you mean a_shape"),
        ("patterns: [[[a_shape, 1]]]", "initial tokens and window tokens"),
        ("patterns: [[[a_shape, 1, -2]]]", "whole numbers"),
        ("patterns: [[[block_sparse, 1.5]]]", "whole numbers of blocks"),
        ("patterns: [[3]]", r"\[pattern, size, ...\] \(layer 0, head 0 is 3\)"),
        ('[{"0": ["vertical_and_slash", 1, 2, 0.5], "2": ["vertical_and_slash", 1, 2, 0.5]}]', "heads 0, 1, 2"),
        ('[{"0": ["vertical_and_slash", 1]}]', "known pattern"),
    ],
)
def test_tables_that_cannot_be_used_are_named(tmp_path, text, said):
    path = tmp_path / "t.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=said) as stop:
        MInference(table=str(path)).validate()
    assert stop.value.field == "method.table"


@pytest.mark.parametrize(
    "change,field",
    [
        ({"block_size": 32}, "method.block_size=32"),
        ({"vertical_size": 0}, "method.vertical_size=0"),
        ({"slash_size": 0}, "method.slash_size=0"),
        ({"adaptive_budget": 0.0}, "method.adaptive_budget=0.0"),
        ({"adaptive_budget": 1.1}, "method.adaptive_budget=1.1"),
        ({"adaptive_budget": 0.5, "table": "x"}, "method.adaptive_budget=0.5: null with method.table"),
        ({"adaptive_budget": 0.5}, "method.vertical_size=40: 1000, its default, with method.adaptive_budget=0.5"),
        (
            {"adaptive_budget": 0.5, "vertical_size": 1000},
            "method.slash_size=120: 6096, its default, with method.adaptive_budget=0.5",
        ),
        ({"table": "x"}, "method.vertical_size=40: 1000, its default, with method.table='x'"),
        ({"table": "x", "vertical_size": 1000}, "method.slash_size=120: 6096, its default, with method.table='x'"),
        ({"ratio": 0.0}, "method.ratio=0.0"),
        ({"ratio": float("nan")}, "method.ratio=nan"),
        ({"last_q": 0}, "method.last_q=0"),
        ({"last_q": 129}, "method.last_q=129"),
        ({"execution": "blok"}, "method.execution='blok': did you mean block"),
    ],
)
def test_values_out_of_range_are_named(change, field):
    with pytest.raises(InputError, match=field):
        replace(BASE, **change).validate()


def test_sizes_are_fitted_to_the_prompt():
    assert fitted(HeadPattern("vertical_slash", (10, 9999)), 200, 64) == HeadPattern("vertical_slash", (30, 200))
    assert fitted(HeadPattern("vertical_slash", (10, 10)), 20, 64) == HeadPattern("vertical_slash", (20, 20))
    assert fitted(HeadPattern("a_shape", (0, 0)), 200, 64) == HeadPattern("a_shape", (0, 1))
    assert fitted(HeadPattern("block_sparse", (100,)), 200, 64) == HeadPattern("block_sparse", (4,))
    assert fitted(HeadPattern("block_sparse", (100,)), 6400, 64, 0.001) == HeadPattern("block_sparse", (1,))
