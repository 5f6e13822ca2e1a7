"""Findings: what is wrong with a training run, in words, from the numbers read off it while it runs.

Rules look at three things: each step's loss, gradient norm, loss scale and whether it was applied (step_rules.py);
the readings of tensors (tensor_rules.py); the scales and counts of FP8 sites (tensor_rules.py). A rule gives a finding
once for each place. Serious means that the run cannot be trusted; a healthy run of any recipe has none of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SERIOUS, WARNING = "serious", "warning"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something about a run that its owner should know."""

    rule: str
    severity: str
    """serious: the run cannot be trusted. warning: worth a look."""
    where: str
    """The module, parameter or moment."""
    detail: str
    """The evidence."""
    fix: str
    consequence: str = ""
    """What it leads to where it is left as it is."""


@dataclass
class Log:
    """The findings so far, each rule and place once; a warning that turns serious is told again."""

    findings: list[Finding] = field(default_factory=list)
    _known: dict[tuple[str, str], str] = field(default_factory=dict)

    def state_dict(self) -> list[dict[str, Any]]:
        """The findings, as plain values."""
        return [asdict(finding) for finding in self.findings]

    def load_state_dict(self, state: Iterable[Mapping[str, Any]]) -> None:
        self.findings = [Finding(**finding) for finding in state]
        self._known = {(finding.rule, finding.where): finding.severity for finding in self.findings}

    def add(self, found: Iterable[Finding]) -> list[Finding]:
        """Those of the findings that are new."""
        new = []
        for finding in found:
            before = self._known.get((finding.rule, finding.where))
            if before is None or (before == WARNING and finding.severity == SERIOUS):
                self._known[finding.rule, finding.where] = finding.severity
                new.append(finding)
        self.findings += new
        return new
