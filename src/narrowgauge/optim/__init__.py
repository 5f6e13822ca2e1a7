"""Optimizers that hold less: exact FP32 masters in 16 + 16 bits, moments in 8, everything stepped at once."""

from narrowgauge.optim.adamw import AdamW
from narrowgauge.optim.masters import full_precision, load_full_precision, narrow, widen
from narrowgauge.optim.takeover import plain_state, take_over

__all__ = ["AdamW", "full_precision", "load_full_precision", "narrow", "plain_state", "take_over", "widen"]
