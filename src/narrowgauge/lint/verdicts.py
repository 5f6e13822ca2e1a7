"""Verdicts of rules on lines, over all paths that reach a line.

A line is reported if some path to it is wrong and none is right. A script that does it right on one path probably does
so on purpose, and its paths may depend on each other in a way that reading does not show. A rule that excludes this
calls its verdict certain.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from narrowgauge.lint.rule import Rule


@dataclass
class Verdict:
    """The verdict of one rule on one line."""

    rule: Rule
    node: ast.AST
    detail: str = ""
    fix: str = ""
    severity: str = ""
    bad: bool = False
    """Some path is wrong."""
    good: bool = False
    """Some path is right."""
    certain: bool = False
    """It is wrong even if another path is right."""

    @property
    def line(self) -> int:
        """The line number."""
        return int(getattr(self.node, "lineno", 0))


@dataclass
class Verdicts:
    """All verdicts on one script."""

    _all: dict[tuple[str, str, int, int], Verdict] = field(default_factory=dict)

    def judge(
        self,
        rule: Rule,
        node: ast.AST,
        bad: bool,
        detail: str = "",
        fix: str = "",
        severity: str = "",
        when: str = "",
        certain: bool = False,
    ) -> None:
        """Record the verdict of one path.

        Args:
            rule: the rule.
            node: the place.
            bad: False if the path does it right.
            detail: the evidence, for a bad path.
            fix: a more precise fix than the rule's.
            severity: another severity than the rule's.
            when: verdicts at different moments are kept separate, and reported as one.
            certain: the line is wrong even if another path does it right.
        """
        place = (rule.name, when, getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        verdict = self._all.setdefault(place, Verdict(rule, node))
        if bad:
            verdict.bad, verdict.detail, verdict.fix, verdict.severity = True, detail, fix, severity
            verdict.certain = verdict.certain or certain
        else:
            verdict.good = True

    def of(self, rule: Rule) -> list[Verdict]:
        """Return the verdicts of a rule, good or bad."""
        return [verdict for verdict in self._all.values() if verdict.rule is rule]

    def clear(self, *rules: Rule) -> None:
        """Withdraw the verdicts of rules, because something else in the script makes the lines right."""
        for rule in rules:
            for verdict in self.of(rule):
                verdict.good, verdict.certain = True, False

    def bad(self) -> Iterator[Verdict]:
        """Yield the verdicts to report, each rule and place once."""
        seen: set[tuple[str, ast.AST]] = set()
        for verdict in self._all.values():
            key = (verdict.rule.name, verdict.node)
            if verdict.bad and (verdict.certain or not verdict.good) and key not in seen:
                seen.add(key)
                yield verdict

    def are_bad(self, rule: Rule) -> list[Verdict]:
        """Return the verdicts of one rule that would be reported."""
        return [verdict for verdict in self.bad() if verdict.rule is rule]
