"""One way through a script: what its names stand for, and how far the gradients are on their way to the optimizer.

    phase of the gradients      reached by
    start                       the beginning: nothing is known of what happened before
    plain, scaled               backward, of a loss as it is or of one that a scaler multiplied
    unscaled                    scaler.unscale_()
    used                        a step
    wiped                       cleared after backward, before a step
    lost                        something that cannot be followed

Ways that end alike are merged. Where there are too many, they become one that may be in any of their phases.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from narrowgauge.lint.values import Autocast, Site, Value

Phase = tuple[str, Site | None]
"""A phase's name, and for ``wiped`` whose gradients."""
START: frozenset[Phase] = frozenset({("start", None)})
MOST = 12
"""Ways that are followed beside each other."""


@dataclass
class State:
    """What holds at one point of one way."""

    env: dict[str, Value] = field(default_factory=dict)
    """Values by ``frame|name``, attributes of objects by ``#site.name``."""
    grads: frozenset[Phase] = START
    stages: dict[tuple[Site, Site], frozenset[str]] = field(default_factory=dict)
    """Of a scaler and an optimizer since the scaler's last update: ready, unscaled or stepped."""
    assumed: dict[str, bool] = field(default_factory=dict)
    """Tests that were taken one way or the other, by their text."""
    autocast: tuple[Autocast, ...] = ()
    contexts: tuple[Site, ...] = ()
    """Engines whose forward() or evaluating() is open."""
    engines: dict[Site, frozenset[str]] = field(default_factory=dict)
    """Of each engine that was made on this way: fresh, backward (a microbatch is in) or stepped."""
    flow: str = ""
    """return, break, continue or raise, where the way leaves the block."""
    result: Value | None = None

    def fork(self) -> State:
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
        """The autocast that holds here; None where there is none, or it is switched off."""
        return self.autocast[-1] if self.autocast and self.autocast[-1].active else None

    def bind(self, key: str, value: Value | None) -> None:
        if value is None:
            self.env.pop(key, None)
        else:
            self.env[key] = value

    def forget_tests_of(self, name: str) -> None:
        """What was assumed about a name no longer holds: it has been given another value."""
        word = re.compile(rf"\b{re.escape(name)}\b")
        self.assumed = {test: way for test, way in self.assumed.items() if not word.search(test)}

    def move(self, phase: str, of: Site | None = None) -> None:
        self.grads = frozenset({(phase, of)})

    def is_like(self, other: State) -> bool:
        """Whether all but the assumptions is the same."""
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
    """The same ways, those that came to the same end as one, and at most ``most`` of each flow."""
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
    by_flow: dict[object, list[State]] = {}
    for state in kept:
        by_flow.setdefault((state.flow, state.autocast, state.contexts), []).append(state)
    return [_union(group) for group in by_flow.values()]


def _union(states: list[State]) -> State:
    """One way that may be any of these: values they agree on, and every phase one of them is in."""
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
