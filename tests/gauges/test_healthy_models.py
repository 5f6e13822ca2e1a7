"""Healthy runs of many kinds have no finding: each in FP32 and in one other recipe. bench/healthy_kinds.py has all."""

import itertools

import pytest
import torch
from healthy_models import CASES
from zero_start_models import train

STEPS, EVERY = 18, 3
OTHERS = itertools.cycle(["fp16", "bf16", "fp16", "bf16-lean", "fp8[products=all]"])
RUNS = [*((name, "fp32") for name in CASES), *((name, next(OTHERS)) for name in CASES)]
EXPECTED = {("large_targets", "fp16"): {"skips-in-a-row", "scale-oscillating"}}
"""Warnings, not serious: the dynamic loss scale adapts to gradients of thousands."""


@pytest.mark.parametrize(("name", "recipe"), RUNS)
def test_a_healthy_run_has_no_finding(name, recipe):
    torch.manual_seed(0)
    found = train(recipe=recipe, steps=STEPS, every=EVERY, **CASES[name]())
    assert [finding for finding in found.values() if finding.severity == "serious"] == []
    assert {rule for rule, _ in found} <= EXPECTED.get((name, recipe), set())


def test_there_are_enough():
    assert len(RUNS) >= 66
