"""bench/logit_gradients.py: only what is right on average leaves rows that add up to zero."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import forked

SCRIPT = Path(__file__).parents[2] / "bench" / "logit_gradients.py"
LINE = re.compile(r"(E\dM\d), (\w+).*?([+-][\d.]+) \+- ([\d.]+)")


@pytest.mark.timeout(120)
def test_sums_of_rows() -> None:
    code, out, err = forked.finish_script([str(SCRIPT), "2048", "2000", "64"], 100)
    assert code == 0, err
    found = [match.groups() for match in map(LINE.match, out.splitlines()) if match]
    assert [(format, way) for format, way, _, _ in found] == 3 * [
        ("E5M2", "to"), ("E4M3", "to"), ("E4M3", "small"), ("E4M3", "all"),
    ]  # fmt: skip
    errors = {
        way: [abs(float(mean)) / float(error) for _, other, mean, error in found if other == way]
        for way in ("to", "all")
    }
    assert max(errors["all"]) < 3.5 and min(errors["to"]) > 3.5
