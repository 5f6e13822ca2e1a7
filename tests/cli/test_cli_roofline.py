"""``narrowgauge roofline``: its JSON, several GPUs at once, costs."""

from __future__ import annotations

import json

import pytest

from narrowgauge import cli, hardware
from narrowgauge.cli.roofline import collapse
from narrowgauge.forecast.time import measure
from narrowgauge.forecast.time.roofline import Layer

SMALL = ["roofline", "gpt:2x128", "--batch", "4", "--context", "64", "--device", "cpu"]


def test_json_has_the_documented_fields(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpu", "h200,a100", "--recipes", "bf16", "--price", "2", "--tokens", "3.6e6", "--json"]
    assert cli.main([*SMALL, *options]) == 0
    data = json.loads(capsys.readouterr().out)
    row = data["recipes"]["bf16"]
    assert {"step_ms", "tokens_per_s", "bound", "mfu", "by_kind"} <= set(row) and row["bound"] == "launches"
    assert row["tokens_per_s"] == pytest.approx(256 / row["step_ms"] * 1e3)
    assert row["cost"] == pytest.approx(2 * 3.6e6 / row["tokens_per_s"] / 3600) and row["measured_ms"] is None
    assert data["gpu"] == "H200" and data["ridge"]["bf16"] == pytest.approx(206.125)
    assert list(data["gpus"]) == ["H200", "A100-SXM4-80GB"]
    assert data["gpus"]["A100-SXM4-80GB"]["source"] == "from an H200's shares of the peak"
    where = ("blocks.*.qkv", "forward", "product")
    layer = next(one for one in data["layers"] if (one["path"], one["phase"], one["kind"]) == where)
    assert layer["flops"] == 2 * 2 * 256 * 128 * 384 and layer["bound"] in ("compute", "memory", "launch")
    assert layer["intensity"] == pytest.approx(layer["flops"] / layer["bytes"]) and layer["recipe"] == "bf16"
    assert data["attention"]["backend"] == "cudnn" and data["attention"]["plain_ms"] > 0
    assert {saving["name"] for saving in data["fusions"]} >= {"activations", "head and loss"}


def test_the_text_names_layers_bounds_and_what_fusions_save(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--recipes", "fp8", "--layers", "5"]) == 0
    text = capsys.readouterr().out
    assert "H200: 132 SMs" in text and "fp8 1979 (412)" in text and "blocks.*" in text
    assert "more)" in text and "ms unfused, with a peak of" in text and "fused head and loss" in text
    assert cli.main([*SMALL, "--recipes", "fp8", "--quick"]) == 0
    assert "unfused" not in capsys.readouterr().out


def test_a_step_that_does_not_fit_is_said_not_to(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["roofline", "gpt:2x4096", "--batch", "512", "--context", "1024", "--device", "cpu", "--quick"]
    assert cli.main([*large, "--recipes", "bf16", "--gpu", "l4"]) == 0
    text = capsys.readouterr().out
    assert "bf16 does NOT fit into L4" in text and "narrowgauge memory says what to change" in text
    assert cli.main([*SMALL, "--recipes", "bf16", "--quick", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["recipes"]["bf16"]
    assert row["fits"] is True and row["peak"] > 0 and row["notes"] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "h200,b900"], "unknown GPU 'b900': expected one of"),
        (["--price", "-1"], "--price -1 must be a positive number"),
        (["--tokens", "inf"], "--tokens inf must be a positive number"),
        (["--recipes", "fp8", "--gpu", "v100"], "needs 8.9 or later"),
    ],
)
def test_bad_input_is_rejected_with_one_clear_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*SMALL, *options]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("narrowgauge:")]
    assert len(lines) == 1 and message in lines[0]


def test_with_the_gpu_installed_it_prints_its_own_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    h200 = hardware.describe_gpu("NVIDIA H200", 0, (9, 0), 2**37)
    monkeypatch.setattr(hardware, "detect", lambda text=None: h200)
    monkeypatch.setattr(measure, "measure_roofs", lambda device: {"copy": 4.19e12, "bf16": 772e12, "fp8": 1398e12})
    monkeypatch.setattr(measure, "measure_calls", lambda costs, *_: {cost.op.call: 2 * cost.seconds for cost in costs})
    monkeypatch.setattr(measure, "measure_run", lambda *_, **__: measure.MeasuredRun(peak_bytes=1, step_ms=4.0))
    options = ["roofline", "gpt:2x128", "--batch", "4", "--context", "64", "--recipes", "bf16", "--quick"]
    assert cli.main([*options, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    row = data["recipes"]["bf16"]
    assert row["measured_ms"] == 4.0 and row["error"] == pytest.approx(row["step_ms"] / 4.0 - 1)
    assert data["source"] == "measured on this GPU" and data["roofs"]["bf16"] == 772e12
    product = next(one for one in data["layers"] if one["path"] == "blocks.*.up" and one["kind"] == "product")
    assert product["error"] == pytest.approx(-0.5)
    assert cli.main(options) == 0
    text = capsys.readouterr().out
    assert "measured copy: 4.19 T/s, 87% of the datasheet" in text and "-50%" in text
    assert cli.main([*options, "--no-measure", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipes"]["bf16"]["measured_ms"] is None


def test_identical_blocks_become_one_row() -> None:
    def layer(path: str, ms: float) -> Layer:
        return Layer(path=path, kind="product", phase="forward", format="bf16", count=1, flops=10.0, bytes=5, ms=ms,
                     bound="compute")  # fmt: skip

    found = collapse([layer("blocks.0.up", 1.0), layer("head", 5.0), layer("blocks.11.up", 2.0), layer("v2.up", 0.5)])
    assert [(one.path, one.count, one.ms) for one in found] == [
        ("head", 1, 5.0),
        ("blocks.*.up", 2, 3.0),
        ("v2.up", 1, 0.5),
    ]
    assert found[1].intensity == 2.0
