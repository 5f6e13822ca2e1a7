"""Runs the steps in which an engine plans its memory, before a benchmark measures it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from narrowgauge.engine import Engine
from narrowgauge.errors import UsageError

MOST_STEPS = 16
"""The most steps that a plan may take: a few, and one for each correction."""


def settle_memory(engine: Engine, step: Callable[[int], Any]) -> None:
    """Run steps until the memory plan of an engine is final.

    Args:
        engine: An engine with a memory budget.
        step: Runs a step, given its number.

    Raises:
        UsageError: Nothing fits into the budget.
    """
    for number in range(MOST_STEPS):
        if engine.memory_settled:
            break
        step(number)
    plan = engine.memory_plan
    if plan is None or not plan.fits:
        raise UsageError(f"--fit: {plan or 'no plan was found'}")
