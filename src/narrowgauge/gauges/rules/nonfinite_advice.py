"""What to do about inf and NaN, by the recipe of the run: only FP16 and FP8 have a narrow range."""

from __future__ import annotations

from narrowgauge.recipe import Recipe

REPLAY = "`narrowgauge replay` names the op that produced the first inf or NaN"


def advise_on_nonfinite(recipe: Recipe) -> str:
    """Return the fix for losses or gradients that are not finite.

    Args:
        recipe: The recipe of the run.

    Returns:
        One sentence. A run in FP32, TF32 or BF16 is not told to use another format, because none has a wider range.
    """
    if recipe.compute == "fp16" and recipe.loss_scale == "dynamic":
        return f"{REPLAY}; lower the learning rate, or use bf16, which has the range of FP32"
    if recipe.compute == "fp16":
        return f"use a dynamic loss scale (recipe fp16) instead of loss_scale={recipe.loss_scale}, or use bf16"
    if recipe.compute == "fp8":
        return f"{REPLAY}; train with --recipe bf16 to see whether FP8 is to blame"
    return f"{REPLAY}; {recipe.compute.upper()} has the widest range, so check the op, the data and the learning rate"
