"""LossScaler: dynamic or static loss scaling for FP16, a safe superset of ``torch.amp.GradScaler``.

    scale(loss):     loss * scale                                        so that small gradients survive FP16
    unscale_(opt):   gradients / scale; found_inf = any of them is not finite
    step(opt):       unscale_ unless done; opt.step() only if not found_inf
    update():        found_inf: scale <- max(scale * backoff, floor), steady <- 0
                     else:      steady <- steady + 1; at growth_interval: scale <- scale * growth if that is finite
                     max_consecutive_skips skips in a row: raise TrainingStalled with the parameters' names

Why a floor: GradScaler has none. After 144 skips in a row its scale is so small that 1/scale is inf in FP32; the
gradients then become inf *after* the check, found_inf stays 0, and healthy weights turn into inf.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from narrowgauge.errors import UsageError
from narrowgauge.scaling.guard import Mark, SkipGuard

SMALLEST_FLOOR = 2.0**-126
"""Below this 1/scale is no longer finite in FP32."""


class LossScaler(GradScaler):
    """Scales the loss for FP16; takes GradScaler's place without other changes, and cannot ruin weights.

    Arguments beyond GradScaler's: ``floor``, the smallest scale; ``max_consecutive_skips``, after which
    ``TrainingStalled`` is raised; ``dynamic=False`` for a fixed scale; ``names``, a model (or its named parameters) so
    that errors can name parameters.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        dynamic: bool = True,
        floor: float = 1.0,
        max_consecutive_skips: int = 50,
        names: torch.nn.Module | dict[str, Tensor] | None = None,
    ) -> None:
        if not isinstance(device, str):
            raise UsageError(f"LossScaler: the first argument is the device type ('cuda' or 'cpu'), got {device!r}")
        _check_number("init_scale", init_scale, SMALLEST_FLOOR, math.inf)
        _check_number("growth_factor", growth_factor, 1.0, math.inf, open_low=True)
        _check_number("backoff_factor", backoff_factor, 0.0, 1.0, open_low=True, open_high=True)
        _check_number("floor", floor, SMALLEST_FLOOR, math.inf)
        _check_interval(growth_interval)
        if dynamic and init_scale < floor:
            raise UsageError(f"LossScaler: init_scale={init_scale} is below the floor of {floor}")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.dynamic = dynamic
        self.floor = floor
        self.guard = SkipGuard(max_consecutive_skips)
        parameters = names.named_parameters() if isinstance(names, torch.nn.Module) else (names or {}).items()
        self._name_of = {id(parameter): name for name, parameter in parameters}
        self._watched: dict[str, Tensor] = {}

    @property
    def skipped(self) -> int:
        """Updates skipped in all, as far as the host has heard: reading it waits for nothing."""
        return self.guard.skipped

    @property
    def history(self) -> deque[Mark]:
        """Skips and changes of scale, oldest first."""
        self.guard.settle()
        return self.guard.history

    def tensor(self, device: torch.device) -> Tensor:
        """The scale on its device, made on first use; reading it costs no synchronisation."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return self._scale

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless a gradient is inf or NaN. Fused optimizers decide on the device, without a wait."""
        if self._enabled and ("closure" in kwargs or any(callable(arg) for arg in args)):
            raise UsageError(
                "LossScaler.step: a closure would see unscaled and scaled gradients mixed; step without one"
            )
        if self._enabled and self._scale is None:
            raise UsageError("LossScaler.step: nothing was scaled yet; call scaler.scale(loss).backward() first")
        result = super().step(optimizer, *args, **kwargs)
        if self._enabled:
            self._watch(optimizer)
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Grow or back off. With ``new_scale``, set the scale instead."""
        if not self._enabled:
            return
        if new_scale is not None:
            if isinstance(new_scale, int | float):
                _check_number("new_scale", new_scale, SMALLEST_FLOOR, math.inf)
                new_scale = float(new_scale)
            super().update(new_scale)
            return
        scale, _ = self._check_scale_growth_tracker("update")
        found = [
            found_inf.to(scale.device, non_blocking=True)
            for state in self._per_optimizer_states.values()
            for found_inf in state["found_inf_per_device"].values()
        ]
        if not found:
            raise UsageError("LossScaler.update: no gradients were checked; call scaler.step(optimizer) first")
        self._per_optimizer_states.clear()
        bad = None
        if self._watched:
            self.guard.names = list(self._watched)
            bad = torch.stack([flag.to(scale.device, non_blocking=True) for flag in self._watched.values()])
            self._watched = {}
        self.settle(torch.stack(found).sum(), bad)

    def settle(self, found_inf: Tensor, bad: Tensor | None = None) -> None:
        """Move the scale by one update's outcome and count it: all on the device. ``bad`` marks parameters at fault."""
        scale, tracker = self._check_scale_growth_tracker("update")
        used = scale.clone()
        if self.dynamic:
            torch._amp_update_scale_(
                scale, tracker, found_inf, self._growth_factor, self._backoff_factor, self._growth_interval
            )
            scale.clamp_(min=self.floor)
        self.guard.record(found_inf, used, bad)

    def _watch(self, optimizer: Optimizer) -> None:
        """Note which gradients are not finite, once skipping has begun: a healthy run pays nothing for it."""
        found = self._found_inf_per_device(optimizer).values()
        on_host = all(tensor.device.type == "cpu" for tensor in found)
        if not (any(tensor.item() for tensor in found) if on_host else self.guard.streak > 0):
            return
        for index, (name, parameter) in enumerate(_named(optimizer, self._name_of)):
            if parameter.grad is not None:
                grad = parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
                label = name if name is not None else f"parameter {index} of shape {tuple(parameter.shape)}"
                self._watched[label] = ~torch.isfinite(torch.linalg.vector_norm(grad, math.inf))

    def set_growth_interval(self, new_interval: int) -> None:
        """Change how many healthy updates make the scale grow.

        torch grows at exactly ``growth_interval`` healthy updates: a shorter interval than those already counted would
        never be met again, so the count is brought down with it.
        """
        _check_interval(new_interval)
        super().set_growth_interval(new_interval)
        if self._growth_tracker is not None:
            self._growth_tracker.clamp_(max=new_interval - 1)

    def state_dict(self) -> dict[str, Any]:
        """GradScaler's keys, and ``narrowgauge`` with what it does not know. Empty where disabled, as there."""
        if not self._enabled:
            return {}
        extra = {"dynamic": self.dynamic, "floor": self.floor, "guard": self.guard.state_dict()}
        return {**super().state_dict(), "narrowgauge": extra}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a LossScaler's or a GradScaler's state."""
        super().load_state_dict(state_dict)
        extra = state_dict.get("narrowgauge")
        if not self._enabled:
            return
        if extra is not None:
            self.dynamic, self.floor = extra["dynamic"], extra["floor"]
            self.guard.load_state_dict(extra["guard"])
        if self.dynamic and self._init_scale < self.floor:  # a GradScaler that had sunk too deep
            self._init_scale = self.floor
            if self._scale is not None:
                self._scale.fill_(self.floor)


def _named(optimizer: Optimizer, name_of: dict[int, str]) -> list[tuple[str | None, Tensor]]:
    """The optimizer's parameters with the names that are known: the user's, or those the optimizer was made with."""
    named: list[tuple[str | None, Tensor]] = []
    for group in optimizer.param_groups:
        own = group.get("param_names") or [None] * len(group["params"])
        named += [(name_of.get(id(p), name), p) for name, p in zip(own, group["params"], strict=True)]
    return named


def _check_interval(value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"LossScaler: growth_interval={value!r} must be a whole number of at least 1")


def _check_number(
    name: str, value: float, low: float, high: float, open_low: bool = False, open_high: bool = False
) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ok = ok and (value > low if open_low else value >= low) and (value < high if open_high else value <= high)
    if not ok:
        below = f"more than {low}" if open_low else f"at least {low}"
        above = f" and below {high}" if open_high else ""
        raise UsageError(f"LossScaler: {name}={value!r} must be a finite number, {below}{above}")
