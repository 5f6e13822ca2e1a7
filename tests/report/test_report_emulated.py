"""Runs and validations of emulated formats: the report says that they are emulated, and shows no speed of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import example_results
import example_run
import pytest

from narrowgauge.gauges.rules.predict_block_formats import predict_block_formats
from narrowgauge.gauges.watch.rounding_readings import RoundingReading
from narrowgauge.report import layer_table, pages
from narrowgauge.report.inputs import open_inputs
from narrowgauge.report.run_data import RunData
from narrowgauge.runs import record


def make_reading(module: str, format: str = "nvfp4", noise: float = 1.0, flushed: float = 70.0) -> RoundingReading:
    return RoundingReading(
        format=format, rule="floor", rounding="nearest", operand="input", product="output", module=module,
        nonzero=1000.0, flushed=flushed, saturated=30.0, lost=0.0, signal=100.0, noise=noise,
    )  # fmt: skip


def write_run(folder: Path, recipe: str, *, rounding: list[Any] | None = None, predicted: bool = False) -> Path:
    example_run.write_run(folder, 20, recipe=recipe, end=False)
    names = ("blocks.0.qkv", "blocks.0.up")
    with record.Record(folder) as book:
        for step, noise in ((21, 1.0), (22, 4.0)):
            own = [make_reading(name, noise=noise).as_event() for name in names] if rounding is None else rounding
            readings = example_run.readings(names, 1.0)
            book.append("look", step, applied=True, readings=readings, rounding=own)
        if predicted:
            found = predict_block_formats([[make_reading("blocks.0.qkv", name) for name in ("mxfp4", "nvfp4")]])
            for name in ("fp16", "fp8"):
                fields = {"survives": True, "recipe": name, "loss_scale": None, "breaks": [], "updates": 22}
                book.append("prediction", 22, format=name, **fields)
            for one in found:
                book.append("prediction", 22, **one.as_event())
        book.append("end", 22, run=str(folder), recipe=recipe, tokens_per_s=5e4, unit="token", interrupted=False)
    return folder


def read(folder: Path) -> tuple[RunData, dict[str, Any]]:
    found = open_inputs([folder])
    return found.runs[0], pages.collect(found)


@pytest.mark.parametrize(
    "recipe", ["emulated-nvfp4", "emulated-nvfp4[hadamard=random]", "nvfp4", "bf16[emulate=nvfp4]"]
)
def test_an_emulated_run_says_so_and_shows_no_speed(recipe: str, tmp_path: Path) -> None:
    run, data = read(write_run(tmp_path / "run", recipe))
    shown = data["runs"][0]
    assert run.emulated == shown["emulated"] == "NVFP4"
    assert shown["summary"]["tokens_per_s"] is None and "tokens_per_s" not in shown["curves"]
    assert "loss" in shown["curves"]
    (note,) = [one for one in data["summary"]["findings"] if one["rule"] == "emulated"]
    assert (
        "NVFP4" in note["detail"] and "an emulation" in note["detail"] and "nothing about the speed" in note["detail"]
    )
    assert note["severity"] == "note"


def test_other_runs_keep_their_speed(tmp_path: Path) -> None:
    _, data = read(write_run(tmp_path / "run", "bf16", rounding=[]))
    assert data["runs"][0]["summary"]["tokens_per_s"] and "tokens_per_s" in data["runs"][0]["curves"]
    assert not [one for one in data["summary"]["findings"] if one["rule"] == "emulated"]


def test_the_table_of_layers_has_the_worst_of_each(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "emulated-nvfp4")
    (table,) = layer_table.build_tables(open_inputs([tmp_path / "run"]))
    titles = [column["title"] for column in table["columns"]]
    assert "NVFP4 emulated: lowest dB of an operand" in titles and "NVFP4 emulated: most flushed" in titles
    (row,) = [row for row in table["rows"] if row["module"] == "blocks.0.qkv"]
    assert row["dB NVFP4 emulated"] == pytest.approx(13.98, abs=0.01)
    assert row["flushed NVFP4 emulated"] == pytest.approx(0.07)


def test_all_predictions_are_shown(tmp_path: Path) -> None:
    _, data = read(write_run(tmp_path / "run", "bf16", predicted=True))
    found = {one["format"]: one for one in data["runs"][0]["predictions"]}
    assert list(found) == ["fp16", "fp8", "mxfp4", "nvfp4"]
    assert found["fp8"]["measured"] == "" and found["nvfp4"]["recipe"] == "emulated-nvfp4"
    assert "1 operands at 20.0 dB in the median (normal values have 20.4)" in found["nvfp4"]["measured"]
    assert "7.0% flushed to zero, 3.0% saturated" in found["nvfp4"]["measured"]
    (table,) = layer_table.build_tables(open_inputs([tmp_path / "run"]))
    titles = [column["title"] for column in table["columns"]]
    assert "NVFP4 predicted: lowest dB of an operand" in titles
    assert not any("emulated" in title for title in titles), "readings for predictions are no emulation"


@pytest.mark.parametrize(
    "wrong", [[1], ["nvfp4"], None, "nvfp4", ["x"] * 12, [*make_reading("m").as_event()[:-1], "x"]]
)
def test_damaged_readings_are_counted(wrong: Any, tmp_path: Path) -> None:
    run, data = read(write_run(tmp_path / "run", "emulated-nvfp4", rounding=[wrong, make_reading("good").as_event()]))
    assert run.damaged == 2 and "good" in run.rounding.emulated
    assert data["runs"][0]["damaged"] == 2


@pytest.mark.parametrize("verdict", ["worse", "equivalent"])
def test_a_validation_answers_the_question(verdict: str, tmp_path: Path) -> None:
    data = example_results.validation(verdict)
    name = next(iter(data["candidates"]))
    answer = "Would it train in NVFP4? no: worse compared with fp32. Emulated (emulated-nvfp4)"
    data["candidates"]["emulated-nvfp4"] = data["candidates"].pop(name) | {"emulated": "NVFP4", "answer": answer}
    (path,) = example_results.save(tmp_path, validation=data)
    found = pages.collect(open_inputs([path]))
    assert found["validations"][0]["candidates"]["emulated-nvfp4"]["emulated"] == "NVFP4"
    assert any(answer in one["detail"] for one in found["summary"]["findings"])
    page = pages.render(found)
    assert "Would it train in NVFP4? no" in page


def test_the_report_needs_no_torch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "emulated-nvfp4", predicted=True)
    program = (
        "import sys, json; from pathlib import Path; from narrowgauge.report import pages\n"
        f"pages.write([Path({str(folder)!r})], Path({str(tmp_path)!r}))\n"
        "print(json.dumps('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False
