"""Every option of ``train`` passes through torchrun's own parser, which also reads what follows the module's name."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from narrowgauge.cli import Parser, train


def options() -> list[str]:
    parser = Parser(prog="narrowgauge train")
    for name in ("--json", "--seed", "--device", "--out"):
        parser.add_argument(name)
    train.add_arguments(parser)
    hidden = (argparse.SUPPRESS,)
    return sorted(name for action in parser._actions if action.help not in hidden for name in action.option_strings)


@pytest.mark.parametrize("option", [name for name in options() if name not in ("--log", "-h", "--help")])
def test_torchrun_passes_the_option_on(option: str) -> None:
    found = parse_args(["--nproc-per-node", "2", "-m", "narrowgauge", "train", "gpt-tiny", option, "value"])
    assert found.module and found.training_script == "narrowgauge"
    assert found.training_script_args == ["train", "gpt-tiny", option, "value"]


def test_tracker_is_another_name_for_log(tmp_path: Path) -> None:
    """Run torchrun itself: narrowgauge refuses the tracker, which does not exist."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "narrowgauge"]
    command += ["train", "gpt:1x64", "--device", "cpu", "--tracker", "no-such-tracker", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode != 0
    assert "no-such-tracker" in done.stderr and "ambiguous" not in done.stderr
    assert not (tmp_path / "run").exists()
