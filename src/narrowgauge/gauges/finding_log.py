"""FindingLog: the findings of a run so far, each rule and place once.

Rules check each step's numbers (rules/step_rules.py), the readings of tensors (rules/tensor_rules.py), and the scales
and counts of FP8 sites (rules/fp8_rules.py). A finding is serious if the run cannot be trusted. A healthy run of any
recipe has no serious finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.findings import SERIOUS, WARNING, Finding


@dataclass
class FindingLog:
    """Keeps one finding per rule and place, and a second one if a warning becomes serious."""

    findings: list[Finding] = field(default_factory=list)
    _known: dict[tuple[str, str], str] = field(default_factory=dict)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the findings as plain values."""
        return [finding.describe() for finding in self.findings]

    def load_state_dict(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Restore the findings from ``state_dict``."""
        self.findings = [Finding.from_record(fields) for fields in state]
        self._known = {(finding.rule, finding.where): finding.severity for finding in self.findings}

    def add(self, found: Iterable[Finding]) -> list[Finding]:
        """Add findings and return those that are new."""
        new = []
        for finding in found:
            before = self._known.get((finding.rule, finding.where))
            if before is None or (before == WARNING and finding.severity == SERIOUS):
                self._known[finding.rule, finding.where] = finding.severity
                new.append(finding)
        self.findings += new
        return new
