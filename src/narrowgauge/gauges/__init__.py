"""Gauges: what is read off the tensors while training, and what is made of it when a number goes wrong."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """``ng.gauges.capture.Recorder`` without an import of its own; nothing heavy is imported before it is asked for."""
    if name in ("capture", "captured"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
