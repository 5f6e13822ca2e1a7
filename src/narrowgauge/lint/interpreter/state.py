"""The state of one path through a script: the values of names, and the phase of the gradients.

    phase of the gradients      entered by
    start                       the beginning of the path: nothing is known yet
    plain, scaled               backward, of an unscaled loss or of one that a scaler multiplied
    unscaled                    scaler.unscale_()
    used                        a step
    wiped                       zero_grad() after backward, before a step
    lost                        code that cannot be followed

Paths with equal states are merged. If there are too many, they become one path that may be in any of their phases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from narrowgauge.lint.interpreter.values import Autocast, Site, Value

Phase = tuple[str, Site | None]
"""Name of a phase; for ``wiped`` also the optimizer whose gradients were cleared."""
START: frozenset[Phase] = frozenset({("start", None)})
MOST = 12
"""Paths that are followed separately."""


@dataclass
class State:
    """What is known at one point of one path."""

    env: dict[str, Value] = field(default_factory=dict)
    """Values by ``frame|name``, attributes of objects by ``#site.name``."""
    grads: frozenset[Phase] = START
    stages: dict[tuple[Site, Site], frozenset[str]] = field(default_factory=dict)
    """For a scaler and an optimizer, since the scaler's last update: ready, unscaled or stepped."""
    assumed: dict[str, bool] = field(default_factory=dict)
    """Conditions that this path took as true or false, by their text."""
    autocast: tuple[Autocast, ...] = ()
    contexts: tuple[Site, ...] = ()
    """Engines whose forward() or evaluating() is open."""
    engines: dict[Site, frozenset[str]] = field(default_factory=dict)
    """For each engine created on this path: fresh, backward (a microbatch was accumulated) or stepped."""
    flow: str = ""
    """return, break, continue or raise if the path leaves the block; else empty."""
    result: Value | None = None
    """The value that ``return`` returned."""

    def fork(self) -> State:
        """Return a copy that can change independently."""
        return State(
            dict(self.env),
            self.grads,
            dict(self.stages),
            dict(self.assumed),
            self.autocast,
            self.contexts,
            dict(self.engines),
            self.flow,
            self.result,
        )

    @property
    def casting(self) -> Autocast | None:
        """The active autocast; None if there is none or it is switched off."""
        return self.autocast[-1] if self.autocast and self.autocast[-1].active else None

    def bind(self, key: str, value: Value | None) -> None:
        """Store a value; None forgets it."""
        if value is None:
            self.env.pop(key, None)
        else:
            self.env[key] = value

    def forget_tests_of(self, name: str) -> None:
        """Drop assumptions about conditions that contain a name, because its value changed."""
        word = re.compile(rf"\b{re.escape(name)}\b")
        self.assumed = {test: way for test, way in self.assumed.items() if not word.search(test)}

    def move(self, phase: str, of: Site | None = None) -> None:
        """Set the phase of the gradients."""
        self.grads = frozenset({(phase, of)})

    def is_like(self, other: State) -> bool:
        """Return whether everything but the assumptions is equal."""
        return (
            self.flow == other.flow
            and self.grads == other.grads
            and self.result == other.result
            and self.autocast == other.autocast
            and self.contexts == other.contexts
            and self.engines == other.engines
            and self.stages == other.stages
            and self.env == other.env
        )


def merge(states: Iterable[State], most: int = MOST) -> list[State]:
    """Return the states with equal ones merged; if over ``most`` remain, merge all that leave the block equally."""
    states = list(states)
    if len(states) < 2:
        return states
    kept: list[State] = []
    for state in states:
        known = next((one for one in kept if one.is_like(state)), None)
        if known is None:
            kept.append(state)
        else:
            known.assumed = {test: way for test, way in known.assumed.items() if state.assumed.get(test) == way}
    if len(kept) <= most:
        return kept
    # Paths with equal gradients first: what they assumed about the branch that scaled the loss stays known.
    if most > 1:
        kept = _unite(kept, lambda state: (state.flow, state.autocast, state.contexts, state.grads))
    return kept if len(kept) <= most else _unite(kept, lambda state: (state.flow, state.autocast, state.contexts))


def _unite(states: list[State], key: Callable[[State], object]) -> list[State]:
    groups: dict[object, list[State]] = {}
    for state in states:
        groups.setdefault(key(state), []).append(state)
    return [_union(group) for group in groups.values()]


def _union(states: list[State]) -> State:
    """Return one state that covers all: the values they agree on, and every phase that one of them is in."""
    whole = states[0].fork()
    for state in states[1:]:
        whole.env = {key: value for key, value in whole.env.items() if state.env.get(key) == value}
        whole.grads |= state.grads
        for pair in {*whole.stages, *state.stages}:
            ready = frozenset({"ready"})
            whole.stages[pair] = whole.stages.get(pair, ready) | state.stages.get(pair, ready)
        both = whole.engines.keys() & state.engines.keys()
        whole.engines = {site: whole.engines[site] | state.engines[site] for site in both}
        whole.assumed = {test: way for test, way in whole.assumed.items() if state.assumed.get(test) == way}
        whole.result = whole.result if whole.result == state.result else None
    return whole
