"""Rules about the files themselves: those that cannot be read, and comments that suppress nothing."""

from __future__ import annotations

from narrowgauge.findings import WARNING
from narrowgauge.lint.rule import Rule

SYNTAX = Rule(
    name="syntax",
    severity=WARNING,
    about="a file or cell that cannot be read, or is not valid Python",
    why="it was not checked",
    fix="fix the syntax, or leave it out with --exclude",
)
UNKNOWN_RULE = Rule(
    name="unknown-rule",
    severity=WARNING,
    about="a comment `# narrowgauge: ignore[...]` names a rule that does not exist",
    why="the comment suppresses nothing",
    fix="use a name that `narrowgauge lint --rules` lists",
)
