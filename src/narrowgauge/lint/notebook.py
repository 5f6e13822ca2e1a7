"""What is noted while a script is followed: what each way over a line says of it, and what happened where.

A verdict counts where some way is bad and none is good: a script that does it right on one way to a line knows what it
is doing, and its ways may depend on each other in a manner that reading does not show.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from narrowgauge.lint.values import Autocast, Site, Value


@dataclass(frozen=True)
class Event:
    """Something that happened, in which loop and under which tests inside that loop."""

    kind: str
    node: ast.AST
    loop: int
    guards: tuple[ast.expr, ...]
    scaler: Site | None = None
    optimizer: Site | None = None
    value: Value | None = None
    text: str = ""


@dataclass
class Verdict:
    """What the ways over a line say about one rule."""

    node: ast.AST
    detail: str = ""
    fix: str | None = None
    severity: str | None = None
    bad: bool = False
    good: bool = False


@dataclass
class Notebook:
    """Everything noted about one script."""

    verdicts: dict[tuple[str, int, int], Verdict] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    autocasts: set[Autocast] = field(default_factory=set)
    scalers: dict[Site, ast.AST] = field(default_factory=dict)
    escaped: set[Site] = field(default_factory=set)
    """Scalers and engines that were handed to something that cannot be followed."""
    contexts: dict[ast.AST, tuple[Site, bool]] = field(default_factory=dict)
    """Where forward() or evaluating() of an engine is made, of which, and whether a ``with`` opens it."""
    formats: set[str] = field(default_factory=set)
    """Low-precision formats that the script certainly computes in."""
    _seen: set[tuple[str, ast.AST, int]] = field(default_factory=set)

    def judge(
        self,
        rule: str,
        node: ast.AST,
        bad: bool,
        detail: str = "",
        fix: str | None = None,
        severity: str | None = None,
    ) -> None:
        """A way's verdict on a line. ``bad=False`` clears it."""
        place = (rule, getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        verdict = self.verdicts.setdefault(place, Verdict(node))
        if bad:
            verdict.bad, verdict.detail, verdict.fix, verdict.severity = True, detail, fix, severity
        else:
            verdict.good = True

    def note(self, event: Event) -> None:
        """An event, once for each place and loop."""
        key = (event.kind, event.node, event.loop)
        if key not in self._seen:
            self._seen.add(key)
            self.events.append(event)

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]

    def judged(self) -> Iterator[tuple[str, Verdict]]:
        """Rules and places where the verdict is bad; ``rule@when`` are judged apart and told as one."""
        told: set[tuple[str, ast.AST]] = set()
        for (rule, _, _), verdict in self.verdicts.items():
            name = rule.partition("@")[0]
            if verdict.bad and not verdict.good and (name, verdict.node) not in told:
                told.add((name, verdict.node))
                yield name, verdict

    @property
    def computes_low(self) -> bool:
        """Whether the script computes in low precision at all."""
        return bool(self.formats or self.scalers or any(cast.active for cast in self.autocasts))


def has_modulo(tests: Iterable[ast.expr]) -> bool:
    """Whether a test asks for every so many-th step."""
    return any(isinstance(node, ast.Mod) for test in tests for node in ast.walk(test))
