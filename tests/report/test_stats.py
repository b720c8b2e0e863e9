from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from evalkit.report import stats


def single(values):
    return [(1.0, values)]


# --------------------------------------------------------------------------------------------------------- scores
@pytest.mark.parametrize(("hits", "n"), [(0, 1), (1, 1), (0, 6), (3, 6), (6, 6), (97, 100), (100, 100)])
def test_wilson_is_scipys_for_counts(hits, n):
    expected = scipy_stats.binomtest(hits, n).proportion_ci(0.95, method="wilson")
    found = stats.mean_score(single([1.0] * hits + [0.0] * (n - hits)))
    assert found.interval == pytest.approx((expected.low, expected.high), abs=1e-9)
    assert found.low < found.high and found.n == n and found.value == hits / n


def test_wilson_covers_fractions_at_least_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        interval = stats.mean_score(single(rng.beta(0.6, 0.3, 12))).interval
        hits += interval[0] <= 0.6 / 0.9 <= interval[1]
    assert hits / 2000 >= 0.95


@pytest.mark.parametrize("values", [[], [1.2], [-0.1], [float("nan")]])
def test_scores_outside_the_unit_interval_are_refused(values):
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        stats.mean_score(single(values))


def test_stratified_mean_is_the_unweighted_mean_over_subtasks():
    found = stats.mean_score([(0.5, [1.0]), (0.5, [0.0, 0.0, 0.0])])
    assert found.value == 0.5 and found.n == 4


@pytest.mark.parametrize(
    ("rates", "n", "widest"),
    [([0.5] * 3, 2, None), ([0.0, 0.5, 1.0], 2, None), ([0.9, 0.2, 0.6], 4, None), ([1.0] * 6 + [0.5] * 7, 50, 0.9)],
)
def test_stratified_interval_covers_and_gains_from_strata(rates, n, widest):
    rng = np.random.default_rng(1)
    truth, weight = float(np.mean(rates)), 1 / len(rates)
    inside, widths, pooled = 0, [], []
    repeats = 3000
    for _ in range(repeats):
        scores = [(rng.random(n) < rate).astype(float) for rate in rates]
        low, high = stats.mean_score([(weight, s) for s in scores]).interval
        inside += low <= truth <= high
        widths.append(high - low)
        plain = stats.mean_score(single(np.concatenate(scores))).interval
        pooled.append(plain[1] - plain[0])
    assert inside / repeats >= 0.94
    if widest is not None:
        assert np.mean(widths) < widest * np.mean(pooled)


def test_stratified_interval_agrees_with_a_bootstrap_within_strata():
    rng = np.random.default_rng(2)
    scores = [(rng.random(200) < rate).astype(float) for rate in (0.95, 0.6, 0.3)]
    means = [np.mean([rng.choice(s, len(s)).mean() for s in scores]) for _ in range(4000)]
    low, high = stats.mean_score([(1 / 3, s) for s in scores]).interval
    assert (low, high) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.006)


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_stratified_interval_has_width_at_the_ends(score):
    low, high = stats.mean_score([(0.5, [score]), (0.5, [score])]).interval
    assert high - low > 0.3 and low >= 0 and high <= 1


# ---------------------------------------------------------------------------------------------- paired differences
def test_paired_difference_is_agresti_and_mins_for_counts():
    both, only_sparse, only_dense, neither = 40, 3, 9, 8
    d = np.repeat([0.0, 1.0, -1.0, 0.0], [both, only_sparse, only_dense, neither])
    n, b, c = len(d) + 2, only_sparse + 0.5, only_dense + 0.5
    centre, half = (b - c) / n, stats.Z * math.sqrt(b + c - (b - c) ** 2 / n) / n
    found = stats.score_difference(single(d))
    assert found.interval == pytest.approx((centre - half, centre + half), abs=1e-12)
    assert found.value == pytest.approx((only_sparse - only_dense) / 60)


@pytest.mark.parametrize("d", [[0.0], [0.0] * 6, [1.0], [-1.0] * 4, [1.0] * 1000])
def test_paired_interval_has_width_and_holds_its_value(d):
    found = stats.score_difference(single(d))
    assert -1 <= found.low <= found.value <= found.high <= 1 and found.low < found.high


def test_paired_interval_gains_from_pairing():
    rng = np.random.default_rng(3)
    dense = (rng.random(400) < 0.5).astype(float)
    sparse = np.where(rng.random(400) < 0.03, 1 - dense, dense)
    paired = stats.score_difference(single(sparse - dense)).interval
    alone = [stats.mean_score(single(x)).interval for x in (sparse, dense)]
    unpaired = math.hypot(*(high - low for low, high in alone))
    assert paired[1] - paired[0] < 0.5 * unpaired


def test_paired_interval_agrees_with_a_bootstrap_on_fractions():
    rng = np.random.default_rng(4)
    d = rng.choice([0.0, 0.25, -0.5, -0.25], 500, p=[0.7, 0.1, 0.1, 0.1])
    means = rng.choice(d, (4000, 500)).mean(axis=1)
    assert stats.score_difference(single(d)).interval == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.006)


@pytest.mark.parametrize(("n", "changed"), [(6, 0.3), (20, 0.2), (100, 0.05)])
def test_paired_interval_covers(n, changed):
    rng = np.random.default_rng(5)
    truth = -changed * 0.5  # a changed pair is worse three times out of four
    inside = 0
    for _ in range(3000):
        d = np.where(rng.random(n) < changed, np.where(rng.random(n) < 0.75, -1.0, 1.0), 0.0)
        low, high = stats.score_difference(single(d)).interval
        inside += low <= truth <= high
    assert inside / 3000 >= 0.94


# ----------------------------------------------------------------------------------------------------- perplexity
def test_equal_windows_give_scipys_t_interval():
    losses = np.array([2.5, 2.9, 2.7, 2.2])
    expected = scipy_stats.ttest_1samp(losses, 0).confidence_interval(0.95)
    found = stats.perplexity(losses * 512, np.full(4, 512))
    assert found.value == pytest.approx(math.exp(losses.mean()))
    assert found.interval == pytest.approx((math.exp(expected.low), math.exp(expected.high)))


def test_windows_count_by_their_tokens():
    found = stats.perplexity([100 * 2.0, 300 * 3.0], [100, 300])
    assert found.value == pytest.approx(math.exp(2.75))


def test_ratio_interval_agrees_with_a_bootstrap_over_windows():
    rng = np.random.default_rng(6)
    tokens = rng.integers(200, 800, 300).astype(float)
    nll = tokens * rng.normal(2.7, 0.3, 300)
    picks = rng.integers(0, 300, (4000, 300))
    means = nll[picks].sum(1) / tokens[picks].sum(1)
    assert stats.ratio_mean(nll, tokens).interval == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.004)


def test_perplexity_difference_is_paired():
    rng = np.random.default_rng(7)
    tokens = np.full(6, 512)
    dense = tokens * rng.normal(2.75, 0.4, 6)
    change = rng.normal(0.05, 0.01, 6)
    found = stats.perplexity_difference(dense + tokens * change, dense, tokens)
    base = stats.perplexity(dense, tokens)
    assert found.value == pytest.approx(stats.perplexity(dense + tokens * change, tokens).value - base.value)
    assert found.low < found.value < found.high and found.high - found.low < 0.1 * (base.high - base.low)


def test_perplexity_difference_counts_that_dense_varies_too():
    """A loss of exactly half a nat more in every window: the ratio is certain, the difference is not."""
    rng = np.random.default_rng(11)
    tokens = np.full(200, 512)
    dense = tokens * rng.normal(3.2, 0.2, 200)
    sparse = dense + 0.5 * tokens
    ratio = stats.perplexity_ratio(sparse, dense, tokens)
    assert ratio.interval == pytest.approx((math.exp(0.5), math.exp(0.5)))
    found, base = stats.perplexity_difference(sparse, dense, tokens), stats.perplexity(dense, tokens)
    width = (base.high - base.low) * math.expm1(0.5)
    assert found.value == pytest.approx(base.value * math.expm1(0.5))
    assert found.high - found.low == pytest.approx(width, rel=0.01)


def test_perplexity_difference_agrees_with_a_paired_bootstrap():
    rng = np.random.default_rng(12)
    tokens = rng.integers(200, 800, 300).astype(float)
    dense = tokens * rng.normal(3.2, 0.2, 300)
    sparse = dense + tokens * rng.normal(0.4, 0.05, 300)
    picks = rng.integers(0, 300, (4000, 300))
    means = [np.exp(x[picks].sum(1) / tokens[picks].sum(1)) for x in (sparse, dense)]
    expected = np.quantile(means[0] - means[1], [0.025, 0.975])
    found = stats.perplexity_difference(sparse, dense, tokens)
    assert found.interval == pytest.approx(expected, abs=0.05 * (expected[1] - expected[0]))


def test_perplexity_difference_covers():
    rng = np.random.default_rng(13)
    tokens, truth, inside = np.full(32, 2048), math.exp(3.6) - math.exp(3.2), 0
    for _ in range(1000):
        dense = tokens * rng.normal(3.2, 0.15, 32)
        sparse = dense + tokens * rng.normal(0.4, 0.03, 32)
        low, high = stats.perplexity_difference(sparse, dense, tokens).interval
        inside += low <= truth <= high
    assert 0.93 <= inside / 1000 <= 0.97


def test_one_window_has_no_interval():
    assert stats.perplexity([1000.0], [400]).interval is None
    assert stats.perplexity_difference([1010.0], [1000.0], [400]).interval is None
    assert stats.divergence([0.1], [400]).interval is None
    assert stats.perplexity([1000.0], [400]).times(2).value == pytest.approx(2 * math.exp(2.5))


def test_two_wild_windows_end_at_infinity_not_in_an_error():
    found = stats.perplexity([100.0, 90000.0], [100, 100])
    assert found.high == math.inf and found.low >= 0
    wild = stats.perplexity_difference([100.0, 190000.0], [100.0, 100.0], [100, 100])
    assert wild.value == math.inf and wild.interval is None


def test_divergence_is_token_weighted_and_not_negative():
    found = stats.divergence([0.0, 0.4], [300, 100])
    assert found.value == pytest.approx(0.1) and found.low == 0.0 and found.high > 0.1


@pytest.mark.parametrize(("sums", "weights"), [([], []), ([1.0], [0.0]), ([1.0, 2.0], [1.0])])
def test_bad_windows(sums, weights):
    with pytest.raises(ValueError):
        stats.ratio_mean(sums, weights)


# ------------------------------------------------------------------------------------------------------ agreement
def test_agreement_of_alike_windows_is_wilson_over_tokens():
    expected = scipy_stats.binomtest(1900, 2000).proportion_ci(0.95, method="wilson")
    assert stats.agreement([0.95] * 4, [500] * 4).interval == pytest.approx((expected.low, expected.high))


def test_agreement_of_unlike_windows_is_wider_than_over_tokens_and_no_wider_than_over_windows():
    a, tokens = [0.99, 0.7, 0.95, 0.8], [500] * 4
    low, high = stats.agreement(a, tokens).interval
    over_tokens = stats.wilson(float(np.mean(a)), 2000)
    over_windows = stats.wilson(float(np.mean(a)), 4)
    assert high - low > 5 * (over_tokens[1] - over_tokens[0])
    assert high - low <= over_windows[1] - over_windows[0]


def test_agreement_covers_when_windows_differ():
    rng = np.random.default_rng(8)
    inside = 0
    for _ in range(2000):
        rates = rng.beta(18, 2, 6)
        a = rng.binomial(500, rates) / 500
        low, high = stats.agreement(a, [500] * 6).interval
        inside += low <= 0.9 <= high
    assert inside / 2000 >= 0.94


def test_agreement_of_one_window():
    low, high = stats.agreement([1.0], [500]).interval
    assert low < 0.3 and high == 1.0


@pytest.mark.parametrize("weights", [[0.5, 0.6], [1.5, -0.5], [0.0, 1.0]])
def test_weights_must_add_up(weights):
    strata = [(weight, [0.5]) for weight in weights]
    for function in (stats.mean_score, stats.score_difference):
        with pytest.raises(ValueError, match="add up to 1"):
            function(strata)
