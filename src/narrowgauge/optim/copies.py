"""FP8 copies of weights that the optimizer's update writes: it has the new weight at hand, so no pass reads it again.

A copy is cast by the scale that the next step's products will divide by, so the scales must have moved before the
update; ``moves`` notes which they were, and whoever reads the copy compares. An update that is skipped on the device
writes the copy all the same, from the weight as it stands, because the scale has moved under it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from narrowgauge.scaling.tensor import Site, TensorScales


@dataclass
class Fp8Copy:
    """A parameter in E4M3, row by row, at its site of the FP8 scales."""

    lp: Tensor
    site: Site
    scales: TensorScales
    moves: tuple[int, int] | None = None
    """Of the scales, when an update last wrote the copy; None: none has since it was made."""


def attach(parameter: Tensor, copy: Fp8Copy) -> None:
    """Let updates of the parameter write the copy."""
    parameter.fp8_copy = copy  # type: ignore[attr-defined]


def detach(parameter: Tensor) -> None:
    """Let updates write no copy any more: the model has passed into other hands."""
    parameter.__dict__.pop("fp8_copy", None)


def copy_of(parameter: Tensor) -> Fp8Copy | None:
    """The copy that updates are to write: where the scales are there beforehand."""
    copy: Fp8Copy | None = getattr(parameter, "fp8_copy", None)
    return copy if copy is not None and copy.scales.delayed else None
