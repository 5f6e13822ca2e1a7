"""What reaches a terminal: text, and never what a terminal would obey."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.cli import main
from narrowgauge.cli.terminal import say, show_table
from narrowgauge.errors import printable

EVIL = "plain \x1b[2J\x1b]0;title\x07 \x9b31m \x7f \r over \u202egnirts \ud800 \x00"
TASK = f"""
import torch
from narrowgauge import Task, UsageError

def sample(model):
    return {EVIL!r}

def batch(step, split):
    return torch.ones(2, 4)

def make():
    return Task(model=lambda: torch.nn.Linear(4, 4), batch=batch, loss=lambda m, b: m(b).square().mean(), sample=sample,
                name={EVIL!r}, unit={EVIL!r}, steps=2)
"""


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def assert_harmless(text: str) -> None:
    assert all(character.isprintable() or character in "\n\t" for character in text), ascii(text)


@given(st.text())
def test_only_what_is_harmful_is_changed(text: str) -> None:
    shown = printable(text)
    assert not set(shown) & set(map(chr, [*range(9), *range(11, 32), *range(127, 160)]))
    shown.encode()
    if text.isprintable():
        assert shown == text


def test_lines_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    say(EVIL)
    show_table(EVIL, ["name", EVIL], [["a", EVIL]])
    assert_harmless(capsys.readouterr().out)


def test_samples_and_names_of_a_task(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(TASK)
    argv = ["train", "mine.py:make", "--device", "cpu", "--recipe", "fp32", "--log", "none", "--out", "run"]
    assert main(argv) in (0, 1)
    captured = capsys.readouterr()
    assert_harmless(captured.out + captured.err)
    assert r"\x1b[2J" in captured.out
    page = Path("run/report.html").read_text()
    assert not set(page) & set("\x1b\x07\x9b\x7f\u202e\x00")
    assert main(["train", "--resume", "run", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["sample"].startswith("plain \x1b[2J")  # data stay as they are


def test_names_with_control_characters_reach_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Path("\x1b]0;owned\x07.py").write_text("import torch\n")
    assert main(["lint", "\x1b]0;owned\x07.py"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and r"\x1b]0;owned\x07.py" in out


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_of_any_encoding_ends_no_verb(encoding: str, tmp_path: Path) -> None:
    Path("größe\udcff.py").write_text("import torch\n")
    code = "import sys; from narrowgauge.cli import main\n"
    code += "sys.exit(main(['formats', '1.5']) or main(['lint', sys.argv[1]]) or main(['break']))"
    done = subprocess.run(
        [sys.executable, "-c", code, "größe\udcff.py"],
        capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
