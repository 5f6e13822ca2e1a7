"""Weights as a plain safetensors file: what opens anywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from narrowgauge.runs import disk
from narrowgauge.tree import Taker, write_tensors


def write_weights(weights: Mapping[str, Any], file: Path) -> dict[str, Tensor]:
    """Write a state dictionary under its own names, atomically; what is stored twice by sharing is stored once."""
    taker = Taker()
    taker.take(weights)
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(taker.tensors, temporary, {"format": "pt", **taker.aliases})
        disk.sync(temporary)
        temporary.replace(file)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):  # a read-only disk refuses that, too
            temporary.unlink(missing_ok=True)
        raise disk.refuse(file, error) from error
    return taker.tensors
