"""A rank is killed: torchrun restarts the ranks, and they end with the weights of an undisturbed run."""

import sys
from pathlib import Path

import forked

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import kill_ranks


def test_training_recovers_from_a_killed_rank():
    forked.get_context()  # for the ranks of the undisturbed run; torchrun starts its own
    found = kill_ranks.main(1, 2, "fp32", "fsdp")
    assert found["kills"] == 1 and found["exit"] == 0 and found["same_weights"], found
    assert found["checkpoints_lost"] == 0 and found["longest_pause_s"] < 60 and found["tracebacks"] == 0
    assert found["lines"] and all("another process of the run has ended" in line for line in found["lines"])
