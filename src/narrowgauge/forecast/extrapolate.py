"""Extrapolates a model of many identical blocks from traces of two and three of them: the difference is one block.

Memory of every segment of a step (``layout``) and time of every operation outside of blocks are linear in the number of
blocks, so two points determine those of the whole model. Forecasting a 70B model takes as long as a small one. A test
compares this with a trace of the whole model. Models whose blocks differ are traced whole.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from narrowgauge.forecast.memory.estimate import Memory, summarize
from narrowgauge.forecast.memory.layout import Layout, Moment, Peak, compute_layout
from narrowgauge.forecast.time.host_copies import is_inside
from narrowgauge.forecast.time.reachable_rates import ReachableRates
from narrowgauge.forecast.time.roofline import Cost, estimate_costs
from narrowgauge.forecast.trace.trace_step import Traced
from narrowgauge.kernels.norm import MAX_COLUMNS
from narrowgauge.nn.recompute import find_blocks, shorten_row
from narrowgauge.task import Task

ROWS = nn.ModuleList | nn.Sequential
"""Lists of blocks that can be shortened."""
TRACED_BLOCKS = 2, 3
"""How many blocks are traced: a first and a last one, then one more between them."""
MIN_BLOCKS = 6
"""The fewest blocks for which extrapolating is faster."""


@dataclass(frozen=True)
class TracedModel:
    """Traces of a model: of the whole, or of two shortened versions of it."""

    traces: tuple[Traced, ...]
    blocks: int
    """Blocks of the whole model."""
    parameters: int
    too_wide: bool = False
    """Its blocks are wider than narrowgauge's norm kernel supports, so they were traced without fused blocks."""

    @property
    def traced(self) -> Traced:
        """The largest trace."""
        return self.traces[-1]

    @property
    def is_whole(self) -> bool:
        return len(self.traces) == 1

    def memory(self, shards: int = 1) -> Memory:
        """Predict what a rank of ``shards`` allocates."""
        layouts = [compute_layout(traced, shards, self.parameters) for traced in self.traces]
        layout = layouts[0] if self.is_whole else _extend(layouts[0], layouts[1], self.blocks)
        if not self.is_whole:
            layout.when = self._moment(layout)
        found = summarize(self.traced, layout, shards, self.parameters)
        return replace(found, host=self._offloaded, notes=[*found.notes, *self.notes])

    @property
    def _offloaded(self) -> int:
        small, large = self.traces[0].offloaded, self.traced.offloaded
        return large if self.is_whole else large + (large - small) * (self.blocks - TRACED_BLOCKS[1])

    @property
    def notes(self) -> list[str]:
        """How the forecast was made, for the user."""
        notes = []
        if not self.is_whole:
            few, more = TRACED_BLOCKS
            notes.append(f"extrapolated from traces of {few} and {more} of {self.blocks} identical blocks")
        if self.too_wide:
            notes.append(
                f"wider than the {MAX_COLUMNS:,} columns that narrowgauge's norm kernel supports: predicted without "
                "fused blocks, as training would run it"
            )
        return notes

    def costs(self, rates: ReachableRates) -> list[tuple[Cost, float]]:
        """Every operation of a step and how often it runs.

        The middle block represents all but the first and the last. Work on all blocks at once (the optimizer) grows by
        as much per block as it did from two to three blocks.
        """
        if self.is_whole:
            return [(cost, 1.0) for cost in estimate_costs(self.traced, rates)]
        small, large = (estimate_costs(traced, rates) for traced in self.traces)
        paths = self.traced.block_paths
        before = _outside_seconds(small, self.traces[0].block_paths)
        after = _outside_seconds(large, paths)
        found = []
        for cost in large:
            if is_inside(cost.op.where, paths):
                found.append((cost, float(self.blocks - 2) if is_inside(cost.op.where, paths[1:2]) else 1.0))
            else:
                key = cost.op.phase, cost.op.name
                grown = after[key] + (after[key] - before.get(key, after[key])) * (self.blocks - TRACED_BLOCKS[1])
                found.append((cost, max(grown, 0.0) / after[key] if after[key] else 1.0))
        return found

    def _moment(self, layout: Layout) -> Moment:
        ops = self.traced.trace.ops
        stretch = max((s for s in layout.peaks if s[0] == self.traced.steps - 1), key=lambda s: layout.peaks[s].total)
        op = ops[layout.peaks[stretch].index]
        first = next(index for index, one in enumerate(ops) if one.step == self.traced.steps - 1)
        last = self.traced.block_paths[-1]
        module = op.where
        if module == last or module.startswith(f"{last}."):
            module = last.rpartition(".")[0] + f".{self.blocks - 1}" + module.removeprefix(last)
        share = (layout.peaks[stretch].index - first) / (len(ops) - first)
        return Moment(phase=op.phase, module=module, op=op.name, share=share)


def trace_model(task: Task, trace: Callable[[Task], Traced]) -> TracedModel:
    """Trace a task; only a few of its blocks where it has many identical ones."""
    blocks, parameters, _ = inspect_blocks(task)
    if blocks < MIN_BLOCKS:
        traced = trace(task)
        return TracedModel((traced,), len(traced.block_paths), traced.parameters)
    small, large = (trace(replace(task, model=functools.partial(_cut, task, count))) for count in TRACED_BLOCKS)
    return TracedModel((small, large), blocks, parameters)


def inspect_blocks(task: Task) -> tuple[int, int, int]:
    """The number of identical blocks (0: trace it whole), of parameters, and the longest vector of a block."""
    try:
        with torch.device("meta"):
            model = task.model()
    except Exception:  # a user's model may not support meta tensors: it is traced whole
        return 0, 0, 0
    blocks = find_blocks(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    shapes = {tuple(tuple(p.shape) for p in block.parameters()) for block in blocks.values()}
    lists = {path.rpartition(".")[0] for path in blocks}
    if any(not isinstance(model.get_submodule(row), ROWS) for row in lists):
        return 0, parameters, 0
    vectors = [len(p) for block in blocks.values() for p in block.parameters() if p.dim() == 1]
    return len(blocks) if len(shapes) == len(lists) == 1 else 0, parameters, max(vectors, default=0)


def _cut(task: Task, count: int) -> nn.Module:
    """The task's model with only its first few blocks."""
    model = task.model()
    path = next(iter(find_blocks(model))).rpartition(".")[0]
    blocks = model.get_submodule(path)
    assert isinstance(blocks, ROWS)
    shorten_row(blocks, count)
    return model


def _extend(small: Layout, large: Layout, blocks: int) -> Layout:
    """Extrapolate the layout of a model of ``blocks`` blocks from those of two and three."""
    more = blocks - TRACED_BLOCKS[1]

    def line(before: int, after: int) -> int:
        return after + (after - before) * more

    def lines(before: Counter[str], after: Counter[str]) -> Counter[str]:
        return Counter({name: line(before[name], after[name]) for name in {*before, *after}})

    peaks: dict[tuple[int, str, str], Peak] = {}
    for stretch, after in large.peaks.items():
        before = small.peaks.get(stretch)
        if before is not None:  # segments of a middle block exist only in the trace of three
            peaks[stretch] = Peak(
                line(before.total, after.total), lines(before.held, after.held), after.gathered,
                lines(before.largest, after.largest), after.index,
            )  # fmt: skip
    return Layout(peaks, large.when, line(small.between, large.between), line(small.reserved, large.reserved))


def _outside_seconds(costs: list[Cost], paths: list[str]) -> dict[tuple[str, str], float]:
    sums: dict[tuple[str, str], float] = {}
    for cost in costs:
        if not is_inside(cost.op.where, paths):
            key = cost.op.phase, cost.op.name
            sums[key] = sums.get(key, 0.0) + cost.seconds
    return sums
