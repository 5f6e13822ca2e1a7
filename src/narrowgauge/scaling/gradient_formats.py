"""Chooses the FP8 format of each gradient: E4M3, unless too many of its values are too small for it.

    format   bits of mantissa   from the largest number to the smallest
    E4M3     3                  2 ** 17.8
    E5M2     2                  2 ** 31.8

A gradient starts in E5M2. In the backward of some updates (``is_due``) its FP8 values are read on the device. Those
that E4M3 would flush to zero are known from their exponents: with scales that fit, a number in E5M2 is 128 times the
one in E4M3, and E4M3 flushes what is below half of its smallest number, 2 ** -10. A gradient that is in E4M3 has
counted what it flushed. If that is at most ``MOST_FLUSHED`` of the values that are not zero, E4M3 is the format until
the next time.

The host reads the counts at the end of such an update, and waits for the GPU then: in 4 of the first 512 updates, and
in one of 512 after that. So a run that continues from a checkpoint, or is repeated, changes formats at the same update.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge import events
from narrowgauge.kernels.fp8_formats import FP8_DTYPES, FP8_MAX
from narrowgauge.scaling.operand import Operand
from narrowgauge.scaling.tensor import TensorScales

E4M3, E5M2 = FP8_DTYPES["e4m3"], FP8_DTYPES["e5m2"]
NAMES = {dtype: name for name, dtype in FP8_DTYPES.items()}
EARLY, EVERY = (2, 16, 128), 512
"""The updates in which gradients are read."""
MOST_FLUSHED = 0.01
"""The largest share of a gradient's values that E4M3 may flush to zero."""
SAMPLE = 2**22
"""The most values of a tensor that are read."""
FLUSHED_BELOW = int(torch.tensor(2.0**-10 * FP8_MAX[E5M2] / FP8_MAX[E4M3]).to(E5M2).view(torch.uint8)) + 1
"""Numbers in E5M2 whose bits, without sign, are less than this are flushed in E4M3; half of its smallest number is."""


class FormatChange(NamedTuple):
    """A gradient that has changed its format."""

    update: int
    site: str
    format: str
    """e4m3 or e5m2."""
    flushed: float
    """The share of its values that E4M3 flushes to zero."""


class GradientFormats(events.Listener):
    """The formats of a model's gradients, and when they changed."""

    def __init__(self, scales: TensorScales, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """``sum_over_ranks`` sums what each rank has counted, so that all choose the same formats."""
        self.scales, self.changes = scales, list[FormatChange]()
        self._sum = sum_over_ranks
        self._rows = {name: row for row, name in enumerate(scales.sites) if name in scales.changeable}
        self._by_address = {scales.sites[name].inv_scale.data_ptr(): name for name in self._rows}
        self._seen: dict[str, dict[str, Tensor]] = {}
        self._flushed_before: Tensor | None = None

    @property
    def is_due(self) -> bool:
        """Whether gradients are read in the update that comes next."""
        update = self.scales.updates + 1
        return bool(self._rows) and self.scales.delayed and (update in EARLY or update % EVERY == 0)

    @contextlib.contextmanager
    def observe(self) -> Iterator[None]:
        """Read the gradients of a backward in this context, if it is time to."""
        if not self.is_due:
            yield
            return
        if self._flushed_before is None:
            self._flushed_before = self.scales.counts[:, 1].clone()
        with events.listening(self):
            yield

    def report_operands(self, product: str, path: str, operands: Sequence[Any]) -> None:
        """Count the values of a gradient that is read by a product."""
        if product == "output":
            return
        first, scales = operands[0], operands[1:]
        gradient = first
        if isinstance(first, Operand):
            gradient, scales = first.lp if first.lp is not None else first.lp_t, (first.inv_scale,)
        names = (self._by_address.get(one.data_ptr()) for one in scales if isinstance(one, Tensor))
        name = next((name for name in names if name is not None), None)  # experts have it among other arguments
        if name is None or gradient is None or gradient.element_size() != 1:
            return
        counts = _count(gradient)
        found = self._seen.setdefault(product, {})
        found[name] = found[name] + counts if name in found else counts

    @torch.no_grad()
    def end_update(self, skipped: Tensor) -> list[FormatChange]:
        """Choose formats if the update has read gradients, and was not ``skipped``; return the changes."""
        before, self._flushed_before = self._flushed_before, None
        if before is None:
            return []
        # a product grad_input reads each gradient once; where the input needs none, only grad_weight does
        seen, self._seen = {**self._seen.get("grad_weight", {}), **self._seen.get("grad_input", {})}, {}
        if not seen:
            return []
        flushed = (self.scales.counts[:, 1] - before).double()
        rows = [torch.cat([one, flushed[self._rows[name], None]]) for name, one in seen.items()]
        table = self._sum(torch.stack(rows))
        if skipped:  # inf or NaN say nothing about other batches
            return []
        changes, update = [], self.scales.updates
        for name, (present, small, counted) in zip(seen, table.tolist(), strict=True):
            now = self.scales.sites[name].dtype
            lost, values = (small, present) if now is E5M2 else (counted, present + counted)
            share = lost / values if values else math.nan
            if math.isnan(share):
                continue  # all zeros tell nothing
            best = E4M3 if share <= MOST_FLUSHED else E5M2
            if best is not now:
                changes.append(FormatChange(update, name, NAMES[best], share))
        if changes:
            self.scales.set_formats({change.site: FP8_DTYPES[change.format] for change in changes})
            self.changes += changes
        return changes

    @property
    def formats(self) -> dict[str, str]:
        """The format of each gradient, by its site."""
        return {name: NAMES[self.scales.sites[name].dtype] for name in self._rows}

    def __str__(self) -> str:
        found = list(self.formats.values())
        return f"{found.count('e4m3')} of {len(found)} gradients in E4M3, the others in E5M2"


def _count(x: Tensor) -> Tensor:
    """Return how many values of a tensor are not zero, and how many of these E4M3 would flush if it is E5M2."""
    step = -(-x.numel() // SAMPLE) | 1  # odd: the sample has all columns
    sizes = x.reshape(-1).view(torch.uint8)[::step] & 127
    small = (sizes > 0) & (sizes < FLUSHED_BELOW)
    counts: Tensor = torch.stack([torch.count_nonzero(sizes), torch.count_nonzero(small)]).double() * step
    return counts
