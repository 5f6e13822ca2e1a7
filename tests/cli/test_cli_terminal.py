"""Terminal output contains no control characters."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.cli import main
from narrowgauge.cli.terminal import say, show_table
from narrowgauge.errors import printable

CONTROLS = "plain \x1b[2J\x1b]0;title\x07 \x9b31m \x7f \r over \u202egnirts \ud800 \x00"
TASK = f"""
import torch
from narrowgauge import Task, UsageError

def sample(model):
    return {CONTROLS!r}

def batch(step, split):
    return torch.ones(2, 4)

def make():
    return Task(model=lambda: torch.nn.Linear(4, 4), batch=batch, loss=lambda m, b: m(b).square().mean(), sample=sample,
                name={CONTROLS!r}, unit={CONTROLS!r}, steps=2)
"""


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def assert_no_controls(text: str) -> None:
    assert all(character.isprintable() or character in "\n\t" for character in text), ascii(text)


@given(st.text())
def test_only_control_characters_are_escaped(text: str) -> None:
    shown = printable(text)
    assert not set(shown) & set(map(chr, [*range(9), *range(11, 32), *range(127, 160)]))
    shown.encode()
    if text.isprintable():
        assert shown == text


def test_lines_and_tables_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    say(CONTROLS)
    show_table(CONTROLS, ["name", CONTROLS], [["a", CONTROLS]])
    assert_no_controls(capsys.readouterr().out)


def test_samples_and_names_of_a_task_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(TASK)
    argv = ["train", "mine.py:make", "--device", "cpu", "--recipe", "fp32", "--log", "none", "--out", "run"]
    assert main(argv) in (0, 1)
    captured = capsys.readouterr()
    assert_no_controls(captured.out + captured.err)
    assert r"\x1b[2J" in captured.out
    page = Path("run/report.html").read_text()
    assert not set(page) & set("\x1b\x07\x9b\x7f\u202e\x00")
    assert main(["train", "--resume", "run", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["sample"].startswith("plain \x1b[2J")  # JSON data are not escaped


def test_file_names_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    Path("\x1b]0;owned\x07.py").write_text("import torch\n")
    assert main(["lint", "\x1b]0;owned\x07.py"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and r"\x1b]0;owned\x07.py" in out


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_terminal_encoding_works(encoding: str) -> None:
    Path("größe\udcff.py").write_text("import torch\n")
    for argv in (["formats", "1.5"], ["lint", "größe\udcff.py"], ["break"]):
        out = io.TextIOWrapper(io.BytesIO(), encoding, errors="strict")  # as the interpreter opens them
        err = io.TextIOWrapper(io.BytesIO(), encoding, errors="backslashreplace")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(argv)
        out.flush()
        err.flush()
        assert code == 0, err.buffer.getvalue()
        assert out.buffer.getvalue().decode(encoding)
