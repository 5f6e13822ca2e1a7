"""Memory plans of models that a step calls several times with inputs of different sizes, on a simulated GPU."""

from __future__ import annotations

import pytest
import torch

import narrowgauge as ng
from narrowgauge import tasks
from narrowgauge.nn.call_size import CallSize
from narrowgauge.task import Task


def call_twice(second: int) -> Task:
    """A language model that a step also calls with the first ``second`` rows of its batch."""
    made = tasks.find("gpt:2x64", batch=8, context=32)

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return made.loss(model, (inputs, targets)) + made.loss(model, (inputs[:second], targets[:second]))

    return ng.Task(model=made.model, batch=made.batch, loss=loss, items_per_batch=8, synthetic=made.synthetic)


def test_the_largest_call_of_a_step_counts() -> None:
    size = CallSize()
    for length in (8, 24, 4):
        size.exceeds_plan(torch.zeros(1, length, requires_grad=True))
    assert (size.latest, size.of_step, size.largest) == (4, 24, 24)
    size.begin_step()
    size.exceeds_plan(torch.zeros(1, 6))
    assert (size.latest, size.of_step, size.largest) == (6, 6, 24)


@pytest.mark.parametrize("second", [8, 1])
def test_a_model_that_is_called_twice_is_planned(second: int) -> None:
    """A smaller second call is no smaller batch: the plan does not wait for a larger one."""
    found = ng.forecast(call_twice(second), "fp8", gpu="h200", fit="1GB")["fp8"]
    assert found.plan is not None and found.plan.counts == {"none": 2} and found.plan.fits


def test_a_forecast_is_found_by_any_text_of_its_recipe() -> None:
    text = "fp8[first_forward=bf16,gradients_format=e4m3]"
    found = ng.forecast("gpt:1x64", [text, "bf16"], gpu="h200")
    assert found[text] is found["fp8[gradients_format=e4m3,first_forward=bf16]"] is found[ng.recipe(text)]
    assert list(found) == [str(ng.recipe(text)), "bf16"]
    with pytest.raises(KeyError):
        found["fp16"]
    with pytest.raises(KeyError):
        found["no recipe"]
