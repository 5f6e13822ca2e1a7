"""SkipGuard: counts updates that were skipped because gradients were not finite, without blocking on the device.

    record(found_inf, scale, bad):                                  on the device, no synchronization
        streak  <- streak + 1 if found_inf else 0
        skipped <- skipped + found_inf
        first   <- bad if this skip started the streak              (which parameters were not finite first)
        copy (found_inf, streak, skipped, scale) to the host
        take what has arrived from earlier records: extend the history; streak >= limit: raise TrainingStalled

The host learns of a skip a step or two late on a GPU and at once on a CPU. The delay is harmless: a skipped update
leaves weights and optimizer unchanged, so a stalled run just runs a few more steps before it is stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.device_readback import Readback
from narrowgauge.errors import TrainingStalled, UsageError

HISTORY = 4096
"""Number of skips and scale changes that are kept; the run's record has all of them."""


@dataclass(frozen=True)
class Mark:
    """An update that was skipped, or whose loss scale differs from the one before."""

    update: int
    """Number of the update, counted from 1."""
    scale: float
    """The loss scale used in the update (1 if the loss is not scaled)."""
    skipped: bool


class SkipGuard:
    """Counts skipped updates, and knows which parameters caused them."""

    def __init__(self, max_consecutive_skips: int = 50) -> None:
        """Start counting.

        Args:
            max_consecutive_skips: Raise ``TrainingStalled`` after this many consecutive skipped updates.

        Raises:
            UsageError: The limit is not an integer of at least 1.
        """
        if (
            isinstance(max_consecutive_skips, bool)
            or not isinstance(max_consecutive_skips, int)
            or max_consecutive_skips < 1
        ):
            raise UsageError(f"max_consecutive_skips={max_consecutive_skips!r} must be an integer of at least 1")
        self.max_consecutive_skips = max_consecutive_skips
        self.names: Sequence[str] = ()
        """Parameter names, in the order of the masks passed to ``record``."""
        self.history: deque[Mark] = deque(maxlen=HISTORY)
        self.updates = 0
        """Updates attempted, including skipped ones."""
        self._streak: Tensor | None = None
        self._skipped: Tensor | None = None
        self._first: Tensor | None = None
        self._known = {"streak": 0.0, "skipped": 0.0}
        self._readback = Readback()

    @property
    def skipped(self) -> int:
        """Number of skipped updates known to the host so far. Reading it does not block."""
        self._collect()
        return int(self._known["skipped"])

    @property
    def streak(self) -> int:
        """Number of consecutive skipped updates known to the host so far. Reading it does not block."""
        self._collect()
        return int(self._known["streak"])

    def record(self, found_inf: Tensor, scale: Tensor | None = None, bad: Tensor | None = None) -> None:
        """Count one update without blocking.

        Args:
            found_inf: Scalar on the device; nonzero if the update was skipped.
            scale: The loss scale used in the update.
            bad: One boolean per name in ``names``: whether its gradient was not finite.

        Raises:
            TrainingStalled: Too many consecutive updates were skipped.
        """
        self.send(self.count(found_inf, bad), scale)

    def count(self, found_inf: Tensor, bad: Tensor | None = None) -> dict[str, Tensor]:
        """Count one update on the device: the first half of ``record``, which a CUDA graph can contain.

        Args:
            found_inf: As for ``record``.
            bad: As for ``record``.

        Returns:
            The counts, for ``send``.
        """
        found = (found_inf > 0).reshape(())
        streak, skipped = self._counters(found.device)
        streak.copy_(torch.where(found, streak + 1, torch.zeros_like(streak)))
        skipped.add_(found)
        if bad is not None:
            if self._first is None or self._first.shape != bad.shape:
                self._first = torch.zeros_like(bad)
            self._first = self._first.to(bad.device)
            self._first.copy_(torch.where(streak == 1, bad, self._first))
        return {"found": found, "streak": streak, "skipped": skipped}

    def send(self, counted: Mapping[str, Tensor], scale: Tensor | None = None) -> None:
        """Start copying the counts of one update to the host: the second half of ``record``.

        Args:
            counted: What ``count`` returned.
            scale: As for ``record``.

        Raises:
            TrainingStalled: Too many consecutive updates were skipped.
        """
        self.updates += 1
        self._readback.push(self.updates, {**counted, "scale": scale} if scale is not None else counted)
        self._collect()
        if self._known["streak"] >= self.max_consecutive_skips:
            self._raise_stalled()

    def settle(self) -> None:
        """Wait for the numbers of all recorded updates (before a checkpoint, or at the end)."""
        for update, values in self._readback.drain():
            self._add_arrived(update, values)

    def first_bad(self) -> list[str]:
        """Return the parameters whose gradients were not finite in the first update of the latest streak."""
        if self._first is None:
            return []
        mask = self._first.tolist()
        names = self.names if len(self.names) == len(mask) else [f"parameter {i}" for i in range(len(mask))]
        return [name for name, is_bad in zip(names, mask, strict=True) if is_bad]

    @property
    def tensors(self) -> list[Tensor]:
        """The counts on the device, which ``count`` changes in place."""
        return [tensor for tensor in (self._streak, self._skipped, self._first) if tensor is not None]

    def _counters(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._streak is None or self._skipped is None:
            self._streak = torch.full((), self._known["streak"], dtype=torch.float64, device=device)
            self._skipped = torch.full((), self._known["skipped"], dtype=torch.float64, device=device)
        return self._streak, self._skipped

    def _collect(self) -> None:
        for update, values in self._readback.ready():
            self._add_arrived(update, values)

    def _add_arrived(self, update: int, values: dict[str, float]) -> None:
        scale, skipped = values.get("scale", 1.0), values["found"] > 0
        if skipped or not self.history or self.history[-1].scale != scale:
            self.history.append(Mark(update, scale, skipped))
        self._known = {"streak": values["streak"], "skipped": values["skipped"]}

    def _raise_stalled(self) -> None:
        bad, streak = self.first_bad(), int(self._known["streak"])
        # If the error is caught and training continues, counting starts over: drop what is still being copied.
        self.settle()
        self._known["streak"], self._streak, self._skipped = 0.0, None, None
        named = (
            ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "") if bad else "unknown parameters"
        )
        raise TrainingStalled(
            f"training stalled: {streak} consecutive updates were skipped (the last is update {self.updates}) because "
            f"gradients were not finite; first in {named}. Weights and optimizer are unchanged since before the first "
            "skip. Check the data and the loss for inf or NaN, lower the learning rate, or keep the named modules in "
            "FP32"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return counters and history as plain values. This waits for the device."""
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
        """Restore counters and history from ``state_dict``."""
        self.settle()
        self.max_consecutive_skips = state["max_consecutive_skips"]
        self.updates = state["updates"]
        self._known = {"streak": float(state["streak"]), "skipped": float(state["skipped"])}
        self._streak = self._skipped = None
        first = state["first_bad"]
        self._first = None if first is None else torch.tensor(first, dtype=torch.bool)
        self.history = deque((Mark(*mark) for mark in state["history"]), maxlen=HISTORY)
