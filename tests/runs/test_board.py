"""TensorBoard reads the numbers back, forgets what a killed life wrote too much, and is not needed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from narrowgauge.runs.trackers.tensorboard import Board

ignored = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's reader, not narrowgauge, uses them


@ignored
def test_tensorboard_reads_one_story(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    told: list[str] = []
    first = Board(tmp_path, 1, told.append)
    for step in (1, 2, 3, 4):
        first.add("train", step, {"loss": 1.0 / step, "lr": 0.5})
    first.close()
    second = Board(tmp_path, 3, told.append)
    second.add("train", 3, {"loss": 30.0, "lr": 0.5})
    second.add("eval", 3, {"loss": float("nan")})
    second.close()
    assert told == [] and len(list((tmp_path / "tensorboard").iterdir())) == 2
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1.0), (2, 0.5), (3, 30.0)]
    assert [e.step for e in events.Scalars("eval/loss")] == [3]


def test_without_tensorboard_one_line_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorboard.compat.proto", None)
    told: list[str] = []
    board = Board(tmp_path, 1, told.append)
    board.add("train", 1, {"loss": 1.0})
    board.close()
    assert len(told) == 1 and "not installed" in told[0] and list(tmp_path.iterdir()) == []


def test_a_full_disk_costs_the_board_alone(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small disk")
    try:
        told: list[str] = []
        board = Board(tmp_path, 1, told.append)
        for step in range(2000):
            board.add("train", step, {"loss": 1.0})
        board.close()
        assert len(told) == 1 and "No space left on device" in told[0]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
