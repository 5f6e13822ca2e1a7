"""Sequential tests: error rates stay within their level, and no time is wasted on hopeless candidates."""

import importlib.util
import random
from pathlib import Path

import pytest

from narrowgauge.validate.statistics.sequential_test import FIRST, LEVELS, SequentialTest
from narrowgauge.validate.statistics.verdict import ALPHA

BENCH = Path(__file__).resolve().parents[2] / "bench" / "sequential.py"


@pytest.fixture(scope="module")
def trial():
    spec = importlib.util.spec_from_file_location("bench_sequential", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.trial


def test_levels_sum_to_five_percent():
    assert sum(LEVELS) == pytest.approx(ALPHA)


@pytest.mark.parametrize(("gap", "wrong"), [(0.005, ("equivalent",)), (0.0, ("worse", "better"))])
def test_repeated_analyses_keep_the_error_rate(trial, gap, wrong):
    """bench/sequential.py has 2,000 trials of nine cases; these are enough to detect levels that are not divided."""
    rng = random.Random(1)
    verdicts = [trial(rng, gap, 0.003, most=40)[0] for _ in range(300)]
    assert sum(verdict in wrong for verdict in verdicts) <= 300 * ALPHA + 3 * (300 * ALPHA * (1 - ALPHA)) ** 0.5
    assert len(set(verdicts)) > 1 or gap == 0


def test_more_pairs_give_more_power(trial):
    rng = random.Random(2)
    found = [trial(rng, 0.0, 0.004) for _ in range(60)]
    assert sum(verdict == "equivalent" for verdict, _ in found) > 45
    assert max(count for _, count in found) > FIRST
    found = [trial(rng, 0.02, 0.004) for _ in range(60)]
    assert sum(verdict == "worse" for verdict, _ in found) > 50


def test_candidate_without_noise_is_decided_at_once():
    test = SequentialTest(0.005)
    assert test.pairs_wanted == FIRST
    test.update([1.0, 2.0, 3.0], [1.0001, 2.0001, 3.0001], 100)
    assert test.verdict.verdict == "equivalent" and test.pairs_wanted is None and test.pairs_needed is None


def test_no_more_copies_of_one_pair_are_trained():
    test = SequentialTest(0.005)
    test.update([2.0] * 3, [2.001] * 3, 100)
    assert test.verdict.verdict == "inconclusive" and test.pairs_wanted is None and test.pairs_needed is None


def test_unaffordable_pairs_are_not_started():
    noisy = [1.0, 1.02, 0.98]
    poor, rich = SequentialTest(0.005), SequentialTest(0.005)
    poor.update([1.0] * 3, noisy, 5)
    rich.update([1.0] * 3, noisy, 10_000)
    assert poor.pairs_wanted is None and poor.pairs_needed == rich.pairs_needed == rich.pairs_wanted > 100


def test_fixed_number_of_pairs_is_one_analysis():
    test = SequentialTest(0.005, 2)
    test.update([1.0, 1.0], [1.01, 0.99], 1000)
    assert test.verdict.verdict == "inconclusive" and test.verdict.alpha == ALPHA
    assert test.pairs_wanted is None and test.pairs_needed > 2
