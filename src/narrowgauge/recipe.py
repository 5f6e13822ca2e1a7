"""Recipe: which number format plays which role in a training run.

A recipe is frozen, checked where it is made, and has a text that parses back to the same object: a name, and in
brackets what differs from it, as in ``bf16[moments=8bit,master=split,checkpoint=selective]``.

    name            compute   master   gradients   moments   loss scale   recomputation
    fp32, tf32      as named  fp32     fp32        fp32      none         none
    fp16            fp16      fp32     fp32        fp32      dynamic      none
    bf16            bf16      fp32     fp32        fp32      none         none
    fp8             fp8       fp32     fp32        fp32      none         none         (delayed scaling per tensor)
    bf16-lean       bf16      split    bf16        8bit      none         full
    fp8-lean        fp8       split    bf16        8bit      none         full
    auto            what suits the machine at hand: see ``choose``
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from narrowgauge.errors import UsageError

if TYPE_CHECKING:
    from narrowgauge.hardware import Device

CHOICES: dict[str, tuple[str, ...]] = {
    "compute": ("fp32", "tf32", "fp16", "bf16", "fp8"),
    "master": ("fp32", "split", "none"),
    "gradients": ("fp32", "bf16", "released"),
    "moments": ("fp32", "bf16", "8bit"),
    "scaling": ("none", "delayed", "current"),
    "amax": ("max", "recent"),
    "products": ("fastest", "all"),
    "attention": ("auto", "any", "cudnn", "flash", "efficient", "math"),
    "checkpoint": ("none", "selective", "full"),
}
_PATTERN = re.compile(r"[A-Za-z0-9_.*?-]+")
_TEXT = re.compile(r"(?P<base>[^\[\]]*)(\[(?P<changes>[^\[\]]*)\])?")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Which format plays which role. Make one by name: ``narrowgauge.recipe("bf16")``."""

    compute: str = "fp32"
    """Format of the matrix products: fp32, tf32, fp16, bf16 or fp8."""
    master: str = "fp32"
    """The weights the optimizer updates: fp32 parameters, split (BF16 + 16 bits = FP32), or none."""
    gradients: str = "fp32"
    """Format of the weight gradients: fp32, bf16, or released (stepped and freed during backward)."""
    moments: str = "fp32"
    """Format of the optimizer's moments: fp32, bf16 or 8bit."""
    loss_scale: str | float = "none"
    """none, dynamic, or a fixed factor. Only FP16 needs one."""
    scaling: str = "none"
    """FP8 scale per tensor: delayed (from the amax of earlier steps), current, or none."""
    history: int = 16
    """How many steps of amax delayed scaling remembers."""
    margin: int = 0
    """FP8 scales are lowered by 2**margin, as headroom."""
    amax: str = "max"
    """Delayed scaling takes the max of the history, or the most recent."""
    products: str = "fastest"
    """Which matrix products run in FP8: the fastest mix, measured on this GPU layer by layer, or all that can."""
    keep: tuple[str, ...] = ()
    """Modules kept in FP32 beside norms, softmax and loss: module paths or class names, * and ? allowed."""
    attention: str = "auto"
    """SDPA backend. auto: the fastest fused one, never silently the unfused; any: torch's choice; or one by name."""
    checkpoint: str = "none"
    """Recomputation of activations: none, selective (keep products, recompute the rest) or full (whole blocks)."""

    def __post_init__(self) -> None:
        for field, allowed in CHOICES.items():
            value = getattr(self, field)
            if value not in allowed:
                raise UsageError(f"recipe: {field}={value} is unknown; expected one of {', '.join(allowed)}")
        self._check_loss_scale()
        if self.compute == "fp8":
            if isinstance(self.history, bool) or not isinstance(self.history, int) or not 1 <= self.history <= 4096:
                raise UsageError(f"recipe: history={self.history} must be a whole number from 1 to 4096")
            if isinstance(self.margin, bool) or not isinstance(self.margin, int) or not 0 <= self.margin <= 16:
                raise UsageError(f"recipe: margin={self.margin} must be a whole number from 0 to 16")
        elif (self.scaling, self.history, self.margin, self.amax, self.products) != ("none", 16, 0, "max", "fastest"):
            raise UsageError(f"recipe: scaling, history, margin, amax and products belong to fp8, not {self.compute}")
        if self.master != "fp32" and self.compute not in ("bf16", "fp8"):
            raise UsageError(
                f"recipe: master={self.master} keeps BF16 weights, which {self.compute} does not compute with"
            )
        if self.gradients == "bf16" and self.master == "fp32":
            raise UsageError(
                "recipe: gradients=bf16 needs master=split or master=none: FP32 weights have FP32 gradients"
            )
        if self.gradients == "released" and self.loss_scale != "none":
            raise UsageError(
                "recipe: gradients=released steps each parameter during backward, before a loss scale can be checked; "
                "take bf16, which needs none, or gradients=fp32"
            )
        if not isinstance(self.keep, tuple) or not all(isinstance(k, str) and _PATTERN.fullmatch(k) for k in self.keep):
            raise UsageError(f"recipe: keep={self.keep} must be module paths or class names, with * and ? as wildcards")

    def _check_loss_scale(self) -> None:
        scale = self.loss_scale
        if scale == "none":
            return
        if scale != "dynamic" and (
            isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf
        ):
            raise UsageError(f"recipe: loss_scale={scale} must be none, dynamic or a positive number")
        if self.compute != "fp16":
            raise UsageError(
                f"recipe: loss_scale={scale} does nothing for {self.compute}, whose range is FP32's or which "
                "scales per tensor; only fp16 needs it"
            )

    def replace(self, **changes: Any) -> Recipe:
        """The same recipe with some roles changed."""
        unknown = sorted(set(changes) - {field.name for field in dataclasses.fields(self)})
        if unknown:
            raise UsageError(_no_such_field(unknown[0]))
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        for name, recipe in NAMED.items():
            if recipe == self:
                return name
        base = NAMED[self.compute]
        changes = [
            f"{field.name}={_write(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(base, field.name)
        ]
        return f"{self.compute}[{','.join(changes)}]"


_LEAN: dict[str, Any] = {"master": "split", "gradients": "bf16", "moments": "8bit", "checkpoint": "full"}
NAMED: dict[str, Recipe] = {
    "fp32": Recipe(),
    "tf32": Recipe(compute="tf32"),
    "fp16": Recipe(compute="fp16", loss_scale="dynamic"),
    "bf16": Recipe(compute="bf16"),
    "fp8": Recipe(compute="fp8", scaling="delayed"),
    "bf16-lean": Recipe(compute="bf16", **_LEAN),
    "fp8-lean": Recipe(compute="fp8", scaling="delayed", **_LEAN),
}


def split(text: str) -> list[str]:
    """Split at the commas that stand outside of brackets: ``fp32,bf16[checkpoint=full,keep=head]`` is two recipes."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def parse(text: str | Recipe, device: Device | None = None) -> Recipe:
    """The recipe a text means; ``auto`` is chosen for ``device``, or for the machine at hand."""
    if isinstance(text, Recipe):
        return text
    if not isinstance(text, str):
        raise UsageError(f"recipe: expected a name such as 'bf16', got {text!r}")
    match = _TEXT.fullmatch(text.strip())
    name = match["base"].strip() if match else text
    if match is None or (name != "auto" and name not in NAMED):
        known = [*NAMED, "auto"]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"unknown recipe {text!r}: expected one of {', '.join(known)}, "
            f"or a changed one such as bf16[checkpoint=full]{hint}"
        )
    base = choose(device or _detect())[0] if name == "auto" else NAMED[name]
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
    """The recipe ``auto`` takes on a device, and why."""
    if "bf16" in device.native:
        where = "computes in BF16 natively"
        return NAMED["bf16"], f"{device.name} {where}, and BF16 has FP32's range, so it needs no loss scaling"
    if device.kind == "cuda" and "fp16" in device.native:
        return NAMED["fp16"], f"{device.name} has FP16 tensor cores but no BF16 ones; the loss is scaled dynamically"
    return NAMED["fp32"], f"{device.name} has no native 16-bit matrix products: anything but FP32 would be slower"


def refusal(recipe: Recipe, device: Device) -> str | None:
    """Why a device cannot run a recipe, or None where it can."""
    need = {"tf32": (8, 0), "fp16": (7, 0), "bf16": (8, 0), "fp8": (8, 9)}.get(recipe.compute)
    if device.kind == "cpu":
        if recipe.compute == "tf32":
            return f"recipe {recipe}: TF32 is a mode of NVIDIA tensor cores, and {device.name} is a CPU; take fp32"
        return None
    if need is not None and device.capability is not None and device.capability < need:
        have = ".".join(map(str, device.capability))
        return (
            f"recipe {recipe}: {device.name} has compute capability {have}, {recipe.compute} needs "
            f"{need[0]}.{need[1]} or later; take {choose(device)[0]}"
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
    return value


def _no_such_field(name: str) -> str:
    fields = [field.name for field in dataclasses.fields(Recipe)]
    near = difflib.get_close_matches(name, fields, n=1)
    return f"recipe: no field {name!r}; the fields are {', '.join(fields)}" + (
        f"; did you mean {near[0]}?" if near else ""
    )
