"""Kinds of code in public scripts that were judged wrongly once: false alarms, and bugs that were missed."""

from __future__ import annotations

import re

import pytest
from lint_false_alarms import FALSE_ALARMS
from lint_hidden_bugs import HIDDEN_BUGS
from lint_wrong import HEAD

from narrowgauge.lint import script


def found(text: str) -> set[tuple[int, str]]:
    return {(finding.span.line, finding.rule) for finding in script.check_text(text) if finding.span}


@pytest.mark.parametrize("name", FALSE_ALARMS)
def test_correct_code_has_no_findings(name: str) -> None:
    assert found(HEAD + FALSE_ALARMS[name]) == set()


@pytest.mark.parametrize("name", HIDDEN_BUGS)
def test_bugs_are_found_at_their_lines(name: str) -> None:
    text = HEAD + HIDDEN_BUGS[name]
    marks = [(number, re.search(r"# lint: ([\w\s,-]+)$", line)) for number, line in enumerate(text.splitlines(), 1)]
    assert found(text) == {(number, rule.strip()) for number, mark in marks if mark for rule in mark[1].split(",")}
