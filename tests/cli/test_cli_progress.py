"""Progress of a run: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import io
from typing import Any

import pytest

from narrowgauge.cli import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def step(number: int, **changes: Any) -> dict[str, Any]:
    fields = {"kind": "step", "step": number, "loss": 2.5, "tokens_per_s": 12_345.0, "loss_scale": 65536.0}
    return {**fields, **changes}


def watch(stream: io.StringIO) -> str:
    watcher = progress.make_progress("token", stream)
    watcher.on_start(0, 100)
    for number in range(1, 60):
        watcher.on_metrics(step(number), skipped=3)
    watcher.on_metrics({"kind": "eval", "step": 59, "loss": 2.25, "accuracy": 0.5}, skipped=3)
    watcher.notify("a line [with brackets]")
    watcher.on_end()
    return stream.getvalue()


def test_plain_lines_are_few() -> None:
    lines = watch(io.StringIO()).splitlines()
    assert lines == [
        "step 1/100  loss 2.5000  12.3k tokens/s  scale 65536  skipped 3",
        "step 59/100  evaluation loss 2.2500  accuracy 0.5",
        "a line [with brackets]",
    ]


def test_a_terminal_shows_a_bar() -> None:
    pytest.importorskip("rich")
    text = watch(Terminal())
    assert "59/100" in text and "a line [with brackets]" in text and "evaluation loss 2.2500" in text
    assert text.index("\x1b[?25l") < text.rindex("\x1b[?25h")  # the cursor is hidden, and shown again


def test_a_terminal_without_rich_shows_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "has_rich", lambda: False)
    assert "\x1b" not in watch(Terminal())


@pytest.mark.parametrize(
    ("number", "text"), [(0.5, "0.5"), (950, "950"), (12_345, "12.3k"), (4.56e6, "4.56M"), (2e9, "2G")]
)
def test_format_count(number: float, text: str) -> None:
    assert progress.format_count(number) == text
