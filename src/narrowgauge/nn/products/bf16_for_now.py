"""Whether layers multiply in BF16 for now, whatever conversion chose: in an engine's evaluations.

Training in FP8 is a way to find weights. An evaluation is about these weights, as they will be exported
and used. Rounding operands to FP8 there would add an error that no user of the weights has. Weights that are stored
in FP8 stay what they are, and so do products that are emulated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from narrowgauge.nn.products.gemm import GemmChoice
from narrowgauge.recipe import Recipe

_bf16_for_now = False


@contextlib.contextmanager
def bf16_for_now() -> Iterator[None]:
    """Context manager in which layers whose weights are not stored in FP8 multiply in BF16 instead of FP8."""
    global _bf16_for_now
    before, _bf16_for_now = _bf16_for_now, True
    try:
        yield
    finally:
        _bf16_for_now = before


def for_evaluation(recipe: Recipe) -> contextlib.AbstractContextManager[None]:
    """Return the context of an evaluation under a recipe."""
    return bf16_for_now() if recipe.compute == "fp8" else contextlib.nullcontext()


def is_bf16_for_now() -> bool:
    """Whether the context is open."""
    return _bf16_for_now


def get_current(choice: GemmChoice, stored_scale: Tensor | None) -> GemmChoice:
    """Return the formats of a layer's products for now.

    Args:
        choice: The formats that conversion chose.
        stored_scale: The scale of a weight that is stored in FP8, whose products have no other form.
    """
    return choice.without_fp8 if _bf16_for_now and stored_scale is None else choice
