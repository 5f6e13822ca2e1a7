"""narrowgauge: mixed-precision training for PyTorch that is fast, stays on the rails, and proves it."""

from __future__ import annotations

import importlib
from typing import Any

from narrowgauge.recipe import Recipe
from narrowgauge.recipe import parse as recipe  # after this line the function stands before the module of its name

__version__ = "0.1.0"

# Public names are imported when first asked for, so that ``narrowgauge formats`` never waits for torch.
_WHERE = {
    "Engine": "narrowgauge.engine",
    "LossScaler": "narrowgauge.scaling.loss",
    "NarrowgaugeError": "narrowgauge.errors",
    "StepReport": "narrowgauge.step_report",
    "Task": "narrowgauge.task",
    "TrainingStalled": "narrowgauge.errors",
    "UsageError": "narrowgauge.errors",
    "convert": "narrowgauge.nn.convert",
    "keep_fp32": "narrowgauge.nn.keepers",
    "replay": "narrowgauge.gauges.replay",
    "watch": "narrowgauge.gauges.probe",
}
_MODULES = ("forecast", "formats", "gauges", "hardware", "optim", "validate")

__all__ = [*sorted(_WHERE), *_MODULES, "Recipe", "recipe"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"narrowgauge.{name}")
    raise AttributeError(f"module 'narrowgauge' has no attribute {name!r}")
