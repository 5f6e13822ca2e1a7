"""Simulates a step on several GPUs with two clocks, one for computation and one for communication.

    shards (FSDP2)    all-gather what is outside of blocks; then for every block in forward:
                        wait for its all-gather; start the next block's; compute
                      for every block in backward, from the last:
                        wait for its all-gather; start that of the block before; compute; when the reduce-scatter of the
                        following block is done, whose buffer is reused, start the reduce-scatter of the gradients
                      reduce-scatter the gradients outside of blocks; all-reduce norms; step
    copies (DDP)      compute; in backward start an all-reduce for each block's gradients; wait for all; step

One collective runs at a time, in the order in which they were started. What computation waits for is exposed, the rest
is hidden. Gradients are reduced in the last microbatch of an update, those of large models in every microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GATHER, REGATHER, SCATTER = "all-gather, forward", "all-gather, backward", "reduce-scatter"
GATHER_OUTSIDE, SCATTER_OUTSIDE = "all-gather, outside of blocks", "reduce-scatter, outside of blocks"
REDUCE, AGREE = "all-reduce of gradients", "all-reduce of vectors and norms"


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds of computation and of collectives."""

    blocks: int
    microbatches: int = 1
    sums_each: bool = False
    """Gradients are reduced in every microbatch, because a GPU cannot hold them whole until the last."""
    start: float = 0.0
    """Forward before the blocks, per microbatch."""
    forward: float = 0.0
    """Of a block."""
    head: float = 0.0
    """Forward after the blocks."""
    head_backward: float = 0.0
    backward: float = 0.0
    """Of a block."""
    end: float = 0.0
    """Backward after the blocks: the embedding."""
    step: float = 0.0
    """The optimizer's."""
    messages: dict[str, float] = field(default_factory=dict)
    """Seconds of one collective by kind: of one block, or of everything outside of blocks."""

    @property
    def compute(self) -> float:
        """Seconds of computation of an update."""
        once = self.start + self.head + self.head_backward + self.end + self.blocks * (self.forward + self.backward)
        return self.microbatches * once + self.step


@dataclass
class Timeline:
    """The two clocks, and the collectives and waits so far."""

    now: float = 0.0
    free: float = 0.0
    """When the last collective that was started ends."""
    sent: list[tuple[str, float, float]] = field(default_factory=list)
    """Kind, begin and end of every collective."""
    waits: list[tuple[float, float]] = field(default_factory=list)

    def start(self, kind: str, seconds: float) -> float:
        """Start a collective as soon as those before it have ended; return when it ends."""
        begin = max(self.now, self.free)
        self.free = begin + seconds
        if seconds:
            self.sent.append((kind, begin, self.free))
        return self.free if seconds else self.now

    def wait(self, until: float) -> None:
        """Let computation wait."""
        if until > self.now:
            self.waits.append((self.now, until))
            self.now = until

    def work(self, seconds: float) -> None:
        """Compute for so long."""
        self.now += seconds

    def seconds(self, kind: str) -> float:
        """Seconds of all collectives of a kind."""
        return sum(end - begin for name, begin, end in self.sent if name == kind)

    def count(self, kind: str) -> int:
        """Number of collectives of a kind."""
        return sum(1 for name, _, _ in self.sent if name == kind)

    def exposed(self, kind: str) -> float:
        """Seconds that computation waited while collectives of a kind ran."""
        total = 0.0
        for name, begin, end in self.sent:
            if name == kind:
                total += sum(max(0.0, min(end, until) - max(begin, since)) for since, until in self.waits)
        return total


def simulate_fsdp(work: Work) -> Timeline:
    """Simulate an update under FSDP2, which gathers one block at a time."""
    clock, cost = Timeline(), work.messages.get
    for microbatch in range(work.microbatches):
        outside = clock.start(GATHER_OUTSIDE, cost(GATHER_OUTSIDE, 0.0))
        there = clock.start(GATHER, cost(GATHER, 0.0)) if work.blocks else clock.now
        clock.wait(outside)
        clock.work(work.start)
        for block in range(work.blocks):
            clock.wait(there)
            if block + 1 < work.blocks:
                there = clock.start(GATHER, cost(GATHER, 0.0))
            clock.work(work.forward)
        clock.work(work.head)
        if work.blocks:
            there = clock.start(REGATHER, cost(REGATHER, 0.0))
        clock.work(work.head_backward)
        last = microbatch + 1 == work.microbatches
        summed = clock.now
        for block in reversed(range(work.blocks)):
            clock.wait(there)
            if block:
                there = clock.start(REGATHER, cost(REGATHER, 0.0))
            clock.work(work.backward)
            clock.wait(summed)
            if last or work.sums_each:
                summed = clock.start(SCATTER, cost(SCATTER, 0.0))
        clock.work(work.end)
        clock.wait(summed)
        if last or work.sums_each:
            clock.wait(clock.start(SCATTER_OUTSIDE, cost(SCATTER_OUTSIDE, 0.0)))
    clock.wait(clock.start(AGREE, cost(AGREE, 0.0)))
    clock.work(work.step)
    return clock


def simulate_ddp(work: Work, outside: float = 0.0) -> Timeline:
    """Simulate an update under DDP; ``outside``: seconds to all-reduce the gradients outside of blocks."""
    clock = Timeline()
    for microbatch in range(work.microbatches):
        last = microbatch + 1 == work.microbatches
        clock.work(work.start + work.blocks * work.forward + work.head + work.head_backward)
        for _ in range(work.blocks):
            clock.work(work.backward)
            if last:
                clock.start(REDUCE, work.messages.get(REDUCE, 0.0))
        clock.work(work.end)
    clock.wait(clock.start(REDUCE, outside))
    clock.wait(clock.free)
    clock.work(work.step)
    return clock
