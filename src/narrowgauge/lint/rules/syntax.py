"""The rule about files that cannot be parsed; ``script.check_folder`` reports it."""

from __future__ import annotations

from narrowgauge.findings import WARNING
from narrowgauge.lint.rule import Rule

SYNTAX = Rule(
    name="syntax",
    severity=WARNING,
    about="a file that is not valid Python",
    why="it cannot be checked",
    fix="fix the syntax",
)
