"""Every option of ``train`` passes through torchrun's own parser, which also reads what follows the module's name."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from narrowgauge.cli import Parser, main, train


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


def test_tracker_is_another_name_for_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What torchrun passes on is refused for the tracker, which does not exist, and not for the option."""
    argv = ["train", "gpt:1x64", "--device", "cpu", "--tracker", "no-such-tracker", "--out", str(tmp_path / "run")]
    found = parse_args(["--nproc-per-node", "1", "-m", "narrowgauge", *argv])
    assert main(found.training_script_args) == 2
    said = capsys.readouterr().err
    assert "no-such-tracker" in said and "ambiguous" not in said
    assert not (tmp_path / "run").exists()
