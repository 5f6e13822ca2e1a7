"""Forecasts of runs with Muon: one moment less for the matrices of blocks, and no step on a GPU."""

import pytest

from narrowgauge import hardware, tasks
from narrowgauge.forecast.run import Scenario
from narrowgauge.recipe import parse
from narrowgauge.runs.optimizers import with_optimizer

LAYERS, WIDTH = 4, 256


@pytest.mark.parametrize(("recipe", "bytes_each"), [("bf16", 4.0), ("fp8", 4.0), ("fp8-lean", 1.0 + 1 / 32)])
def test_moments_of_matrices_are_half(recipe, bytes_each):
    found = {}
    for name in ("adamw", "muon"):
        task = with_optimizer(tasks.find(f"gpt:{LAYERS}x{WIDTH}", batch=4, context=128), name)
        found[name] = Scenario(task=task, gpu=hardware.find_gpu("h200")).predict_memory(parse(recipe))
    matrices = LAYERS * 12 * WIDTH**2
    assert found["adamw"].moments - found["muon"].moments == pytest.approx(bytes_each * matrices, rel=0.02)
    assert found["adamw"].master == found["muon"].master
