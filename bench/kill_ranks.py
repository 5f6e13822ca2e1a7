"""Kills a rank of a run at random moments under torchrun with restarts. No checkpoint may be lost, no rank may hang.

usage: python bench/kill_ranks.py [KILLS] [RANKS] [RECIPE] [fsdp|ddp]      (JSON on stdout)

A run without kills, whose ranks are started without torchrun, must end with the same weights, bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from narrowgauge import cli
from narrowgauge.runs import record
from narrowgauge.runs.checkpoints import checkpoint

TASK = [f"{Path(__file__).with_name('small_tasks.py')}:llama", "--device", "cpu", "--tracker", "none", "--watch", "0"]
TASK += ["--checkpoint-every", "7", "--eval-every", "40"]


def run_undisturbed(folder: Path, ranks: int, *options: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(
        run_rank, (ranks, port, ["train", *TASK, "--out", str(folder), *options]), ranks, start_method="forkserver"
    )


def run_rank(rank: int, ranks: int, port: int, argv: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
        assert cli.main(argv) == 0


def start(folder: Path, ranks: int, restarts: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "0.2", "--standalone"]
    command += ["-m", "narrowgauge", "train", *TASK, "--out", str(folder), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def list_children(parent: int) -> list[int]:
    """List the ranks: the processes that torchrun has started."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.name))
    return found


def read_record_size(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return (folder / record.EVENTS).stat().st_size
    return 0


def find_newest_step(folder: Path) -> int:
    return max(checkpoint.list_steps(folder), default=0)


def main(kills: int, ranks: int, recipe: str, parallel: str) -> dict[str, object]:
    steps = 40 * kills
    with tempfile.TemporaryDirectory() as room, contextlib.ExitStack() as at_end:
        options = ["--steps", str(steps), "--recipe", recipe, "--parallel", parallel]
        undisturbed, killed = Path(room) / "undisturbed", Path(room) / "killed"
        run_undisturbed(undisturbed, ranks, *options)
        step_s = list(record.read(undisturbed))[-1]["seconds"] / steps
        process = start(killed, ranks, kills + 2, *options)
        at_end.callback(process.terminate)  # torchrun then ends its ranks
        waits, lost, done = [], 0, 0
        while done <= kills and process.poll() is None:
            size, begin = read_record_size(killed), time.monotonic()
            while read_record_size(killed) <= size and process.poll() is None:  # until training continues
                time.sleep(0.02)
                if time.monotonic() - begin > 180:
                    process.send_signal(signal.SIGKILL)
                    raise SystemExit(f"hangs after {done} kills")
            if done and process.poll() is None:
                waits.append(time.monotonic() - begin)
            if done == kills:
                break
            time.sleep(random.uniform(0, 15 * step_s))  # while the run has steps left
            alive = list_children(process.pid)
            if not alive:
                continue
            before = find_newest_step(killed)
            with contextlib.suppress(ProcessLookupError):
                os.kill(random.choice(alive), signal.SIGKILL)
                done += 1
            lost += find_newest_step(killed) < before
        _, err = process.communicate(timeout=600)
        same = False
        if process.returncode == 0:
            ends = [checkpoint.load(checkpoint.make_path(folder, steps)).weights for folder in (undisturbed, killed)]
            same = all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    tracebacks = sum("Traceback" in line and "rank" in line for line in err.splitlines())
    return {
        "kills": done, "ranks": ranks, "recipe": recipe, "parallel": parallel, "exit": process.returncode,
        "checkpoints_lost": lost, "same_weights": same, "longest_pause_s": round(max(waits, default=0), 1),
        "tracebacks": tracebacks, "lines": [line for line in err.splitlines() if line.startswith("narrowgauge:")][:3],
    }  # fmt: skip


if __name__ == "__main__":
    given = sys.argv[1:] + ["5", "2", "fp32", "fsdp"][len(sys.argv) - 1 :]
    print(json.dumps(main(int(given[0]), int(given[1]), given[2], given[3])))
