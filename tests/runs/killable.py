"""Runs the command line in a process that has imported torch already, for the test that kills runs."""

from __future__ import annotations

import os
from collections.abc import Sequence


def run_cli(argv: Sequence[str], log: str) -> None:
    """Run ``narrowgauge`` with its output in a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    import torch

    from narrowgauge.cli import main

    torch.set_num_threads(1)
    os._exit(main(argv))
