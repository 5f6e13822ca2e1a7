"""Memory plans of loops whose steps are not all alike: errors, skipped losses, and forwards without gradients."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge import hardware, tasks
from narrowgauge.forecast.memory.estimate import predict_memory
from narrowgauge.forecast.trace.fake_gpu import simulate_gpu
from narrowgauge.forecast.trace.recorder import Recorder
from narrowgauge.forecast.trace.trace_step import trace_steps
from narrowgauge.forecast.trace.workspaces import Workspaces, get_cublas_bytes
from narrowgauge.nn.memory_plan import MemoryPlan
from narrowgauge.recipe import parse
from narrowgauge.task import make_plain_optimizers

H200 = hardware.find_gpu("h200")
TASK = tasks.find("gpt:4x256", batch=32, context=256)
STEPS = 10
MEASURED = (1, 2, 3)
"""Steps in which the engine measures and tries."""
Before = Callable[[int, ng.Engine, Tensor], Any]


@functools.cache
def train_plainly() -> MemoryPlan:
    train()  # the first run of a process may allocate what later ones find
    return train()


class Interruption(BaseException):
    """As KeyboardInterrupt is, which ends a cell of a notebook and not its process."""


@functools.cache
def get_budget() -> int:
    sizes = [
        predict_memory(trace_steps(TASK, parse(f"bf16[checkpoint={mode},activations=bf16]"), H200)).total
        for mode in ("full", "none")
    ]
    return int(0.6 * sizes[0] + 0.4 * sizes[1])


def train(before: Before | None = None, within: Before | None = None) -> MemoryPlan:
    """Train with a budget, and with something else before or in each forward; return the plan."""
    recorder = Recorder(Workspaces(H200), get_cublas_bytes(H200))
    with simulate_gpu(H200, meter=recorder.meter), recorder:
        with torch.device("cuda"):
            model = TASK.model()
        optimizers = make_plain_optimizers(TASK, model)
        engine = ng.Engine(model, optimizers, "bf16", clip_norm=1.0, memory_budget=get_budget())
        tokens = torch.zeros(32, 256, dtype=torch.long).to("cuda")
        for step in range(STEPS):
            recorder.step, recorder.phase = step, "forward"
            if before is not None:
                before(step, engine, tokens)
            with engine.forward():
                if within is not None:
                    within(step, engine, tokens)
                loss = model(tokens, tokens)
            recorder.phase = "backward"
            engine.backward(loss)
            del loss
            recorder.phase = "step"
            engine.step()
        assert engine.memory_settled and engine.memory_plan is not None
        return engine.memory_plan


def interrupt(*args: Any) -> Any:
    raise Interruption


def interrupt_forward(step: int, engine: ng.Engine, tokens: Tensor) -> None:
    if step in MEASURED:
        handle = engine.model.blocks[2].register_forward_pre_hook(interrupt)  # type: ignore[index,union-attr]
        with contextlib.suppress(Interruption), engine.forward():
            engine.model(tokens, tokens)
        handle.remove()
        gc.collect()  # frames of the error hold tensors


def interrupt_backward(step: int, engine: ng.Engine, tokens: Tensor) -> None:
    if step in MEASURED:
        with engine.forward():
            loss = engine.model(tokens, tokens)
        handle = next(engine.model.blocks[1].parameters()).register_hook(interrupt)  # type: ignore[index,union-attr]
        with contextlib.suppress(Interruption):
            engine.backward(loss)
        handle.remove()
        del loss
        gc.collect()
        for parameter in engine.model.parameters():
            parameter.grad = None


def give_up_loss(step: int, engine: ng.Engine, tokens: Tensor) -> None:
    """As loops do whose loss is not finite."""
    if step in MEASURED:
        with engine.forward():
            engine.model(tokens, tokens)


def run_without_gradients(step: int, engine: ng.Engine, tokens: Tensor) -> None:
    """As preference optimization does for its reference."""
    with torch.no_grad():
        engine.model(tokens, tokens)


@pytest.mark.parametrize("before", [interrupt_forward, interrupt_backward, give_up_loss])
def test_a_plan_does_not_depend_on_steps_that_were_given_up(before: Before) -> None:
    plain, found = train_plainly(), train(before)
    assert found.fits and found.blocks == plain.blocks and found.peak == plain.peak
    assert len(plain.counts) > 1


def test_a_plan_does_not_count_forwards_without_gradients() -> None:
    plain, found = train_plainly(), train(within=run_without_gradients)
    assert found.fits and found.blocks == plain.blocks


def test_a_loop_that_gives_up_a_loss_in_every_step_gets_a_plan() -> None:
    def give_up(step: int, engine: ng.Engine, tokens: Tensor) -> None:
        give_up_loss(MEASURED[0], engine, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("narrowgauge.engine.fit_memory.MOST_WAITS", 2)
        assert train(give_up).fits
