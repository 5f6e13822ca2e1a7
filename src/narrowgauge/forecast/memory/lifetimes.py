"""When each memory block of a trace is allocated and freed: in eager mode, or as torch.compile plans it.

Eager mode is as traced, with one correction: where two gradients of a tensor are summed, autograd adds the second to
the first in place, but not under a dispatch mode such as the recorder.

torch.compile fuses everything between products, convolutions and attention into few kernels, and plans which tensors to
keep. These parts of its plan are modeled:

    merged       the same operation on the same tensors runs once: casting one input for query, key and value
    dropped      what one fused kernel writes and only the same kernel reads is never in memory
    recomputed   what backward's fused kernels read is not kept if it follows from a smaller tensor that is kept anyway:
                 a log-softmax from its logits. What backward's *products* read is kept, as in eager mode
    reused       a fused kernel overwrites an input that is not read again: logits become their gradient
    zeros        outputs other than the loss get a gradient of zeros, which exists until backward ends
    padded       a 16-bit product's operands are copied where rows do not begin on 16 bytes (in ``Op.workspace``)

Inductor's scheduler is not modeled, so figures of compiled models are estimates: docs/forecast.md has their accuracy.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.forecast.trace.trace import Op, Trace

NOT_FUSED = ("product", "convolution", "attention")


@dataclass
class Lifetimes:
    """For each block: the operation that allocates it, and the one after which it is freed; -1: never."""

    trace: Trace
    born: dict[int, int] = field(default_factory=dict)
    died: dict[int, int] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    """Blocks that are never in memory."""
    reuses: dict[int, int] = field(default_factory=dict)
    """Blocks that reuse the memory of another one: new to old."""
    recomputed: dict[int, int] = field(default_factory=dict)
    """Blocks that backward computes again, and from which block."""

    def events(self) -> Iterator[tuple[int, list[int], list[int]]]:
        """Operations in order, each with the blocks it allocates and those that are freed after it."""
        come: dict[int, list[int]] = {}
        go: dict[int, list[int]] = {}
        for block, op in self.born.items():
            if block not in self.dropped and block not in self.reuses:
                come.setdefault(op, []).append(block)
        heirs = {old: new for new, old in self.reuses.items()}
        for block in self.born:
            if block in self.dropped or block in self.reuses:
                continue
            last = block
            while last in heirs:
                last = heirs[last]
            if self.died[last] >= 0:
                go.setdefault(self.died[last], []).append(block)
        for op in range(len(self.trace.ops)):
            yield op, come.get(op, []), go.get(op, [])


def find_lifetimes(trace: Trace) -> Lifetimes:
    """Find the lifetimes of a trace's blocks; what is compiled, as torch.compile plans it."""
    found = Lifetimes(trace)
    for place, event in trace.events:
        if event > 0:
            found.born[event - 1], found.died[event - 1] = place, -1
        else:
            found.died[-event - 1] = place
    for index, op in enumerate(trace.ops):
        if op.accumulates and op.reads and op.writes:
            _reuse(found, index, op.writes[-1].block, [op.reads[0].block], (index, index + 1))
    if any(op.compiled for op in trace.ops):
        _plan(found)
    return found


def _is_fused(op: Op) -> bool:
    return op.compiled and op.kind not in NOT_FUSED and not op.name.startswith("narrowgauge")


def _plan(found: Lifetimes) -> None:
    ops = found.trace.ops
    readers: dict[int, list[int]] = {}
    for index, op in enumerate(ops):
        for piece in op.reads:
            readers.setdefault(piece.block, []).append(index)
    _merge(found, readers)
    walls = [index for index, op in enumerate(ops) if not _is_fused(op) and op.kind != "view"]
    ends = [b for b, end in found.died.items() if end >= 0 and b in readers and b not in found.dropped]
    fused = [block for block in ends if _is_fused(ops[found.born[block]])]
    for block in fused:
        _recompute(found, block, readers[block])
    for block in fused:
        uses = [index for index in readers[block] if index <= found.died[block]]
        start, end = found.born[block], max((*uses, found.born[block]))
        if not _walls_between(walls, start, end) and all(_is_fused(ops[index]) for index in uses):
            found.dropped.add(block)
    for index, op in enumerate(ops):
        if _is_fused(op):
            place = bisect.bisect_left(walls, index)
            around = walls[place - 1] if place else 0, (walls[place] if place < len(walls) else len(ops)) - 1
            for piece in op.writes:
                if found.born.get(piece.block) == index and piece.block not in found.dropped:
                    _reuse(found, index, piece.block, _sources(found, index), around)
    _add_zeros(found)


def _merge(found: Lifetimes, readers: dict[int, list[int]]) -> None:
    ops = found.trace.ops
    writes = Counter(piece.block for op in ops for piece in op.writes)
    known: dict[Any, int] = {}
    same: dict[int, int] = {}
    for index, op in enumerate(ops):
        if not _is_fused(op) or op.phase != "forward" or len(op.writes) != 1 or op.call is None or _is_random(op):
            continue
        block = op.writes[0].block
        if found.born.get(block) != index or writes[block] > 1 or found.trace.blocks[block].role != "activations":
            continue
        first = known.setdefault((op.step, op.call, *(same.get(p.block, p.block) for p in op.reads)), block)
        if first != block and found.died[first] >= 0 and found.died[block] >= 0:
            same[block] = first
            found.dropped.add(block)
            readers[first] = sorted(readers.get(first, []) + readers.pop(block, []))
            found.died[first] = max(found.died[first], found.died[block])


def _add_zeros(found: Lifetimes) -> None:
    """Autograd passes compiled code a gradient for every output."""
    ops = found.trace.ops
    for place, block in found.trace.returned:
        start = next((i for i in range(place, len(ops)) if ops[i].phase == "backward"), len(ops))
        end = next((i for i in range(start, len(ops)) if ops[i].phase != "backward"), len(ops))
        if start < end:
            found.born[block], found.died[block] = start, end - 1


def _is_random(op: Op) -> bool:
    return any(word in op.name for word in ("dropout", "rand", "bernoulli"))


def _walls_between(walls: list[int], start: int, end: int) -> int:
    """How many operations that are not fused come after ``start`` and up to ``end``."""
    return bisect.bisect_right(walls, end) - bisect.bisect_right(walls, start)


def _sources(found: Lifetimes, index: int) -> list[int]:
    """The blocks in memory that a fused operation's result is computed from, looking through dropped ones."""
    blocks: list[int] = []
    seen, ahead = set(), [index]
    while ahead:
        for piece in found.trace.ops[ahead.pop()].reads:
            if piece.block in seen or piece.block not in found.born:
                continue
            seen.add(piece.block)
            if piece.block in found.dropped:
                ahead.append(found.born[piece.block])
            else:
                blocks.append(piece.block)
    return blocks


def _recompute(found: Lifetimes, block: int, readers: list[int]) -> None:
    """Do not keep a block for backward if its one large source is not larger and only fused kernels read it."""
    ops, blocks = found.trace.ops, found.trace.blocks
    start = found.born[block]
    later = [index for index in readers if ops[index].phase == "backward"]
    if (
        _is_random(ops[start])
        or ops[start].phase != "forward"
        or not later
        or not all(_is_fused(ops[index]) for index in later)
    ):
        return
    large = [source for source in _origins(found, start) if blocks[source].bytes * 64 > blocks[block].bytes]
    if len(large) != 1 or blocks[large[0]].bytes > blocks[block].bytes or blocks[large[0]].role != "activations":
        return
    if found.died[large[0]] >= 0:
        found.died[large[0]] = max(found.died[large[0]], found.died[block])
    found.died[block] = max((index for index in readers if index not in later), default=start)
    found.recomputed[block] = large[0]


def _origins(found: Lifetimes, index: int) -> set[int]:
    """The blocks not written by fused kernels from which an operation's result is computed."""
    ops = found.trace.ops
    origins: set[int] = set()
    seen, ahead = set(), [index]
    while ahead:
        for piece in ops[ahead.pop()].reads:
            producer = found.born.get(piece.block)
            if producer is None or piece.block in seen:
                continue
            seen.add(piece.block)
            if _is_fused(ops[producer]):
                ahead.append(producer)
            else:
                origins.add(piece.block)
    return origins


def _reuse(found: Lifetimes, index: int, block: int, sources: list[int], around: tuple[int, int]) -> None:
    """Let a result reuse the memory of a source of its size whose last use is in the same kernel (``around``)."""
    if found.born.get(block) != index or block in found.reuses:
        return
    blocks, taken = found.trace.blocks, set(found.reuses.values())
    for source in sources:
        fits = source in found.born and blocks[source].bytes == blocks[block].bytes
        free = around[0] <= found.died[source] <= around[1] if fits else False
        if fits and free and source not in taken | found.dropped and blocks[source].role == "activations":
            found.reuses[block] = source
            return
