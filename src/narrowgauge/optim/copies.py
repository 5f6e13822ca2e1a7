"""Copies of weights that the optimizer's update writes: it has the new weight at hand, so no pass reads it again.

In FP8 a copy is cast by the scale that the next step's products will divide by, so the scales must have moved before
the update; ``moves`` notes which they were, and whoever reads the copy compares. An update that is skipped on the
device writes the copy all the same, from the weight as it stands, because the scale has moved under it. A step over
the weight that did not write the copy, by other hands than ours, makes it old, whatever the weight's version says.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from narrowgauge.optim import steps
from narrowgauge.scaling.tensor import Site, TensorScales

NAMES = ("fp8_copy", "bf16_copy")
"""What a parameter calls its copies."""


@dataclass
class Fp8Copy:
    """A parameter in E4M3, row by row, at its site of the FP8 scales."""

    lp: Tensor
    site: Site
    scales: TensorScales
    moves: tuple[int, int] | None = None
    """Of the scales, when an update last wrote the copy; None: none has since it was made."""
    step: int | None = None
    """The step over the weight that wrote it; None where the last one did not."""

    @property
    def fresh(self) -> bool:
        """Whether the weight's last step wrote it, by the scale as it is now."""
        return self.step is not None and self.moves == self.scales.moves

    def note(self) -> None:
        """The step that is being taken has written it."""
        self.moves, self.step = self.scales.moves, steps.taken() + 1


@dataclass
class Bf16Copy:
    """An FP32 parameter in BF16."""

    hp: Tensor
    step: int | None = None
    """As an FP8 copy's."""

    @property
    def fresh(self) -> bool:
        """Whether the weight's last step wrote it."""
        return self.step is not None

    def note(self) -> None:
        """The step that is being taken has written it."""
        self.step = steps.taken() + 1


def attach(parameter: Tensor, copy: Fp8Copy | Bf16Copy) -> None:
    """Let updates of the parameter write the copy."""
    setattr(parameter, _name(copy), copy)


def detach(parameter: Tensor) -> None:
    """Let updates write no copies any more: the model has passed into other hands."""
    for name in NAMES:
        parameter.__dict__.pop(name, None)


def copy_of(parameter: Tensor) -> Fp8Copy | None:
    """The FP8 copy that updates are to write: where the scales are there beforehand."""
    copy: Fp8Copy | None = getattr(parameter, "fp8_copy", None)
    return copy if copy is not None and copy.scales.delayed else None


def bf16_copy_of(parameter: Tensor) -> Bf16Copy | None:
    """The BF16 copy that updates are to write."""
    copy: Bf16Copy | None = getattr(parameter, "bf16_copy", None)
    return copy


def _name(copy: Fp8Copy | Bf16Copy) -> str:
    return "fp8_copy" if isinstance(copy, Fp8Copy) else "bf16_copy"


def _make_others_old(optimizer: Optimizer, *_: object) -> None:
    """After a step: the copies of its weights that it did not write are old."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name in NAMES:
                copy: Fp8Copy | Bf16Copy | None = getattr(parameter, name, None)
                if copy is not None and copy.step != steps.taken():
                    copy.step = None


register_optimizer_step_post_hook(_make_others_old)  # behind that of ``steps``, which counts the step
