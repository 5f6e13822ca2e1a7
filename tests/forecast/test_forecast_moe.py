"""Forecasts of the built-in mixture: products count the chosen experts only, in every recipe."""

import pytest

from narrowgauge import hardware, tasks
from narrowgauge.forecast.memory.estimate import predict_memory
from narrowgauge.forecast.run import Scenario
from narrowgauge.forecast.trace.trace_step import STEPS
from narrowgauge.recipe import parse


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8", "fp8-lean"])
def test_a_mixture_is_predicted(recipe):
    task = tasks.find("moe:2x128x8+1", batch=4, context=64)
    traced = Scenario(task=task, gpu=hardware.find_gpu("h200")).trace(parse(recipe))
    assert traced.parameters == task.facts["parameters"]
    memory = predict_memory(traced)
    assert memory.total > 4 * traced.parameters
    assert any("every expert was given the same number" in note for note in memory.notes)


def test_flops_are_those_of_the_chosen_experts():
    """Forward and backward of 2 layers: 8,192 choices of an expert with 3 matrices of 128 x 256, and a shared one.

    Experts begin at multiples of 128 slots, so that some are empty: 6% here, half as many as there can be.
    """
    task = tasks.find("moe:2x128x8+1", batch=64, context=64)
    traced = Scenario(task=task, gpu=hardware.find_gpu("h200")).trace(parse("bf16[checkpoint=none]"))
    products = [op for op in traced.trace.of_step(STEPS - 1) if op.kind == "product"]
    tokens, matrices = 64 * 64, 3 * 128 * 256
    experts = sum(op.flops for op in products if ".mixture.experts." in op.where)
    shared = sum(op.flops for op in products if ".mixture.shared." in op.where)
    assert experts == pytest.approx(2 * 6 * 2 * tokens * matrices * (1 + 64 * 8 / (2 * tokens)), rel=0.02)
    assert shared == pytest.approx(2 * 6 * tokens * matrices, rel=0.01)
    attention = 12.0 * 2 * 128 * 64 * tokens
    assert sum(op.flops for op in products) == pytest.approx(task.flops_per_item * tokens - attention, rel=0.05)
