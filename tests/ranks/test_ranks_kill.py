"""A rank is killed: torchrun restarts the ranks, and they end with the weights of an undisturbed run."""

import contextlib
import sys
from pathlib import Path

import torch.distributed.run as torchrun

import forked

BENCH = Path(__file__).parents[2] / "bench"


def run_torchrun(argv):
    """As ``python -m torch.distributed.run``, but ranks are forks of this process, which has imported torch."""
    launch = torchrun.elastic_launch

    def launch_forks(config, entrypoint):
        config.start_method = "fork"
        return lambda *command: launch(config, run_rank)(*command)

    torchrun.elastic_launch = launch_forks
    torchrun.main(argv)
    return 0


def run_rank(*command):
    assert command[:3] == ("-u", "-m", "narrowgauge")
    sys.exit(forked.run_verb([*command[3:]]))


def test_training_recovers_from_a_killed_rank(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    import kill_ranks

    forked.get_context()  # for the ranks of the undisturbed run; torchrun starts its own
    with contextlib.ExitStack() as stack:

        def start_fork(command, *, env, text, stdout, stderr, start_new_session):
            assert command[1:3] == ["-m", "torch.distributed.run"]
            given = {"env": env, "text": text, "stdout": stdout, "stderr": stderr}
            return stack.enter_context(forked.start(run_torchrun, command[3:], **given))

        monkeypatch.setattr(kill_ranks.subprocess, "Popen", start_fork)
        found = kill_ranks.main(1, 2, "fp32", "fsdp")
    assert found["kills"] == 1 and found["exit"] == 0 and found["same_weights"], found
    assert found["checkpoints_lost"] == 0 and found["longest_pause_s"] < 60 and found["tracebacks"] == 0
    assert found["lines"] and all("another process of the run has ended" in line for line in found["lines"])
