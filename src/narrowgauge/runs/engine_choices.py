"""What an engine chooses: formats of products, and while it trains the memory plan and formats of gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from narrowgauge.engine import Engine
from narrowgauge.nn.matrix_inventory_text import measure_share
from narrowgauge.scaling.gradient_formats import FormatChange
from narrowgauge.step_report import StepReport, Watcher

MOST_NAMED = 3
"""Gradients that a line names."""


def describe_choices(engine: Engine) -> dict[str, Any]:
    """Return what an engine has chosen, as fields of ``Result``."""
    plan, formats, conversion = engine.memory_plan, engine.gradient_formats, engine.conversion
    return {
        "conversion": conversion.summary(),
        "format_share": measure_share(conversion.matrices, conversion.compute),
        "memory_plan": None if plan is None else plan.describe(),
        "gradient_formats": None if formats is None else formats.formats,
    }


class ChoicesReporter(Watcher):
    """Tells the memory plan when it is final, with the peak that was measured, and changes of gradients' formats."""

    def __init__(self, engine: Engine, notify: Callable[[str], None]) -> None:
        self._engine, self._notify = engine, notify
        self._plan: dict[str, str] | None = None
        self._changes = 0

    def around(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """Do nothing around a phase."""
        return contextlib.nullcontext()

    def is_idle(self) -> bool:
        """Return True: nothing happens around phases."""
        return True

    def after(self, report: StepReport) -> None:
        """Tell a new plan, and new formats."""
        plan, formats = self._engine.memory_plan, self._engine.gradient_formats
        if plan is not None and self._engine.memory_settled and plan.blocks != self._plan:
            self._plan = plan.blocks
            self._notify(f"measured: {plan}")
        if formats is not None and len(formats.changes) > self._changes:
            new, self._changes = formats.changes[self._changes :], len(formats.changes)
            self._notify(f"update {report.index}: {formats}; {describe_changes(new)}")


def describe_changes(changes: list[FormatChange]) -> str:
    """Name the gradients that changed to E5M2, with what E4M3 would flush, or else how many changed to E4M3."""
    wide = sorted((change for change in changes if change.format == "e5m2"), key=lambda change: -change.flushed)
    if not wide:
        return f"{len(changes)} changed to E4M3"
    named = ", ".join(f"{one.site.removesuffix('.grad_output')} ({one.flushed:.1%})" for one in wide[:MOST_NAMED])
    more = f" and {len(wide) - MOST_NAMED} more" if len(wide) > MOST_NAMED else ""
    return f"changed to E5M2, as E4M3 flushed too much: {named}{more}"
