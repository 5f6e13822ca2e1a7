"""Every classic mistake is found where it is, and its healthy counterpart has no serious finding."""

import functools

import pytest

from narrowgauge.gauges.faults.faults import FAULTS, select_expected, train_setup


def test_there_are_at_least_fourteen_faults():
    assert len(FAULTS) >= 14 and all(name == fault.name and fault.about for name, fault in FAULTS.items())


FOUND_LATE = {"clip-before-unscale", "fp8-stale-scale", "nan-in-batch", "scale-too-high"}
"""Mistakes that take more than 20 steps to find."""


def count_steps(fault):
    """Return enough steps for the finding, fewer than ``narrowgauge break`` takes."""
    if fault.name == "scale-too-high":  # its rule counts the skips of 50 steps
        return fault.steps
    return 3 if fault.name == "bf16-accumulation" else min(fault.steps, 40)


@functools.cache
def train_right(name):
    """Train the healthy counterpart; several faults share one, which is trained once."""
    fault = FAULTS[name]
    first = max((other for other in FAULTS.values() if other.right is fault.right), key=count_steps)
    return train_setup(fault.right, count_steps(fault)) if first is fault else train_right(first.name)


@pytest.mark.parametrize("name", FAULTS)
def test_the_mistake_is_found_and_the_healthy_counterpart_is_clean(name):
    fault = FAULTS[name]
    steps = count_steps(fault)
    wrong, right = train_setup(fault.wrong, steps if name in FOUND_LATE else min(steps, 20)), train_right(name)
    found = [(finding.rule, finding.where) for finding in wrong.findings]
    assert select_expected(fault, wrong.findings), found
    assert not right.serious, right.serious
    assert not select_expected(fault, right.findings)
