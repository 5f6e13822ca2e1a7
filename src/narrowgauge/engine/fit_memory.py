"""Fits a run into a memory budget: measures some steps, chooses what blocks keep for backward, and checks the result.

    warm      the first step, recomputed: optimizers make their states, FP8 its scales
    measure   a step in which all blocks are recomputed: the peak of each part of it
    try       a step in which one block of each kind uses each other option, if that is sure to fit: the bytes that the
              option keeps
    check     steps with the chosen plan: if one exceeds the budget, its blocks are chosen again with less room
    done      nothing is measured; a batch that is larger than planned for begins again with ``measure``

A step with a larger batch does not exceed the budget, as its blocks are recomputed. With several ranks, every block
keeps what the rank with the least room chose, and a plan is made once. A forecast runs the same code on a simulated
GPU, whose allocator counts as CUDA's does.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from narrowgauge.byte_sizes import parse_budget
from narrowgauge.errors import UsageError
from narrowgauge.hardware import Device, is_assumed
from narrowgauge.nn.block_memory import FIELDS, OFFLOADED, RECOMPUTED, BlockMemory
from narrowgauge.nn.fused.offload import get_host_room
from narrowgauge.nn.fused.rehearse import suspended
from narrowgauge.nn.measure_blocks import MeasuredStep, StepMeter
from narrowgauge.nn.memory_plan import MemoryPlan, Option, choose, choose_least, predict_peak
from narrowgauge.ranks.update_sync import UpdateSync

MARGIN = 0.01
"""Share of the budget that a plan leaves free, for what differs from step to step."""
CHECKED_STEPS = 1
"""Steps within the budget after which a plan is final."""
MOST_CORRECTIONS = 4
"""How often a plan that exceeds the budget is chosen again."""
MOST_PLANS = 8
"""How many plans are made as larger batches come; after these, larger batches are recomputed."""
APART = 2
"""How far apart tried blocks are: the tensor that a block hands to the next one counts there first."""
MOST_WAITS = 16
"""Steps to wait for a batch of about the largest size before measuring, and for one without errors."""
NEARLY = 0.9
"""Share of the largest batch that is large enough to plan with."""

Budget = str | int | float | MemoryPlan


class MemoryFitter:
    """Fits the steps of one engine into a budget."""

    def __init__(
        self,
        blocks: Sequence[BlockMemory],
        budget: Budget,
        *,
        device: torch.device,
        hardware: Device,
        compute: str,
        update_sync: UpdateSync,
    ) -> None:
        self.blocks, self.device, self.hardware = list(blocks), device, hardware
        self._by_path = {block.path: block for block in self.blocks}
        self.compute, self._sync = compute, update_sync
        self.plan: MemoryPlan | None = None
        self._stage, self._has_begun = "warm", False
        self._meter: StepMeter | None = None
        self._base: MeasuredStep | None = None
        self._kinds: dict[str, Any] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        """Values of each block's input in the measured step, and of the largest one then."""
        self._kept: dict[Any, dict[str, tuple[float, float]]] = {}
        """Bytes per value of each kind of block with an option, beyond recomputation: kept, and at its own backward."""
        self._tried: dict[str, str] = {}
        self._predicted, self._is_least = 0, False
        self._excess = self._corrections = self._checked = self._plans = self._waits = self._repeats = 0
        if isinstance(budget, MemoryPlan):
            self.budget = budget.budget
            self.adopt(budget)
            return
        if device.type != "cuda":
            raise UsageError(
                f"memory_budget {budget}: torch does not count what a CPU allocates, so there is nothing to plan with; "
                "use a GPU, or predict a plan with narrowgauge memory --fit"
            )
        self.budget = parse_budget(budget, hardware.memory_bytes)
        self._recompute_all()

    @property
    def is_settled(self) -> bool:
        """Whether the plan is final for batches of the sizes so far."""
        return self._stage == "done"

    def adopt(self, plan: MemoryPlan, at_once: bool = False) -> None:
        """Use a plan that was made for this model before, after a first recomputed step or at once, and check it."""
        known = self._by_path
        if set(plan.blocks) != set(known) or any(plan.blocks[path] not in known[path].options for path in known):
            raise UsageError("memory_budget: the plan was made for another model or recipe; make one for this model")
        self.plan, self._stage, self._checked = plan, "adopted", 0
        if at_once:
            self._use(plan)
        else:  # a step without FP8 scales takes more memory
            self._recompute_all()

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Adopt the plan of a saved state, so that a resumed run computes as before; ignore one that does not apply."""
        if saved is None or saved.get("budget") != self.budget or not saved.get("fits"):
            return
        with contextlib.suppress(UsageError, KeyError):
            self.adopt(MemoryPlan.read(saved), at_once=True)

    def observe(self, backward: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context of a forward with gradients, or of a backward."""
        if (self._stage == "check" or not self.blocks) and not self._has_begun:
            self._has_begun = True
            self._reset_peak()  # what came before the step, such as an evaluation, does not count
        if self._stage not in ("measure", "try") or not self.blocks:
            return suspended() if self._stage == "check" else contextlib.nullcontext()
        if self._meter is None:
            self._meter = StepMeter(self.blocks, self.device)
        return self._meter.observe(backward)

    def end_step(self) -> None:
        """An update is complete: take the next step of the plan."""
        self._has_begun = False
        if self._stage == "done":
            self._notice_larger_batch()
        elif self._stage in ("warm", "adopted"):
            self._stage = "measure" if self._stage == "warm" else "check"
            if self.plan is not None:
                self._use(self.plan)
            if self.device.type != "cuda":
                self._finish()
        elif self._stage == "check" or self._meter is None:  # without blocks there is nothing to measure
            self._check(torch.cuda.max_memory_allocated(self.device))
        else:
            measured, disturbed, self._meter = self._meter.finish(), self._meter.is_disturbed, None
            if disturbed and self._sync.size == 1 and self._repeats < MOST_WAITS:
                self._repeats += 1  # the next step is measured in its place
            elif self._stage == "measure":
                self._take_measure(measured)
            else:
                self._take_trial(measured)
        for block in self.blocks:
            block.size.begin_step()

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _use(self, plan: MemoryPlan) -> None:
        for path, name in plan.blocks.items():
            self._by_path[path].set(name)

    def _recompute_all(self) -> None:
        for block in self.blocks:
            block.set(RECOMPUTED if RECOMPUTED in block.options else next(iter(block.options)))
            block.size.planned = None

    def _take_measure(self, measured: MeasuredStep) -> None:
        """Keep the measure of a recomputed step, unless larger batches are known to come."""
        small = any(block.size.of_step < NEARLY * block.size.largest for block in self.blocks)
        if small and self._sync.size == 1 and self._waits < MOST_WAITS:
            self._waits += 1
            return
        self._base, self._waits = self._share(measured), 0
        self._kinds = {block.path: block.kind for block in self.blocks}
        self._kept = {kind: {} for kind in self._kinds.values()}
        self._sizes = {block.path: (block.size.of_step, block.size.largest) for block in self.blocks}
        self._plans += 1
        self._stage = "try"
        self._begin_trial()

    def _share(self, measured: MeasuredStep) -> MeasuredStep:
        """Return a step with the largest figures of all ranks, so that all take the same decisions."""
        paths = sorted(measured.remade)
        own = [part.peak for part in measured.peaks] + [measured.remade[path] for path in paths]
        figures = [round(figure) for figure in self._sync.maximum([float(figure) for figure in own])]
        measured.peaks = [p._replace(peak=peak) for p, peak in zip(measured.peaks, figures, strict=False)]
        measured.remade = dict(zip(paths, figures[len(measured.peaks) :], strict=True))
        return measured

    def _begin_trial(self) -> None:
        """Let one block of each kind use each option that is not known yet, where that fits; without any, choose."""
        self._recompute_all()
        self._tried = {}
        for in_last in (False, True):
            self._set_trials(in_last)
            if self._tried:
                return
        self._choose()

    def _set_trials(self, in_last: bool) -> None:
        """Set the options to try. The last block of its kind tries one; more only if ``in_last``, as it hands a tensor
        to the head and not to a block, and so seems to keep less than others."""
        base = self._base
        assert base is not None
        order = [self._by_path[path] for path in base.order]
        nearest, moments = len(order) + APART, base.list_moments()
        bounds = [Option("", 0, 0.0)] * len(order)
        # The last blocks are freed first in backward, where recomputed steps have their peak.
        for place in range(len(order) - 1, -1, -1):
            block = order[place]
            kind = self._kinds[block.path]
            if place == len(order) - 1 and self._kept[kind] and not in_last:
                continue
            known = {*self._kept[kind], *(name for path, name in self._tried.items() if self._kinds[path] == kind)}
            unknown = [name for name in block.options if name != RECOMPUTED and name not in known]
            for name in unknown if nearest - place >= APART else ():
                if name == OFFLOADED:  # keeps less; backward reads the last input before it has left the GPU
                    fits, tried = place < len(order) - 1 or len(order) == 1, bounds
                else:
                    tried = [*bounds[:place], Option("", base.remade.get(block.path, 0), 0.0), *bounds[place + 1 :]]
                    fits = predict_peak(tried, moments) <= self.budget
                if fits:
                    bounds = tried
                    block.set(name)
                    self._tried[block.path] = name
                    nearest = place
                    break

    def _take_trial(self, measured: MeasuredStep) -> None:
        base = self._base
        assert base is not None
        before = 0.0  # kept by the tried blocks before this one
        tried = [path for path in base.order if path in self._tried]
        for path, after in zip(tried, [*tried[1:], None], strict=True):
            kept = max(_compare(base, measured, path, after), default=0.0)
            values = max((one[path].values for one in measured.kept if path in one), default=0)
            peaks = zip(base.list_backward_peaks(path), measured.list_backward_peaks(path), strict=False)
            own = max((new.peak - old.peak - before for old, new in peaks), default=0.0)
            known = self._kept[self._kinds[path]]
            known[self._tried[path]] = (kept / values, own / values) if values else (0.0, 0.0)
            before += kept
        self._begin_trial()

    def _choose(self) -> None:
        """Choose the option of every block, and use it from the next step on."""
        assert self._base is not None
        gpu = self.hardware.gpu
        by_path, order = self._by_path, self._base.order
        calls = {path: max((one[path].values for one in self._base.kept if path in one), default=0) for path in order}
        options: list[list[Option]] = []
        host_room = get_host_room() / self._sync.size
        for path in order:
            block = by_path[path]
            costs = block.estimate_costs(self.compute, gpu, len(self._base.kept))
            known = self._kept[self._kinds[path]] | {RECOMPUTED: (0.0, 0.0)}
            names = [name for name in block.options if name in known]  # without those that had no room to be tried
            sizes = {name: [round(size * calls[path]) for size in known[name]] for name in names}
            if OFFLOADED in sizes:
                kept, own = sizes[OFFLOADED]
                sizes[OFFLOADED] = [kept, own - kept]  # its backward also fetches the input of the block before it
                host_room += kept
                if host_room < 0 or kept >= 0:
                    del sizes[OFFLOADED]
            options.append([Option(n, kept, costs.get(n, 0.0), own) for n, (kept, own) in sizes.items()])
        moments = self._base.list_moments()
        measured = max(moment.base_bytes for moment in moments)  # needs no margin
        limit = max(int(self.budget * (1 - MARGIN)), min(measured, self.budget)) - self._excess
        picked, least = choose(options, moments, limit), choose_least(options, moments)
        self._is_least = picked is None
        used = self._agree([some[place].name for some, place in zip(options, picked or least, strict=True)])
        chosen = [next(one for one in some if one.name == name) for some, name in zip(options, used, strict=True)]
        smallest = predict_peak([some[place] for some, place in zip(options, least, strict=True)], moments)
        peak = predict_peak(chosen, moments)
        self.plan = MemoryPlan(
            budget=self.budget,
            blocks=dict.fromkeys(by_path, RECOMPUTED) | dict(zip(order, used, strict=True)),
            peak=peak,
            cost_ms=sum(one.cost_ms for one in chosen) if gpu is not None else None,
            smallest=smallest,
            fits=peak <= self.budget,
        )
        self._predicted = peak
        self._use(self.plan)
        for path, (planned, _) in self._sizes.items():
            by_path[path].size.planned = planned
        self._stage, self._checked = "check", 0

    def _agree(self, names: list[str]) -> list[str]:
        """Return what every rank uses: of the ranks' options the one that keeps least."""
        known = list(FIELDS)
        if self._sync.size == 1:
            return names
        return [known[round(place)] for place in self._sync.maximum([float(known.index(name)) for name in names])]

    def _check(self, peak: int) -> None:
        """Compare the peak of a step with the budget."""
        peak = round(self._sync.maximum([float(peak)])[0])
        plan = self.plan or MemoryPlan(budget=self.budget, smallest=peak)
        self.plan = replace(plan, peak=peak, smallest=min(plan.smallest or peak, peak), fits=peak <= self.budget)
        if peak <= self.budget:
            self._checked += 1
            if self._checked >= CHECKED_STEPS:
                self._finish()
        elif self._is_least or not self.plan.blocks or self._corrections >= MOST_CORRECTIONS:
            self._finish()
        elif self._base is None:  # an adopted plan
            self._recompute_all()
            self._corrections += 1
            self._stage = "measure"
        else:
            self._corrections += 1
            self._excess += peak - self._predicted
            self._choose()

    def _finish(self) -> None:
        assert self.plan is not None
        self._stage = "done"
        if self._base is None:  # an adopted plan
            self._sizes = {block.path: (block.size.largest, block.size.largest) for block in self.blocks}
            for block in self.blocks:
                block.size.planned = block.size.largest
        if self._sync.is_first and not is_assumed():
            logging.getLogger("narrowgauge").info("%s", self.plan)
            if not self.plan.fits:
                warnings.warn(str(self.plan), stacklevel=4)

    def _notice_larger_batch(self) -> None:
        larger = any(block.size.largest > self._sizes[block.path][1] for block in self.blocks)
        if larger and self._sync.size == 1 and self._plans < MOST_PLANS and self.device.type == "cuda":
            self._recompute_all()
            self._excess = self._corrections = 0
            self._stage, self._base = "measure", None


def _compare(base: MeasuredStep, measured: MeasuredStep, path: str, end: str | None) -> list[float]:
    """Return how many bytes more the blocks from ``path`` to before ``end`` have kept, for each forward of a step."""
    stop = None if end is None else base.order.index(end)
    places = base.order[base.order.index(path) : stop]
    return [
        sum((new[one].per_value - old[one].per_value) * new[one].values for one in places if one in old and one in new)
        for old, new in zip(base.kept, measured.kept, strict=False)
    ]
