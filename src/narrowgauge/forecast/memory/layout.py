"""Replays the memory blocks of a trace through the allocator, and records the peak of every segment of a step.

A segment is the part of a phase that runs in one position of the model: before its blocks, in the first block, in the
last, after them. In models of identical blocks the peak of each segment is linear in the number of blocks, so that a
few traced blocks are enough to extrapolate (``extrapolate``). The highest segment is the peak of the step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from narrowgauge.forecast.memory.allocator import CachingAllocator
from narrowgauge.forecast.memory.lifetimes import find_lifetimes
from narrowgauge.forecast.memory.rank_memory import RankMemory
from narrowgauge.forecast.trace.trace import Op
from narrowgauge.forecast.trace.trace_step import Traced
from narrowgauge.forecast.trace.workspaces import get_cublas_bytes, times_products
from narrowgauge.ranks.distribute import reduces_every_microbatch

Segment = tuple[int, str, str]
"""Step, phase and position."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When the peak occurs."""

    phase: str
    """forward, backward or step."""
    module: str
    """Path of the module that runs."""
    op: str
    """Name of the operation that runs."""
    share: float
    """How far into the step, by its number of operations: 0 to 1."""

    def __str__(self) -> str:
        return f"{self.phase}, {self.module or 'outside of modules'} ({self.op})"


@dataclass
class Peak:
    """The peak of a segment: bytes allocated in total, by role, and gathered in addition to the trace's blocks."""

    total: int = 0
    held: Counter[str] = field(default_factory=Counter)
    gathered: Counter[str] = field(default_factory=Counter)
    largest: Counter[str] = field(default_factory=Counter)
    """The maximum of each role over the segment."""
    index: int = 0


@dataclass
class Layout:
    """A trace's memory over time."""

    peaks: dict[Segment, Peak]
    when: Moment
    between: int
    reserved: int
    timeline: list[tuple[str, Peak]] = field(default_factory=list)
    """The peaks of the last step, module by module; empty where blocks were extrapolated."""

    def peak(self, step: int) -> Peak:
        """The peak of a step (-1: of building the model); of equal ones the first."""
        own = [top for (number, _, _), top in self.peaks.items() if number == step]
        return max(own, key=lambda top: top.total, default=Peak())

    def largest(self, step: int) -> Counter[str]:
        """The maximum of each role over a step."""
        found: Counter[str] = Counter()
        for (number, _, _), top in self.peaks.items():
            found |= top.largest if number == step else Counter()
        return found


def compute_layout(traced: Traced, shards: int = 1, parameters: int | None = None) -> Layout:
    """Replay a trace's memory; with ``shards``, as one of so many FSDP ranks would hold it.

    ``parameters`` is the whole model's number, where only a few of its blocks were traced.
    """
    sums_each = reduces_every_microbatch(parameters or traced.parameters, traced.gpu.memory_bytes)
    trace, lifetimes, rank = traced.trace, find_lifetimes(traced.trace), RankMemory(traced, shards, sums_each)
    rank.shorten(lifetimes)
    allocator, held = CachingAllocator(), Counter[str]()
    addresses: dict[int, int] = {}
    sizes: dict[int, int] = {}
    threads: set[str] = set()
    heights: dict[int, int] = {}
    peaks: dict[Segment, Peak] = {}
    timeline: list[tuple[str, Peak]] = []
    positions = BlockPositions(traced)
    if times_products(traced.recipe, traced.layers):
        allocator.allocate(get_cublas_bytes(traced.gpu))

    def add_block(block: int, size: int) -> None:
        if size:
            addresses[block], sizes[block] = allocator.allocate(size), size
            held[trace.blocks[block].role] += size

    def free_block(block: int) -> None:
        if block in addresses:
            allocator.release(addresses.pop(block))
            held[trace.blocks[block].role] -= sizes.pop(block)

    for index, come, go in lifetimes.events():
        op = trace.ops[index]
        for block in come:
            add_block(block, rank.size(trace.blocks[block]))
        if op.kind == "product" and op.phase not in threads:
            threads.add(op.phase)
            allocator.allocate(get_cublas_bytes(traced.gpu))
        gathered = rank.gathered(index, op)
        extra = [allocator.allocate(size) for size in (op.workspace, gathered.total()) if size]
        top = peaks.setdefault((op.step, op.phase, positions.of(op.where)), Peak())
        if op.step == traced.steps - 1:
            heights[index] = allocator.allocated
            top.largest |= held
            _record(timeline, op, allocator.allocated, held)
        if allocator.allocated > top.total:
            top.total, top.held, top.gathered, top.index = allocator.allocated, held.copy(), gathered, index
        for address in extra:
            allocator.release(address)
        for block in go:
            free_block(block)
        if index in rank.settling:
            for block in [one for one in addresses if trace.blocks[one].role == "gradients"]:
                free_block(block)
                add_block(block, rank.settled_size(trace.blocks[block]))
    nowhere = Moment(phase="", module="", op="", share=0.0)
    found = Layout(peaks, nowhere, allocator.allocated, allocator.reserved, timeline)
    there = next(index for index, height in heights.items() if height >= 0.999 * found.peak(traced.steps - 1).total)
    found.when = Moment(
        phase=trace.ops[there].phase,
        module=trace.ops[there].where,
        op=trace.ops[there].name,
        share=(there - min(heights)) / len(heights),
    )
    return found


def _record(timeline: list[tuple[str, Peak]], op: Op, allocated: int, held: Counter[str]) -> None:
    """Record the memory at an operation: one entry per module, two names deep."""
    label = ", ".join(filter(None, (op.phase, ".".join(op.where.split(".")[:2]))))
    follows = timeline and label == op.phase and timeline[-1][0].startswith(op.phase)  # between modules: same entry
    if not follows and (not timeline or timeline[-1][0] != label):
        timeline.append((label, Peak()))
    top = timeline[-1][1]
    if allocated > top.total:
        top.total, top.held = allocated, held.copy()


class BlockPositions:
    """Tracks where in the model operations run."""

    def __init__(self, traced: Traced) -> None:
        paths = traced.block_paths
        last = len(paths) - 1
        self._names = {path: "first" if i == 0 else "last" if i == last else "middle" for i, path in enumerate(paths)}
        self._now = "outside"

    def of(self, where: str) -> str:
        """first, middle or last block; otherwise outside, and after which of them."""
        name = next((name for path, name in self._names.items() if where == path or where.startswith(f"{path}.")), "")
        if name:
            self._now = name
            return name
        if not self._now.startswith("outside"):
            self._now = f"outside, after {self._now}"
        return self._now
