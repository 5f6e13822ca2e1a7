"""A model of many alike blocks, studied by a few of them: two and three are traced, and the difference is one block.

Memory of every stretch of a step (``layout``) and time of every operation outside of blocks are straight lines over the
number of blocks, so that those of the whole follow from two points; a 70B model takes as long as a small one. A test
holds a whole trace and this one together. Models whose blocks differ, or that cannot be cut, are traced whole.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from narrowgauge.forecast.memory.estimate import Memory, describe
from narrowgauge.forecast.memory.layout import Layout, Moment, Top, lay_out
from narrowgauge.forecast.time.reachable_rates import ReachableRates
from narrowgauge.forecast.time.roofline import Cost, costs_of
from narrowgauge.forecast.trace.trace_step import STEPS, Traced
from narrowgauge.kernels.norm import MAX_COLUMNS
from narrowgauge.nn.recompute import find_blocks
from narrowgauge.task import Task

FEW = 2, 3
"""How many blocks are traced: a first and a last one, and one between them."""
WORTH = 6
"""Blocks from which on it pays."""


@dataclass(frozen=True)
class Sample:
    """Traces of a model: of the whole, or of two cuts of it that stand for the whole."""

    traces: tuple[Traced, ...]
    blocks: int
    """Of the whole model."""
    parameters: int
    too_wide: bool = False
    """Its blocks are wider than narrowgauge's own norm takes: they were traced without fused blocks."""

    @property
    def traced(self) -> Traced:
        """The largest one that was traced."""
        return self.traces[-1]

    @property
    def is_whole(self) -> bool:
        return len(self.traces) == 1

    def memory(self, shards: int = 1) -> Memory:
        """What a rank of ``shards`` allocates."""
        layouts = [lay_out(traced, shards, self.parameters) for traced in self.traces]
        layout = layouts[0] if self.is_whole else _extend(layouts[0], layouts[1], self.blocks)
        if not self.is_whole:
            layout.when = self._moment(layout)
        found = describe(self.traced, layout, shards, self.parameters)
        return replace(found, notes=[*found.notes, *self.notes])

    @property
    def notes(self) -> list[str]:
        """What is to be known of how this was found."""
        notes = []
        if not self.is_whole:
            notes.append(f"{FEW[0]} and {FEW[1]} of {self.blocks} alike blocks were traced, and the rest multiplied")
        if self.too_wide:
            notes.append(
                f"wider than the {MAX_COLUMNS:,} columns that narrowgauge's own norm takes: without its fused blocks, "
                "as training would run it"
            )
        return notes

    def costs(self, rates: ReachableRates) -> list[tuple[Cost, float]]:
        """Every operation of a step, and how often it is there: the middle block's for all but the first and the last.

        What is done to all blocks at once (the optimizer) takes longer by as much as it did from two to three.
        """
        if self.is_whole:
            return [(cost, 1.0) for cost in costs_of(self.traced, rates)]
        small, large = (costs_of(traced, rates) for traced in self.traces)
        paths = self.traced.block_paths
        before = _outside_seconds(small, self.traces[0].block_paths)
        after = _outside_seconds(large, paths)
        found = []
        for cost in large:
            if _is_inside(cost.op.where, paths):
                found.append((cost, float(self.blocks - 2) if _is_inside(cost.op.where, paths[1:2]) else 1.0))
            else:
                key = cost.op.phase, cost.op.name
                grown = after[key] + (after[key] - before.get(key, after[key])) * (self.blocks - FEW[1])
                found.append((cost, max(grown, 0.0) / after[key] if after[key] else 1.0))
        return found

    def _moment(self, layout: Layout) -> Moment:
        ops = self.traced.trace.ops
        stretch = max((s for s in layout.tops if s[0] == STEPS - 1), key=lambda s: layout.tops[s].total)
        op = ops[layout.tops[stretch].index]
        first = next(index for index, one in enumerate(ops) if one.step == STEPS - 1)
        last = self.traced.block_paths[-1]
        module = op.where
        if module == last or module.startswith(f"{last}."):
            module = last.rpartition(".")[0] + f".{self.blocks - 1}" + module.removeprefix(last)
        share = (layout.tops[stretch].index - first) / (len(ops) - first)
        return Moment(phase=op.phase, module=module, op=op.name, share=share)


def take(task: Task, trace: Callable[[Task], Traced]) -> Sample:
    """Trace a task, by a few of its blocks where they are many and alike."""
    blocks, parameters, _ = survey(task)
    if blocks < WORTH:
        traced = trace(task)
        return Sample((traced,), len(traced.block_paths), traced.parameters)
    small, large = (trace(replace(task, model=functools.partial(_cut, task, count))) for count in FEW)
    return Sample((small, large), blocks, parameters)


def survey(task: Task) -> tuple[int, int, int]:
    """Of a task's model: alike blocks (0 where it cannot be cut), parameters, and the longest vector of a block."""
    try:
        with torch.device("meta"):
            model = task.model()
    except Exception:  # whatever a user's model does not like about meta tensors: it is traced whole
        return 0, 0, 0
    blocks = find_blocks(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    shapes = {tuple(tuple(p.shape) for p in block.parameters()) for block in blocks.values()}
    lists = {path.rpartition(".")[0] for path in blocks}
    vectors = [len(p) for block in blocks.values() for p in block.parameters() if p.dim() == 1]
    return len(blocks) if len(shapes) == len(lists) == 1 else 0, parameters, max(vectors, default=0)


def _cut(task: Task, count: int) -> nn.Module:
    """The task's model with its first few blocks alone."""
    model = task.model()
    path = next(iter(find_blocks(model))).rpartition(".")[0]
    blocks = model.get_submodule(path)
    assert isinstance(blocks, nn.ModuleList)
    del blocks[count:]
    return model


def _extend(small: Layout, large: Layout, blocks: int) -> Layout:
    """The layout of a model of ``blocks`` blocks from those of two and three."""
    more = blocks - FEW[1]

    def line(before: int, after: int) -> int:
        return after + (after - before) * more

    def lines(before: Counter[str], after: Counter[str]) -> Counter[str]:
        return Counter({name: line(before[name], after[name]) for name in {*before, *after}})

    tops: dict[tuple[int, str, str], Top] = {}
    for stretch, after in large.tops.items():
        before = small.tops.get(stretch)
        if before is not None:  # the middle block's lie between the first one's and the last one's
            tops[stretch] = Top(
                line(before.total, after.total), lines(before.held, after.held), after.gathered,
                lines(before.largest, after.largest), after.index,
            )  # fmt: skip
    return Layout(tops, large.when, line(small.between, large.between), line(small.reserved, large.reserved))


def _outside_seconds(costs: list[Cost], paths: list[str]) -> dict[tuple[str, str], float]:
    sums: dict[tuple[str, str], float] = {}
    for cost in costs:
        if not _is_inside(cost.op.where, paths):
            key = cost.op.phase, cost.op.name
            sums[key] = sums.get(key, 0.0) + cost.seconds
    return sums


def _is_inside(where: str, paths: list[str]) -> bool:
    return any(where == path or where.startswith(f"{path}.") for path in paths)
