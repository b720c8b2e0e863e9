"""The pattern search: equal cost, smallest error, planted patterns, resumption, and the table that comes out."""

from __future__ import annotations

import math
from dataclasses import replace

import literal_vertical_slash as literal
import pytest
import torch
import yaml
from kernel_cases import paged, tensors
from prefill_kernels import dense_attention, sparse_attention
from prefill_kernels.vertical_slash import STEP

from evalkit.app import search_patterns as app
from evalkit.calibration import pattern_run, patterns
from evalkit.calibration.pattern_run import PatternRequest, search_patterns
from evalkit.calibration.pattern_settings import PatternSearchConfig
from evalkit.calibration.patterns import Candidate, LayerResult, a_shape_blocks, blocks_for, choose, search_layer
from evalkit.config import ExecutionConfig
from evalkit.errors import InputError, IntegrityError, StoreError
from evalkit.methods.head_patterns import HeadPattern, load_patterns
from evalkit.methods.minference import MInference, pattern_plan
from evalkit.runner import run_cell

SMALL = PatternSearchConfig(length=600, initial=20, local=130, columns=(30, 60), step=10)


def a_shape_literal(initial, local, size, length):
    return sum(literal.executed_blocks(list(range(initial)), list(range(local)), size, STEP, length))


@pytest.mark.parametrize("initial,local,size,length", [(20, 130, 64, 600), (0, 64, 64, 100), (100, 1, 128, 300)])
def test_the_target_is_what_the_kernel_executes_for_the_a_shape(initial, local, size, length):
    assert a_shape_blocks(initial, local, size, length) == a_shape_literal(initial, local, size, length)


@pytest.mark.parametrize("length,size", [(600, 64), (64, 64), (1000, 128)])
def test_block_sparse_heads_stay_within_the_target(length, size):
    tiles = math.ceil(length / size)

    def cost(k):
        return sum(min(t + 1, k) for t in range(tiles))

    for target in range(tiles, tiles * (tiles + 1) // 2 + 1):
        k = blocks_for(target, length, size)
        assert cost(k) <= target and (k == tiles or cost(k + 1) > target)
    assert blocks_for(1, length, size) == 1


def planted(length=1000, dim=64, seed=0):
    """Heads of known kinds: sink and window; a line and a diagonal; far blocks of like direction."""
    g = torch.Generator().manual_seed(seed)

    def directions(count):
        x = torch.randn(count, dim, generator=g)
        return x / x.norm(dim=-1, keepdim=True)

    offset, line = 333, 250
    q, k = torch.zeros(1, 3, length, dim), torch.zeros(1, 3, length, dim)
    # Head 0: a query sees its own group of 100 and the one before it, and 20 sinks that the mean of their block hides;
    # the last queries look elsewhere and mislead an estimate.
    group = torch.arange(length) // 100
    q[0, 0, torch.arange(length), group] = q[0, 0, torch.arange(length), (group - 1).clamp(min=0)] = 8.0
    k[0, 0, torch.arange(length), group] = 1.0
    q[0, 0, :, -1] = 8.0
    k[0, 0, :20, -1], k[0, 0, 20:64, -1] = 1.2, -1.2 * 20 / 44
    q[0, 0, -64:], q[0, 0, -64:, 2] = 0.0, 8.0
    q[0, 0, :, -2], k[0, 0, 64:, -2] = 1.0, 0.01  # the first block is no one's choice among equals
    # Head 1: key j answers query j + offset, and key `line` all.
    codes = directions(length + offset)
    q[0, 1], k[0, 1] = 40 * codes[:length], 2 * codes[offset : offset + length]
    q[0, 1, :, -1] = 12.0
    k[0, 1, line] = 0.0
    k[0, 1, line, -1] = 6.0
    # Head 2: tile t looks for the block that a permutation names.
    blocks = math.ceil(length / 64)
    marks = directions(blocks)
    wanted = torch.tensor([int(torch.randint(0, t + 1, (1,), generator=g)) for t in range(blocks)])
    q[0, 2] = 60 * marks[wanted].repeat_interleave(64, 0)[:length]
    k[0, 2] = marks.repeat_interleave(64, 0)[:length]
    v = torch.randn(1, 3, length, dim, generator=g)
    v[0, 0, 200:300] = 0.0  # what the last queries of head 0 look for holds nothing
    return q, k, v


def test_planted_patterns_are_told_apart():
    q, k, v = planted()
    config = replace(SMALL, length=1000, local=200)
    result = search_layer(q, paged(k, v, 64), config, scale=1.0)
    table, facts = choose([[result]], SMALL.step)
    assert [pattern.name for pattern in table[0]] == ["a_shape", "vertical_slash", "block_sparse"]
    assert sum(facts["heads"].values()) == 3


def test_candidates_cost_the_same_and_errors_are_those_of_their_outputs():
    q, k, v = tensors(600, 3, 1, 16, block=16, seed=1)
    kv = paged(k, v, 64)
    result = search_layer(q, kv, SMALL, scale=0.25)
    assert result.target == a_shape_literal(20, 130, 64, 600)
    names = [candidate.patterns[0].name for candidate in result.candidates]
    assert names == ["a_shape", "vertical_slash", "vertical_slash", "block_sparse"]
    dense = dense_attention(q, k, v, scale=0.25).double()
    for candidate in result.candidates:
        plan = pattern_plan(q, kv, candidate.patterns, block_size=64, scale=0.25)
        out, _ = sparse_attention(q, kv, plan, scale=0.25)
        expected = (out.double() - dense).square().sum((2, 3))[0]
        assert candidate.error == pytest.approx(expected.tolist(), rel=1e-6)
        if candidate.patterns[0].name != "vertical_slash":
            continue
        parts = (plan.columns, plan.slashes)
        columns, slashes = ([[x for x in row if x >= 0] for row in part[0].tolist()] for part in parts)
        for h in range(3):
            cost = sum(literal.executed_blocks(columns[h], slashes[h], 64, STEP, 600))
            assert candidate.blocks[h] == cost
            more = tuple(replace(p, sizes=(p.sizes[0], p.sizes[1] + SMALL.step)) for p in candidate.patterns)
            wider = pattern_plan(q, kv, more, block_size=64, scale=0.25)
            lists = ([x for x in part[0, h].tolist() if x >= 0] for part in (wider.columns, wider.slashes))
            above = sum(literal.executed_blocks(*lists, 64, STEP, 600))
            assert cost <= result.target < above or candidate.patterns[h].sizes[1] == 50
    assert result.norm == pytest.approx(dense.square().sum((2, 3))[0].tolist(), rel=1e-6)
    assert LayerResult.from_plain(result.plain()) == result


def test_block_execution_is_searched_as_it_is_run():
    q, k, v = tensors(600, 3, 1, 16, block=16, seed=1)
    kv = paged(k, v, 64)
    token, block = (search_layer(q, kv, replace(SMALL, execution=x), scale=0.25) for x in ("token", "block"))
    for one, other in zip(token.candidates, block.candidates, strict=True):
        assert one.patterns == other.patterns and one.blocks == other.blocks
        assert (one.error == other.error) == (one.patterns[0].name == "block_sparse")


def test_the_choice_is_made_over_all_windows():
    a = HeadPattern("a_shape", (4, 8))
    lines = [HeadPattern("vertical_slash", (30, 40)), HeadPattern("vertical_slash", (30, 70))]
    windows = [
        LayerResult(10, (4.0,), (Candidate((a,), (1.0,), (10,)), Candidate((lines[0],), (2.0,), (9,)))),
        LayerResult(10, (4.0,), (Candidate((a,), (3.0,), (10,)), Candidate((lines[1],), (1.0,), (8,)))),
    ]
    table, facts = choose([[window] for window in windows], 10)
    assert table == [[HeadPattern("vertical_slash", (30, 60))]]  # 55, to a multiple of 10
    assert facts["relative_error"] == pytest.approx(
        {"chosen": math.sqrt(3 / 8), "a_shape": math.sqrt(4 / 8), "vertical_slash(30, ...)": math.sqrt(3 / 8)}, rel=1e-5
    )
    assert facts["executed_over_target"] == 0.85
    assert choose([[windows[0]]], 10)[0] == [[a]]


# ----------------------------------------------------------------------------------------------------- whole searches
@pytest.fixture
def request_patterns(model_config, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))

    def make(out=None, **changes):
        settings = replace(SMALL, length=512, text=str(corpus), windows=2, **changes)
        return PatternRequest(model_config, settings, ExecutionConfig(), out)

    return make


def test_a_search_writes_a_table_that_the_method_runs(request_patterns, cell_for, corpus, tmp_path, capsys):
    path = search_patterns(request_patterns())
    assert str(path) == "results/patterns/tiny-512.yaml" and not list(path.parent.glob("*partial*"))
    assert "written: results/patterns/tiny-512.yaml" in capsys.readouterr().out
    table = load_patterns(str(path), "method.table")
    table.check_model("method.table", 2, 4)
    content = yaml.safe_load(path.read_text())
    assert content["search"]["initial"] == 20 and content["text"]["characters"][0][1] > 0
    assert sum(content["result"]["heads"].values()) == 8
    assert content["result"]["relative_error"]["chosen"] <= min(
        value for name, value in content["result"]["relative_error"].items() if name != "chosen"
    )
    method = MInference(table=str(path))
    run_cell(cell_for(method))
    same = tmp_path / "same.txt"
    same.write_text(corpus.read_text()[min(start for start, _ in content["text"]["characters"]) - 100 :])
    with pytest.raises(IntegrityError, match="tokens .* are in the text that .*tiny-512.yaml was calibrated on"):
        run_cell(cell_for(method, corpus=str(same), limit=1))
    with pytest.raises(InputError, match="method.block_size=128: 64, of which"):
        replace(method, block_size=128).validate()


def test_an_interrupted_search_goes_on_and_ends_the_same(request_patterns, monkeypatch):
    whole = search_patterns(request_patterns("whole.yaml"))
    calls = []
    own = patterns.search_layer

    def counted(*args, **kw):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(1)
        return own(*args, **kw)

    monkeypatch.setattr(pattern_run, "search_layer", counted)
    request = request_patterns("parts.yaml")
    with pytest.raises(KeyboardInterrupt):
        search_patterns(request)
    journal = pattern_run.Path("parts.partial.jsonl")
    with open(journal, "a") as stream:
        stream.write('{"identity": "cut sho')  # a kill in the middle of a line
    monkeypatch.setattr(pattern_run, "search_layer", lambda *a, **kw: calls.append(1) or own(*a, **kw))
    assert search_patterns(request).read_text() == whole.read_text()
    assert len(calls) == 4, "two layers of two windows, none searched twice"
    assert not journal.exists()


def test_a_journal_of_another_search_is_not_mixed_in(request_patterns, monkeypatch):
    monkeypatch.setattr(pattern_run, "choose", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        search_patterns(request_patterns("t.yaml"))
    with pytest.raises(InputError, match="out='t.partial.jsonl': no journal of another search"):
        search_patterns(request_patterns("t.yaml", local=140))


def test_two_searches_for_one_table_do_not_run_at_once(request_patterns):
    request = request_patterns("t.yaml")
    with pattern_run._journal(request.path, {}), pytest.raises(StoreError, match="another process"):
        search_patterns(request)


def test_execution_settings_change_no_pattern(request_patterns):
    one = load_patterns(str(search_patterns(request_patterns("a.yaml"))), "f")
    request = replace(request_patterns("b.yaml"), execution=ExecutionConfig(page_size=16, page_shuffle=3))
    assert load_patterns(str(search_patterns(request)), "f").heads == one.heads


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"length": 8}, "search.length=8"),
        ({"windows": 0}, "search.windows=0"),
        ({"initial": -1}, "search.initial=-1"),
        ({"local": 580}, "search.local=580.*nothing would be left out"),
        ({"columns": ()}, "search.columns"),
        ({"columns": (30, 30)}, "search.columns"),
        ({"columns": (0,)}, "search.columns"),
        ({"columns": (30, 600)}, "search.columns.*below search.length=600"),
        ({"step": 0}, "search.step=0"),
        ({"block_size": 32}, "search.block_size=32"),
        ({"last_q": 129}, "search.last_q=129"),
        ({"execution": "blocks"}, "search.execution='blocks'"),
        ({"text": "nowhere.txt"}, "search.text='nowhere.txt'"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_named(changes, said):
    with pytest.raises(InputError, match=said):
        replace(SMALL, **changes).validate()


def test_requests_that_cannot_run_are_refused(request_patterns):
    request = request_patterns()
    for bad, said in (
        (replace(request, out="t.json"), "out='t.json'"),
        (replace(request, execution=ExecutionConfig(chunk_size=128)), "execution.chunk_size=128"),
        (replace(request, settings=replace(request.settings, length=4096)), "search.length=4096: at most 2048"),
        (replace(request, settings=replace(request.settings, windows=99)), "search.windows=99: at most"),
    ):
        with pytest.raises(InputError, match=said):
            search_patterns(bad)


def test_the_command(model_folder, corpus, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert app.run(["--help"]) == 0 and "usage: evalkit search-patterns" in capfd.readouterr().out
    model = ["model=local", f"model.path={model_folder}", "model.native_context=2048", "model.dtype=float32"]
    small = ["search.length=256", "search.initial=8", "search.local=64", "search.columns=[30]", f"search.text={corpus}"]
    assert app.run([*model, *small, "out=found.yaml", "--cfg", "job"]) == 0
    assert "initial: 8" in capfd.readouterr().out and not (tmp_path / "found.yaml").exists()
    assert app.run([*model, *small, "out=found.yaml"]) == 0
    load_patterns("found.yaml", "f").check_model("f", 2, 4)
    for arguments, said in (
        (["serch.length=4"], "did you mean search"),
        (["search.lenght=4"], "did you mean length"),
        ([*model, *small, "search.local=1000"], "search.local=1000"),
        (["model=smolm2"], "did you mean smollm2"),
    ):
        assert app.run(arguments) == 2
        error = capfd.readouterr().err
        assert said in error and error.count("\n") == 1, error
