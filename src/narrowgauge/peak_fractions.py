"""How much of a GPU's datasheet training reaches, from the table ``peak_fractions.toml``.

Forecasts, the choice of FP8 products and lint all predict with these figures, so that they agree with each other.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, kw_only=True)
class Fraction:
    """One entry of the table."""

    name: str
    value: float
    of: str
    """What it is a fraction of."""
    measured_on: str
    """The GPU, or "derived" where the figure was not measured on its own."""
    date: str
    source: str


@functools.cache
def load_fractions() -> Mapping[str, Fraction]:
    """Every entry of the table, by its name."""
    text = resources.files("narrowgauge").joinpath("peak_fractions.toml").read_text(encoding="utf-8")
    entries = (Fraction(**entry) for entry in tomllib.loads(text)["fraction"])
    return {entry.name: entry for entry in entries}


def get_fraction(name: str) -> float:
    """The value of one entry, such as "product.bf16" or "memory.optimizer"."""
    return load_fractions()[name].value
