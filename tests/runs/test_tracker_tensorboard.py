"""TensorBoard reads the metrics back, purges steps after the resumed checkpoint, and is optional."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from narrowgauge.runs.trackers.tensorboard import TensorBoardTracker

ignored = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's reader, not narrowgauge, uses them


@ignored
def test_tensorboard_purges_steps_after_the_resumed_checkpoint(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    lines: list[str] = []
    first = TensorBoardTracker(tmp_path, {}, 1, lines.append)
    for step in (1, 2, 3, 4):
        first.log_metrics("train", step, {"loss": 1.0 / step, "lr": 0.5})
    first.close()
    second = TensorBoardTracker(tmp_path, {}, 3, lines.append)
    second.log_metrics("train", 3, {"loss": 30.0, "lr": 0.5})
    second.log_metrics("eval", 3, {"loss": float("nan")})
    second.close()
    assert lines == [] and len(list((tmp_path / "tensorboard").iterdir())) == 2
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1.0), (2, 0.5), (3, 30.0)]
    assert [e.step for e in events.Scalars("eval/loss")] == [3]


def test_without_tensorboard_one_line_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorboard.compat.proto", None)
    lines: list[str] = []
    board = TensorBoardTracker(tmp_path, {}, 1, lines.append)
    board.log_metrics("train", 1, {"loss": 1.0})
    board.close()
    assert len(lines) == 1 and "not installed" in lines[0] and list(tmp_path.iterdir()) == []


def test_a_full_disk_only_disables_tensorboard(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small disk")
    try:
        lines: list[str] = []
        board = TensorBoardTracker(tmp_path, {}, 1, lines.append)
        for step in range(2000):
            board.log_metrics("train", step, {"loss": 1.0})
        board.close()
        assert len(lines) == 1 and "No space left on device" in lines[0]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
