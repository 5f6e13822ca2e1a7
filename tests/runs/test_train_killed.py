"""A run that is killed (kill -9) and resumed again and again ends with the weights of an undisturbed run, bit for bit.

Each process is a fork (tests/forked.py), so that twenty processes do not cost twenty imports. A kill comes a few random
milliseconds after a random step of the whole run. Some come right after the start of a process, and some while a
checkpoint is being written.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
from test_train import assert_same_run

import forked
from narrowgauge.runs import record
from narrowgauge.runs.checkpoints import checkpoint

STEPS = 120
PATIENCE_S = 60
TASK = f"{Path(__file__).parent / 'tiny_task.py'}:command_line"


def wait_until(condition: Callable[[], bool], process: forked.Child, every_s: float) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition() and process.poll() is None:
        assert time.monotonic() < limit, "the process neither got there nor ended"
        time.sleep(every_s)


def last_step(folder: Path) -> int:
    """Read the newest step from the end of a record that is being written."""
    path = folder / record.EVENTS
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2000))
        lines = file.read().split(b"\n")[1:-1]
    return max((json.loads(line)["step"] for line in lines), default=0)


def is_writing(folder: Path) -> bool:
    return any((folder / "checkpoints").glob(".step-*.tmp"))


def run_to_the_end(argv: list[str], streams: dict[str, IO[str]]) -> None:
    with forked.start_cli(argv, **streams) as process:
        assert process.wait(PATIENCE_S) == 0, read(streams["stdout"])


def read(log: IO[str]) -> str:
    log.seek(0)
    return log.read()


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "kills"), [("fp16", 12), ("fp8", 8)])  # loss scaler and FP8 scales must survive
def test_kills_do_not_change_the_weights(tmp_path: Path, recipe: str, kills: int) -> None:
    chance = random.Random(20)
    options = ["--recipe", recipe, "--device", "cpu", "--steps", str(STEPS), "--checkpoint-every", "7", "--json"]
    begin = ["train", TASK, *options, "--eval-every", "50"]
    with (tmp_path / "log").open("w+") as log:
        streams = {"stdout": log, "stderr": log}
        run_to_the_end([*begin, "--out", str(tmp_path / "whole")], streams)

        folder = tmp_path / "killed"
        targets = sorted(chance.randrange(int(STEPS * 0.75)) for _ in range(kills))
        killed_writing = attempts = 0
        for attempt, target in enumerate(targets):
            argv = ["train", "--resume", str(folder), "--json"] if record.holds_run(folder) else None
            with forked.start_cli(argv or [*begin, "--out", str(folder)], **streams) as process:
                attempts += 1
                if attempt % 5 == 4:  # somewhere between the fork and the first steps
                    time.sleep(chance.uniform(0, 0.15))
                else:
                    wait_until(lambda target=target: last_step(folder) >= target, process, 0.003)  # type: ignore[misc]
                    if attempt % 3 == 0:
                        wait_until(lambda: is_writing(folder), process, 0.0005)
                    else:
                        time.sleep(chance.uniform(0, 0.02))
                assert process.poll() is None, read(log)
                process.kill()
                process.wait(PATIENCE_S)
            killed_writing += is_writing(folder)
        assert attempts == kills and killed_writing > 0
        run_to_the_end(["train", "--resume", str(folder), "--json"], streams)
    assert_same_run(tmp_path / "whole", folder, STEPS)
    weights = [checkpoint.make_path(run, STEPS) / "weights.safetensors" for run in (tmp_path / "whole", folder)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert not list((folder / "checkpoints").glob(".*"))
