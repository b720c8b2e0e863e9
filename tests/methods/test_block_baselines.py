"""XAttention, FlexPrefill, FlashPrefill and SpargeAttn: plans and budgets against the literal selections."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import literal_proxies
import pytest
import torch
from prefill_kernels import BlockPlan, DensePlan, PagedKV, block_attention

from evalkit.budget import BudgetMeter
from evalkit.errors import InputError
from evalkit.methods import METHODS
from evalkit.methods.base import PlanContext
from evalkit.methods.flashprefill import FlashPrefill
from evalkit.methods.flexprefill import FlexPrefill
from evalkit.methods.spargeattn import SpargeAttn
from evalkit.methods.xattention import XAttention

# Blocks of 16 tokens, which no command accepts, keep the literal loops short.
B, D, SCALE = 16, 8, 0.35
BASE = [
    XAttention(block_size=B, stride=16, threshold=0.7),
    FlexPrefill(block_size=B, gamma=0.6, tau=0.4, min_budget=16),
    FlashPrefill(block_size=B, alpha=0.7, sink=1, window=1, last_full=1),
    SpargeAttn(block_size=B, tau=0.9, theta=0.45, pv_threshold=None),
]
BY_NAME = {method.name: method for method in BASE}
LENGTHS = [1, 15, 16, 17, 50, 97]


def inputs(length: int, q_heads: int = 4, kv_heads: int = 2, seed: int = 0):
    """Blocks of rows around a direction of their own, some closely and some not; even heads only loosely."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for heads in (q_heads, kv_heads):
        centre = torch.randn(1, heads, math.ceil(length / B), D, generator=g)
        spread = torch.rand(1, heads, math.ceil(length / B), 1, generator=g) * 2
        each = torch.arange(length) // B
        found.append(1.5 * centre[:, :, each] + spread[:, :, each] * torch.randn(1, heads, length, D, generator=g))
    return found[0], found[1]


def run(method, q, k, *, scale=SCALE, backend="torch", layer=0, offset=0, prompt_len=None):
    kv = PagedKV.from_dense(k, k, 32, generator=torch.Generator().manual_seed(1))
    return kv, method.plan(q, kv, PlanContext(layer, offset, prompt_len or k.shape[2], scale, backend))


def sets(plan: BlockPlan) -> list[list[set[int]]]:
    return [[set(row[row >= 0].tolist()) for row in head] for head in plan.order[0]]


def literal(method, q, k) -> list[list[set[int]]] | None:
    """Kept blocks of each head and tile; None for a dense fallback."""
    q, k = q[0], k[0]
    heads, length = q.shape[0], k.shape[1]
    tiles = range(math.ceil(length / B))
    if isinstance(method, XAttention):
        mass = literal_proxies.xattn(q, k, method.stride, B, SCALE)
        top_p = literal_proxies.sink_diagonal_top_p
        return [[top_p(mass[h, i], i, method.threshold) for i in tiles] for h in range(heads)]
    if isinstance(method, FlexPrefill):
        if length <= 2 * B:
            return None
        return literal_proxies.flex(q, k, method.gamma, method.tau, method.min_budget, B, SCALE)[0]
    if isinstance(method, FlashPrefill):
        mass = literal_proxies.flash_mass(q, k, B, SCALE)
        rules = {name: getattr(method, name) for name in ("alpha", "sink", "window", "last_full")}
        kept = literal_proxies.flash_kept
        return [[kept(mass[h, i], i, prompt_tiles=len(tiles), **rules) for i in tiles] for h in range(heads)]
    return literal_proxies.sparge(q, k, method.tau, method.theta, B, SCALE, method.sink)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("method", BASE, ids=lambda m: m.name)
def test_plan_and_budget_equal_a_brute_force_mask(method, length):
    q, k = inputs(length, seed=length)
    want = literal(method, q, k)
    kv, plan = run(method, q, k)
    meter = BudgetMeter(1, 4, B)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    cells = 4 * int(causal.sum())
    if want is None:
        assert plan == DensePlan("fallback")
        meter.add_dense(0, 0, length, fallback=True, estimator_cells=method.estimator_cells(0, length))
        assert method.estimator_cells(0, length) == 0
    else:
        plan.check()
        assert sets(plan) == want
        assert all(row[row >= 0].tolist() == sorted(row[row >= 0].tolist()) for row in plan.order.flatten(0, 2))
        _, stats = block_attention(q, kv, plan, scale=SCALE)
        meter.add_sparse(0, 0, length, stats, method.estimator_cells(0, length))
        cells = 0
        for tiles in want:
            mask = torch.zeros(length, length, dtype=torch.bool)
            for i, blocks in enumerate(tiles):
                for j in blocks:
                    mask[i * B : (i + 1) * B, j * B : (j + 1) * B] = True
            cells += int((mask & causal).sum())
        if length > 50:
            assert cells < 0.95 * 4 * int(causal.sum()), "the case is meant to drop blocks"
    record = meter.read().record()
    assert record["computed"] == record["visited"] == cells
    assert record["B"] == pytest.approx(cells / (4 * int(causal.sum())))
    assert record["fallback_share"] == (want is None)


FULL = {
    "xattention": {"threshold": 1.0},
    "flexprefill": {"gamma": 1.0},
    "flashprefill": {"alpha": 0.0},
    "spargeattn": {"tau": 1.0},
}


@pytest.mark.parametrize("method", BASE, ids=lambda m: m.name)
def test_the_full_setting_keeps_every_causal_block(method):
    q, k = inputs(97)
    q, k = 30 * q, 30 * k  # masses that underflow to zero are kept too
    method = replace(method, **FULL[method.name])
    replace(method, block_size=64).validate()
    _, plan = run(method, q, k)
    assert sets(plan) == [[set(range(i + 1)) for i in range(7)]] * 4


CHANGES = [
    ("xattention", {"stride": 4}),
    ("xattention", {"stride": 8}),
    ("xattention", {"threshold": 0.5}),
    ("flexprefill", {"gamma": 0.9}),
    ("flexprefill", {"tau": 0.0}),
    ("flexprefill", {"min_budget": 33}),
    ("flashprefill", {"alpha": 0.1}),
    ("flashprefill", {"sink": 2}),
    ("flashprefill", {"window": 3}),
    ("flashprefill", {"last_full": 0}),
    ("spargeattn", {"tau": 0.2}),
    ("spargeattn", {"theta": 0.0}),
    ("spargeattn", {"sink": True, "tau": 0.2}),
]


@pytest.mark.parametrize("name,change", CHANGES, ids=str)
def test_each_knob_reaches_the_plan(name, change):
    q, k = inputs(97)
    method = replace(BY_NAME[name], **change)
    replace(method, block_size=64).validate()
    _, plan = run(method, q, k)
    assert sets(plan) == literal(method, q, k)
    assert sets(plan) != sets(run(BY_NAME[name], q, k)[1]), "the knob must make a difference"


@pytest.mark.parametrize("method", BASE, ids=lambda m: m.name)
def test_block_size_and_the_modules_scaling_reach_the_plan(method):
    q, k = inputs(250)
    _, plan = run(replace(method, block_size=64), q, k)
    assert plan.block_size == 64 and plan.order.shape[2] == 4
    assert sets(run(method, q, k)[1]) != sets(run(method, q, k, scale=2.0)[1])


@pytest.mark.parametrize("method", [m for m in BASE if m.chunkable], ids=lambda m: m.name)
def test_chunks_are_planned_as_the_whole(method):
    q, k = inputs(250)
    _, whole = run(method, q, k)
    for start, end in ((0, 64), (64, 192), (192, 250)):
        _, part = run(method, q[:, :, start:end], k[:, :, :end], offset=start, prompt_len=250)
        part.check()
        assert sets(part) == [head[start // B : -(-end // B)] for head in sets(whole)]
        assert (part.q_offset, part.kv_len, part.prompt_len) == (start, end, 250)
    cells = method.estimator_cells
    assert cells(0, 64) + cells(64, 128) + cells(192, 58) == cells(0, 250)


def test_which_methods_take_chunks():
    assert [m.name for m in BASE if m.chunkable] == ["xattention", "flashprefill"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize("method", BASE, ids=lambda m: m.name)
def test_the_triton_backend_plans_alike(method):
    pytest.importorskip("triton")
    q, k = inputs(97)
    q, k = q.repeat(1, 1, 1, 2), k.repeat(1, 1, 1, 2)
    assert sets(run(method, q, k, backend="triton")[1]) == sets(run(method, q, k)[1])


# ----------------------------------------------------------------------------------------------------------- XAttention
def test_a_table_sets_a_threshold_for_each_layer_and_head(tmp_path):
    q, k = inputs(97)
    rows = [[0.9, 0.8, 0.7, 0.6], [0.3, 1.0, 0.5, 0.95]]
    for name, text in (("a.json", json.dumps(rows)), ("b.yaml", "values:\n" + "".join(f"- {r}\n" for r in rows))):
        (tmp_path / name).write_text(text)
        method = XAttention(block_size=B, stride=16, threshold_table=str(tmp_path / name))
        replace(method, block_size=64).validate()
        method.check_model(2, 4)
        for layer in (0, 1):
            got = sets(run(method, q, k, layer=layer)[1])
            alone = [sets(run(XAttention(block_size=B, stride=16, threshold=p), q, k)[1]) for p in rows[layer]]
            assert got == [alone[h][h] for h in range(4)]


@pytest.mark.parametrize(
    "rows,shape,message",
    [
        ([[0.9] * 32] * 32, (36, 32), "36 layers x 32 query heads.*32 x 32"),
        ([[0.9] * 8] * 36, (36, 32), "36 layers x 32 query heads.*36 x 8"),
        ([[0.9, 0.8], [0.9]], (2, 2), "as many values in layer 1"),
        ([[0.9, 1.2]], (1, 2), "layer 0, head 1 is 1.2"),
        ([[0.0, 0.5]], (1, 2), "layer 0, head 0 is 0.0"),
        ({"table": [[0.9]]}, (1, 1), "a list with one list of numbers for each layer"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(rows, shape, message, tmp_path):
    (tmp_path / "table.json").write_text(json.dumps(rows))
    method = XAttention(threshold_table=str(tmp_path / "table.json"))
    with pytest.raises(InputError, match=message) as caught:
        method.validate()
        method.check_model(*shape)
    assert caught.value.field == "method.threshold_table"


def test_a_scalar_threshold_fits_any_model():
    for layers, heads in ((36, 32), (32, 32), (30, 9)):
        XAttention(threshold=0.9).check_model(layers, heads)
    with pytest.raises(InputError, match="method.threshold_table='none.yaml'"):
        XAttention(threshold_table="none.yaml").validate()


def test_a_threshold_beside_a_table_cannot_act(tmp_path):
    (tmp_path / "t.json").write_text("[[0.9, 0.8]]")
    method = XAttention(threshold_table=str(tmp_path / "t.json"))
    replace(method, threshold=0.9).validate()  # the default is no wish
    with pytest.raises(
        InputError, match=r"method.threshold=0.5: 0.9, its default, with method.threshold_table='.*t.json'"
    ):
        replace(method, threshold=0.5).validate()


# ---------------------------------------------------------------------------------------------------------- FlexPrefill
@pytest.mark.parametrize("length,min_budget,dense", [(32, 1, True), (33, 1, False), (48, 33, True), (49, 33, False)])
def test_short_prompts_fall_back_to_dense(length, min_budget, dense):
    q, k = inputs(length)
    method = replace(BY_NAME["flexprefill"], min_budget=min_budget)
    _, plan = run(method, q, k)
    assert isinstance(plan, DensePlan) == dense
    assert (method.estimator_cells(0, length) == 0) == bool(method.warnings(length)) == dense


# ----------------------------------------------------------------------------------------------------------- SpargeAttn
@pytest.mark.parametrize("sink", [False, True])
def test_the_first_block_is_kept_only_where_asked(sink):
    q, k = (x.double() for x in inputs(97, seed=97))
    method = SpargeAttn(block_size=B, tau=0.3, theta=0.0, sink=sink)
    kept = sets(run(method, q, k)[1])
    assert kept == literal(method, q, k)
    assert all(0 in tile for head in kept for tile in head) == sink
    assert SpargeAttn().sink is False  # attention_sink of the authors' functions


def test_the_skip_does_not_depend_on_the_length():
    for length in (50, 97):
        q, k = inputs(length)
        plan = run(SpargeAttn(block_size=B, pv_threshold=3.0), q, k, prompt_len=1000)[1]
        assert plan.log_threshold == pytest.approx(-3.0) and plan.skip_scale == pytest.approx(1000 * math.exp(-3))
    assert run(SpargeAttn(block_size=B, pv_threshold=None), q, k)[1].log_threshold is None
    assert run(SpargeAttn(block_size=B), q, k)[1].log_threshold == pytest.approx(-50.0)


def test_the_skip_leaves_out_values_and_not_products():
    q, k = inputs(97)
    method = SpargeAttn(block_size=B, tau=1.0, pv_threshold=1.0)
    kv, plan = run(method, q, k)
    _, stats = block_attention(q, kv, plan, scale=SCALE)
    assert stats.visited_blocks.sum() == 4 * 28 and 4 * 7 <= stats.computed_blocks.sum() < 4 * 28
    assert method.features.in_kernel_skip and not replace(method, pv_threshold=None).features.in_kernel_skip


# ---------------------------------------------------------------------------------------------------------- all of them
@pytest.mark.parametrize(
    "name,change,field",
    [
        ("xattention", {"block_size": 96}, "method.block_size=96"),
        ("xattention", {"stride": 6}, "method.stride=6"),
        ("xattention", {"threshold": 0.0}, "method.threshold=0.0"),
        ("xattention", {"threshold": math.nan}, "method.threshold=nan"),
        ("flexprefill", {"block_size": 32}, "method.block_size=32"),
        ("flexprefill", {"gamma": 1.1}, "method.gamma=1.1"),
        ("flexprefill", {"tau": -0.1}, "method.tau=-0.1"),
        ("flexprefill", {"min_budget": 0}, "method.min_budget=0"),
        ("flashprefill", {"block_size": 256}, "method.block_size=256"),
        ("flashprefill", {"alpha": 1.5}, "method.alpha=1.5"),
        ("flashprefill", {"window": 0}, "method.window=0"),
        ("flashprefill", {"sink": -1}, "method.sink=-1"),
        ("flashprefill", {"last_full": -1}, "method.last_full=-1"),
        ("spargeattn", {"block_size": 0}, "method.block_size=0"),
        ("spargeattn", {"tau": 0.0}, "method.tau=0.0"),
        ("spargeattn", {"theta": 1.5}, "method.theta=1.5"),
        ("spargeattn", {"pv_threshold": -1.0}, "method.pv_threshold=-1.0"),
        ("spargeattn", {"pv_threshold": 800.0}, "method.pv_threshold=800.0"),
    ],
)
def test_values_out_of_range_are_named(name, change, field):
    with pytest.raises(InputError, match=field):
        replace(METHODS.get(name)(), **change).validate()


@pytest.mark.parametrize("name", list(BY_NAME))
def test_defaults_are_the_registered_ones_and_valid(name):
    cls = METHODS.get(name)
    assert cls is type(BY_NAME[name])
    cls().validate()
    knob = cls.knob
    assert knob is not None
    for value in (knob.low, knob.high):
        replace(cls(), **{knob.field: value}).validate()
    q, k = inputs(200)
    sparse, dense = (run(replace(BY_NAME[name], **{knob.field: x}), q, k)[1] for x in (knob.low, knob.high))
    if not knob.rises:
        sparse, dense = dense, sparse
    assert sparse.count.sum() < dense.count.sum()


def test_estimators_cost_what_the_methods_say():
    length = 1 << 17
    dense = length * (length + 1)
    assert XAttention(stride=8).estimator_cells(0, length) / dense == pytest.approx(1 / 16, rel=1e-3)
    assert FlexPrefill().estimator_cells(0, length) / dense == pytest.approx(1 / 1024 + 1 / (2 * 128**2), rel=0.01)
    assert FlashPrefill().estimator_cells(0, length) / dense == pytest.approx(1 / 256, rel=0.01)
    assert SpargeAttn().estimator_cells(0, length) / dense == pytest.approx(1 / (2 * 128**2), rel=0.01)
