"""A rank is killed: torchrun restarts the ranks, and they end with the weights of an undisturbed run."""

import json
import subprocess
import sys
from pathlib import Path


def test_training_recovers_from_a_killed_rank():
    script = Path(__file__).parents[2] / "bench" / "kill_ranks.py"
    done = subprocess.run(
        [sys.executable, str(script), "1", "2", "fp32", "fsdp"],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    found = json.loads(done.stdout)
    assert found["kills"] == 1 and found["exit"] == 0 and found["same_weights"], done.stderr
    assert found["checkpoints_lost"] == 0 and found["longest_pause_s"] < 60 and found["tracebacks"] == 0
    assert found["lines"] and all("another process of the run has ended" in line for line in found["lines"])
