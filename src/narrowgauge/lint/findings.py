"""What the linter says: a finding has a rule, a place, the evidence, why it matters and how to fix it.

A place is a line of a script (``train.py:31``) or a module of a model (``blocks.0.up``). Only warnings and serious
findings are failures; a note is worth knowing and nothing to stop for.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SERIOUS, WARNING, NOTE = "serious", "warning", "note"
ORDER = {SERIOUS: 0, WARNING: 1, NOTE: 2}


@dataclass(frozen=True)
class Rule:
    """A pitfall by name."""

    name: str
    severity: str
    about: str
    why: str
    fix: str


@dataclass(frozen=True)
class Span:
    """A stretch of a file, lines and columns from 1, as editors and SARIF count them."""

    path: str
    line: int
    column: int = 1
    end_line: int | None = None
    end_column: int | None = None

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A pitfall that was found."""

    rule: str
    severity: str
    """serious: training breaks or learns something else. warning: speed or precision is lost. note: worth knowing."""
    where: str
    """file:line, or the path of a module."""
    detail: str
    """The evidence."""
    why: str
    """What it leads to where it is left as it is."""
    fix: str
    span: Span | None = None
    """The place in a file, where it is one."""

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        fields = asdict(self)
        span = fields.pop("span")
        return {**fields, **({"path": span["path"], "line": span["line"]} if span else {})}


def in_order(findings: list[Finding]) -> list[Finding]:
    """By file and line, modules last; each once."""
    unique = list(dict.fromkeys(findings))

    def key(finding: Finding) -> tuple[bool, str, int, int]:
        span = finding.span
        return (span is None, span.path if span else "", span.line if span else 0, ORDER[finding.severity])

    return sorted(unique, key=key)
