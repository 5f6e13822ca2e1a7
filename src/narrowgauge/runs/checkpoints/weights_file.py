"""Weights as a plain safetensors file: what opens anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from narrowgauge import files
from narrowgauge.runs import atomic_files
from narrowgauge.serialization import Flattener, write_tensors


def write_weights(weights: Mapping[str, Any], file: Path) -> dict[str, Tensor]:
    """Write a state dictionary under its own names, atomically; what is stored twice by sharing is stored once."""
    flattener = Flattener()
    flattener.flatten(weights)
    try:
        files.replace(file, lambda new: write_tensors(flattener.tensors, new, {"format": "pt", **flattener.aliases}))
    except (OSError, SafetensorError) as error:
        raise atomic_files.refuse(file, error) from error
    return flattener.tensors
