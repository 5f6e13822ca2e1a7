"""Gauges: read tensors while training, report problems, and capture and replay steps with inf or NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["capture"]

if TYPE_CHECKING:
    from narrowgauge.gauges import capture
else:

    def __getattr__(name: str) -> object:
        """Import a module on first use, so that ``ng.gauges.capture.Recorder`` works without an import of its own."""
        import importlib

        if name in __all__:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
