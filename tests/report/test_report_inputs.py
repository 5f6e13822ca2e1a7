"""Paths that are neither runs nor known results are refused with one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowgauge.errors import UsageError
from narrowgauge.report.inputs import open_inputs


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "neither a run folder nor JSON"),
        ("[1, 2]", "unknown kind"),
        ('"text"', "unknown kind"),
        ('{"rows": []}', "unknown kind"),
        ('{"candidates": {"a": 3}}', "looks like validation JSON but cannot be read"),
        ('{"candidates": {"a": {}}}', "no 'verdict'"),
    ],
)
def test_other_files_give_a_one_line_error(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        open_inputs([path])
    assert "\n" not in str(caught.value)


def test_bad_paths_are_refused(tmp_path: Path) -> None:
    for paths, message in (
        ([], "at least one"),
        ([tmp_path], "contains no run"),
        ([tmp_path / "gone"], "does not exist"),
    ):
        with pytest.raises(UsageError, match=message):
            open_inputs(paths)
