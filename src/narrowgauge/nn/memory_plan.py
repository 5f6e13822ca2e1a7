"""Chooses what each block keeps for backward, so that a step fits into a budget at the least extra time.

A block keeps all its activations, keeps some of them, or recomputes them. Each way is an option with the bytes that it
keeps beyond full recomputation, and the milliseconds that it costs beyond keeping everything. A step has moments, each
with the bytes that are allocated if all blocks are recomputed, and the number of blocks, in the order of forward, whose
activations exist then. In forward that number rises, in backward it falls, so that the activations of the last blocks
exist for the shortest time. With S(k) the bytes kept by the first k blocks, every moment must fit:

    base bytes of the moment + S(blocks held at the moment) <= limit

In the backward of a block, what it kept is used and freed, and recomputation makes the same again: what an option adds
to the peak there is a figure of its own (``own_bytes``).

The best choice for the first k blocks depends on the rest only through S(k). So ``choose`` goes through the blocks
once, and of all choices for the first k keeps those that no other one beats in both bytes and time. That is exact, and
fast for equal blocks, where many choices have the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.byte_sizes import format_size

MOST_CHOICES = 4096
"""How many choices for the first blocks are compared; if there are more, the best of those with similar bytes stay."""
WORDS = {
    "none": "kept",
    "normalized": "kept with normalized rows in BF16",
    "recompute": "kept but for the activation's input",
    "8bit": "kept in 8 bits",
    "selective": "kept but for norms and activations",
    "full": "recomputed",
    "offload": "recomputed from inputs in host memory",
}
"""What happens to a block's activations with each option."""


@dataclass(frozen=True)
class Option:
    """One way to keep a block's activations."""

    name: str
    kept_bytes: int
    """Bytes kept from forward to backward, beyond what full recomputation keeps; below 0 for inputs on the host."""
    cost_ms: float
    """Milliseconds per step, beyond keeping everything."""
    own_bytes: int = 0
    """Bytes that the peak of the block's own backward has beyond that of a recomputed block."""


@dataclass(frozen=True)
class Moment:
    """A part of a step: its peak if all blocks are recomputed, and how many blocks' activations exist."""

    base_bytes: int
    held: int
    """The activations of the first so many blocks exist."""
    block: int | None = None
    """The number of the block whose backward it is; its own activations do not count as held."""


def choose(blocks: Sequence[Sequence[Option]], moments: Sequence[Moment], limit: int) -> list[int] | None:
    """Return the number of each block's option, with the least time that fits; None if nothing fits.

    Args:
        blocks: The options of each block, in the order of forward.
        moments: The moments of a step.
        limit: The bytes that may be allocated.
    """
    room: dict[int, int] = {}
    own_room: dict[int, int] = {}
    for moment in moments:
        left = limit - moment.base_bytes
        if moment.block is not None and moment.block == moment.held:
            own_room[moment.block] = min(own_room.get(moment.block, left), left)
        else:
            room[moment.held] = min(room.get(moment.held, left), left)
    if room.get(0, 0) < 0:
        return None  # what does not depend on the blocks does not fit
    found: list[_Choice] = [(0, 0.0, None)]
    for number, options in enumerate(blocks, 1):
        most, own = room.get(number), own_room.get(number - 1)
        longer: list[_Choice] = [
            (kept + option.kept_bytes, cost + option.cost_ms, (index, place))
            for place, (kept, cost, _) in enumerate(found)
            for index, option in enumerate(options)
            if (own is None or kept + option.own_bytes <= own) and (most is None or kept + option.kept_bytes <= most)
        ]
        best = _drop_beaten(longer)
        if not best:
            return None
        found = _Frontier(best, found)
    if not isinstance(found, _Frontier):
        return []
    picked = found.trace_back()
    sorted_ = _sort_equal(blocks, list(picked))
    return sorted_ if predict_peak(_pick(blocks, sorted_), moments) <= limit else picked


def choose_least(blocks: Sequence[Sequence[Option]], moments: Sequence[Moment]) -> list[int]:
    """Return one option for all blocks, with the smallest peak. It need not be the one that keeps least: a block that
    is recomputed may need more in its own backward."""
    names = dict.fromkeys(option.name for options in blocks for option in options)
    found = [
        [next((i for i, one in enumerate(options) if one.name == name), len(options) - 1) for options in blocks]
        for name in names
    ]
    return min(found, key=lambda picked: predict_peak(_pick(blocks, picked), moments), default=[])


def _pick(blocks: Sequence[Sequence[Option]], picked: Sequence[int]) -> list[Option]:
    return [options[place] for options, place in zip(blocks, picked, strict=True)]


def _sort_equal(blocks: Sequence[Sequence[Option]], picked: list[int]) -> list[int]:
    """Let the last of equal blocks keep most: what they keep exists for the shortest time."""
    places: dict[tuple[Option, ...], list[int]] = {}
    for place, options in enumerate(blocks):
        places.setdefault(tuple(options), []).append(place)
    for options_of, own in places.items():
        chosen = sorted((picked[place] for place in own), key=lambda one: (options_of[one].kept_bytes, one))
        for place, one in zip(own, chosen, strict=True):
            picked[place] = one
    return picked


_Choice = tuple[int, float, tuple[int, int] | None]
"""Bytes, milliseconds, and the option of the last block with the place of the choice for those before it."""


class _Frontier(list[_Choice]):
    """The choices for the first blocks that no other one beats, least bytes first."""

    def __init__(self, choices: list[_Choice], before: list[_Choice]) -> None:
        super().__init__(choices)
        self.before = before

    def trace_back(self) -> list[int]:
        """Return the options of the choice with the least time."""
        picked: list[int] = []
        here: list[_Choice] = self
        place = len(self) - 1
        while isinstance(here, _Frontier):
            last = here[place][2]
            assert last is not None
            picked.append(last[0])
            here, place = here.before, last[1]
        return picked[::-1]


def _drop_beaten(choices: list[_Choice]) -> list[_Choice]:
    """Return the choices with less time than all that have no more bytes; at most ``MOST_CHOICES``."""
    best: list[_Choice] = []
    for choice in sorted(choices, key=lambda one: one[:2]):
        if not best or choice[1] < best[-1][1] - 1e-9:
            best.append(choice)
    if len(best) <= MOST_CHOICES:
        return best
    last = len(best) - 1  # those with the least bytes and with the least time are among them
    return [best[number * last // (MOST_CHOICES - 1)] for number in range(MOST_CHOICES)]


def predict_peak(chosen: Sequence[Option], moments: Sequence[Moment]) -> int:
    """Return the peak with one option for each block."""
    sums = [0]
    for option in chosen:
        sums.append(sums[-1] + option.kept_bytes)
    own = [0 if one.block is None or one.block != one.held else chosen[one.block].own_bytes for one in moments]
    return max((one.base_bytes + sums[one.held] + extra for one, extra in zip(moments, own, strict=True)), default=0)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What each block keeps for backward, and what that costs. ``print(plan)`` is one line."""

    budget: int
    """The budget in bytes."""
    blocks: dict[str, str] = field(default_factory=dict)
    """The option of each block, by its path: a key of ``WORDS``."""
    peak: int = 0
    """The predicted peak of a step in bytes, or the measured one once a step has run with the plan."""
    cost_ms: float | None = None
    """Milliseconds per step more than if every block kept everything; None for a GPU that is not in the table."""
    smallest: int = 0
    """The smallest peak with one option for all blocks, usually that of recomputing them."""
    fits: bool = True
    """Whether the peak is within the budget."""

    @property
    def counts(self) -> dict[str, int]:
        """The number of blocks of each option."""
        return dict(Counter(self.blocks.values()).most_common())

    def describe(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        return {
            "budget": self.budget, "fits": self.fits, "peak": self.peak, "smallest": self.smallest,
            "cost_ms": self.cost_ms, "options": self.counts, "blocks": dict(self.blocks),
        }  # fmt: skip

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> MemoryPlan:
        """Make the plan from what ``describe`` returned."""
        return cls(**{name: saved[name] for name in ("budget", "blocks", "peak", "cost_ms", "smallest", "fits")})

    def __str__(self) -> str:
        if not self.fits:
            return (
                f"the budget of {format_size(self.budget)} is too small: a step takes at least "
                f"{format_size(self.smallest)}, whatever its blocks keep"
            )
        parts = [f"{count} {WORDS.get(name, name)}" for name, count in self.counts.items()]
        cost = f"; {self.cost_ms:.1f} ms per step more than if all are kept" if self.cost_ms else ""
        chosen = f"activations of blocks: {', '.join(parts)}{cost}" if parts else "there are no blocks to recompute"
        return f"memory plan for {format_size(self.budget)}: {chosen}; peak {format_size(self.peak)}"
