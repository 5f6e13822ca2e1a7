"""What one of several ranks holds of a traced step: its shards, and the weights gathered from the other ranks.

The trace is of one GPU. A rank of N (FSDP2, ``ranks.distribute``) differs from it by these rules:

    parameters, states    ceil(rows / N) rows of each matrix; vectors and modules kept in FP32 are not sharded
    copies of weights     no 16-bit copies of a block's weights, as the gathered weight has that format. FP8 copies and
                          stacked weights exist while the product that reads them runs. Outside of blocks: until the
                          last read in the step
    gathered              the matrices of two blocks in the compute format, in forward and backward: of the running
                          block and of the next one, which is being gathered (or the collective's output and the weights
                          it is copied into). Everything outside of blocks, in its own format, from the first operation
                          to the last of backward
    gradients of a block  whole, in the gathered format, while its backward runs, and those of the previous block in
                          FP32 while they are reduced; then 1/N, in the parameter's format
    gradients outside     whole until the end of backward, when they are copied to FP32 and reduced
    accumulation          gradients are reduced in the last microbatch only, and whole in FP32 until then; those of a
                          large model (``ranks.distribute.reduces_every_microbatch``) in every microbatch
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from narrowgauge.forecast.memory.lifetimes import Lifetimes
from narrowgauge.forecast.trace.trace import MemoryBlock, Op
from narrowgauge.forecast.trace.trace_step import Traced
from narrowgauge.ranks.distribute import GATHERED

REDUCED_BYTES = 4
"""Bytes of a gradient's element while it is reduced: FP32, whatever it was computed in."""
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class RankMemory:
    """Sizes of a trace's memory blocks on one rank of ``shards``; with one shard, as traced."""

    def __init__(self, traced: Traced, shards: int, sums_each: bool = False) -> None:
        self.traced, self.shards = traced, shards
        self.waits = traced.accumulate > 1 and not sums_each
        """Whether gradients stay whole until they are reduced in the last microbatch."""
        ops = traced.trace.ops
        last = {op.step: index for index, op in enumerate(ops) if op.phase == "backward"}
        self.settling = {index + 1 for index in last.values()} if shards > 1 else set()
        """The operations right after backward, when gradients outside of blocks have been reduced."""
        self.width = get_gathered_bytes(traced)
        self._gathered = self._rules()

    def _rules(self) -> dict[str, Counter[str]]:
        """What is gathered in each phase, and at the end of backward."""
        parts = self.traced.shard_sizes
        if self.shards == 1 or parts is None:
            return {}
        outside = parts.outside * get_outside_bytes(self.traced)
        blocks = 2 * parts.block * self.width
        gradients = parts.block * (self.width + REDUCED_BYTES)
        return {
            "forward": Counter(gathered_blocks=blocks, gathered_outside=outside),
            "backward": Counter(gathered_blocks=blocks, gathered_outside=outside, gradient_buffers=gradients),
            "end": Counter(gradient_buffers=REDUCED_BYTES * parts.outside),
        }

    def size(self, block: MemoryBlock) -> int:
        """Bytes of a block when it is allocated."""
        owner = block.owner
        if owner is None and self._is_initial(block):
            return -(-block.bytes // self.shards)
        if self.shards == 1 or owner is None or owner.part == "copied":
            return block.bytes
        if block.is_copy:
            return block.bytes if owner.part == "outside" else 0
        if block.role == "gradients" and self.waits:
            narrow = self.traced.shard_sizes is not None and self.traced.shard_sizes.narrow
            return block.bytes * (2 if narrow else 1)  # in FP32; one block may hold the gradients of several
        if block.role == "gradients" and owner.part == "outside":
            return block.bytes
        return self._shard(block)

    def _is_initial(self, block: MemoryBlock) -> bool:
        """Whether a block is from before the weights became BF16: a rank casts its shards."""
        return block.role == "workspace" and self.traced.trace.ops[block.born].phase == "build"

    def settled_size(self, block: MemoryBlock) -> int:
        """Bytes of a gradient after it was reduced."""
        sharded = block.owner is not None and block.owner.part != "copied"
        return self._shard(block) if sharded else block.bytes

    def _shard(self, block: MemoryBlock) -> int:
        assert block.owner is not None
        return -(-block.bytes * count_shard_rows(block.owner.rows, self.shards) // max(1, block.owner.rows))

    def gathered(self, index: int, op: Op) -> Counter[str]:
        """Bytes in addition to the trace's own blocks while an operation runs, by purpose."""
        if not self._gathered or op.step < 0:
            return Counter()
        found = self._gathered.get("end" if index in self.settling else op.phase, Counter())
        passing = self._passing(op)
        return found + Counter(passing_copies=passing) if passing else found

    def _passing(self, op: Op) -> int:
        """Bytes of copies of a block's weights that exist only while an operation runs."""
        return sum(size for size, dtype, stacked in self._copies(op) if stacked or dtype in FP8)

    def stacked(self, op: Op) -> int:
        """How many elements of weights are stacked into one tensor for an operation."""
        return sum(size // dtype.itemsize for size, dtype, stacked in self._copies(op) if stacked)

    def _copies(self, op: Op) -> Iterator[tuple[int, torch.dtype, bool]]:
        """Each copy of a block's weights that an operation reads: bytes, format, and whether it stacks several."""
        if op.phase not in ("forward", "backward"):
            return
        for piece in {piece.block: piece for piece in op.reads if piece.block >= 0}.values():
            block = self.traced.trace.blocks[piece.block]
            owner = block.owner
            if owner is None or owner.part != "block" or block.role != "weights":
                continue
            joint = not block.is_copy and block.bytes > owner.numel * piece.dtype.itemsize
            if joint or block.is_copy:
                yield block.bytes, piece.dtype, joint or owner.stacked

    def shorten(self, lifetimes: Lifetimes) -> None:
        """Free copies outside of blocks after their last read in the step: a rank does not keep them."""
        if self.shards == 1:
            return
        ops = self.traced.trace.ops
        readers: dict[int, list[int]] = {}
        for index, op in enumerate(ops):
            for piece in op.reads:
                readers.setdefault(piece.block, []).append(index)
        for number, block in enumerate(self.traced.trace.blocks):
            if not block.is_copy or block.owner is None or block.owner.part != "outside":
                continue
            uses = readers.get(number, [block.born])
            last = [index for index in uses if ops[index].step == ops[uses[-1]].step]
            if number in lifetimes.died:
                lifetimes.died[number] = max(last[-1], block.born)
                if ops[last[0]].step != ops[block.born].step:  # kept from step to step, and written by the optimizer
                    lifetimes.born[number] = last[0]


def count_shard_rows(rows: int, shards: int) -> int:
    """The most rows of a matrix that a rank has: FSDP2 splits as torch.chunk does."""
    return -(-rows // shards)


def get_gathered_bytes(traced: Traced) -> int:
    """Bytes of an element of a block's parameters while they are gathered."""
    return GATHERED.get(traced.recipe.compute, torch.float32).itemsize


def get_outside_bytes(traced: Traced) -> int:
    """Bytes of an element outside of blocks while it is gathered: as stored; without any blocks, as in a block."""
    narrow = traced.shard_sizes is not None and traced.shard_sizes.narrow
    return get_gathered_bytes(traced) if not traced.block_paths else 2 if narrow else 4
