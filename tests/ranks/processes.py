"""Starts several ranks for a test as torchrun does, but faster: forked from a process that has imported torch."""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import forked
from narrowgauge.tasks import language


def run_ranks(ranks: int, job: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """Run a job in ``ranks`` processes. Returns what each returned, as JSON values, in the order of ranks."""
    forked.get_context()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    torch.multiprocessing.start_processes(
        _start, args=(ranks, port, folder, job, *arguments), nprocs=ranks, daemon=True, start_method="forkserver"
    )
    return [json.loads((folder / f"answer-{rank}.json").read_text()) for rank in range(ranks)]


def _start(rank: int, ranks: int, port: int, folder: Path, job: Callable[..., Any], *arguments: Any) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*torch.jit.script_method.*")
    torch.set_num_threads(1)
    language.SAMPLE_TOKENS = 3  # writing the sample takes longer than a step
    language.EVAL_BATCHES = 4  # as in the process of the test
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (folder / f"answer-{rank}.json").write_text(json.dumps(job(*arguments)))
