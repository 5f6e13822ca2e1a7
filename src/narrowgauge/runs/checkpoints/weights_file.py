"""Writes weights as one plain safetensors file, which opens in any tool."""

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
    """Write a state dict under its own names, atomically. Tied weights are stored once.

    Returns:
        The tensors that were written, by name.
    """
    flattener = Flattener()
    flattener.flatten(weights)
    try:
        files.replace(file, lambda new: write_tensors(flattener.tensors, new, {"format": "pt", **flattener.aliases}))
    except (OSError, SafetensorError) as error:
        raise atomic_files.explain_error(file, error, again="repeat the command") from error
    return flattener.tensors
