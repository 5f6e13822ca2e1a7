"""Shows the progress of a run: a bar on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from narrowgauge.cli.terminal import has_rich
from narrowgauge.errors import printable
from narrowgauge.runs.trainer import Observer

EVERY_S = 10.0
"""Seconds between two plain lines."""
_SMOOTH = 0.9


def make_progress(unit: str, stream: TextIO | None = None) -> Observer:
    """Create a bar if the stream is a terminal and rich is installed, else plain lines."""
    out = stream or sys.stderr
    return Bar(unit, out) if out.isatty() and has_rich() else Lines(unit, out)


def format_count(number: float) -> str:
    """Format a number in few characters: 950, 12.3k, 4.56M."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.3g}"


class Lines(Observer):
    """Prints a line after the first step, then every ten seconds, and for every evaluation."""

    def __init__(self, unit: str, stream: TextIO) -> None:
        self._unit, self._out = unit, stream
        self._steps = 0
        self._next = 0.0
        self._rate: float | None = None

    def notify(self, line: str) -> None:
        print(printable(line), file=self._out, flush=True)

    def on_start(self, step: int, steps: int) -> None:
        self._steps = steps

    def on_metrics(self, event: Mapping[str, Any], skipped: int) -> None:
        if event["kind"] == "eval":
            metrics = "  ".join(f"{n} {v:.4g}" for n, v in event.items() if n not in ("kind", "step", "loss"))
            self.notify(f"step {event['step']}/{self._steps}  evaluation loss {event['loss']:.4f}  {metrics}".rstrip())
            return
        text = self._describe(event, skipped)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY_S
            self.notify(f"step {event['step']}/{self._steps}  {text}")

    def _describe(self, event: Mapping[str, Any], skipped: int) -> str:
        rate = event["tokens_per_s"]
        self._rate = rate if self._rate is None else _SMOOTH * self._rate + (1 - _SMOOTH) * rate
        parts = [f"loss {event['loss']:.4f}", f"{format_count(self._rate or 0)} {self._unit}s/s"]
        if event["loss_scale"] != 1:
            parts.append(f"scale {event['loss_scale']:g}")
        return "  ".join([*parts, f"skipped {skipped}"])


class Bar(Lines):
    """Shows a progress bar with rich."""

    def __init__(self, unit: str, stream: TextIO) -> None:
        super().__init__(unit, stream)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
            console=Console(file=stream, markup=False, highlight=False),
        )
        self._task = self._progress.add_task("")

    def notify(self, line: str) -> None:
        self._progress.console.print(printable(line))

    def on_start(self, step: int, steps: int) -> None:
        super().on_start(step, steps)
        self._progress.update(
            self._task, total=steps, completed=step, description="first step: compiling and allocating"
        )
        self._progress.start()

    def on_metrics(self, event: Mapping[str, Any], skipped: int) -> None:
        if event["kind"] == "eval":
            super().on_metrics(event, skipped)
        else:
            self._progress.update(self._task, completed=event["step"], description=self._describe(event, skipped))

    def on_end(self) -> None:
        self._progress.stop()
