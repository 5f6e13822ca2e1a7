"""A step of several GPUs on two clocks: one for computation, one for communication, which waits its turn.

    shards (FSDP2)    gather what is outside; then for every block forward:
                        wait for its gather; order the next block's; compute
                      for every block backward, from the last:
                        wait for its gather; order the one before; compute; once the scatter of the block behind is
                        done, whose buffer it takes over, order the scatter of its gradients
                      scatter the gradients of what is outside; agree on norms; step
    copies (DDP)      compute; backward, as a block's gradients are there, order their sum; wait for all; step

One collective runs at a time, in the order in which they were ordered. What computation has to wait for is exposed,
the rest is hidden. Gradients are summed in an update's last microbatch alone, those of large
models in every one.
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
    """Gradients are summed in every microbatch, as a GPU could not hold them whole until the last."""
    start: float = 0.0
    """Forward before the blocks, of a microbatch."""
    forward: float = 0.0
    """Of a block."""
    head: float = 0.0
    """Forward behind the blocks."""
    head_backward: float = 0.0
    backward: float = 0.0
    """Of a block."""
    end: float = 0.0
    """Backward behind the blocks: the embedding."""
    step: float = 0.0
    """The optimizer's."""
    messages: dict[str, float] = field(default_factory=dict)
    """Seconds of one collective of a kind: of one block, or of all that is outside."""

    @property
    def compute(self) -> float:
        once = self.start + self.head + self.head_backward + self.end + self.blocks * (self.forward + self.backward)
        return self.microbatches * once + self.step


@dataclass
class Timeline:
    """The two clocks, and what happened."""

    now: float = 0.0
    free: float = 0.0
    """When communication has nothing more to do."""
    sent: list[tuple[str, float, float]] = field(default_factory=list)
    """Kind, begin and end of every collective."""
    waits: list[tuple[float, float]] = field(default_factory=list)

    def order(self, kind: str, seconds: float) -> float:
        """Have a collective done from now on; returns when it ends."""
        begin = max(self.now, self.free)
        self.free = begin + seconds
        if seconds:
            self.sent.append((kind, begin, self.free))
        return self.free if seconds else self.now

    def wait(self, until: float) -> None:
        if until > self.now:
            self.waits.append((self.now, until))
            self.now = until

    def work(self, seconds: float) -> None:
        self.now += seconds

    def seconds(self, kind: str) -> float:
        return sum(end - begin for name, begin, end in self.sent if name == kind)

    def count(self, kind: str) -> int:
        return sum(1 for name, _, _ in self.sent if name == kind)

    def exposed(self, kind: str) -> float:
        """For how long computation waited while such collectives ran."""
        total = 0.0
        for name, begin, end in self.sent:
            if name == kind:
                total += sum(max(0.0, min(end, until) - max(begin, since)) for since, until in self.waits)
        return total


def run_shards(work: Work) -> Timeline:
    """An update of a model whose blocks are gathered one at a time."""
    clock, cost = Timeline(), work.messages.get
    for microbatch in range(work.microbatches):
        outside = clock.order(GATHER_OUTSIDE, cost(GATHER_OUTSIDE, 0.0))
        there = clock.order(GATHER, cost(GATHER, 0.0)) if work.blocks else clock.now
        clock.wait(outside)
        clock.work(work.start)
        for block in range(work.blocks):
            clock.wait(there)
            if block + 1 < work.blocks:
                there = clock.order(GATHER, cost(GATHER, 0.0))
            clock.work(work.forward)
        clock.work(work.head)
        if work.blocks:
            there = clock.order(REGATHER, cost(REGATHER, 0.0))
        clock.work(work.head_backward)
        last = microbatch + 1 == work.microbatches
        summed = clock.now
        for block in reversed(range(work.blocks)):
            clock.wait(there)
            if block:
                there = clock.order(REGATHER, cost(REGATHER, 0.0))
            clock.work(work.backward)
            clock.wait(summed)
            if last or work.sums_each:
                summed = clock.order(SCATTER, cost(SCATTER, 0.0))
        clock.work(work.end)
        clock.wait(summed)
        if last or work.sums_each:
            clock.wait(clock.order(SCATTER_OUTSIDE, cost(SCATTER_OUTSIDE, 0.0)))
    clock.wait(clock.order(AGREE, cost(AGREE, 0.0)))
    clock.work(work.step)
    return clock


def run_copies(work: Work, outside: float = 0.0) -> Timeline:
    """An update of a model that every GPU has a copy of; ``outside``: seconds to sum what is in no block."""
    clock = Timeline()
    for microbatch in range(work.microbatches):
        last = microbatch + 1 == work.microbatches
        clock.work(work.start + work.blocks * work.forward + work.head + work.head_backward)
        for _ in range(work.blocks):
            clock.work(work.backward)
            if last:
                clock.order(REDUCE, work.messages.get(REDUCE, 0.0))
        clock.work(work.end)
    clock.wait(clock.order(REDUCE, outside))
    clock.wait(clock.free)
    clock.work(work.step)
    return clock
