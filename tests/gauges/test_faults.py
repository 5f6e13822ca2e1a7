"""Every classic mistake is caught by its finding, at its place, and its healthy twin is accused of nothing serious."""

import functools

import pytest

from narrowgauge.gauges.faults.faults import FAULTS, caught, run


def test_there_are_enough():
    assert len(FAULTS) >= 14 and all(name == fault.name and fault.about for name, fault in FAULTS.items())


@functools.cache
def run_twin(name):
    """Twins are shared between faults; equal ones are the same object, and run once."""
    fault = FAULTS[name]
    first = next(other for other in FAULTS.values() if other.right is fault.right and other.steps == fault.steps)
    return run(fault.right, fault.steps) if first is fault else run_twin(first.name)


@pytest.mark.parametrize("name", FAULTS)
def test_the_mistake_is_named_and_the_twin_is_not_accused(name):
    fault = FAULTS[name]
    wrong, right = run(fault.wrong, fault.steps), run_twin(name)
    found = [(finding.rule, finding.where) for finding in wrong.findings]
    assert caught(fault, wrong.findings), found
    assert not right.serious, right.serious
    assert not caught(fault, right.findings)
