"""The parameters of a task's function are options of every verb that takes a task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from narrowgauge.cli import main

TASK = """
from __future__ import annotations
import enum
import json
import pathlib
import torch
from pathlib import Path
from typing import Literal, Optional
from narrowgauge import Task

class Shade(enum.Enum):
    light = "l"
    dark = "d"

with open("imported", "a") as file:
    file.write("x")

def make(width: int = 4, bias: bool = True, rate: float = 0.5, act: Literal["relu", "gelu"] = "relu",
         where: Path = Path("."), note: Optional[str] = None, sizes: list[int] = (), shade: Shade = Shade.light,
         guess=3, step: int = 1, log_scale=False, batch: int = 2, either: int | str = 1, seed: int = 7, odd: dict = {}):
    got = dict(width=width, bias=bias, rate=rate, act=act, where=str(where), where_is=type(where).__mro__[1].__name__,
               note=note, sizes=sizes, shade=str(shade), guess=guess, step=step, log_scale=log_scale, batch=batch,
               either=either, seed=seed)
    pathlib.Path("got.json").write_text(json.dumps(got))
    return Task(
        model=lambda: torch.nn.Linear(width, width, bias=bias),
        batch=lambda step, split: torch.ones(batch, width),
        loss=lambda model, x: model(x).square().mean(),
        items_per_batch=batch,
        steps=2,
    )

def needs(width: int, depth: int):
    return make(width)

def annotated(width: "NoSuchType" = 4, depth=2):
    return make(width)
"""
VERBS = {
    "train": ["--log", "none", "--recipe", "fp32", "--watch", "0"],
    "bench": ["--steps", "1", "--rounds", "1", "--recipes", "fp32"],
    "memory": ["--recipes", "bf16", "--no-search"],
    "roofline": ["--recipes", "bf16", "--quick"],
    "validate": ["--steps", "2", "--seeds", "2", "--no-layers", "--margin", "0.5"],
    "lint": [],
}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))
    Path("mine.py").write_text(TASK)


def call_with(*argv: str, task: str = "mine.py:make") -> dict[str, object]:
    """Run a verb; return the arguments that the task's function received."""
    assert main([argv[0], task, "--device", "cpu", *VERBS[argv[0]], *argv[1:]]) in (0, 1)
    found: dict[str, object] = json.loads(Path("got.json").read_text())
    return found


def run_refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    try:
        code = main(argv)
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    err = capsys.readouterr().err
    assert code == 2 and "Traceback" not in err, err
    return err.strip().splitlines()[-1]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_passes_task_options(verb: str) -> None:
    found = call_with(verb, "--width", "8", "--no-bias", "--act=gelu")
    assert (found["width"], found["bias"], found["act"], found["rate"]) == (8, False, "gelu", 0.5)


def test_types_of_options() -> None:
    assert call_with("lint")["seed"] == 7
    every = ["--rate", "1e-3", "--where", "a/b", "--note", "hello there", "--sizes", "3, 4,5", "--shade", "d"]
    found = call_with("lint", *every, "--guess", "9", "--step", "5", "--log-scale", "--either", "word")
    assert found["rate"] == 1e-3 and (found["where"], found["where_is"]) == ("a/b", "Path")
    assert found["note"] == "hello there" and found["sizes"] == [3, 4, 5] and found["shade"] == "Shade.dark"
    assert found["guess"] == 9 and found["step"] == 5 and found["log_scale"] is True and found["either"] == "word"
    assert call_with("lint", "--log_scale", "--either", "12", "--shade", "dark")["either"] == 12
    assert call_with("lint", "--width", "8", task="mine.py:annotated")["width"] == 8  # the type of the default


def test_invalid_options_give_one_line_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--width 'abc': expected a whole number" in run_refused(capsys, "train", "mine.py:make", "--width", "abc")
    assert "--act 'tanh': expected one of relu, gelu" in run_refused(capsys, "memory", "mine.py:make", "--act", "tanh")
    assert "expected one of l, d, light, dark" in run_refused(capsys, "bench", "mine.py:make", "--shade", "x")
    assert "a whole number, or several" in run_refused(capsys, "lint", "mine.py:make", "--sizes", "1,b")
    assert "unrecognized arguments: --depth 3" in run_refused(capsys, "train", "mine.py:make", "--depth", "3")
    assert "unrecognized arguments: --odd 3" in run_refused(capsys, "train", "mine.py:make", "--odd", "3")
    assert "unrecognized arguments: --width 3" in run_refused(capsys, "train", "gpt-tiny", "--width", "3")
    assert "needs --width, --depth" in run_refused(capsys, "memory", "mine.py:needs")
    assert "needs --depth" in run_refused(capsys, "roofline", "mine.py:needs", "--width", "3")
    assert not Path("runs").exists()


def test_help_lists_task_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "mine.py:make", "--help"])
    out = capsys.readouterr().out
    assert "options of mine.py:make" in out and "--width WIDTH" in out and "--bias, --no-bias" in out
    assert "default relu" in out


def test_a_run_records_and_keeps_task_options(capsys: pytest.CaptureFixture[str]) -> None:
    found = call_with("train", "--out", "run", "--width", "8", "--sizes", "1,2", "--where", "here", "--seed", "5")
    assert found["seed"] == 5
    options = json.loads(Path("run/run.json").read_text())["options"]
    assert options == {"width": 8, "sizes": [1, 2], "where": "here", "seed": 5}
    assert Path("imported").read_text() == "x", "the task's file must run only once"
    Path("got.json").unlink()
    assert main(["train", "--resume", "run", "--width", "8"]) == 0
    again = json.loads(Path("got.json").read_text())
    assert again == found
    assert "--width 9 differs from the setting of run run (8)" in run_refused(
        capsys, "train", "--resume", "run", "--width", "9"
    )


def test_saved_baselines_record_task_options(capsys: pytest.CaptureFixture[str]) -> None:
    call_with("bench", "--width", "8", "--peers", "torch", "--save", "base.json")
    assert json.loads(Path("base.json").read_text())["options"] == {"width": 8}
    line = run_refused(capsys, "bench", "--device", "cpu", "--against", "base.json", "--width", "4")
    assert "was measured with options" in line
    call_with("validate", "--width", "8", "--save", "saved.json")
    Path("got.json").unlink()
    assert main(["validate", "--device", "cpu", "--against", "saved.json", "--no-layers"]) in (0, 1)
    assert json.loads(Path("got.json").read_text())["width"] == 8
