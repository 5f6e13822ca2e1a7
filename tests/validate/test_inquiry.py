"""A validation that looks again and again: errors stay within what was shared out, and time is not wasted."""

import importlib.util
import random
from pathlib import Path

import pytest

from narrowgauge.validate.statistics.sample_size import FIRST, LEVELS, Inquiry
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
def test_looking_often_does_not_find_what_is_not_there(trial, gap, wrong):
    """bench/sequential.py has 2,000 trials of nine cases; these are enough to catch levels that are not shared out."""
    rng = random.Random(1)
    verdicts = [trial(rng, gap, 0.003, most=40)[0] for _ in range(300)]
    assert sum(verdict in wrong for verdict in verdicts) <= 300 * ALPHA + 3 * (300 * ALPHA * (1 - ALPHA)) ** 0.5
    assert len(set(verdicts)) > 1 or gap == 0


def test_power_comes_with_pairs(trial):
    rng = random.Random(2)
    found = [trial(rng, 0.0, 0.004) for _ in range(60)]
    assert sum(verdict == "equivalent" for verdict, _ in found) > 45
    assert max(count for _, count in found) > FIRST
    found = [trial(rng, 0.02, 0.004) for _ in range(60)]
    assert sum(verdict == "worse" for verdict, _ in found) > 50


def test_no_noise_is_decided_at_the_first_look():
    inquiry = Inquiry(0.005)
    assert inquiry.wanted == FIRST
    inquiry.see([1.0, 2.0, 3.0], [1.0001, 2.0001, 3.0001], 100)
    assert inquiry.verdict.verdict == "equivalent" and inquiry.wanted is None and inquiry.needed is None


def test_what_cannot_be_afforded_is_not_begun():
    noisy = [1.0, 1.02, 0.98]
    poor, rich = Inquiry(0.005), Inquiry(0.005)
    poor.see([1.0] * 3, noisy, 5)
    rich.see([1.0] * 3, noisy, 10_000)
    assert poor.wanted is None and poor.needed == rich.needed == rich.wanted > 100


def test_a_fixed_number_of_pairs_is_one_look():
    inquiry = Inquiry(0.005, 2)
    inquiry.see([1.0, 1.0], [1.01, 0.99], 1000)
    assert inquiry.verdict.verdict == "inconclusive" and inquiry.verdict.alpha == ALPHA
    assert inquiry.wanted is None and inquiry.needed > 2
