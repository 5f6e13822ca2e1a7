"""The picture of tokens per expert in a browser: the layers can be selected, and cells read with keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import example_run

from narrowgauge.report import write
from narrowgauge.runs import record

if TYPE_CHECKING:
    from conftest import Page

DOWN, HOME = "\ue015", "\ue011"


def test_tokens_per_expert(page: Page, tmp_path: Path) -> None:
    example_run.configure(tmp_path / "run", 10)
    layers = [["layers.0.experts", 2, [40, 10, 10, 0], 1.0, []], ["layers.1.experts", 2, [15, 15, 15, 15], 1.0, []]]
    with record.Record(tmp_path / "run") as book:
        for step in (1, 5, 9):
            book.append("look", step, applied=True, readings=[], experts=layers)
    page.open(write([tmp_path / "run"], tmp_path / "report.html"))
    assert "Expert 0 gets the most: 66.7% of all choices. 1 got no token." in page.text("#experts .note")
    page.press("#plot-experts", HOME)
    assert "expert 0 step 1: 2.7 times an equal share" in page.text("#experts .readout")
    for _ in range(3):
        page.press("#plot-experts", DOWN)
    assert "expert 3 step 1: no token" in page.text("#experts .readout")
    page.set("#choose-experts-layer", "layers.1.experts", "change")
    assert "as if there were 4.00 with equal shares (2 per token)" in page.text("#experts .note")
