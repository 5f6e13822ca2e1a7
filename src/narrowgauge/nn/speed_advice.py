"""Says in one line if FP8 is not expected to make a converted model faster, why, and what to do."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Protocol

from narrowgauge.errors import SlowRecipeWarning
from narrowgauge.hardware import is_assumed
from narrowgauge.nn.matrix_inventory import Matrix
from narrowgauge.nn.predict_speed import Speed

NEGLIGIBLE_GAIN = 1.02
"""A predicted speed of FP8 relative to BF16, in the same blocks, up to which FP8 gains nothing."""
PREDICTED = ("measured:", "predicted:")
"""How the reason of a layer begins whose formats were chosen by their speed (products/choose_formats.py)."""


class ConversionReport(Protocol):
    """What the advice needs to know of a conversion."""

    @property
    def compute(self) -> str: ...

    @property
    def matrices(self) -> Sequence[Matrix]: ...

    def predict_speed(self, compiled: bool = False) -> Speed | None: ...


def explain_slow(conversion: ConversionReport, *, compiled: bool, can_compile: bool) -> str | None:
    """Return one line if FP8 is not expected to make the model faster: how slow, why, and what to do. Else None.

    Args:
        conversion: The report of a conversion for a GPU. Without a GPU of the table there is nothing to say.
        compiled: Whether torch.compile compiles what is not fused.
        can_compile: Whether torch.compile could compile it.
    """
    speed = conversion.predict_speed(compiled) if conversion.compute == "fp8" else None
    if speed is None:
        return None
    if speed.as_converted < NEGLIGIBLE_GAIN * speed.in_bf16:
        return f"FP8 gains nothing for this model: {_explain_no_gain(conversion, speed)}"
    if speed.as_converted >= 1:
        return None
    fix = "use bf16 instead of fp8"
    if can_compile and not compiled:
        fix += ", also with compile=True"
        if speed.if_compiled >= 1:
            fix = f"use compile=True (predicted: {speed.if_compiled:.1f} times)"
    return (
        f"FP8 trains this model at about {speed.as_converted:.1f} times the speed of BF16 with torch.compile "
        f"(predicted), because {1 - speed.fused_share:.0%} of its matrix products run layer by layer and uncompiled: "
        f"{fix}; printing the conversion tells why blocks are not fused"
    )


def _explain_no_gain(conversion: ConversionReport, speed: Speed) -> str:
    by_reason: dict[str, float] = {}
    for matrix in conversion.matrices:
        if matrix.formats and "fp8" not in matrix.formats:
            small = matrix.reason.startswith(PREDICTED)
            reason = "small" if small else matrix.reason
            by_reason[reason] = by_reason.get(reason, 0.0) + matrix.size * (matrix.active or 1.0)
    most = max(by_reason, key=lambda reason: by_reason[reason], default="small")
    if most == "small" or speed.fp8_share > 0.5:
        return (
            "its layers are so small that casts to FP8 take longer than FP8 products save; "
            "use bf16 instead of fp8, or wider layers"
        )
    return f"{1 - speed.fp8_share:.0%} of its FLOPs are not in FP8 ({most}); use bf16 instead of fp8"


def warn_about_speed(line: str | None, stacklevel: int) -> None:
    """Warn with the line of ``explain_slow``, if there is one and the GPU is not just simulated.

    Args:
        line: The line.
        stacklevel: As for ``warnings.warn``: 2 is the caller of this function.
    """
    if line is not None and not is_assumed():
        warnings.warn(line, SlowRecipeWarning, stacklevel=stacklevel)


@contextlib.contextmanager
def no_speed_warnings() -> Iterator[None]:
    """Do not warn inside the context: for engines that do not train, and for callers that show the line themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowRecipeWarning)
        yield
