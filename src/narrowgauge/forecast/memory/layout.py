"""Lays the blocks of a trace out in time, and notes the highest moment of every stretch of it.

A stretch is a phase of a step between two changes of place: before the blocks of a model, in the first, in the last,
behind them. In models of alike blocks each stretch's height is a straight line over the number of blocks, so that a few
blocks tell of many (``few``); its highest stretch is the peak.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from narrowgauge.forecast.cluster.shards import Rank
from narrowgauge.forecast.memory.allocator import CachingAllocator
from narrowgauge.forecast.memory.lifetimes import follow
from narrowgauge.forecast.trace.trace import Op
from narrowgauge.forecast.trace.trace_step import STEPS, Traced
from narrowgauge.forecast.trace.workspaces import cublas_bytes
from narrowgauge.ranks.distribute import reduces_every_microbatch

Stretch = tuple[int, str, str]
"""Step, phase and place."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When the peak comes."""

    phase: str
    """forward, backward or step."""
    module: str
    op: str
    share: float
    """How far into the step, in operations: 0 to 1."""

    def __str__(self) -> str:
        return f"{self.phase}, {self.module or 'outside of modules'} ({self.op})"


@dataclass
class Top:
    """The highest moment of a stretch: what was allocated, what it was for, and beside the trace's blocks."""

    total: int = 0
    held: Counter[str] = field(default_factory=Counter)
    gathered: Counter[str] = field(default_factory=Counter)
    largest: Counter[str] = field(default_factory=Counter)
    """The most of each role at any moment of the stretch."""
    index: int = 0


@dataclass
class Layout:
    """A trace's memory over time."""

    tops: dict[Stretch, Top]
    when: Moment
    between: int
    reserved: int
    course: list[tuple[str, Top]] = field(default_factory=list)
    """The last step's way, from module to module: the highest moment in each; empty where blocks were multiplied."""

    def peak(self, step: int) -> Top:
        """The highest moment of a step (-1: of building), the first of equal ones."""
        own = [top for (number, _, _), top in self.tops.items() if number == step]
        return max(own, key=lambda top: top.total, default=Top())

    def largest(self, step: int) -> Counter[str]:
        found: Counter[str] = Counter()
        for (number, _, _), top in self.tops.items():
            found |= top.largest if number == step else Counter()
        return found


def lay_out(traced: Traced, shards: int = 1, parameters: int | None = None) -> Layout:
    """Lay the trace's blocks out in time; with ``shards``, as one of so many FSDP ranks would hold them.

    ``parameters``: of the whole model, where the trace is of a few of its blocks.
    """
    sums_each = reduces_every_microbatch(parameters or traced.parameters, traced.gpu.memory_bytes)
    trace, lifetimes, rank = traced.trace, follow(traced.trace), Rank(traced, shards, sums_each)
    rank.shorten(lifetimes)
    allocator, held = CachingAllocator(), Counter[str]()
    addresses: dict[int, int] = {}
    sizes: dict[int, int] = {}
    threads: set[str] = set()
    heights: dict[int, int] = {}
    tops: dict[Stretch, Top] = {}
    course: list[tuple[str, Top]] = []
    places = Places(traced)
    if traced.recipe.products == "fastest" and any(layer.decision is not None for layer in traced.layers):
        allocator.allocate(cublas_bytes(traced.gpu))  # products are timed on a stream of their own, the first time

    def come_in(block: int, size: int) -> None:
        if size:
            addresses[block], sizes[block] = allocator.allocate(size), size
            held[trace.blocks[block].role] += size

    def go_out(block: int) -> None:
        if block in addresses:
            allocator.release(addresses.pop(block))
            held[trace.blocks[block].role] -= sizes.pop(block)

    for index, come, go in lifetimes.events():
        op = trace.ops[index]
        for block in come:
            come_in(block, rank.size(trace.blocks[block]))
        if op.kind == "product" and op.phase not in threads:
            threads.add(op.phase)
            allocator.allocate(cublas_bytes(traced.gpu))
        beside = rank.gathered(index, op)
        extra = [allocator.allocate(size) for size in (op.workspace, beside.total()) if size]
        top = tops.setdefault((op.step, op.phase, places.of(op.where)), Top())
        if op.step == STEPS - 1:
            heights[index] = allocator.allocated
            top.largest |= held
            _pass(course, op, allocator.allocated, held)
        if allocator.allocated > top.total:
            top.total, top.held, top.gathered, top.index = allocator.allocated, held.copy(), beside, index
        for address in extra:
            allocator.release(address)
        for block in go:
            go_out(block)
        if index in rank.settling:
            for block in [one for one in addresses if trace.blocks[one].role == "gradients"]:
                go_out(block)
                come_in(block, rank.settled_size(trace.blocks[block]))
    nowhere = Moment(phase="", module="", op="", share=0.0)
    found = Layout(tops, nowhere, allocator.allocated, allocator.reserved, course)
    there = next(index for index, height in heights.items() if height >= 0.999 * found.peak(STEPS - 1).total)
    found.when = Moment(
        phase=trace.ops[there].phase,
        module=trace.ops[there].where,
        op=trace.ops[there].name,
        share=(there - min(heights)) / len(heights),
    )
    return found


def _pass(course: list[tuple[str, Top]], op: Op, allocated: int, held: Counter[str]) -> None:
    """Note how high memory stands at an operation: one note for each module that is passed, two names deep."""
    label = ", ".join(filter(None, (op.phase, ".".join(op.where.split(".")[:2]))))
    follows = course and label == op.phase and course[-1][0].startswith(op.phase)  # between modules: still the last one
    if not follows and (not course or course[-1][0] != label):
        course.append((label, Top()))
    top = course[-1][1]
    if allocated > top.total:
        top.total, top.held = allocated, held.copy()


class Places:
    """Where in the model an operation is, by the operations before it."""

    def __init__(self, traced: Traced) -> None:
        paths = traced.block_paths
        last = len(paths) - 1
        self._names = {path: "first" if i == 0 else "last" if i == last else "middle" for i, path in enumerate(paths)}
        self._now = "outside"

    def of(self, where: str) -> str:
        """first, middle or last block; else outside, and behind which of them."""
        name = next((name for path, name in self._names.items() if where == path or where.startswith(f"{path}.")), "")
        if name:
            self._now = name
            return name
        if not self._now.startswith("outside"):
            self._now = f"outside, after {self._now}"
        return self._now
