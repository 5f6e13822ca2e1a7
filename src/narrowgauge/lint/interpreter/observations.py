"""What the interpreter records about a script as a whole: events with their loops and branches, scalers, formats."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

from narrowgauge.lint.interpreter.values import Autocast, Site, Value


@dataclass(frozen=True)
class Event:
    """Something that happens at a line, with the loop it is in and the conditions inside that loop."""

    kind: str
    node: ast.AST
    loop: int
    """Identifies the innermost loop; 0 outside of loops."""
    guards: tuple[ast.expr, ...]
    """Conditions of the ``if`` statements around it, up to the loop."""
    scaler: Site | None = None
    optimizer: Site | None = None
    value: Value | None = None
    text: str = ""

    @property
    def line(self) -> int:
        """The line number."""
        return int(getattr(self.node, "lineno", 0))


@dataclass
class Observations:
    """Everything that was recorded about one script."""

    events: list[Event] = field(default_factory=list)
    autocasts: set[Autocast] = field(default_factory=set)
    scalers: dict[Site, ast.AST] = field(default_factory=dict)
    """Scalers that are not disabled, and the calls that create them."""
    optimizers: dict[Site, ast.Call] = field(default_factory=dict)
    """Optimizers, and the calls that create them."""
    escaped: set[Site] = field(default_factory=set)
    """Scalers and engines that were passed to code that cannot be followed."""
    contexts: dict[ast.AST, tuple[Site, bool]] = field(default_factory=dict)
    """Calls of an engine's forward() or evaluating(): the engine, and whether a ``with`` statement enters it."""
    formats: set[str] = field(default_factory=set)
    """Low-precision formats that the script certainly computes in."""
    called_under: Mapping[str, Autocast] = field(default_factory=dict)
    """Classes of the script that other files call under autocast."""
    _seen: set[tuple[str, ast.AST, int]] = field(default_factory=set)

    def record(self, event: Event) -> None:
        """Add an event, once for each place and loop."""
        key = (event.kind, event.node, event.loop)
        if key not in self._seen:
            self._seen.add(key)
            self.events.append(event)

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of these kinds, in order."""
        return [event for event in self.events if event.kind in kinds]

    @property
    def computes_low(self) -> bool:
        """Whether the script computes in low precision at all."""
        return bool(self.formats or self.scalers or any(cast.active for cast in self.autocasts))
