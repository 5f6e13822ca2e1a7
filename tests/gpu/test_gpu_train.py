"""Training on a GPU: pinned batches, compiled steps, checkpoints, and resuming a stopped run."""

import json
import signal
import subprocess
import sys
import time

import pytest

import child_processes

ARGUMENTS = ["train", "gpt:2x128", "--vocab", "256", "--steps", "60", "--checkpoint-every", "20", "--eval-every", "30"]


def narrowgauge(*arguments, check=True):
    command = [sys.executable, "-m", "narrowgauge", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert not check or done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("recipe", ["fp16", "bf16"])
def test_a_run_learns_and_resumes(tmp_path, recipe):
    straight = narrowgauge(*ARGUMENTS, "--recipe", recipe, "--out", str(tmp_path / "straight"))
    assert straight["loss_last"] < straight["loss_first"] - 1
    assert (straight["steps"], straight["findings"]) == (60, [])
    folder = tmp_path / "stopped"
    command = [sys.executable, "-m", "narrowgauge", *ARGUMENTS, "--recipe", recipe, "--out", str(folder), "--json"]
    with child_processes.start(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        events = folder / "events.jsonl"
        while process.poll() is None and not (events.exists() and '"step"' in events.read_text()):
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        first = json.loads(process.communicate(timeout=120)[0])
    assert process.returncode == 0
    if first["interrupted"]:
        assert first["steps"] < 60
        second = narrowgauge("train", "--resume", str(folder))
        assert second["steps"] == 60
    losses = []
    for run in ("straight", "stopped"):
        lines = (tmp_path / run / "events.jsonl").read_text().splitlines()
        losses.append([e["loss"] for e in map(json.loads, lines) if e["kind"] == "step"])
    assert len(losses[0]) == len(losses[1]) == 60
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
