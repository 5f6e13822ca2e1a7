"""LossScaler: dynamic or static loss scaling for FP16, a safe superset of ``torch.amp.GradScaler``.

    scale(loss):     loss * scale                                        keeps small gradients above FP16 underflow
    unscale_(opt):   gradients / scale; found_inf = any of them is not finite
    step(opt):       unscale_ unless done; opt.step() only if not found_inf
    update():        found_inf: scale <- max(scale * backoff, floor), steady <- 0
                     else:      steady <- steady + 1; at growth_interval: scale <- scale * growth if that is finite
                     max_consecutive_skips consecutive skips: raise TrainingStalled with the parameter names

Why a floor: GradScaler has none. After 144 consecutive skips its scale is so small that 1/scale is inf in FP32. The
gradients then become inf *after* the check, found_inf stays 0, and healthy weights become inf.
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
    """Loss scaling for FP16: a drop-in replacement for ``torch.amp.GradScaler`` that cannot corrupt weights.

    It has the same methods and state keys, and adds a floor for the scale, a limit for consecutive skipped updates, a
    fixed scale, and counters that can be read without blocking.
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
        """Create a scaler. The first six arguments are those of ``GradScaler``.

        Args:
            device: Device type, ``"cuda"`` or ``"cpu"``.
            init_scale: Initial scale.
            growth_factor: The scale is multiplied by this after ``growth_interval`` updates without a skip.
            backoff_factor: The scale is multiplied by this after a skipped update.
            growth_interval: Consecutive applied updates before the scale grows.
            enabled: If False, the scaler only calls ``optimizer.step()``.
            dynamic: If False, the scale never changes.
            floor: Smallest value of a dynamic scale.
            max_consecutive_skips: Raise ``TrainingStalled`` after this many consecutive skipped updates.
            names: A model, or its named parameters, so that errors can name parameters.

        Raises:
            UsageError: An argument is out of range.
        """
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
        """Number of skipped updates known to the host so far. Reading it does not block."""
        return self.guard.skipped

    @property
    def history(self) -> deque[Mark]:
        """Skipped updates and changes of the scale, oldest first. Reading it waits for the device."""
        self.guard.settle()
        return self.guard.history

    def tensor(self, device: torch.device) -> Tensor:
        """Return the scale as a tensor on its device without synchronizing; it is created on first use."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return self._scale

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless a gradient is inf or NaN. With a fused optimizer this does not block.

        Args:
            optimizer: The optimizer to step.
            *args: Passed to ``optimizer.step``.
            **kwargs: Passed to ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returned, or None if it was skipped.

        Raises:
            UsageError: A closure was passed, or no loss was scaled yet.
        """
        if self._enabled and ("closure" in kwargs or any(callable(arg) for arg in args)):
            raise UsageError(
                "LossScaler.step: closures are not supported: they would mix scaled and unscaled gradients"
            )
        if self._enabled and self._scale is None:
            raise UsageError("LossScaler.step: no loss was scaled yet; call scaler.scale(loss).backward() first")
        result = super().step(optimizer, *args, **kwargs)
        if self._enabled:
            self._watch(optimizer)
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale after the optimizers have stepped.

        Args:
            new_scale: Set the scale to this instead.

        Raises:
            UsageError: No optimizer was stepped, or ``new_scale`` is out of range.
            TrainingStalled: Too many consecutive updates were skipped.
        """
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
        """Adjust the scale after one update and count it, on the device.

        Args:
            found_inf: Scalar; nonzero if the update was skipped.
            bad: One boolean per parameter: whether its gradient was not finite.

        Raises:
            TrainingStalled: Too many consecutive updates were skipped.
        """
        scale, tracker = self._check_scale_growth_tracker("update")
        used = scale.clone()
        if self.dynamic:
            torch._amp_update_scale_(
                scale, tracker, found_inf, self._growth_factor, self._backoff_factor, self._growth_interval
            )
            scale.clamp_(min=self.floor)
        self.guard.record(found_inf, used, bad)

    def _watch(self, optimizer: Optimizer) -> None:
        """Find which gradients are not finite, but only during a streak of skips, so healthy runs pay nothing."""
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
        """Change the growth interval.

        torch grows the scale when its count *equals* the interval. If the new interval is below the current count, the
        count is lowered too; otherwise the scale would never grow again.

        Args:
            new_interval: Consecutive applied updates before the scale grows.

        Raises:
            UsageError: The interval is not an integer of at least 1.
        """
        _check_interval(new_interval)
        super().set_growth_interval(new_interval)
        if self._growth_tracker is not None:
            self._growth_tracker.clamp_(max=new_interval - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the keys of ``GradScaler.state_dict``, and the rest under ``narrowgauge``. Empty if disabled."""
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
        if self.dynamic and self._init_scale < self.floor:  # a GradScaler state with a scale below the floor
            self._init_scale = self.floor
            if self._scale is not None:
                self._scale.fill_(self.floor)


def _named(optimizer: Optimizer, name_of: dict[int, str]) -> list[tuple[str | None, Tensor]]:
    """The optimizer's parameters with their names: from the user, else from the optimizer, else None."""
    named: list[tuple[str | None, Tensor]] = []
    for group in optimizer.param_groups:
        own = group.get("param_names") or [None] * len(group["params"])
        named += [(name_of.get(id(p), name), p) for name, p in zip(own, group["params"], strict=True)]
    return named


def _check_interval(value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"LossScaler: growth_interval={value!r} must be an integer of at least 1")


def _check_number(
    name: str, value: float, low: float, high: float, open_low: bool = False, open_high: bool = False
) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ok = ok and (value > low if open_low else value >= low) and (value < high if open_high else value <= high)
    if not ok:
        below = f"more than {low}" if open_low else f"at least {low}"
        above = f" and below {high}" if open_high else ""
        raise UsageError(f"LossScaler: {name}={value!r} must be a finite number, {below}{above}")
