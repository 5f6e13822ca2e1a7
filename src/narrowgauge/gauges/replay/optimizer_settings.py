"""Names the optimizer setting that made weights inf, NaN or huge.

A capture has the settings of the last update before the step, because that update wrote the weights that the step read.
Only settings that must destroy weights are named:

    a setting is not finite          every weight becomes NaN or inf
    eps = 0, adaptive optimizers     0/0 for each weight whose gradient has always been 0
    lr * weight_decay > 2            decoupled decay or SGD: an update multiplies weights by 1 - lr * weight_decay
    a beta or momentum >= 1          sums of gradients grow without limit, or their correction divides by 0
    lr < 0                           updates increase the loss
    lr >= 1, Adam and its kind       an update changes each weight by about lr
    eps = 0, Muon                    0/0 for each matrix whose gradient has always been 0
    ns_coefficients, Muon            the iteration that orthogonalizes updates diverges with them
    lr >= 1, Muon                    an update changes the singular values of each matrix by about lr

Groups of narrowgauge's Muon have a rule: those of "adamw" are judged as AdamW's, those of "muon" have no betas.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

COUPLED = frozenset({"Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Adadelta"})
"""Adaptive optimizers that add weight decay to the gradient, where it cannot make weights diverge."""
OPTIMIZER = "optimizer"
WORDS = ("rule", "adjust_lr_fn")
"""Settings of Muon that are words."""
Settings = dict[str, Any]
"""The settings of a parameter group, and the name of its optimizer."""
HUGE = 1e4
"""Weights beyond this are a sign that updates made them grow."""


@dataclass(frozen=True)
class FaultySetting:
    """A setting that destroys weights."""

    text: str
    """The optimizer and the setting, such as ``AdamW eps=0``."""
    effect: str
    needs_nan: bool
    """Whether the effect shows in weights that are not finite, rather than in weights that grow."""


def read_settings(optimizers: Sequence[Optimizer]) -> list[Settings]:
    """Return the numbers among the settings of each parameter group. Tensors are copied on their device."""
    found = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            kept = {name: value for name, value in group.items() if name != "params" and _is_number(value)}
            kept |= {name: group[name] for name in WORDS if isinstance(group.get(name), str)}
            copied = {name: value.clone() if isinstance(value, Tensor) else value for name, value in kept.items()}
            found.append({OPTIMIZER: type(optimizer).__name__, **copied})
    return found


def to_numbers(groups: list[Settings] | None) -> list[Settings] | None:
    """Convert tensors among the settings to numbers. This waits for the device."""
    if groups is None:
        return None
    return [{name: v.item() if isinstance(v, Tensor) else v for name, v in group.items()} for group in groups]


def find_faulty_setting(facts: Mapping[str, Any] | None) -> FaultySetting | None:
    """Return the setting that destroys weights, or None.

    Args:
        facts: ``optimizer`` of a capture: the settings of the last update and of the step.
    """
    if not facts:
        return None
    groups = [group for which in ("last_update", "this_step") for group in facts.get(which) or ()]
    found = [fault for group in groups for fault in _check_group(group)]
    return max(found, key=lambda fault: fault.needs_nan, default=None)


def _check_group(group: Mapping[str, Any]) -> Iterator[FaultySetting]:
    name = str(group[OPTIMIZER])
    settings = {setting: value for setting, value in group.items() if setting not in (OPTIMIZER, *WORDS)}
    if "ns_coefficients" in group:
        if group.get("rule") != "adamw":
            yield from _check_muon(name, group)
            settings.pop("betas", None)
        settings.pop("momentum", None)  # an average of gradients, which cannot grow
    values = {setting: float(v) for setting, v in settings.items() if not isinstance(v, list | tuple | bool)}
    betas = [float(beta) for beta in settings.get("betas") or ()]
    rate, decay = values.get("lr", 0.0), values.get("weight_decay", 0.0)
    adaptive = bool(betas) and "eps" in values
    for setting, value in [*values.items(), *(("betas", beta) for beta in betas)]:
        if not math.isfinite(value):
            yield FaultySetting(f"{name} {setting}={value}", "an update with it makes weights NaN or inf", True)
    if values.get("eps", 1.0) == 0 and (adaptive or name in COUPLED):
        yield FaultySetting(f"{name} eps=0", "the update of a weight whose gradient is always 0 is 0/0", True)
    for setting, value in [*(("betas", beta) for beta in betas), ("momentum", values.get("momentum", 0.0))]:
        if 1 <= value < math.inf:
            yield FaultySetting(f"{name} {setting}={value:g}", "it must be less than 1, or updates never stop growing",
                                setting == "betas")  # fmt: skip
    decoupled = name not in COUPLED or bool(group.get("decoupled_weight_decay"))
    if decoupled and 2 < rate * decay < math.inf:
        effect = f"with lr={rate:g}, every update multiplies all weights by {1 - rate * decay:g}"
        yield FaultySetting(f"{name} weight_decay={decay:g}", effect, False)
    if rate < 0:
        yield FaultySetting(f"{name} lr={rate:g}", "a negative learning rate increases the loss", False)
    if adaptive and 1 <= rate < math.inf:
        yield FaultySetting(f"{name} lr={rate:g}", f"every update changes each weight by about {rate:g}", False)


def _check_muon(name: str, group: Mapping[str, Any]) -> Iterator[FaultySetting]:
    """Check settings of groups whose updates are orthogonalized."""
    rate, coefficients = float(group.get("lr", 0.0)), [float(value) for value in group["ns_coefficients"]]
    if float(group.get("eps", 1.0)) == 0:
        yield FaultySetting(f"{name} eps=0", "the update of a matrix whose gradient is always 0 is 0/0", True)
    if all(map(math.isfinite, coefficients)) and _diverges(coefficients, int(group.get("ns_steps", 5))):
        listed = ", ".join(f"{value:g}" for value in coefficients)
        effect = "the iteration that orthogonalizes updates diverges with them"
        yield FaultySetting(f"{name} ns_coefficients=({listed})", effect, True)
    if 1 <= rate < math.inf and group.get("adjust_lr_fn") != "match_rms_adamw":
        effect = f"every update changes the singular values of each matrix by about {rate:g}"
        yield FaultySetting(f"{name} lr={rate:g}", effect, False)


def _diverges(coefficients: list[float], steps: int) -> bool:
    """Whether s <- a s + b s^3 + c s^5 takes a singular value between 0 and 1 beyond 100."""
    a, b, c = coefficients
    values = [number / 64 for number in range(1, 65)]
    for _ in range(steps):
        values = [min(abs(s * (a + s * s * (b + s * s * c))), 1e6) for s in values]
    return max(values) > 100


def _is_number(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(item, numbers.Real) for item in value)
    return isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.numel() == 1)
