"""FP8 scales, one for each tensor that is cast: from the amax of earlier steps (delayed) or of the tensor (current).

A tensor at a *site* (the input of a layer, its weight, the gradient of its output) is stored as cast(x * scale), so the
scale must bring the largest |x| just below the format's largest number. Delayed scaling takes it from the steps before,
which is why a cast needs no look at the tensor first and can be part of the kernel that makes it:

    cast:     x_lp <- saturate(x * scale);  amax <- max(amax, |x|);  counts <- saturated, flushed     while training
    update:   once an optimizer step, for all sites at once, on the device:
              skipped:                  history and scale stay: a bad batch teaches nothing
              amax good (finite, > 0):  history <- amax, then the older ones
                                        scale   <- largest number / max of history / 2 ** margin
              else:                     history and scale stay
              amax <- 0
    check:    a cast saturates, so that an inf would come out of it as a large number like any other. The amax has
              seen it: an update is skipped where any amax is inf or NaN (``misfits``)

The largest value of the history lands on the format's largest number. Scales rounded down to powers of two were tried:
they leave headroom and an exact inverse, but cost 0.05 to 0.2 dB (bench/sqnr.py), because the values then lie elsewhere
between two powers of two; ``margin`` gives headroom to who wants it. A jump beyond the range saturates, is counted, and
is in the history at the next update.
Microbatches share one amax, so their maximum counts; recomputation takes the same maximum again, which changes nothing;
evaluation passes no amax at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.kernels import FP8_MAX, compute_scale


def _spaced(count: int, device: torch.device | str, fill: float) -> Tensor:
    """Numbers 16 bytes apart: Triton compiles a kernel anew for a pointer that is aligned otherwise."""
    return torch.full((count, 4), fill, device=device)[:, 0]


@dataclass(frozen=True)
class Site:
    """One tensor's place in the book: views of its numbers, which an update changes in place."""

    name: str
    dtype: torch.dtype
    scale: Tensor
    inv_scale: Tensor
    amax: Tensor
    counts: Tensor
    """Values that saturated and values that were flushed to zero, over the whole run."""
    pending: Tensor
    """The same of a cast that may yet be made again by another scale; zeros between casts."""


class TensorScales:
    """The scales of every site of a model, in a few flat tensors on its device."""

    def __init__(
        self,
        sites: Mapping[str, torch.dtype],
        device: torch.device | str,
        *,
        mode: str = "delayed",
        history: int = 16,
        margin: int = 0,
        amax: str = "max",
    ) -> None:
        wrong = [str(dtype) for dtype in sites.values() if dtype not in FP8_MAX]
        if wrong:
            raise UsageError(f"FP8 scales are for float8_e4m3fn and float8_e5m2, not for {wrong[0]}")
        self.mode, self.margin, self.take = mode, margin, amax
        count = len(sites)
        self.scale, self.inv_scale, self.amax = (_spaced(count, device, fill) for fill in (1.0, 1.0, 0.0))
        self.history = torch.zeros(history, count, device=device)
        self.counts, pending = torch.zeros(2, count, 2, dtype=torch.int64, device=device).unbind()
        self.largest = torch.tensor([FP8_MAX[dtype] for dtype in sites.values()], device=device)
        self.seen_beside = torch.zeros((), device=device)
        """The largest amax, or NaN, of tensors that are cast without a site: the head's input."""
        self.updates = 0
        self.moves = 0
        """How often the scales have moved, by updates and by checkpoints: casts from before belong to other ones."""
        self.delayed = mode == "none"
        """Whether casts may take the scales as they stand: not before the first update has seen the tensors.

        A flag that changes once, since a compiled graph is made anew when what it read has changed.
        """
        self.sites = {
            name: Site(name, dtype, self.scale[i], self.inv_scale[i], self.amax[i], self.counts[i], pending[i])
            for i, (name, dtype) in enumerate(sites.items())
        }

    def notice(self, amax: Tensor) -> None:
        """Remember the amax of a tensor that has no site, for ``misfits``."""
        torch.maximum(self.seen_beside, amax, out=self.seen_beside)

    def misfits(self) -> Tensor:
        """Which sites were given an inf or a NaN since the last update, and as the last of all: any other tensor."""
        return ~torch.isfinite(torch.cat([self.amax, self.seen_beside.reshape(1)]))

    @property
    def names(self) -> list[str]:
        """Of what ``misfits`` tells."""
        return [*(f"{name} (cast to FP8)" for name in self.sites), "another tensor (cast to FP8)"]

    @torch.no_grad()
    def update(self, skipped: Tensor | None = None) -> None:
        """Take this step's amax into the history and move every scale: a dozen small kernels, no synchronisation.

        ``skipped``: a scalar on the device, whether the update was skipped. A site that has no history yet takes a
        skipped step's amax for its scale all the same, until it has seen a good one: 1 would be worse.
        """
        self.updates += 1
        self.moves += 1
        self.delayed = self.mode != "current"
        if self.mode != "none":
            good = torch.isfinite(self.amax) & (self.amax > 0)
            taught = good if skipped is None else good & ~skipped
            pushed = torch.roll(self.history, 1, 0)
            pushed[0] = self.amax
            self.history.copy_(torch.where(taught, pushed, self.history))
            reference = self.history.amax(0) if self.take == "max" else self.history[0]
            known = reference > 0
            scale = compute_scale(torch.where(known, reference, self.amax), self.largest, self.margin)
            self.scale.copy_(torch.where(taught | (good & ~known), scale, self.scale))
            torch.reciprocal(self.scale, out=self.inv_scale)
        self.amax.zero_()
        self.seen_beside.zero_()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copied or unpickled model: no engine moves its scales, so its casts look at each tensor first."""
        self.__dict__.update(state)
        if self.mode == "delayed":
            self.mode, self.delayed = "current", False

    def state_dict(self) -> dict[str, Any]:
        return {
            "sites": list(self.sites),
            "mode": self.mode,
            "updates": self.updates,
            "scale": self.scale.clone(),
            "history": self.history.clone(),
            "amax": self.amax.clone(),
            "counts": self.counts.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the scales of the sites both know; a site that is new starts afresh, as does a longer history."""
        self.moves += 1
        saved = {name: index for index, name in enumerate(state["sites"])}
        both = [(here, saved[name]) for here, name in enumerate(self.sites) if name in saved]
        self.updates = state["updates"] if both else 0
        self.delayed = self.mode == "none" or (self.mode == "delayed" and self.updates > 0)
        if not both:
            return
        here, there = (torch.tensor(column, device=self.scale.device) for column in zip(*both, strict=True))
        depth = min(len(self.history), len(state["history"]))
        for mine, name in ((self.scale, "scale"), (self.amax, "amax"), (self.counts, "counts")):
            mine[here] = state[name].to(mine.device)[there]
        self.history.zero_()
        self.history[:depth, here] = state["history"].to(self.history.device)[:depth, there]
        torch.reciprocal(self.scale, out=self.inv_scale)
