"""A run that is killed (kill -9) and resumed again and again ends with the weights of an undisturbed run, bit for bit.

Each process is forked from a server that has imported torch, so that thirty processes do not cost thirty imports. A
kill comes a few random milliseconds after a random step of the whole run. Some come right after the start of a process,
and some while a checkpoint is being written.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from killable import run_cli
from test_train import assert_same_run

from narrowgauge.runs import record
from narrowgauge.runs.checkpoints import checkpoint

STEPS = 400
PATIENCE_S = 60
PRELOAD = ["killable", "torch", "torch._dynamo", "narrowgauge.runs.trackers.tensorboard", "narrowgauge.runs.train"]
TASK = f"{Path(__file__).parent / 'tiny_task.py'}:command_line"


def start(argv: list[str], log: Path) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=run_cli, args=(argv, str(log)))
    process.start()
    return process


def wait_until(condition: Callable[[], bool], process: BaseProcess) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition() and process.is_alive():
        assert time.monotonic() < limit, "the process neither got there nor ended"
        time.sleep(0.0005)


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


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "kills"), [("fp16", 30), ("fp8", 12)])  # loss scaler and FP8 scales must survive
def test_kills_do_not_change_the_weights(tmp_path: Path, recipe: str, kills: int) -> None:
    chance = random.Random(20)
    options = ["--recipe", recipe, "--device", "cpu", "--steps", str(STEPS), "--checkpoint-every", "7", "--json"]
    begin = ["train", TASK, *options, "--eval-every", "50"]
    log = tmp_path / "log"

    whole = start([*begin, "--out", str(tmp_path / "whole")], log)
    whole.join(PATIENCE_S)
    assert whole.exitcode == 0, log.read_text()

    folder = tmp_path / "killed"
    targets = sorted(chance.randrange(int(STEPS * 0.75)) for _ in range(kills))
    killed_writing = attempts = 0
    for attempt, target in enumerate(targets):
        argv = ["train", "--resume", str(folder), "--json"] if record.holds_run(folder) else None
        process = start(argv or [*begin, "--out", str(folder)], log)
        attempts += 1
        if attempt % 5 == 4:  # somewhere between the fork and the first steps
            time.sleep(chance.uniform(0, 0.15))
        else:
            wait_until(lambda target=target: last_step(folder) >= target, process)  # type: ignore[misc]
            if attempt % 3 == 0:
                wait_until(lambda: is_writing(folder), process)
            else:
                time.sleep(chance.uniform(0, 0.02))
        assert process.is_alive(), log.read_text()
        process.kill()
        process.join(PATIENCE_S)
        killed_writing += is_writing(folder)
    assert attempts == kills and killed_writing > 0

    last = start(["train", "--resume", str(folder), "--json"], log)
    last.join(PATIENCE_S)
    assert last.exitcode == 0, log.read_text()
    assert_same_run(tmp_path / "whole", folder, STEPS)
    weights = [checkpoint.make_path(run, STEPS) / "weights.safetensors" for run in (tmp_path / "whole", folder)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert not list((folder / "checkpoints").glob(".*"))
