"""Every option of ``train`` passes through torchrun's own parser, which also reads what follows the module's name."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
import torch.distributed.run
from torch.distributed.run import parse_args

import forked
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
    argv = ["--nproc-per-node", "1", "-m", "narrowgauge", "train", "gpt:1x64", "--device", "cpu"]
    argv += ["--tracker", "no-such-tracker", "--out", str(tmp_path / "run")]
    process = forked.get_context().Process(target=run_torchrun, args=(argv, tmp_path / "said"))
    process.start()
    process.join(250)
    process.kill()
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 1 and "no-such-tracker" in said and "ambiguous" not in said, said
    assert not (tmp_path / "run").exists()


def run_torchrun(argv: list[str], log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
    torch.distributed.run.main(argv)
