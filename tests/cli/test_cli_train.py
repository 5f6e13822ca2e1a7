"""``narrowgauge train`` on the command line: JSON, exit codes, one-line errors, resuming."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import forked
from narrowgauge.cli import main
from narrowgauge.runs import record
from narrowgauge.runs.checkpoints import checkpoint

TASKS = Path(__file__).parent.parent / "runs" / "tiny_task.py"
TASK = f"{TASKS}:command_line"
SMALL = ["--device", "cpu", "--recipe", "fp32", "--steps", "6"]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any], str]:
    code = main([*argv, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def rejected(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one-line error of a command with bad usage."""
    assert main(argv) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("narrowgauge: ") and "Traceback" not in line
    return line


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, data, err = run_json(capsys, "train", TASK, *SMALL, "--out", "run")
    assert code == 0
    assert data["run"] == "run" and data["recipe"] == "fp32" and data["steps"] == 6
    assert data["tokens_per_s"] > 0 and data["loss_first"] > data["loss_last"] > 0
    assert data["skipped"] == 0 and data["findings"] == [] and data["interrupted"] is False
    assert data["unigram_entropy"] == 1.386 and data["loss_eval"] > 0 and data["parameters"] > 0
    assert Path(data["checkpoint"]).is_dir()
    assert "healthy" in err and "1.3860 unigram baseline" in err and "run/events.jsonl" in err


def test_prose_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", TASK, *SMALL]) == 0
    captured = capsys.readouterr()
    assert "finished after 6 of 6 steps" in captured.out and "weights sum to" in captured.out
    assert "step 1/6" in captured.err and "evaluation loss" in captured.err
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("command_line-fp32-") and record.holds_run(folder)


def test_a_folder_with_a_run_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", TASK, *SMALL, "--out", "run"])
    assert "run already holds a run; resume it with --resume run" in rejected(
        capsys, "train", TASK, *SMALL, "--out", "run"
    )


def test_resuming_a_finished_run_reports_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    _, first, _ = run_json(capsys, "train", TASK, *SMALL, "--out", "run")
    code, again, err = run_json(capsys, "train", "--resume", "run")
    assert code == 0 and again == first and "finished after 6 of 6 steps" in err


def test_resume_by_name_keeps_the_settings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["train", TASK, *SMALL, "--out", "runs/mine", "--seed", "3"])
    assert "--steps 9 differs from the setting of run runs/mine (6)" in rejected(
        capsys, "train", "--resume", "mine", "--steps", "9"
    )
    assert "--recipe fp16" in rejected(capsys, "train", "--resume", "mine", "--recipe", "fp16")
    assert "--seed 4" in rejected(capsys, "train", "--resume", "mine", "--seed", "4")
    assert "task gpt-tiny differs" in rejected(capsys, "train", "gpt-tiny", "--resume", "mine")
    code, data, _ = run_json(capsys, "train", TASK, "--resume", "mine", "--steps", "6", "--keep", "1", "--seed", "3")
    assert code == 0 and data["run"] == "runs/mine"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--resume", "nowhere"], "--resume nowhere: no run there or at runs/nowhere"),
        ([TASK, "--recipe", "fp17"], "unknown recipe 'fp17'"),
        ([TASK, "--recipe", "tf32"], "TF32"),
        (["gpt-tony"], "there is no task 'gpt-tony'"),
        (["missing.py:task"], "there is no file"),
        ([TASK, "--device", "tpu"], "unknown device 'tpu'"),
        ([TASK, "--context", "64"], "takes no --context"),
        ([TASK, "--steps", "0"], "--steps 0: expected a whole number of at least 1"),
        ([TASK, "--lr", "nan"], "--lr nan"),
        ([f"{TASKS}:poisoned", "--steps", "9"], "data of step 8 is not finite"),
    ],
)
def test_bad_input_is_a_one_line_error(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    device = [] if "--device" in argv else ["--device", "cpu"]
    recipe = [] if "--recipe" in argv or "--resume" in argv else ["--recipe", "fp32"]
    assert message in rejected(capsys, "train", *argv, *device, *recipe)


def test_out_that_is_a_file_is_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    assert "--out file is a file" in rejected(capsys, "train", TASK, *SMALL, "--out", "file")


def test_a_stalled_run_exits_with_1_and_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", f"{TASKS}:diverging", "--device", "cpu", "--recipe", "fp32", "--out", "run"]
    code, data, err = run_json(capsys, *argv)
    assert code == 1 and "training-stalled" in {finding["rule"] for finding in data["findings"]}
    assert "training stalled" in err and "narrowgauge train --resume run" in err


def test_sigterm_saves_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGTERM while training saves a checkpoint; a second process on the same run is rejected."""
    steps = "100000"
    program = ["train", "--device", "cpu", "--json"]
    settings = ["--recipe", "fp32", "--steps", steps, "--out", "run", "--eval-every", "0", "--checkpoint-every", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with forked.start_cli(
        [*program, TASK, *settings], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        while not (line := process.stderr.readline()).startswith("step 1/"):
            assert line, "it exited before training"
        second = rejected(capsys, "train", "--device", "cpu", "--json", "--resume", "run")
        assert f"run folder run is in use by process {process.pid}" in second
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    data = json.loads(out)
    assert process.returncode == 0 and data["interrupted"] is True and 1 <= data["steps"] < int(steps)
    assert "narrowgauge train --resume run" in err
    assert checkpoint.list_steps(tmp_path / "run") == [data["steps"]]
    assert list(record.read(tmp_path / "run"))[-1]["interrupted"] is True


def test_predict_and_its_former_name(capsys: pytest.CaptureFixture[str]) -> None:
    for number, option in enumerate(("--predict", "--foretell")):
        code, data, err = run_json(capsys, "train", TASK, *SMALL, "--out", f"run{number}", option)
        formats = ["fp16", "fp8", "mxfp8", "mxfp4", "nvfp4"]
        assert code == 0 and [one["format"] for one in data["predictions"]] == formats
        assert "  fp16        would work" in err and "  nvfp4       " in err and "flushed to zero" in err
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert "--predict" in text and "foretell" not in text
