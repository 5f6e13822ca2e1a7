"""The verdict's statistics in simulations with known noise and gap: error rates, power, and the reasons."""

import math
import random

import pytest

from narrowgauge.errors import UsageError
from narrowgauge.validate.statistics.verdict import (
    BETTER,
    EQUIVALENT,
    INCONCLUSIVE,
    WORSE,
    fisher_exact_test,
    judge,
    power_equivalent,
    power_worse,
    seeds_needed,
)

TRIALS = 2000
MARGIN = 0.005


def simulate(count, deviation, gap, seed=0, trials=TRIALS):
    """Shares of verdicts over many validations whose pairs differ by ``gap`` with a standard deviation."""
    noise = random.Random(seed)
    tally = dict.fromkeys((EQUIVALENT, WORSE, BETTER, INCONCLUSIVE), 0)
    for _ in range(trials):
        reference = [2.0 * (1 + 0.02 * noise.gauss(0, 1)) for _ in range(count)]
        level = sum(reference) / count
        candidate = [r + level * noise.gauss(gap, deviation) for r in reference]
        tally[judge(reference, candidate, MARGIN).verdict] += 1
    return {verdict: number / trials for verdict, number in tally.items()}


@pytest.mark.parametrize(
    ("count", "deviation"), [(2, 0.001), (2, 0.01), (3, 0.003), (5, 0.001), (5, 0.003), (10, 0.003), (10, 0.01)]
)
def test_error_rates_stay_below_their_level(count, deviation):
    allowed = 0.05 + 2.5 * math.sqrt(0.05 * 0.95 / TRIALS)
    at_margin = simulate(count, deviation, MARGIN, seed=1)
    assert at_margin[EQUIVALENT] <= allowed and at_margin[WORSE] <= allowed
    assert simulate(count, deviation, -MARGIN, seed=2)[EQUIVALENT] <= allowed
    assert simulate(count, deviation, 0.0, seed=3)[WORSE] <= allowed


@pytest.mark.parametrize(
    ("count", "deviation", "gap"),
    [(3, 0.001, 0.0), (5, 0.003, 0.0), (8, 0.004, 0.001), (20, 0.008, 0.0), (3, 0.003, 0.0), (2, 0.0005, 0.0)],
)
def test_power_to_show_equivalence_matches_prediction(count, deviation, gap):
    found = simulate(count, deviation, gap, seed=4)[EQUIVALENT]
    assert found == pytest.approx(power_equivalent(count, deviation, gap, MARGIN), abs=0.03)


@pytest.mark.parametrize(("count", "deviation", "gap"), [(3, 0.002, 0.012), (5, 0.004, 0.01), (10, 0.01, 0.013)])
def test_power_to_show_a_gap_matches_prediction(count, deviation, gap):
    found = simulate(count, deviation, gap, seed=5)[WORSE]
    assert found == pytest.approx(power_worse(count, deviation, gap, MARGIN), abs=0.03)


def test_two_noisy_seeds_are_inconclusive_and_seeds_needed_decide():
    deviation = 0.006
    assert simulate(2, deviation, 0.0)[INCONCLUSIVE] > 0.85
    needed = seeds_needed(0.0, deviation, MARGIN)
    assert needed is not None and simulate(needed, deviation, 0.0, trials=500)[EQUIVALENT] > 0.75
    assert simulate(needed - 2, deviation, 0.0, trials=500)[EQUIVALENT] < 0.85


def test_verdicts_and_reasons():
    reference = [2.0, 2.1, 1.9]
    good = judge(reference, [2.001, 2.099, 1.9005])
    assert (good.verdict, good.seeds_needed) == (EQUIVALENT, None) and "margin of ±0.50%" in good.reason
    assert good.interval[0] < good.gap < good.interval[1] and good.detectable > MARGIN
    assert judge(reference, [2.2, 2.3, 2.1]).verdict == WORSE
    assert judge(reference, [1.8, 1.9, 1.7]).verdict == BETTER
    torn = judge([2.0, 2.0], [2.0, 2.05])
    assert torn.verdict == INCONCLUSIVE and torn.seeds_needed > 2
    assert judge([2.0], [2.0]).verdict == INCONCLUSIVE


def test_identical_runs_are_equivalent():
    assert judge([2.0, 1.9], [2.0, 1.9]).verdict == EQUIVALENT


@pytest.mark.parametrize("losses", [(2.0, 2.0), (2.0, 2.001), (2.0, 3.0), (0.0, 0.0)])
def test_copies_of_one_pair_show_no_noise(losses):
    reference, candidate = ([loss] * 5 for loss in losses)
    found = judge(reference, candidate)
    assert found.verdict == INCONCLUSIVE and "the seed changes nothing" in found.reason and not found.decidable
    assert found.interval is found.deviation is found.detectable is found.seeds_needed is None
    assert found.gap == (losses[1] / losses[0] - 1 if losses[0] else None)


def test_gaps_to_a_loss_of_zero_have_no_scale():
    """A hinge loss that reaches 0 in the reference only: 0.001 is not within 0.5% of it."""
    for reference, candidate in (([0.0] * 3, [0.001, 0.002, 0.0015]), ([-1.0, 1.0], [-1.001, 1.001])):
        found = judge(reference, candidate)
        assert found.verdict == INCONCLUSIVE and found.gap is None and not found.decidable
        assert "the mean loss of the reference is 0" in found.reason


def test_diverged_runs():
    nan = math.nan
    assert judge([2.0] * 6, [nan] * 6).verdict == WORSE
    assert judge([2.0], [nan]).verdict == WORSE
    half = judge([2.0] * 8, [nan, nan, nan, nan, *[2.0] * 4])
    assert half.verdict == WORSE and half.diverged == (0, 4) and "4 of 8 runs diverged" in half.reason
    one = judge([2.0, 2.01, 1.99, 2.0, 2.0], [nan, 2.01, 1.99, 2.0, 2.0])
    assert one.verdict == EQUIVALENT and one.diverged == (0, 1)
    both = judge([nan] * 5, [nan] * 5)
    assert both.verdict == INCONCLUSIVE and not both.decidable and both.seeds_needed is None
    assert both.reason.startswith("no pair of 5 has two finite losses: 5 of the reference's runs diverged, and 5 of")
    left = judge([nan, 2.0, 2.0], [2.0, nan, 2.0])
    assert left.verdict == INCONCLUSIVE and left.decidable and left.reason.startswith("only one pair of 3 has")


def test_fisher_exact_test_matches_scipy():
    stats = pytest.importorskip("scipy.stats")
    for bad, of, worse, out_of in ((0, 5, 5, 5), (1, 8, 4, 8), (3, 10, 3, 12)):
        table = [[worse, out_of - worse], [bad, of - bad]]
        assert fisher_exact_test(bad, of, worse, out_of) == pytest.approx(stats.fisher_exact(table, "greater")[1])


def test_bad_input():
    with pytest.raises(UsageError, match="pairs of runs"):
        judge([1.0], [1.0, 2.0])
    with pytest.raises(UsageError, match="margin=0"):
        judge([1.0, 1.0], [1.0, 1.0], margin=0)
