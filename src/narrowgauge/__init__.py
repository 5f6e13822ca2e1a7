"""narrowgauge: mixed-precision training for PyTorch that is fast, stays on the rails, and proves it.

Engine, StepReport          one training step under a recipe, and its result
StepFunction                the same as one function, which a GPU can repeat as one CUDA graph
recipe, Recipe              which number format is used for what
LossScaler                  drop-in replacement for torch.amp.GradScaler
convert, keep_fp32          fused and FP8 layers; functions that compute in FP32
watch, replay, gauges       read tensors while training; find the operation that produced a NaN
validate                    test whether a recipe trains as well as FP32
forecast                    predict memory and time of a training step
Task                        a model, its batches and its loss, for the command line
optim, formats, hardware    optimizers, number formats, GPUs
block_formats               MXFP8, MXFP4 and NVFP4: elements that share a scale
NarrowgaugeError, UsageError, TrainingStalled
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowgauge.recipe import Recipe
from narrowgauge.recipe import parse as recipe  # hides the module of the same name
from narrowgauge.version import __version__ as __version__

# Written out, because type checkers and editors cannot compute it.
__all__ = [
    "Engine",
    "LossScaler",
    "NarrowgaugeError",
    "Recipe",
    "StepFunction",
    "StepReport",
    "Task",
    "TrainingStalled",
    "UsageError",
    "block_formats",
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

# Public names are imported on first use, so that ``narrowgauge formats`` does not wait for torch.
_WHERE = {
    "Engine": "narrowgauge.engine",
    "LossScaler": "narrowgauge.scaling.loss",
    "NarrowgaugeError": "narrowgauge.errors",
    "StepFunction": "narrowgauge.engine.step_function",
    "StepReport": "narrowgauge.step_report",
    "Task": "narrowgauge.task",
    "TrainingStalled": "narrowgauge.errors",
    "UsageError": "narrowgauge.errors",
    "convert": "narrowgauge.nn.convert",
    "keep_fp32": "narrowgauge.nn.keep_fp32",
    "replay": "narrowgauge.gauges.replay.replay",
    "watch": "narrowgauge.gauges.watch.watch",
}
_MODULES = ("block_formats", "forecast", "formats", "gauges", "hardware", "optim", "validate")

if TYPE_CHECKING:  # type checkers cannot see into __getattr__; a test compares the two lists
    from narrowgauge import block_formats, formats, gauges, hardware, optim
    from narrowgauge.engine import Engine
    from narrowgauge.engine.step_function import StepFunction
    from narrowgauge.errors import NarrowgaugeError, TrainingStalled, UsageError
    from narrowgauge.forecast.run import forecast  # at run time the package of this name is callable
    from narrowgauge.gauges.replay.replay import replay
    from narrowgauge.gauges.watch.watch import watch
    from narrowgauge.nn.convert import convert
    from narrowgauge.nn.keep_fp32 import keep_fp32
    from narrowgauge.scaling.loss import LossScaler
    from narrowgauge.step_report import StepReport
    from narrowgauge.task import Task
    from narrowgauge.validate.run import validate  # so is this one
else:

    def __getattr__(name: str) -> object:
        import importlib

        if name in _WHERE:
            return getattr(importlib.import_module(_WHERE[name]), name)
        if name in _MODULES:
            return importlib.import_module(f"narrowgauge.{name}")
        raise AttributeError(f"module 'narrowgauge' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
