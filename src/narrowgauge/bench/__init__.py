"""Benchmarks: measure recipes side by side (``compare``), detect regressions (``gate``), profile a step (``trace``)."""

from __future__ import annotations

from narrowgauge.bench.compare import (
    BATCHES,
    CLIP_NORM,
    Row,
    Settings,
    build_entry,
    free_memory,
    make_batches,
    make_engine_step,
    make_rows,
    measure,
    measure_recipe,
    raise_released,
    settle,
    time_round,
)

__all__ = [
    "BATCHES",
    "CLIP_NORM",
    "Row",
    "Settings",
    "build_entry",
    "free_memory",
    "make_batches",
    "make_engine_step",
    "make_rows",
    "measure",
    "measure_recipe",
    "raise_released",
    "settle",
    "time_round",
]
