"""Trains a model until a step is captured, and replays it; used by the tests of replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import Engine
from narrowgauge.gauges.capture import Recorder
from narrowgauge.gauges.replay.replay import replay
from narrowgauge.gauges.replay.result import Replay

Loss = Callable[[nn.Module, Any], Tensor]


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def step_until_captured(
    model: nn.Module, loss: Loss, batches: list[Any], folder: Path, recipe: str = "fp32", **options: Any
) -> Path:
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe, **options)
    recorder = Recorder(engine, folder, tell=lambda line: None)
    for batch in batches:
        recorder.record_batch(batch)
        with engine.forward():
            value = loss(engine.model, batch)
        engine.backward(value)
        path = recorder.record_step(engine.step(), value)
        if path is not None:
            return path
    raise AssertionError("nothing was captured")


def capture_and_replay(
    make: Callable[[], nn.Module], folder: Path, batch: Any, loss: Loss = mean_square, recipe: str = "fp32"
) -> Replay:
    """Train one step of a new model, which must be captured, and replay it with another new model."""
    torch.manual_seed(0)
    path = step_until_captured(make(), loss, [batch], folder, recipe)
    torch.manual_seed(1)
    return replay(path, make, loss)
