"""narrowgauge: mixed-precision training for PyTorch that is fast, stays on the rails, and proves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowgauge.recipe import Recipe
from narrowgauge.recipe import parse as recipe  # after this line the function stands before the module of its name

__version__ = "0.1.0"

# Written out, because type checkers and editors read this list and cannot compute it.
__all__ = [
    "Engine",
    "LossScaler",
    "NarrowgaugeError",
    "Recipe",
    "StepReport",
    "Task",
    "TrainingStalled",
    "UsageError",
    "convert",
    "forecast",
    "formats",
    "gauges",
    "hardware",
    "keep_fp32",
    "optim",
    "recipe",
    "replay",
    "validate",
    "watch",
]

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
    "keep_fp32": "narrowgauge.nn.keep_fp32",
    "replay": "narrowgauge.gauges.replay.replay",
    "watch": "narrowgauge.gauges.watch.watch",
}
_MODULES = ("forecast", "formats", "gauges", "hardware", "optim", "validate")

if TYPE_CHECKING:  # the same names for type checkers, which do not look into __getattr__; tests hold the lists together
    from narrowgauge import formats, gauges, hardware, optim
    from narrowgauge.engine import Engine
    from narrowgauge.errors import NarrowgaugeError, TrainingStalled, UsageError
    from narrowgauge.forecast.run import forecast  # the package of this name is called in the function's place,
    from narrowgauge.gauges.replay.replay import replay
    from narrowgauge.gauges.watch.watch import watch
    from narrowgauge.nn.convert import convert
    from narrowgauge.nn.keep_fp32 import keep_fp32
    from narrowgauge.scaling.loss import LossScaler
    from narrowgauge.step_report import StepReport
    from narrowgauge.task import Task
    from narrowgauge.validate.run import validate  # and so is this one
else:

    def __getattr__(name: str) -> object:
        import importlib

        if name in _WHERE:
            return getattr(importlib.import_module(_WHERE[name]), name)
        if name in _MODULES:
            return importlib.import_module(f"narrowgauge.{name}")
        raise AttributeError(f"module 'narrowgauge' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
