"""What one rank of several holds of a traced step: its shards, and what is gathered around them.

The trace is of one GPU; a rank of N (``ranks.spread``, FSDP2) differs in this, by rule:

    parameters, states    ceil(rows / N) of the rows of each matrix; vectors and keepers whole
    copies of weights     none of a block's in 16 bits: the gathered weight is it. FP8 copies, and weights that are used
                          as one, stacked, for as long as the product that reads them runs. Outside of blocks: as long
                          as somebody in the step reads them
    gathered              two blocks' matrices in the compute format, forward and backward: the one that runs and the
                          next, on its way (or what the collective wrote and the weights it is copied into); what lies
                          outside of blocks, in its own format, from the first operation to backward's last
    gradients of a block  whole, in the gathered format, while it runs backward, and the block before's in FP32 on its
                          way to be summed; then N-ths, in the parameter's format
    gradients outside     whole from the moment they come until backward's end, when they are copied to FP32 and summed
    accumulation          gradients are summed over ranks in the last microbatch alone: until then all are whole, FP32;
                          of a large model (``ranks.distribute.reduces_every_microbatch``) in every one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from narrowgauge.forecast.memory.lifetimes import Lifetimes
from narrowgauge.forecast.trace.trace import Block, Op
from narrowgauge.forecast.trace.trace_step import Traced
from narrowgauge.ranks.distribute import GATHERED

REDUCED_BYTES = 4
"""Of a gradient on its way to be summed: FP32, whatever it was computed in."""
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Rank:
    """How one rank of ``shards`` sees the blocks of a trace; one alone sees them as they are."""

    def __init__(self, traced: Traced, shards: int, sums_each: bool = False) -> None:
        self.traced, self.shards = traced, shards
        self.waits = traced.accumulate > 1 and not sums_each
        """Whether gradients wait, whole, for the last microbatch to be summed."""
        ops = traced.trace.ops
        last = {op.step: index for index, op in enumerate(ops) if op.phase == "backward"}
        self.settling = {index + 1 for index in last.values()} if shards > 1 else set()
        """The operations behind backward's end, when gradients outside of blocks have been summed."""
        self.width = gathered_bytes(traced)
        self._gathered = self._rules()

    def _rules(self) -> dict[str, Counter[str]]:
        """What is gathered in each phase, and at backward's end."""
        parts = self.traced.spread
        if self.shards == 1 or parts is None:
            return {}
        outside = parts.outside * outside_bytes(self.traced)
        blocks = 2 * parts.block * self.width
        gradients = parts.block * (self.width + REDUCED_BYTES)
        return {
            "forward": Counter(gathered_blocks=blocks, gathered_outside=outside),
            "backward": Counter(gathered_blocks=blocks, gathered_outside=outside, gradient_buffers=gradients),
            "end": Counter(gradient_buffers=REDUCED_BYTES * parts.outside),
        }

    def size(self, block: Block) -> int:
        """Bytes of a block when it comes."""
        owner = block.owner
        if owner is None and self._is_drawn(block):
            return -(-block.bytes // self.shards)
        if self.shards == 1 or owner is None or owner.part == "copied":
            return block.bytes
        if block.is_copy:
            return block.bytes if owner.part == "outside" else 0
        if block.role == "gradients" and self.waits:
            narrow = self.traced.spread is not None and self.traced.spread.narrow
            return block.bytes * (2 if narrow else 1)  # to FP32; one block may hold the gradients of several
        if block.role == "gradients" and owner.part == "outside":
            return block.bytes
        return self._shard(block)

    def _is_drawn(self, block: Block) -> bool:
        """Whether it was there before weights became BF16: a rank narrows its shards."""
        return block.role == "workspace" and self.traced.trace.ops[block.born].phase == "build"

    def settled_size(self, block: Block) -> int:
        """Bytes of a gradient once it has been summed over the ranks."""
        sharded = block.owner is not None and block.owner.part != "copied"
        return self._shard(block) if sharded else block.bytes

    def _shard(self, block: Block) -> int:
        assert block.owner is not None
        return -(-block.bytes * shard_rows(block.owner.rows, self.shards) // max(1, block.owner.rows))

    def gathered(self, index: int, op: Op) -> Counter[str]:
        """What there is beside the trace's own blocks while an operation runs, by what for."""
        if not self._gathered or op.step < 0:
            return Counter()
        found = self._gathered.get("end" if index in self.settling else op.phase, Counter())
        passing = self._passing(op)
        return found + Counter(passing_copies=passing) if passing else found

    def _passing(self, op: Op) -> int:
        """Bytes of copies of a block's weights that are made for an operation and gone after it."""
        return sum(size for size, dtype, stacked in self._copies(op) if stacked or dtype in FP8)

    def stacked(self, op: Op) -> int:
        """How many weights are copied below each other for an operation."""
        return sum(size // dtype.itemsize for size, dtype, stacked in self._copies(op) if stacked)

    def _copies(self, op: Op) -> Iterator[tuple[int, torch.dtype, bool]]:
        """Bytes and format of each copy of a block's weights that an operation reads, and whether it is of several."""
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
        """Let copies outside of blocks end with their last reader of the step: nothing keeps them on a rank."""
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


def shard_rows(rows: int, shards: int) -> int:
    """The most rows that a rank has of a matrix: FSDP2 cuts as torch.chunk does."""
    return -(-rows // shards)


def gathered_bytes(traced: Traced) -> int:
    """Of a parameter of a block while it is gathered."""
    return GATHERED.get(traced.recipe.compute, torch.float32).itemsize


def outside_bytes(traced: Traced) -> int:
    """Of a parameter outside of blocks while it is gathered: as it is stored; without blocks, as one block."""
    narrow = traced.spread is not None and traced.spread.narrow
    return gathered_bytes(traced) if not traced.block_paths else 2 if narrow else 4
