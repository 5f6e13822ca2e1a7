"""Refuses a benchmark that cannot fit into memory, before it starts: a CPU would run out of memory and be killed."""

from __future__ import annotations

from narrowgauge.errors import UsageError
from narrowgauge.hardware import Device
from narrowgauge.recipe import Recipe
from narrowgauge.task import Task

BYTES, LEAN_BYTES = 16, 6
"""Bytes of each parameter, at least: weight, gradient and two moments in FP32, or in the formats of lean recipes."""


def refuse_too_large(task: Task, recipe: Recipe, baselines: int, device: Device) -> None:
    """Refuse a model whose training state alone exceeds the memory. A recipe and its baselines are there together.

    Args:
        task: The task. Nothing is refused if its facts have no number of ``parameters``.
        recipe: The recipe to measure.
        baselines: Number of its baselines.
        device: The device.

    Raises:
        UsageError: It does not fit.
    """
    parameters = task.facts.get("parameters")
    if not isinstance(parameters, int) or device.memory_bytes is None:
        return
    own = BYTES if recipe.master == "fp32" else LEAN_BYTES
    needed = parameters * (own + baselines * BYTES)
    if needed > device.memory_bytes:
        others = f" and {baselines} baseline{'s' * (baselines > 1)}, which take turns," if baselines else ""
        advice = "fewer baselines (--peers '') or " if baselines and parameters * own < device.memory_bytes else ""
        raise UsageError(
            f"{task.name} has {parameters / 1e6:,.0f} million parameters: {recipe}{others} needs at least "
            f"{needed / 2**30:,.0f} GiB, and {device.name} has {device.memory_bytes / 2**30:,.0f}; use {advice}"
            "a smaller model"
        )
