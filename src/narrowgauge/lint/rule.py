"""A rule of the linter, and the order in which its findings are shown."""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.findings import ORDER, Finding


@dataclass(frozen=True)
class Rule:
    """A pitfall by name."""

    name: str
    severity: str
    about: str
    why: str
    fix: str


def in_order(findings: list[Finding]) -> list[Finding]:
    """By file and line, modules last; each once."""
    unique = list(dict.fromkeys(findings))

    def key(finding: Finding) -> tuple[bool, str, int, int]:
        span = finding.span
        return (span is None, span.path if span else "", span.line if span else 0, ORDER[finding.severity])

    return sorted(unique, key=key)
