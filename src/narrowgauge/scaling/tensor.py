"""TensorScales: FP8 scales, one per cast tensor, from the amax of earlier steps (delayed) or of the tensor (current).

A tensor at a *site* (the input of a layer, its weight, the gradient of its output) is stored as cast(x * scale), so the
scale must bring the largest |x| just below the format's largest number. Delayed scaling takes it from earlier steps. A
cast then does not need to read the tensor first, and can be fused into the kernel that produces it:

    cast:     x_lp <- saturate(x * scale);  amax <- max(amax, |x|);  counts <- saturated, flushed     in training only
    update:   once per optimizer step, for all sites at once, on the device:
              skipped:                  history and scale are unchanged: a bad batch has no influence
              amax good (finite, > 0):  history <- amax, then the older ones
                                        scale   <- largest number / max of history / 2 ** margin
              else:                     history and scale are unchanged
              amax <- 0
    check:    a cast saturates, so an inf becomes an ordinary large number. The amax still shows it: an update is
              skipped if any amax is inf or NaN (``find_nonfinite``)

The largest value of the history maps to the format's largest number. Scales rounded down to powers of two were tried:
they have headroom and an exact inverse, but cost 0.05 to 0.2 dB (bench/sqnr.py), because values then fall elsewhere
between two powers of two. ``margin`` adds headroom if needed. A jump beyond the range saturates, is counted, and is in
the history at the next update.
Microbatches share one amax, so their maximum counts. Recomputation takes the same maximum again, which changes nothing.
Evaluation passes no amax at all.

A site whose tensors have a scale for each row or block (``granularity``) uses neither history nor scale: those scales
are always current, and belong to one cast (``scaling/fine_scales.py``). It has amax and counts, which find inf and NaN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.kernels import compute_scale, is_positive_and_finite
from narrowgauge.kernels.fp8_formats import FP8_MAX


def _make_spaced(count: int, device: torch.device | str, fill: float) -> Tensor:
    """Create numbers 16 bytes apart: Triton recompiles a kernel for a pointer with other alignment."""
    return torch.full((count, 4), fill, device=device)[:, 0]


def _make_rows(row: int, forward: int) -> Tensor:
    return torch.tensor([row, row if row < forward else row - forward], device="cpu")


@dataclass(frozen=True)
class Site:
    """The numbers of one cast tensor, as views that an update changes in place."""

    name: str
    dtype: torch.dtype
    scale: Tensor
    inv_scale: Tensor
    amax: Tensor
    counts: Tensor
    """Number of saturated values and of values flushed to zero, over the whole run."""
    pending: Tensor
    """The same for a cast that may be repeated with another scale; zeros between casts."""
    rows: Tensor
    """Its row in the table of all pending counts, and its row in ``ScaleTables``: two integers on the CPU."""
    in_backward: bool = False
    """Whether backward is the first to cast the tensor."""
    granularity: str = "tensor"
    """What has a scale: the tensor, or each row (``scaling/operand.py``)."""

    @property
    def graph_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a compiled graph reads of the site, besides the tables of all sites.

        All are tensors, also the rows: a number would be a constant of the graph, and each of a model's equal layers
        would need a graph of its own.
        """
        return self.scale, self.inv_scale, self.rows

    @staticmethod
    def from_graph_inputs(form: SiteForm, scale: Tensor, inv_scale: Tensor, rows: Tensor) -> Site:
        """Return the site as a graph knows it. Amax and counts are in the tables: here the scale stands for them."""
        return Site("", form.dtype, scale, inv_scale, scale, scale, scale, rows, form.in_backward, form.granularity)

    @property
    def form(self) -> SiteForm:
        return SiteForm(self.dtype, self.in_backward, self.granularity)


class SiteForm(NamedTuple):
    """What sites of equal layers have in common: constants of a compiled graph."""

    dtype: torch.dtype
    in_backward: bool
    granularity: str = "tensor"


class ScalingRule(NamedTuple):
    """How scales are found, without the scales: constants of a compiled graph."""

    mode: str
    margin: int
    delayed: bool
    moves: int = 0


class ScaleTables(NamedTuple):
    """The statistics of all sites. A compiled graph changes these inputs, and not the views of each site.

    Sites that are cast in backward have tables of their own. Otherwise backward's graph would continue from the amax
    that its forward left, and lose what the forward of another microbatch has recorded in between.
    """

    pending: Tensor
    amax: Tensor
    counts: Tensor
    backward_amax: Tensor
    backward_counts: Tensor

    def locate(self, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tables of amax and counts that have the site, and its rows."""
        if site.in_backward:
            return self.backward_amax, self.backward_counts, site.rows
        return self.amax, self.counts, site.rows


class TensorScales:
    """The scales of all sites of a model, in a few flat tensors on its device."""

    def __init__(
        self,
        sites: Mapping[str, torch.dtype],
        device: torch.device | str,
        *,
        mode: str = "delayed",
        history: int = 16,
        margin: int = 0,
        amax: str = "max",
        in_backward: Collection[str] | None = None,
        granularity: Mapping[str, str] | None = None,
        changeable: Collection[str] = (),
    ) -> None:
        """``in_backward`` names the sites whose tensors are cast in backward. Default: those in E5M2.

        ``granularity``: of the sites whose tensors have more than one scale. ``changeable``: sites whose format may
        change (``set_formats``).
        """
        if in_backward is None:
            in_backward = [name for name, dtype in sites.items() if dtype is torch.float8_e5m2]
        sites = dict(sorted(sites.items(), key=lambda item: item[0] in in_backward))
        wrong = [str(dtype) for dtype in sites.values() if dtype not in FP8_MAX]
        if wrong:
            raise UsageError(f"FP8 scales are for float8_e4m3fn and float8_e5m2, not for {wrong[0]}")
        self.mode, self.margin, self.reduce = mode, margin, amax
        count = len(sites)
        self.scale, self.inv_scale, self.amax = (_make_spaced(count, device, fill) for fill in (1.0, 1.0, 0.0))
        self.history = torch.zeros(history, count, device=device)
        self.counts, pending = torch.zeros(2, count, 2, dtype=torch.int64, device=device).unbind()
        self.largest = torch.tensor([FP8_MAX[dtype] for dtype in sites.values()], device=device)
        self.siteless_amax = torch.zeros((), device=device)
        """The largest amax, or NaN, of tensors that are cast without a site (the input of the head)."""
        self.changeable, self.format_changes = frozenset(changeable), 0
        self.updates = 0
        self.moves = 0
        """Number of changes of the scales, by updates and checkpoints. Earlier casts used other scales."""
        self.delayed = mode == "none"
        """Whether casts can use the stored scales; not before the first update has read the tensors.

        This flag changes only once, because a compiled graph is recompiled when a value it read has changed.
        """
        self._pending = pending
        self._forward = forward = sum(name not in in_backward for name in sites)
        self.sites = {
            name: Site(
                *(name, dtype, self.scale[i], self.inv_scale[i], self.amax[i], self.counts[i], pending[i]),
                rows=_make_rows(i, forward),
                in_backward=i >= forward,
                granularity=(granularity or {}).get(name, "tensor"),
            )
            for i, (name, dtype) in enumerate(sites.items())
        }
        self.renew_tables()

    def renew_tables(self) -> None:
        """Make ``tables`` anew, with version counters of their own.

        torch checks the versions of what a graph's forward has saved: a mutation by the backward of another forward, or
        through another view of the same memory, must not count.
        """
        first, last = slice(0, self._forward), slice(self._forward, None)
        self.tables = ScaleTables(
            self._pending.data,
            *(self.amax[first].data, self.counts[first].data),
            *(self.amax[last].data, self.counts[last].data),
        )

    def note_amax(self, amax: Tensor) -> None:
        """Note the amax of a tensor without a site, for ``find_nonfinite``."""
        torch.maximum(self.siteless_amax, amax, out=self.siteless_amax)

    @contextlib.contextmanager
    def unrecorded(self, delayed: bool) -> Iterator[None]:
        """Cast with the stored scales, or with those of each tensor; what is recorded inside is forgotten."""
        tables = self.amax, self.siteless_amax, self.counts, self._pending
        before, was_delayed = [table.clone() for table in tables], self.delayed
        self.delayed = delayed
        try:
            yield
        finally:
            self.delayed = was_delayed
            for table, values in zip(tables, before, strict=True):
                table.copy_(values)

    def find_nonfinite(self) -> Tensor:
        """Return one boolean per site, and a last one for all other tensors: whether inf or NaN was cast since the last
        update."""
        return ~torch.isfinite(torch.cat([self.amax, self.siteless_amax.reshape(1)]))

    @property
    def names(self) -> list[str]:
        """Names for the entries of ``find_nonfinite``."""
        return [*(f"{name} (cast to FP8)" for name in self.sites), "another tensor (cast to FP8)"]

    @torch.no_grad()
    def set_formats(self, formats: Mapping[str, torch.dtype]) -> None:
        """Let sites cast to other formats from now on, with scales that fit."""
        rows = [row for row, name in enumerate(self.sites) if name in formats]
        for name, dtype in formats.items():
            object.__setattr__(self.sites[name], "dtype", dtype)
        index = torch.tensor(rows, device=self.scale.device)
        largest = [FP8_MAX[site.dtype] for site in self.sites.values() if site.name in formats]
        made = torch.tensor(largest, device=self.scale.device)
        self.scale[index] *= made / self.largest[index]
        self.largest[index] = made
        torch.reciprocal(self.scale, out=self.inv_scale)
        self.moves += 1
        self.format_changes += 1

    @torch.no_grad()
    def update(self, skipped: Tensor | None = None) -> None:
        """Add this step's amax to the history and update every scale: a dozen small kernels, no synchronization.

        Args:
            skipped: Scalar on the device: whether the update was skipped. A site without history uses the amax of a
                skipped step for its scale until an update is applied, because a scale of 1 would be worse.
        """
        self.note_update()
        if self.mode != "none":
            good = is_positive_and_finite(self.amax)
            accepted = good if skipped is None else good & ~skipped
            pushed = torch.roll(self.history, 1, 0)
            pushed[0] = self.amax
            self.history.copy_(torch.where(accepted, pushed, self.history))
            reference = self.history.amax(0) if self.reduce == "max" else self.history[0]
            known = reference > 0
            scale = compute_scale(torch.where(known, reference, self.amax), self.largest, self.margin)
            self.scale.copy_(torch.where(accepted | (good & ~known), scale, self.scale))
            torch.reciprocal(self.scale, out=self.inv_scale)
        self.amax.zero_()
        self.siteless_amax.zero_()

    def note_update(self) -> None:
        """Count an update on the host: a CUDA graph that contains ``update`` changes only what is on the device."""
        self.updates += 1
        self.moves += 1
        self.delayed = self.mode != "current"

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled model. No engine updates its scales, so its casts read each tensor first."""
        self.__dict__.update(state)
        if self.mode == "delayed":
            self.mode, self.delayed = "current", False

    def state_dict(self) -> dict[str, Any]:
        """Return copies of scales, history, amax and counts."""
        return {
            "sites": list(self.sites),
            "mode": self.mode,
            "updates": self.updates,
            "largest": self.largest.clone(),
            "scale": self.scale.clone(),
            "history": self.history.clone(),
            "amax": self.amax.clone(),
            "counts": self.counts.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the scales of sites with the same name. New sites, and the rest of a longer history, start empty.

        A site whose format was another one gets the scale that fits its format.
        """
        self.moves += 1
        saved = {name: index for index, name in enumerate(state["sites"])}
        both = [(here, saved[name]) for here, name in enumerate(self.sites) if name in saved]
        self.updates = state["updates"] if both else 0
        self.delayed = self.mode == "none" or (self.mode == "delayed" and self.updates > 0)
        if not both:
            return
        self._load_formats(state, saved)
        here, there = (torch.tensor(column, device=self.scale.device) for column in zip(*both, strict=True))
        depth = min(len(self.history), len(state["history"]))
        for mine, name in ((self.scale, "scale"), (self.amax, "amax"), (self.counts, "counts")):
            mine[here] = state[name].to(mine.device)[there]
        if self.mode != "none":
            self.scale[here] *= self.largest[here] / _get_largest(state).to(self.largest.device)[there]
        self.history.zero_()
        self.history[:depth, here] = state["history"].to(self.history.device)[:depth, there]
        torch.reciprocal(self.scale, out=self.inv_scale)

    def _load_formats(self, state: Mapping[str, Any], saved: Mapping[str, int]) -> None:
        """Set the saved formats of sites whose format may change."""
        formats = {number: dtype for dtype, number in FP8_MAX.items()}
        largest = _get_largest(state).tolist()
        wanted = {name: formats[largest[saved[name]]] for name in self.changeable if name in saved}
        wanted = {name: dtype for name, dtype in wanted.items() if self.sites[name].dtype is not dtype}
        if wanted:
            self.set_formats(wanted)


def _get_largest(state: Mapping[str, Any]) -> Tensor:
    """Return the largest numbers of a state's formats. Before states had them, all gradients were in E5M2."""
    if "largest" in state:
        made: Tensor = state["largest"]
        return made
    e4m3, e5m2 = FP8_MAX[torch.float8_e4m3fn], FP8_MAX[torch.float8_e5m2]
    return torch.tensor([e5m2 if name.endswith(".grad_output") else e4m3 for name in state["sites"]])
