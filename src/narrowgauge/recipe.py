"""Recipe: which number format is used for what in a training run.

A recipe is frozen and checked when it is created. Its text parses back to the same object: a name, and in brackets the
fields that differ from it, as in ``bf16[moments=8bit,master=split,checkpoint=selective]``.

    name            compute   master   gradients   moments   loss scale   recomputation
    fp32, tf32      as named  fp32     fp32        fp32      none         none
    fp16            fp16      fp32     fp32        fp32      dynamic      none
    bf16            bf16      fp32     fp32        fp32      none         none
    fp8             fp8       fp32     fp32        fp32      none         none         (delayed scaling per tensor)
    bf16-lean       bf16      split    bf16        8bit      none         full
    fp8-lean        fp8       split    bf16        8bit      none         full
    emulated-mxfp8  bf16      fp32     fp32        fp32      none         none         (operands rounded to MXFP8)
    emulated-mxfp4, emulated-nvfp4     the same with operands rounded to MXFP4 and NVFP4; without "emulated-" for short
    auto            chosen for the device and the model: see ``choose`` and ``engine/choose_recipe.py``
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from narrowgauge.errors import UsageError
from narrowgauge.recipe_checks import CHOICES, IMPLIED, check_recipe, refuse_other_emulation

if TYPE_CHECKING:
    from narrowgauge.hardware import Device

SYNONYMS = {("activations", "fp8"): "8bit"}
"""Values that are read as another one: 8-bit activations are integers, which are more accurate than FP8."""
_TEXT = re.compile(r"(?P<base>[^\[\]]*)(\[(?P<changes>[^\[\]]*)\])?")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Which number format is used for what. Create one by name: ``narrowgauge.recipe("bf16")``.

    All arguments are keywords; each field below is one. A combination that makes no sense raises ``UsageError``.

    Example:
        >>> ng.recipe("bf16").replace(moments="8bit")
        >>> str(ng.Recipe(compute="bf16", checkpoint="full"))
        'bf16[checkpoint=full]'
    """

    compute: str = "fp32"
    """Format of the matrix products: fp32, tf32, fp16, bf16 or fp8."""
    master: str = "fp32"
    """The weights that the optimizer updates: fp32, split (BF16 and 16 more bits, together FP32), or none (BF16)."""
    gradients: str = "fp32"
    """Weight gradients: fp32, bf16, or released (each parameter is stepped during backward, and its gradient freed)."""
    moments: str = "fp32"
    """Format of the optimizer's moments: fp32, bf16 or 8bit."""
    loss_scale: str | float = "none"
    """Loss scale: none, dynamic, or a fixed number. Only FP16 needs one."""
    scaling: str = "none"
    """FP8 scale of each tensor: delayed (from the amax of earlier steps), current (from the tensor), or none."""
    granularity: str = "tensor"
    """What has an FP8 scale in linear layers: tensor, row (along the dimension that a product sums), or block (128
    values of a row, 128 x 128 of a weight). With the last two, scaling is current, and layers are not fused."""
    history: int = 16
    """Number of steps whose amax delayed scaling uses."""
    margin: int = 0
    """Headroom of FP8 scales: they are divided by 2**margin."""
    amax: str = "max"
    """Which amax of the history delayed scaling uses: max or recent."""
    products: str = "fastest"
    """Which products run in FP8: fastest (the fastest mix, measured on this GPU layer by layer), or all that can."""
    gradients_format: str = "e5m2"
    """FP8 format of gradients that products read: e5m2 (2 mantissa bits), e4m3 (3 bits, 1/16,384 of the range), or auto
    (each gradient starts in e5m2, and is in e4m3 while that flushes at most 1% of its values to zero)."""
    first_forward: str = "auto"
    """Format of the forward products of the first of a model's repeated blocks: fp8, bf16, mostly-bf16 (FP8 only in the
    MLP's last projection), or auto (mostly-bf16 for trained layers of a model with six blocks or more, else fp8)."""
    attention_keys: str = "fp8"
    """Format of the forward products that compute attention's keys (in fused blocks with queries and values, which are
    the same product): fp8 or bf16. Errors of keys count most where attention is sharp."""
    head: str = "fp8"
    """Format of the products of layers that compute logits: fp8 (as for other layers) or bf16."""
    keep: tuple[str, ...] = ()
    """Modules that compute in FP32, besides norms, softmax and loss: paths or class names, * and ? are wildcards."""
    attention: str = "auto"
    """SDPA backend: auto (the fastest fused one, never silently the unfused one), any (torch chooses), or a name."""
    checkpoint: str = "none"
    """Activation checkpointing: none, selective (keep products, recompute the rest) or full (recompute blocks)."""
    frozen: str = "keep"
    """How matrices that are not trained are stored: keep (as they are), bf16, or fp8 (one byte where FP8 products read
    them, BF16 elsewhere)."""
    activations: str = "auto"
    """What fused blocks keep for backward: bf16 (tensors as they were computed), normalized (the norms' rows in BF16 in
    place of the residual stream, and not what they write), 8bit (also the activation's input in 8 bits), recompute (not
    the activation's input: backward runs its product again), or auto (in FP8 what costs at most about 1% of time)."""
    offload: str = "none"
    """What waits for backward in pinned host memory: none, or activations (the inputs of recomputed fused blocks)."""
    emulate: str = "none"
    """A format that this machine does not multiply: linear layers round their operands to it (mxfp8, mxfp4, nvfp4), and
    multiply in BF16. It shows how a model would train, not how fast."""
    gradient_rounding: str = "nearest"
    """How gradients are rounded in an emulation: nearest or stochastic."""
    hadamard: str = "none"
    """random: in an emulation, both operands of the weight's gradient are multiplied by a random Hadamard matrix
    before they are rounded, which spreads outliers."""

    def __post_init__(self) -> None:
        check_recipe(self, {field.name: field.default for field in dataclasses.fields(self)})

    @property
    def first_gradients_format(self) -> str:
        """The format in which gradients start: e5m2 or e4m3."""
        return "e5m2" if self.gradients_format == "auto" else self.gradients_format

    def replace(self, **changes: Any) -> Recipe:
        """Return the same recipe with some fields changed. ``granularity="row"`` or "block" sets ``scaling="current"``.

        Args:
            **changes: Fields and their new values.

        Raises:
            UsageError: A field is unknown, or the result makes no sense.
        """
        unknown = sorted(set(changes) - {field.name for field in dataclasses.fields(self)})
        if unknown:
            raise UsageError(_no_such_field(unknown[0]))
        refuse_other_emulation(self, changes)
        for (name, value), implied in IMPLIED.items():
            changes = {**implied, **changes} if changes.get(name) == value else changes
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        alike = self.compute, self.emulate
        similar = {name: recipe for name, recipe in NAMED.items() if (recipe.compute, recipe.emulate) == alike}
        changes = {name: self._list_changes(recipe) for name, recipe in similar.items()}
        name = min(changes, key=lambda one: len(changes[one]))  # of equal ones the first, which has the shorter name
        return f"{name}[{','.join(changes[name])}]" if changes[name] else name

    def _list_changes(self, base: Recipe) -> list[str]:
        implied = [fields for (name, value), fields in IMPLIED.items() if getattr(self, name) == value]
        base = dataclasses.replace(base, **{name: value for fields in implied for name, value in fields.items()})
        return [
            f"{field.name}={_write(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(base, field.name)
        ]


_LEAN: dict[str, Any] = {"master": "split", "gradients": "bf16", "moments": "8bit", "checkpoint": "full"}
NAMED: dict[str, Recipe] = {
    "fp32": Recipe(),
    "tf32": Recipe(compute="tf32"),
    "fp16": Recipe(compute="fp16", loss_scale="dynamic"),
    "bf16": Recipe(compute="bf16"),
    "fp8": Recipe(compute="fp8", scaling="delayed"),
    "bf16-lean": Recipe(compute="bf16", **_LEAN),
    "fp8-lean": Recipe(compute="fp8", scaling="delayed", **_LEAN),
    "emulated-mxfp8": Recipe(compute="bf16", emulate="mxfp8", gradients_format="e4m3"),
    "emulated-mxfp4": Recipe(compute="bf16", emulate="mxfp4"),
    "emulated-nvfp4": Recipe(compute="bf16", emulate="nvfp4"),
}
EMULATED = tuple(name for name, one in NAMED.items() if one.emulate != "none")
SHORT = {name.removeprefix("emulated-"): name for name in EMULATED}
"""Names for short. A recipe's text says that it is emulated."""


def split(text: str) -> list[str]:
    """Split a list of recipes at the commas outside of brackets.

    Args:
        text: As in ``fp32,bf16[checkpoint=full,keep=head]``, which is two recipes.
    """
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def is_auto(recipe: str | Recipe) -> bool:
    """Return whether a recipe is chosen automatically: ``auto``, or ``auto[...]`` with some fields fixed.

    Args:
        recipe: A recipe or its text.
    """
    return isinstance(recipe, str) and recipe.partition("[")[0].strip() == "auto"


def parse(text: str | Recipe, device: Device | None = None, auto: Recipe | None = None) -> Recipe:
    """Return the recipe of a text. This is ``narrowgauge.recipe``.

    Args:
        text: A name (``bf16``), a name with changed fields (``bf16[checkpoint=full]``), or a recipe.
        device: The device that ``auto`` chooses for. Default: the GPU of this machine, or else its CPU.
        auto: The recipe that ``auto`` stands for. Default: what ``choose`` returns for the device.

    Returns:
        The recipe.

    Raises:
        UsageError: The text is not a recipe.

    Example:
        >>> ng.recipe("fp16[loss_scale=1024,keep=head]").loss_scale
        1024.0
    """
    if isinstance(text, Recipe):
        return text
    if not isinstance(text, str):
        raise UsageError(f"recipe: expected a name such as 'bf16', got {text!r}")
    match = _TEXT.fullmatch(text.strip())
    name = match["base"].strip() if match else text
    name = SHORT.get(name, name)
    if match is None or (name != "auto" and name not in NAMED):
        known = [*NAMED, "auto"]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"unknown recipe {text!r}: expected one of {', '.join(known)}, "
            f"or one with changed fields such as bf16[checkpoint=full]{hint}"
        )
    base = NAMED[name] if name != "auto" else auto or choose(device or _detect())[0]
    changes: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in (match["changes"] or "").split(","))):
        field, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise UsageError(f"recipe {text!r}: {part!r} should read field=value")
        if field in changes:
            raise UsageError(f"recipe {text!r}: {field} is given twice")
        changes[field] = _read(field, value)
    return base.replace(**changes)


def choose(device: Device) -> tuple[Recipe, str]:
    """Return the recipe that ``auto`` chooses on a device as long as no model is known, and the reason.

    An engine knows the model as well. On a GPU with FP8 it takes ``fp8`` if that is faster for the model.

    Args:
        device: The device.
    """
    if "bf16" in device.native:
        reason = f"{device.name} has native BF16, whose range is FP32's, so it needs no loss scaling"
        if device.kind == "cuda" and "fp8" in device.native:
            reason += "; models that FP8 makes faster train in fp8"
        return NAMED["bf16"], reason
    if device.kind == "cuda" and "fp16" in device.native:
        return NAMED["fp16"], f"{device.name} has FP16 tensor cores but no BF16 ones; the loss is scaled dynamically"
    return NAMED["fp32"], f"{device.name} has no native 16-bit matrix products: anything but FP32 would be slower"


def refuse_emulation(verb: str, *recipes: Recipe) -> None:
    """Raise ``UsageError`` if a recipe is an emulation. ``verb`` is what was asked for, such as "bench"."""
    for recipe in recipes:
        if recipe.emulate != "none":
            raise UsageError(
                f"{verb}: {recipe} is an emulation in BF16, whose time and memory say nothing about hardware that has "
                f"the format; train and validate can use it"
            )


def find_emulation(text: str) -> str | None:
    """Return the title of the format that a recipe emulates, such as NVFP4; None if it emulates none.

    Args:
        text: The text of a recipe, also with ``@TASK`` behind it. What is not a recipe emulates nothing.
    """
    name = re.split(r"[\[@]", text, maxsplit=1)[0].strip()
    known = NAMED.get(SHORT.get(name, name))
    found = re.search(r"[\[,]\s*emulate\s*=\s*(\w+)", text.partition("@")[0])
    format = found[1] if found else known.emulate if known is not None else "none"
    return None if format == "none" else format.upper()


def refusal(recipe: Recipe, device: Device) -> str | None:
    """Return why a device cannot run a recipe, or None if it can.

    Args:
        recipe: The recipe.
        device: The device.
    """
    need = {"tf32": (8, 0), "fp16": (7, 0), "bf16": (8, 0), "fp8": (8, 9)}.get(recipe.compute)
    if device.kind == "cpu":
        if recipe.compute == "tf32":
            return f"recipe {recipe}: TF32 is a mode of NVIDIA tensor cores, and {device.name} is a CPU; use fp32"
        return None
    if need is not None and device.capability is not None and device.capability < need:
        have = ".".join(map(str, device.capability))
        return (
            f"recipe {recipe}: {device.name} has compute capability {have}, {recipe.compute} needs "
            f"{need[0]}.{need[1]} or later; use {choose(device)[0]}"
        )
    return None


def _detect() -> Device:
    from narrowgauge.hardware import detect

    return detect()


def _write(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(value)
    return repr(value) if isinstance(value, float) else str(value)


def _read(field: str, value: str) -> Any:
    if field in ("history", "margin"):
        try:
            return int(value)
        except ValueError:
            raise UsageError(f"recipe: {field}={value} must be a whole number") from None
    if field == "keep":
        return tuple(filter(None, value.split("+")))
    if field == "loss_scale" and value not in ("none", "dynamic"):
        try:
            return float(value)
        except ValueError:
            raise UsageError(f"recipe: loss_scale={value} must be none, dynamic or a positive number") from None
    if field not in CHOICES and field != "loss_scale":
        raise UsageError(_no_such_field(field))
    return SYNONYMS.get((field, value), value)


def _no_such_field(name: str) -> str:
    fields = [field.name for field in dataclasses.fields(Recipe)]
    near = difflib.get_close_matches(name, fields, n=1)
    return f"recipe: no field {name!r}; the fields are {', '.join(fields)}" + (
        f"; did you mean {near[0]}?" if near else ""
    )
