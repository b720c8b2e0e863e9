"""The paired bootstrap against a literal loop, that it is paired, and its columns."""

from __future__ import annotations

import csv
import io
import math
import time

import numpy as np
import pytest
import synthetic

from evalkit.report import bootstrap, stats
from evalkit.report.load import Loaded, find_twins, load
from evalkit.report.page.document import build
from evalkit.report.rows import build_rows
from evalkit.report.table import bootstrap_text
from evalkit.report.table import csv as csv_of

SPARSE, DENSE, TOKENS = (
    [900.0, 1130.0, 640.0, 1500.0, 980.0],
    [880.0, 1100.0, 655.0, 1420.0, 960.0],
    [400, 500, 300, 600, 400],
)


def drawn(seed, n):
    """Samples of each resample, one by one."""
    return [[at for at, times in enumerate(line) for _ in range(int(times))] for line in bootstrap.counts(seed, n)]


def percentiles(values):
    values = sorted(values)
    found = []
    for share in (0.025, 0.975):
        at = share * (len(values) - 1)
        low = math.floor(at)
        found.append(values[low] + (at - low) * (values[min(low + 1, len(values) - 1)] - values[low]))
    return tuple(found)


def loop(strata):
    """Weighted mean difference of (weight, seed, sparse, dense), sample by sample."""
    found = [0.0] * bootstrap.RESAMPLES
    for weight, seed, sparse, dense in strata:
        for number, samples in enumerate(drawn(seed, len(sparse))):
            mine = sum(sparse[at] for at in samples) / len(samples)
            found[number] += weight * (mine - sum(dense[at] for at in samples) / len(samples))
    return percentiles(found)


def perplexity_loop(sparse, dense, tokens, seed):
    found = []
    for samples in drawn(seed, len(tokens)):
        total = sum(tokens[at] for at in samples)
        found.append(
            math.exp(sum(sparse[at] for at in samples) / total) - math.exp(sum(dense[at] for at in samples) / total)
        )
    return percentiles(found)


def test_draws_are_those_of_a_bootstrap_and_follow_their_seed():
    counts = bootstrap.counts("a", 40)
    assert counts.shape == (2000, 40) and (counts.sum(axis=1) == 40).all()
    # Each sample's count is binomial: mean 1, variance 1 - 1/n.
    assert counts.mean(axis=0) == pytest.approx(np.ones(40), abs=0.12) and counts.var() == pytest.approx(
        0.975, abs=0.03
    )
    bootstrap._counts.cache_clear()
    assert (bootstrap.counts("a", 40) == counts).all() and (bootstrap.counts("b", 40) != counts).any()


def test_perplexities_are_those_of_a_literal_loop():
    found = bootstrap.perplexity_difference(SPARSE, DENSE, TOKENS, "seed")
    assert found == pytest.approx(perplexity_loop(SPARSE, DENSE, TOKENS, "seed"), rel=1e-9)
    whole = math.exp(sum(SPARSE) / sum(TOKENS)) - math.exp(sum(DENSE) / sum(TOKENS))
    assert found[0] < whole < found[1]


def test_scores_are_those_of_a_literal_loop():
    strata = [(0.25, "a", [1.0, 0.0, 0.4, 1.0], [1.0, 1.0, 0.5, 0.0]), (0.75, "b", [0.0, 1.0, 0.2], [1.0, 1.0, 0.1])]
    found = bootstrap.score_difference([(w, seed, np.subtract(mine, base)) for w, seed, mine, base in strata])
    assert found == pytest.approx(loop(strata), rel=1e-9)


def test_pairs_are_drawn_together():
    """Windows differ by far more than the two methods do: an unpaired resample is wider by an order of magnitude."""
    rng = np.random.default_rng(3)
    tokens = np.full(30, 500)
    dense = tokens * rng.normal(3.0, 0.3, 30)
    sparse = dense + tokens * rng.normal(0.02, 0.002, 30)
    low, high = bootstrap.perplexity_difference(sparse, dense, tokens, "a")
    both = [np.exp(bootstrap.counts(seed, 30) @ x / 15000.0) for seed, x in (("a", sparse), ("b", dense))]
    apart = np.quantile(both[0] - both[1], [0.025, 0.975])
    assert high - low < 0.1 * (apart[1] - apart[0])
    # And near the interval that tables print, which comes from a formula.
    printed = stats.perplexity_difference(sparse, dense, tokens)
    assert (low, high) == pytest.approx(printed.interval, rel=0.15)


def test_it_covers_like_a_percentile_interval():
    rng = np.random.default_rng(5)
    inside = 0
    for at in range(400):
        d = rng.choice([-1.0, 0.0, 1.0], 60, p=[0.3, 0.6, 0.1])
        low, high = bootstrap.score_difference([(1.0, f"{at}", d)])
        inside += low <= -0.2 <= high
    assert 0.91 <= inside / 400 <= 0.98


def test_where_there_is_nothing_to_resample():
    assert bootstrap.perplexity_difference([10.0], [9.0], [5], "a") is None
    assert bootstrap.score_difference([(0.5, "a", [0.1]), (0.5, "b", [0.2])]) is None
    assert bootstrap.score_difference([(0.5, "a", [0.1]), (0.5, "b", [0.2, 0.2])]) == pytest.approx((0.15, 0.15))
    wild = bootstrap.perplexity_difference([1e6, 10.0], [9.0, 10.0], [5, 5], "a")
    assert wild is None, "a perplexity that is infinite has no difference"


# --------------------------------------------------------------------------------------------------------- columns
def interval(row):
    return row.difference_bootstrap_low, row.difference_bootstrap_high


def test_columns_of_perplexity_and_of_the_page(cells):
    cells.perplexity("dense")
    cells.perplexity(p=0.9, damage=0.1, share=0.4)
    loaded = load([cells.out])
    rows = build_rows(loaded)
    (row,) = (r for r in rows.rows if r.metric == "perplexity" and not r.dense)
    by = {cell.is_dense: [record["metrics"] for record in cell.records] for cell in loaded.cells}
    nll = [[m["nll"] for m in by[dense]] for dense in (False, True)]
    expected = perplexity_loop(*nll, [m["tokens"] for m in by[True]], row.group)
    assert interval(row) == pytest.approx(expected, rel=1e-9) and row.group == loaded.cells[0].twin
    assert all(interval(other) == (None, None) for other in rows.rows if other is not row)
    table = list(csv.DictReader(io.StringIO(csv_of(rows))))
    written = [line for line in table if line["difference_bootstrap_low"]]
    assert [float(line["difference_bootstrap_high"]) for line in written] == [row.difference_bootstrap_high]
    document = build(loaded, rows)
    at = document["rows"]["fields"].index("bootstrap")
    assert [text for line in document["rows"]["data"] if (text := line[at])] == [bootstrap_text(row)]


def test_columns_of_scores_are_weighted_as_their_mean_is(cells):
    dense = {"a": [1.0, 1.0, 1.0, 0.0], "b": [0.5, 0.5, 0.0]}
    sparse = {"a": [1.0, 0.0, 0.0, 0.0], "b": [0.5, 0.0, 0.1]}
    for length in (4096, 8192):
        cells.ruler("dense", dense, length=length)
        cells.ruler("cosa", sparse, length=length, share=0.3)
    loaded = load([cells.out])
    rows = [row for row in build_rows(loaded).rows if not row.dense]
    twins = {row.length: row.group for row in rows if row.level == "cell"}

    def strata(length, weight, names="ab"):
        return [(weight / len(names), f"{twins[length]} {name}", sparse[name], dense[name]) for name in names]

    for row in rows:
        if row.level == "average":
            expected = loop(strata("4096", 0.5) + strata("8192", 0.5))
        else:
            expected = loop(strata(row.length, 1.0, row.subtask or "ab"))
        assert interval(row) == pytest.approx([100 * bound for bound in expected], rel=1e-9), row


def test_an_interval_depends_on_nothing_else_in_the_report(cells):
    cells.perplexity("dense")
    cells.perplexity(p=0.9, damage=0.1, share=0.4)

    def found():
        return next(interval(r) for r in build_rows(load([cells.out])).rows if r.method.startswith("cosa p=0.9"))

    before = found()
    cells.perplexity(p=0.8, damage=0.3, share=0.2)
    cells.ruler("dense")
    bootstrap._counts.cache_clear()
    assert found() == before != (None, None)


def test_two_thousand_cells_take_little_more(monkeypatch):
    many = synthetic.cell_results(2000, group=1000, samples=32)
    loaded = Loaded(many, find_twins(many), [])
    begin = time.process_time()
    build_rows(loaded)
    whole = time.process_time() - begin
    monkeypatch.setattr(bootstrap, "perplexity_difference", lambda *args, seed: None)
    begin = time.process_time()
    build_rows(loaded)
    assert whole - (time.process_time() - begin) < 4
