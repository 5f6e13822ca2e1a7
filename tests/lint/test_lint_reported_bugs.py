"""Bugs that were reported in public repositories, in code of our own: how many of them the linter finds."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from lint_right_twins import RIGHT_TWINS, SHARED
from lint_wrong import HEAD
from reported_bugs_experts import EXPERT_BUGS
from reported_bugs_formats import FORMAT_BUGS
from reported_bugs_held_out import HELD_OUT_BUGS
from reported_bugs_loops import LOOP_BUGS
from reported_bugs_numerics import NUMERIC_BUGS
from reported_bugs_scaler import SCALER_BUGS
from reported_bugs_step import STEP_BUGS

from narrowgauge.lint import script
from pace import at_most

SETS = (STEP_BUGS, SCALER_BUGS, LOOP_BUGS, FORMAT_BUGS, NUMERIC_BUGS, EXPERT_BUGS, HELD_OUT_BUGS)
REPORTED = {name: case for cases in SETS for name, case in cases.items()}
MISSED = {
    "FP16 model and an Adam epsilon from the options": "eps is a parameter of a function that the script does not call",
    "criterion from a table of loss functions": "the loss function comes from a dictionary",
    "EMA class with shadow weights in half": "the averages are in a dictionary",
}
"""Bugs that are not found yet, and why."""
CASES = [
    pytest.param(name, marks=pytest.mark.xfail(reason=MISSED[name], strict=True) if name in MISSED else (), id=name)
    for name in REPORTED
]
PAGE = Path(__file__).parent.parent.parent / "docs" / "lint.md"


def files_of(text: str) -> dict[str, str]:
    """Return the files of a case: one, or several that are separated by ``# file: name``."""
    parts = re.split(r"^# file: (\S+)\n", text, flags=re.MULTILINE)
    if len(parts) == 1:
        return {"train.py": HEAD + text}
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def marked(files: dict[str, str]) -> set[tuple[str, int, str]]:
    """Return the file, line and rule of comments ``# lint: rule, rule``."""
    found: set[tuple[str, int, str]] = set()
    for name, text in files.items():
        for number, line in enumerate(text.splitlines(), 1):
            match = re.search(r"# lint: ([\w\s,-]+)$", line)
            found |= {(name, number, rule.strip()) for rule in match[1].split(",")} if match else set()
    return found


@pytest.mark.parametrize("name", CASES)
def test_reported_bugs_are_found_and_nothing_else(name: str, tmp_path: Path) -> None:
    files = files_of(REPORTED[name][1])
    for path, text in files.items():
        (tmp_path / path).write_text(text)
    findings = script.check_folder(tmp_path)
    found = {(Path(one.span.path).name, one.span.line, one.rule) for one in findings if one.span}
    assert found == marked(files)


def test_cases_name_their_reports_and_the_documentation_the_number_found() -> None:
    assert sum(map(len, SETS)) == len(REPORTED) >= 60
    assert all(re.match(r"https://(github\.com|discuss\.pytorch\.org)/\S+/\d+$", url) for url, _ in REPORTED.values())
    assert all(marked(files_of(code)) for _, code in REPORTED.values())
    assert set(MISSED) <= set(REPORTED)
    assert f"{len(REPORTED) - len(MISSED)} of {len(REPORTED)}" in PAGE.read_text()


@pytest.mark.parametrize("name", RIGHT_TWINS)
def test_correct_counterparts_have_no_findings(name: str) -> None:
    text = HEAD + RIGHT_TWINS[name]
    assert [(finding.span.line, finding.rule) for finding in script.check_text(text) if finding.span] == []


@pytest.mark.parametrize("name", SHARED)
def test_correct_files_of_a_folder_have_no_findings(name: str, tmp_path: Path) -> None:
    for path, text in SHARED[name].items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    assert script.check_folder(tmp_path) == []


def test_ten_thousand_lines_take_a_few_seconds() -> None:
    scripts = [code for _, code in REPORTED.values() if "# file: " not in code]
    text = HEAD + "\n".join(scripts * (10_000 // sum(code.count("\n") + 1 for code in scripts) + 1))
    with at_most(5 * text.count("\n") / 10_000, clock=time.process_time):
        assert script.check_text(text)
