"""Counts updates that were skipped because gradients were not finite, without waiting for the device to say so.

    record(found_inf, scale, bad):                                  on the device, no synchronisation
        streak  <- streak + 1 if found_inf else 0
        skipped <- skipped + found_inf
        first   <- bad where this skip began the streak             (which parameters were not finite first)
        send (found_inf, streak, skipped, scale) to the host
        take what has arrived from earlier records: extend the history; streak >= limit: raise TrainingStalled

The host therefore learns of a skip a step or two late on a GPU and at once on a CPU. Nothing is lost by the delay: a
skipped update leaves weights and optimizer untouched, so a stalled run may idle for a few steps before it is stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.device_readback import Readback
from narrowgauge.errors import TrainingStalled, UsageError

HISTORY = 4096
"""How many changes of scale and skips are remembered; the run's record keeps all of them."""


@dataclass(frozen=True)
class Mark:
    """A moment worth remembering: an update that was skipped, or after which the loss scale changed."""

    update: int
    """Which update, counted from 1."""
    scale: float
    """The loss scale the update was made with (1 where the loss is not scaled)."""
    skipped: bool


class SkipGuard:
    """Knows how many updates were skipped, since when, and because of which parameters."""

    def __init__(self, max_consecutive_skips: int = 50) -> None:
        if (
            isinstance(max_consecutive_skips, bool)
            or not isinstance(max_consecutive_skips, int)
            or max_consecutive_skips < 1
        ):
            raise UsageError(f"max_consecutive_skips={max_consecutive_skips!r} must be a whole number of at least 1")
        self.max_consecutive_skips = max_consecutive_skips
        self.names: Sequence[str] = ()
        """Names of the parameters, in the order of the masks given to ``record``."""
        self.history: deque[Mark] = deque(maxlen=HISTORY)
        self.updates = 0
        """Updates attempted."""
        self._streak: Tensor | None = None
        self._skipped: Tensor | None = None
        self._first: Tensor | None = None
        self._known = {"streak": 0.0, "skipped": 0.0}
        self._readback = Readback()

    @property
    def skipped(self) -> int:
        """Updates skipped in all, as far as the host has heard."""
        self._collect()
        return int(self._known["skipped"])

    @property
    def streak(self) -> int:
        """Updates skipped in a row until now, as far as the host has heard."""
        self._collect()
        return int(self._known["streak"])

    def record(self, found_inf: Tensor, scale: Tensor | None = None, bad: Tensor | None = None) -> None:
        """Count one update. ``found_inf`` is a scalar that is not 0 where the update was skipped."""
        self.updates += 1
        found = (found_inf > 0).reshape(())
        streak, skipped = self._counters(found.device)
        streak.copy_(torch.where(found, streak + 1, torch.zeros_like(streak)))
        skipped.add_(found)
        if bad is not None:
            if self._first is None or self._first.shape != bad.shape:
                self._first = torch.zeros_like(bad)
            self._first = torch.where(streak == 1, bad, self._first.to(bad.device))
        sent = {"found": found, "streak": streak, "skipped": skipped}
        if scale is not None:
            sent["scale"] = scale
        self._readback.push(self.updates, sent)
        self._collect()
        if self._known["streak"] >= self.max_consecutive_skips:
            self._raise_stalled()

    def settle(self) -> None:
        """Wait for everything recorded so far (before a checkpoint, or at the end)."""
        for update, values in self._readback.drain():
            self._learn(update, values)

    def first_bad(self) -> list[str]:
        """The parameters whose gradients were not finite in the first update of the latest streak."""
        if self._first is None:
            return []
        mask = self._first.tolist()
        names = self.names if len(self.names) == len(mask) else [f"parameter {i}" for i in range(len(mask))]
        return [name for name, is_bad in zip(names, mask, strict=True) if is_bad]

    def _counters(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._streak is None or self._skipped is None:
            self._streak = torch.full((), self._known["streak"], dtype=torch.float64, device=device)
            self._skipped = torch.full((), self._known["skipped"], dtype=torch.float64, device=device)
        return self._streak, self._skipped

    def _collect(self) -> None:
        for update, values in self._readback.ready():
            self._learn(update, values)

    def _learn(self, update: int, values: dict[str, float]) -> None:
        scale, skipped = values.get("scale", 1.0), values["found"] > 0
        if skipped or not self.history or self.history[-1].scale != scale:
            self.history.append(Mark(update, scale, skipped))
        self._known = {"streak": values["streak"], "skipped": values["skipped"]}

    def _raise_stalled(self) -> None:
        bad, streak = self.first_bad(), int(self._known["streak"])
        # Whoever catches the error and goes on is counted from here: what is on its way from the device is of before.
        self.settle()
        self._known["streak"], self._streak, self._skipped = 0.0, None, None
        named = (
            ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "") if bad else "unknown parameters"
        )
        raise TrainingStalled(
            f"training stalled: {streak} updates in a row were skipped, the last one at update "
            f"{self.updates}, because gradients were not finite; first in {named}. Weights and optimizer are as before "
            "the first of them. Look for inf or NaN in the data or the loss, lower the learning rate, or keep the "
            "named modules in FP32"
        )

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return {
            "max_consecutive_skips": self.max_consecutive_skips,
            "updates": self.updates,
            "skipped": int(self._known["skipped"]),
            "streak": int(self._known["streak"]),
            "first_bad": None if self._first is None else self._first.tolist(),
            "history": [[mark.update, mark.scale, mark.skipped] for mark in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.settle()
        self.max_consecutive_skips = state["max_consecutive_skips"]
        self.updates = state["updates"]
        self._known = {"streak": float(state["streak"]), "skipped": float(state["skipped"])}
        self._streak = self._skipped = None
        first = state["first_bad"]
        self._first = None if first is None else torch.tensor(first, dtype=torch.bool)
        self.history = deque((Mark(*mark) for mark in state["history"]), maxlen=HISTORY)
