"""Which values the fields of a recipe may have, and which combinations make no sense."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from narrowgauge.errors import UsageError

CHOICES: dict[str, tuple[str, ...]] = {
    "compute": ("fp32", "tf32", "fp16", "bf16", "fp8"),
    "master": ("fp32", "split", "none"),
    "gradients": ("fp32", "bf16", "released"),
    "moments": ("fp32", "bf16", "8bit"),
    "scaling": ("none", "delayed", "current"),
    "granularity": ("tensor", "row", "block"),
    "amax": ("max", "recent"),
    "products": ("fastest", "all"),
    "gradients_format": ("e5m2", "e4m3", "auto"),
    "first_forward": ("auto", "fp8", "mostly-bf16", "bf16"),
    "attention_keys": ("fp8", "bf16"),
    "head": ("fp8", "bf16"),
    "attention": ("auto", "any", "cudnn", "flash", "efficient", "math"),
    "checkpoint": ("none", "selective", "full"),
    "frozen": ("keep", "bf16", "fp8"),
    "activations": ("auto", "bf16", "normalized", "8bit", "recompute"),
    "offload": ("none", "activations"),
    "emulate": ("none", "mxfp8", "mxfp4", "nvfp4"),
    "gradient_rounding": ("nearest", "stochastic"),
    "hadamard": ("none", "random"),
}
FP8_FIELDS = (
    "scaling", "granularity", "history", "margin", "amax", "products", "gradients_format", "first_forward",
    "attention_keys", "head",
)  # fmt: skip
"""Fields that only FP8 recipes have; the emulation of MXFP8 has a format of gradients too."""
IMPLIED: dict[tuple[str, str], dict[str, Any]] = {
    ("granularity", "row"): {"scaling": "current"},
    ("granularity", "block"): {"scaling": "current"},
}
"""Fields that a value sets as well, where the same change does not name them."""
_PATTERN = re.compile(r"[A-Za-z0-9_.*?-]+")


def check_recipe(recipe: Any, defaults: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` if a recipe's field has an unknown value, or has no effect beside the others.

    Args:
        recipe: A ``Recipe``, or anything with its fields.
        defaults: The default of each field.
    """
    for field, allowed in CHOICES.items():
        value = getattr(recipe, field)
        if value not in allowed:
            raise UsageError(f"recipe: {field}={value} is unknown; expected one of {', '.join(allowed)}")
    _check_loss_scale(recipe)
    if recipe.compute == "fp8":
        _check_fp8_fields(recipe)
    else:
        _check_no_fp8_fields(recipe, defaults)
    _check_emulation(recipe)
    _check_weights(recipe)
    _check_activations(recipe)
    if not isinstance(recipe.keep, tuple) or not all(isinstance(k, str) and _PATTERN.fullmatch(k) for k in recipe.keep):
        raise UsageError(f"recipe: keep={recipe.keep} must be module paths or class names, with * and ? as wildcards")


def refuse_other_emulation(recipe: Any, changes: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` if MXFP8's recipe is changed to another format, but keeps E4M3 gradients, which only it has.

    The check of the whole recipe would name the gradients, which the change does not mention.

    Args:
        recipe: A ``Recipe``, or anything with its fields.
        changes: Fields and their new values.
    """
    chosen = changes.get("emulate", recipe.emulate)
    if "gradients_format" in changes or recipe.gradients_format != "e4m3" or changes.get("compute") == "fp8":
        return
    if recipe.emulate == "mxfp8" and chosen != "mxfp8" and chosen in CHOICES["emulate"]:
        instead = "bf16" if chosen == "none" else f"emulated-{chosen}"
        raise UsageError(f"recipe: emulate={chosen} contradicts emulated-mxfp8, which emulates MXFP8; use {instead}")


def _check_loss_scale(recipe: Any) -> None:
    scale = recipe.loss_scale
    if scale == "none":
        return
    if scale != "dynamic" and (
        isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf
    ):
        raise UsageError(f"recipe: loss_scale={scale} must be none, dynamic or a positive number")
    if recipe.compute != "fp16":
        raise UsageError(
            f"recipe: loss_scale={scale} has no effect on {recipe.compute}, which has FP32's range or scales each "
            "tensor; only fp16 needs it"
        )


def _check_fp8_fields(recipe: Any) -> None:
    if isinstance(recipe.history, bool) or not isinstance(recipe.history, int) or not 1 <= recipe.history <= 4096:
        raise UsageError(f"recipe: history={recipe.history} must be a whole number from 1 to 4096")
    if isinstance(recipe.margin, bool) or not isinstance(recipe.margin, int) or not 0 <= recipe.margin <= 16:
        raise UsageError(f"recipe: margin={recipe.margin} must be a whole number from 0 to 16")
    if recipe.gradients_format == "auto" and recipe.scaling != "delayed":
        raise UsageError(
            f"recipe: gradients_format=auto measures what delayed scales flush, and scaling is {recipe.scaling}; use "
            "scaling=delayed, or gradients_format=e4m3 or e5m2"
        )
    if recipe.granularity == "tensor":
        return
    if recipe.scaling != "current":
        raise UsageError(
            f"recipe: granularity={recipe.granularity} computes scales from the tensor itself, so scaling="
            f"{recipe.scaling} has no effect; leave scaling out, or use granularity=tensor"
        )
    for field, plain in (("activations", "auto"), ("offload", "none")):
        if getattr(recipe, field) != plain:
            raise UsageError(
                f"recipe: {field}={getattr(recipe, field)} is for fused blocks, which have one scale per tensor; with "
                f"granularity={recipe.granularity} blocks run layer by layer"
            )


def _check_no_fp8_fields(recipe: Any, defaults: Mapping[str, Any]) -> None:
    own = ("gradients_format",) if recipe.emulate == "mxfp8" else ()
    changed = [name for name in FP8_FIELDS if name not in own and getattr(recipe, name) != defaults[name]]
    if "granularity" in changed:
        changed = ["granularity"]  # it has set scaling too
    if changed:
        value = getattr(recipe, changed[0])
        raise UsageError(f"recipe: {changed[0]}={value} has no effect on {recipe.compute}: it belongs to fp8")


def _check_emulation(recipe: Any) -> None:
    if recipe.emulate != "none" and recipe.gradients_format == "auto":
        raise UsageError("recipe: gradients_format=auto is for fp8; an emulation takes e4m3 or e5m2")
    if recipe.emulate != "none" and recipe.compute != "bf16":
        raise UsageError(f"recipe: emulate={recipe.emulate} multiplies in BF16: it needs compute=bf16")
    if recipe.emulate != "none" and (recipe.activations != "auto" or recipe.offload != "none"):
        raise UsageError("recipe: an emulation has no fused blocks, so activations and offload have no effect")
    if recipe.emulate == "none" and (recipe.gradient_rounding, recipe.hadamard) != ("nearest", "none"):
        raise UsageError("recipe: gradient_rounding and hadamard belong to emulations, such as emulated-nvfp4")


def _check_weights(recipe: Any) -> None:
    if recipe.master != "fp32" and recipe.compute not in ("bf16", "fp8"):
        raise UsageError(
            f"recipe: master={recipe.master} keeps BF16 weights, but {recipe.compute} does not compute with them"
        )
    if recipe.frozen not in {"fp8": ("keep", "bf16", "fp8"), "bf16": ("keep", "bf16")}.get(recipe.compute, ("keep",)):
        raise UsageError(
            f"recipe: frozen={recipe.frozen} stores weights that are not trained in that format, but {recipe.compute} "
            "does not compute with it"
        )
    if recipe.gradients == "bf16" and recipe.master == "fp32":
        raise UsageError("recipe: gradients=bf16 needs master=split or master=none: FP32 weights have FP32 gradients")
    if recipe.gradients == "released" and recipe.loss_scale != "none":
        raise UsageError(
            "recipe: gradients=released steps each parameter during backward, before a loss scale can be checked; "
            "use bf16, which needs no loss scale, or gradients=fp32"
        )


def _check_activations(recipe: Any) -> None:
    if recipe.activations in ("normalized", "8bit") and recipe.compute != "fp8":
        raise UsageError(f"recipe: activations={recipe.activations} belongs to fp8, not {recipe.compute}")
    if recipe.activations == "recompute" and recipe.compute not in ("bf16", "fp8"):
        raise UsageError(f"recipe: activations=recompute needs fused blocks, which {recipe.compute} does not have")
    if recipe.activations == "recompute" and recipe.checkpoint != "none":
        raise UsageError(
            f"recipe: activations=recompute has no effect with checkpoint={recipe.checkpoint}; add checkpoint=none"
        )
    if recipe.offload == "activations" and (recipe.checkpoint != "full" or recipe.compute not in ("bf16", "fp8")):
        raise UsageError(
            "recipe: offload=activations moves the inputs of recomputed fused blocks to the host, so it needs bf16 "
            "or fp8, and checkpoint=full"
        )
