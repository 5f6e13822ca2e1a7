"""A run with recipe ``auto`` records what was chosen and why, and resumes with it, whatever would be chosen now."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_task

from narrowgauge import hardware
from narrowgauge.cli import main
from narrowgauge.engine import choose_recipe as choosing
from narrowgauge.recipe import NAMED, choose
from narrowgauge.runs import record
from narrowgauge.runs.settings import make_settings, restore_settings
from narrowgauge.runs.train import train
from narrowgauge.runs.trainer import Observer

TASK = f"{Path(tiny_task.__file__)}:command_line"
COMMAND = ["train", "--device", "cpu", "--steps", "2", "--log", "none", "--watch", "0"]


class Lines(Observer):
    """Keeps the lines, and interrupts the run at a step."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop, self.lines = stop, []  # type: ignore[var-annotated]

    def notify(self, line: str) -> None:
        self.lines.append(line)

    def on_metrics(self, event: Mapping[str, Any], skipped: int) -> None:
        if event["kind"] == "step" and event["step"] == self.stop:
            os.kill(os.getpid(), signal.SIGINT)


def let_auto_choose(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the CPU be a device on which auto depends on the model, and choose this recipe for any."""

    def choose_for_model(text: str, *_: Any, **__: Any) -> Any:
        return choosing.parse(text, auto=NAMED[name]), f"{name} is fast"

    monkeypatch.setattr(choosing, "depends_on_model", lambda *_: True)
    monkeypatch.setattr(choosing, "choose_for_model", choose_for_model)


@pytest.mark.parametrize(("first", "now"), [("fp8", "bf16"), ("bf16", "fp8")])
def test_a_run_keeps_the_recipe_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, now: str
) -> None:
    task, observer = tiny_task.tiny(), Lines(stop=1)
    options: dict[str, Any] = {"compile": False, "steps": 3, "watch_every": 0, "log": "none"}
    settings = make_settings(task, recipe="auto[checkpoint=none]", device="cpu", **options)
    let_auto_choose(monkeypatch, first)
    result = train(task, settings, tmp_path, observer=observer)
    assert result.interrupted and result.recipe == first
    assert f"recipe {first}: {first} is fast" in observer.lines
    configuration = record.read_configuration(tmp_path)
    assert configuration["settings"]["recipe"] == first
    assert configuration["recipe_reason"] == f"{first} is fast"
    let_auto_choose(monkeypatch, now)
    observer = Lines()
    result = train(task, restore_settings(configuration["settings"]), tmp_path, resume=True, observer=observer)
    assert (result.recipe, result.step) == (first, 3)
    assert not any(line.startswith("recipe ") for line in observer.lines)


def test_the_command_says_and_records_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, reason = choose(hardware.detect("cpu"))
    assert main([*COMMAND, TASK, "--out", "by-device"]) == 0
    assert f"recipe {recipe}: {reason}" in capsys.readouterr().out
    assert record.read_configuration(Path("by-device"))["recipe_reason"] == reason
    let_auto_choose(monkeypatch, "bf16")
    assert main([*COMMAND, TASK, "--recipe", "auto[attention=any]"]) == 0
    captured = capsys.readouterr()
    assert "recipe bf16[attention=any]: bf16 is fast" in captured.err
    assert "recipe auto" not in captured.out + captured.err
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("command_line-auto-attention-any-")
    assert record.read_configuration(folder)["settings"]["recipe"] == "bf16[attention=any]"
    let_auto_choose(monkeypatch, "fp8")  # auto on resume is what it was, also after torchrun restarts the command
    assert main(["train", "--resume", str(folder), "--recipe", "auto[attention=any]"]) == 0
    for other in ("auto", "auto[attention=math]", "fp8[attention=any]"):
        assert main(["train", "--resume", str(folder), "--recipe", other]) == 2
        assert "differs from the setting" in capsys.readouterr().err
