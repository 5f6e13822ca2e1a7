"""Errors in the user's code: the traceback is shown, and the exit code is 3, not 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowgauge.cli import main

TASK = """
import torch
from torch import nn
from narrowgauge import Task

KINDS = dict(value=ValueError, key=KeyError, os=FileNotFoundError, type=TypeError, deep=RecursionError, exit=SystemExit)

def fail(kind):
    if kind == "exit":
        raise SystemExit("of my own making")
    raise KINDS[kind](2, "of my own making", "my-file")

class Broken(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kind = kind

    def forward(self, x):
        fail(self.kind)

def build(place, kind):
    if place == "function":
        fail(kind)
    return Task(
        model=(lambda: fail(kind)) if place == "model" else (lambda: Broken(kind)) if place == "forward"
        else lambda: nn.Linear(4, 4),
        batch=(lambda step, split: fail(kind)) if place == "batch" else lambda step, split: torch.ones(2, 4),
        loss=(lambda model, batch: fail(kind)) if place == "loss"
        else (lambda model, batch: model(batch[:, :3]).mean()) if place == "shapes"
        else lambda model, batch: model(batch).square().mean(),
        optimizer=(lambda model, rate: fail(kind)) if place == "optimizer" else None,
        steps=2,
    )
"""
PLACES = {"function": "os", "model": "value", "batch": "key", "loss": "exit", "forward": "deep", "optimizer": "os"}
VERBS = {
    "train": ["--steps", "2", "--log", "none"],
    "bench": ["--steps", "1", "--rounds", "1", "--recipes", "fp32"],
    "memory": ["--recipes", "bf16", "--no-search"],
    "roofline": ["--recipes", "bf16", "--quick"],
    "validate": ["--steps", "2", "--seeds", "2"],
}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f"def {place}():\n    return build({place!r}, {kind!r})\n" for place, kind in PLACES.items()]
    lines.append("def shapes():\n    return build('shapes', '')\n")
    Path("mine.py").write_text(TASK + "\n".join(lines))


@pytest.mark.parametrize(
    ("verb", "place"),
    [  # a benchmark creates its own optimizer
        (verb, place) for verb in VERBS for place in (*PLACES, "shapes") if (verb, place) != ("bench", "optimizer")
    ],
)
def test_the_traceback_starts_with_the_users_code(verb: str, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, f"mine.py:{place}", "--device", "cpu", *VERBS[verb]]) == 3
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "mine.py" in err and ("of my own making" in err or place == "shapes")
    assert err.strip().splitlines()[-1].startswith("narrowgauge: your code raised ")


def test_train_says_how_to_resume_and_whether_there_is_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    """A model that raises in its first step has no checkpoint; one that raises later may have."""
    train = ["train", "--device", "cpu", "--recipe", "fp32", "--log", "none"]
    assert main([*train, "mine.py:shapes", "--out", "first"]) == 3
    err = capsys.readouterr().err
    assert "there is no checkpoint yet; start again at step 1 with: narrowgauge train --resume first" in err
    assert "intact" not in err
    Path("later.py").write_text(
        "from mine import *\ndef later(step, split):\n    return fail('value') if step >= 3 else torch.ones(2, 4)\n"
        "def make():\n    return Task(model=lambda: nn.Linear(4, 4), batch=later, steps=4,\n"
        "                loss=lambda model, batch: model(batch).mean())\n"
    )
    assert main([*train, "later.py:make", "--out", "second", "--checkpoint-every", "1", "--eval-every", "0"]) == 3
    assert "saved checkpoints are intact; resume with: narrowgauge train --resume second" in capsys.readouterr().err


def test_lint_reports_a_model_that_raises_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "mine.py:function"]) == 3
    assert "of my own making" in capsys.readouterr().err
    assert main(["lint", "mine.py:model"]) == 2
    assert "its model cannot be created: ValueError" in capsys.readouterr().err


def test_narrowgauge_errors_in_user_code_stay_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("refuses.py").write_text("import narrowgauge as ng\ndef make():\n    ng.recipe('no such')\n")
    for verb, options in VERBS.items():
        assert main([verb, "refuses.py:make", "--device", "cpu", *options]) == 2
        err = capsys.readouterr().err
        assert "Traceback" not in err and "no such" in err
