"""Gauges: what is read off the tensors while training, and what is made of it when a number goes wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["capture"]

if TYPE_CHECKING:
    from narrowgauge.gauges import capture
else:

    def __getattr__(name: str) -> object:
        """``ng.gauges.capture.Recorder`` without an import of its own; nothing heavy is imported before it is asked."""
        import importlib

        if name in __all__:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
