"""``narrowgauge memory``: its JSON, what fits, and one clear line for invalid input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from narrowgauge import cli, hardware
from narrowgauge.cli.memory import LESSON, bar, gigabytes
from narrowgauge.forecast.memory.estimate import Memory, Moment
from narrowgauge.forecast.time import measure

SMALL = ["memory", "gpt:2x128", "--batch", "4", "--context", "64"]
PARTS = ("weights", "master", "gradients", "moments", "activations", "workspace")


def test_json_has_the_documented_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--json", "--recipes", "fp32,bf16-lean[gradients=released]", "--device", "cpu"]) == 0
    found = capsys.readouterr()
    data = json.loads(found.out)
    assert list(data["recipes"]) == ["fp32", "bf16-lean[gradients=released]"]
    for row in data["recipes"].values():
        assert sum(row[part] for part in PARTS) == row["total"] <= row["peak"]
        assert set(row["when"]) == {"phase", "module", "op", "share"} and row["largest"]["weights"] > 0
        assert row["fits"] is None and row["largest_batch"] is None and row["measured"] is None
    assert data["gpu"] == "H200" and data["batch"] == 4 and data["lesson"] is None
    assert "tracing two simulated steps" in found.err


def test_the_exit_code_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--recipes", "bf16", "--gpu", "h200"]) == 0
    text = capsys.readouterr().out
    assert "fits into H200 (151.40 GB); largest batch " in text and "[" in text and "in backward" in text
    large = ["memory", "gpt:2x128", "--batch", "1024", "--context", "1024", "--gpu", "t4", "--recipes", "fp32"]
    assert cli.main([*large, "--no-search", "--no-compile"]) == 1
    assert "does NOT fit into T4" in capsys.readouterr().out


def test_shards_and_accumulation_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--recipes", "bf16", "--shards", "4", "--accumulate", "2"]) == 0
    text = capsys.readouterr().out
    assert "a rank of 4" in text and "sharded over 4" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "h300"], "unknown GPU 'h300': expected one of V100"),
        (["--recipes", "fp9"], "unknown recipe 'fp9'"),
        (["--recipes", ""], "--recipes is empty"),
        (["--recipes", "fp8", "--gpu", "a100"], "fp8 needs 8.9 or later"),
        (["--shards", "0"], "shards=0 must be a whole number of at least 1"),
        (["--batch", "0"], "--batch 0: expected at least 1"),
    ],
)
def test_bad_input_is_rejected_with_one_clear_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*SMALL, *options]) == 2
    found = capsys.readouterr()
    lines = [line for line in found.err.splitlines() if line.startswith("narrowgauge:")]
    assert len(lines) == 1 and message in lines[0] and "Traceback" not in found.err


def test_default_recipes_are_those_that_the_gpu_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["memory", "digits", "--json", "--gpu", "a100", "--no-search"]) == 0
    assert list(json.loads(capsys.readouterr().out)["recipes"]) == ["fp32", "bf16", "bf16-lean"]


def test_a_users_own_task_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\nfrom narrowgauge import Task\n"
        "def task():\n"
        "    return Task(name='mine', model=lambda: torch.nn.Linear(64, 8), batch=lambda i, s: torch.zeros(16, 64),\n"
        "                loss=lambda model, x: model(x).sum())\n"
    )
    assert cli.main(["memory", f"{path}:task", "--json", "--recipes", "bf16"]) == 0
    assert json.loads(capsys.readouterr().out)["task"] == "mine"


def test_with_the_gpu_installed_it_prints_its_own_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    h200 = hardware.describe_gpu("NVIDIA H200", 0, (9, 0), 2**37)
    monkeypatch.setattr(hardware, "detect", lambda text=None: h200)
    monkeypatch.setattr(measure, "measure_run", lambda *_, **__: measure.MeasuredRun(peak_bytes=10**8, step_ms=1.0))
    assert cli.main([*SMALL, "--recipes", "bf16", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["recipes"]["bf16"]
    assert row["measured"] == 10**8 and row["error"] == pytest.approx(row["total"] / 1e8 - 1)
    assert cli.main([*SMALL, "--recipes", "bf16"]) == 0
    assert "measured 0.10 GB: the prediction is off by" in capsys.readouterr().out


def test_default_recipes_that_do_not_suit_the_task_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plain.py"
    path.write_text(
        "import torch\nfrom narrowgauge import Task\n"
        "def task():\n"
        "    return Task(name='plain', model=lambda: torch.nn.Linear(64, 8), batch=lambda i, s: torch.zeros(16, 64),\n"
        "                loss=lambda model, x: model(x).sum(),\n"
        "                optimizer=lambda model, rate: torch.optim.Rprop(model.parameters(), rate))\n"
    )
    assert cli.main(["memory", f"{path}:task", "--json"]) == 0
    found = capsys.readouterr()
    assert list(json.loads(found.out)["recipes"]) == ["fp32", "bf16", "fp8"]
    assert "bf16-lean: skipped: a lean recipe needs AdamW" in found.err
    assert cli.main(["memory", f"{path}:task", "--recipes", "bf16-lean"]) == 2


def test_the_textbook_estimate_adds_up() -> None:
    assert [sum(parts.values()) for parts in LESSON.values()] == [122, 117]


def test_a_bar_has_its_width_and_every_component_its_share() -> None:
    parts = dict.fromkeys(PARTS, 0) | {"weights": 50, "activations": 25, "workspace": 25}
    memory = Memory(
        recipe="bf16", batch=1, accumulate=1, shards=1, total=100, largest=parts, first_step=1, building=1, between=1,
        reserved=1, exact=True, when=Moment(phase="forward", module="", op="mm", share=0.5), **parts,
    )  # fmt: skip
    assert bar(memory, 8) == "wwwwaa.."
    assert str(memory.when) == "forward, outside of modules (mm)" and gigabytes(1.5e9) == "1.50 GB"
