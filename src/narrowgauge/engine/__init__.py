"""Engine: one training step under a recipe, its checks and its update."""

from narrowgauge.engine.engine import Engine

__all__ = ["Engine"]
