"""Measures the memory of one training step block by block, from what fused and recomputed blocks report.

Two things are read from the allocator's counters, without waiting for the device: how much a block's forward leaves
allocated, and the peak of every part of the step (``Moment``). Counting peaks part by part resets torch's peak counter.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from narrowgauge import events
from narrowgauge.nn.block_memory import BlockMemory
from narrowgauge.nn.memory_plan import Moment


@dataclass
class KeptByBlock:
    """What the calls of a block left allocated in one forward."""

    count: int = 0
    """Bytes."""
    values: int = 0
    """Values of the inputs."""

    @property
    def per_value(self) -> float:
        """Bytes for each value of the input, so that steps with batches of different sizes can be compared."""
        return self.count / self.values if self.values else 0.0


class StepPart(NamedTuple):
    """A part of a step: between two blocks, or in one."""

    held: frozenset[str]
    """Paths of the blocks whose activations exist."""
    peak: int
    """The most bytes allocated in it."""
    backward_of: str = ""
    """Path of the block whose backward it is."""


@dataclass
class MeasuredStep:
    """The memory of a step."""

    kept: list[dict[str, KeptByBlock]] = field(default_factory=list)
    """What each block left allocated, by its path, for every forward of the step."""
    peaks: list[StepPart] = field(default_factory=list)
    """The parts of the step in order."""
    order: list[str] = field(default_factory=list)
    """Paths in the order of their first forward."""
    remade: dict[str, int] = field(default_factory=dict)
    """Bytes that the recomputation of each block leaves allocated for its backward: no option keeps more."""

    def list_moments(self) -> list[Moment]:
        """Return the parts of the step for ``choose``, which counts all blocks up to the last one that is held."""
        places = {path: place for place, path in enumerate(self.order)}
        highest: dict[tuple[int, int], int] = {}
        for part in self.peaks:
            key = max((places[path] + 1 for path in part.held), default=0), places.get(part.backward_of, -1)
            highest[key] = max(highest.get(key, 0), part.peak)
        return [Moment(peak, held, None if own < 0 else own) for (held, own), peak in sorted(highest.items())]

    def list_backward_peaks(self, path: str) -> list[StepPart]:
        """Return the parts that are a block's backward, one for each of the step's backwards."""
        return [part for part in self.peaks if part.backward_of == path]


class StepMeter(events.Listener):
    """Listens to a step, from the first forward to the end of the update."""

    def __init__(self, blocks: Sequence[BlockMemory], device: torch.device) -> None:
        self.step = MeasuredStep()
        self._blocks, self._device = {block.path: block for block in blocks}, device
        self._held: Counter[str] = Counter()
        self._running: list[str] = []
        self._is_backward = False
        self._latest = ""
        self._remaking: int | None = None
        """What was allocated when the recomputation that runs now began."""
        self._before: tuple[str, int] | None = None
        self._is_interrupted, self._without_backward = False, 0
        self._begin()

    def _begin(self) -> None:
        self._now = frozenset(+self._held), self._latest if self._is_backward else ""
        torch.cuda.reset_peak_memory_stats(self._device)

    def _end_part(self) -> None:
        """End the part of the step that runs, and begin the next one with the blocks that are held now."""
        held, backward_of = self._now
        self.step.peaks.append(StepPart(held, torch.cuda.max_memory_allocated(self._device), backward_of))
        self._begin()

    @contextlib.contextmanager
    def observe(self, backward: bool) -> Iterator[None]:
        """Listen to one forward, or to one backward."""
        self._is_backward, self._latest = backward, ""
        self._without_backward += -1 if backward else 1
        if not backward:
            self.step.kept.append({})
        try:
            with events.listening(self):
                yield
        except BaseException:
            self._is_interrupted = True
            raise
        if not backward:
            self._note_kept("")

    def enter_scope(self, path: str) -> None:
        """A block begins its forward, its backward, or the recomputation at the start of its backward."""
        self._running.append(path)
        if path not in self._blocks or path in self._running[:-1]:
            return
        if not self._is_backward:
            if self._blocks[path].size.is_training:  # without gradients a block keeps nothing
                self._note_kept(path)
                self._end_part()
                self._held[path] += 1
        elif path != self._latest:
            self._held[path] -= self._held[path] > 0
            self._latest = path
            self._end_part()
            self._remaking = torch.cuda.memory_allocated(self._device)

    def leave_scope(self) -> None:
        path = self._running.pop()
        if self._remaking is not None and path == self._latest:
            made = torch.cuda.memory_allocated(self._device) - self._remaking
            self.step.remade[path] = max(made, self.step.remade.get(path, 0))
            self._remaking = None
        if not self._is_backward and path in self._blocks and path not in self._running:
            self._end_part()

    @property
    def is_disturbed(self) -> bool:
        """Whether the step was not like others: an error has ended a forward or backward, or a forward was given up.

        Blocks whose backward did not run seem to hold their activations until the end of the step.
        """
        return self._is_interrupted or (self._without_backward > 0 and bool(+self._held))

    def finish(self) -> MeasuredStep:
        """End the step."""
        self._end_part()
        return self.step

    def _note_kept(self, path: str) -> None:
        """A block begins, or forward ends: what was allocated since the block before began is what that one keeps."""
        now = torch.cuda.memory_allocated(self._device)
        if self._before is not None:
            last, then = self._before
            found = self.step.kept[-1].setdefault(last, KeptByBlock())
            found.count += now - then
            found.values += self._blocks[last].size.latest
        self._before = (path, now) if path else None
        if path and path not in self.step.order:
            self.step.order.append(path)
