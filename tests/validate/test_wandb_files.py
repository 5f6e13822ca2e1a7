"""Logs of Weights & Biases: the CSV export of a chart, and the folder of offline runs that the package writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from narrowgauge import cli
from narrowgauge.errors import UsageError
from narrowgauge.validate.curves.external_logs import read_run, read_runs

CHART = """"Step","seed - 0 - train/loss","seed - 0 - train/loss__MIN","seed - 0 - train/loss__MAX",\
"seed - 1 - train/loss"
"1","3.5","3.4","9.9","3.6"
"2","3.0","2.9","9.9",""
"3","2.5","2.4","9.9","2.6"
"""
EVALUATION = '"Step","seed - 0 - eval/loss","seed - 1 - eval/loss"\n"3","2.75","2.85"\n'
SCRIPT = """
import math, sys, wandb
quiet = wandb.Settings(console="off", silent=True, disable_git=True, init_timeout=300)
for name in ("first", "second"):
    run = wandb.init(dir=sys.argv[1], mode="offline", project="p", name=name, reinit="create_new", settings=quiet)
    for step in range(int(sys.argv[2])):
        values = {"train/loss": 3.0 / (step + 1) + (name == "second"), "note": "text", "deep": {"inside": step}}
        if step % 10 == 9:
            values["eval/loss"] = 2.0 / (step + 1)
        if step == 4:
            values["grad_norm"] = math.nan
        run.log(values, step=step)
    run.finish()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("wandb")
    place = tmp_path_factory.mktemp("project")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB__SERVICE_WAIT": "300"}
    subprocess.run([sys.executable, "-c", SCRIPT, str(place), "800"], check=True, env=environment, capture_output=True)
    return place / "wandb"


def test_the_export_of_a_chart_has_one_run_per_column(tmp_path: Path) -> None:
    (tmp_path / "chart.csv").write_text(CHART)
    first, second = read_runs(tmp_path / "chart.csv")
    assert (first.name, second.name) == ("seed - 0", "seed - 1")
    assert first.loss.tag == "train/loss" and first.loss.values.tolist() == [3.5, 3.0, 2.5], "not the bounds"
    assert second.loss.steps.tolist() == [1, 3] and second.eval is None


def test_two_charts_of_the_same_runs_are_joined(tmp_path: Path) -> None:
    (tmp_path / "wandb_export_1.csv").write_text(CHART)
    (tmp_path / "wandb_export_2.csv").write_text(EVALUATION)
    first, second = read_runs(tmp_path)
    assert first.eval is not None and first.eval.values.tolist() == [2.75]
    assert second.eval is not None and second.eval.steps.tolist() == [3]


def test_a_table_with_a_dash_in_one_column_is_plain_csv(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,loss,a - b\n1,2.0,7\n2,1.0,7\n")
    assert read_run(tmp_path / "log.csv").loss.values.tolist() == [2.0, 1.0]


def test_offline_runs_of_the_package_are_read(folder: Path) -> None:
    runs = read_runs(folder)
    assert [run.name for run in runs] == ["first", "second"], "latest-run is a link, not a third run"
    for number, run in enumerate(runs):
        assert run.loss.tag == "train/loss" and run.loss.by == "_step"
        assert run.loss.steps.tolist() == list(range(800)), "records continue over blocks of 32 KiB"
        assert run.loss.values == pytest.approx([3.0 / (step + 1) + number for step in range(800)])
        assert run.eval is not None and run.eval.steps.tolist() == list(range(9, 800, 10))
    assert read_run(next(folder.glob("offline-run-*"))).name in ("first", "second")
    assert read_run(next(folder.glob("offline-run-*/*.wandb")), "deep/inside").loss.values[-1] == 799


def test_an_unfinished_file_is_read_as_far_as_it_goes(folder: Path, tmp_path: Path) -> None:
    whole = next(folder.glob("offline-run-*/*.wandb")).read_bytes()
    for cut in (40000, 40003, len(whole) // 2 + 5):
        (tmp_path / "run-1.wandb").write_bytes(whole[:cut])
        steps = read_run(tmp_path / "run-1.wandb").loss.steps
        assert 0 < len(steps) < 800 and steps.tolist() == list(range(len(steps)))


def test_validate_compares_offline_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (str(one) for one in sorted(folder.glob("offline-run-*")))
    cli.main(["validate", "--curves", first, second, "--json"])
    found = json.loads(capsys.readouterr().out)
    (candidate,) = found["candidates"].values()
    assert candidate["pairs"][0]["final"][0] is not None


@given(st.binary(max_size=200))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    for start in (b"", b":W&B\xe1\xbe\x00", b":W&B\xe1\xbe\x00\x00\x00\x00\x00" + bytes([len(content)]) + b"\x00\x01"):
        (tmp_path / "run-x.wandb").write_bytes(start + content)
        with pytest.raises(UsageError):
            read_run(tmp_path / "run-x.wandb")
