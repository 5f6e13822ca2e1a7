"""Benchmarks: who is faster here (``contest``), is it still as fast (``gate``), and where a step goes (``trace``)."""

from __future__ import annotations

from narrowgauge.bench.contest import (
    BATCHES,
    CLIP_NORM,
    Row,
    Settings,
    build,
    engine_step,
    free,
    gone,
    make_batches,
    make_rows,
    measure,
    race,
    time_round,
)

__all__ = [
    "BATCHES",
    "CLIP_NORM",
    "Row",
    "Settings",
    "build",
    "engine_step",
    "free",
    "gone",
    "make_batches",
    "make_rows",
    "measure",
    "race",
    "time_round",
]
