"""``narrowgauge formats``: JSON fields, a readable table, no torch import, fast."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from narrowgauge import cli
from narrowgauge.cli import terminal

FIELDS = {
    "bits",
    "exponent_bits",
    "mantissa_bits",
    "max",
    "smallest_normal",
    "smallest_subnormal",
    "epsilon",
    "has_nan",
}


def call(*arguments: str) -> int:
    """Run the verb and return its exit code."""
    return cli.main(["formats", *arguments])


def test_json_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--json", "1.2e-7", "inf") == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data["formats"]) == ["fp32", "tf32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"]
    assert all(set(f) >= FIELDS for f in data["formats"].values())
    assert (data["formats"]["tf32"]["bits"], data["formats"]["tf32"]["storage_bits"]) == (19, 32)
    assert list(data["block_formats"]) == ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "nvfp4"]
    nvfp4 = data["block_formats"]["nvfp4"]
    assert (nvfp4["element"], nvfp4["block"], nvfp4["scale"]) == ("fp4_e2m1", 16, "e4m3")
    assert (nvfp4["tensor_scale"], nvfp4["bits_per_element"]) == (True, 4.5)
    assert (nvfp4["numbers"], nvfp4["range_in_block"], nvfp4["decibels"]) == (15, 12.0, {"floor": 20.4})
    assert (nvfp4["smallest_scale"], nvfp4["largest_scale"]) == (2.0**-9, 448.0)
    mxfp8 = data["block_formats"]["mxfp8_e4m3"]
    assert (mxfp8["largest_element"], mxfp8["smallest_element"]) == (448.0, 2.0**-9)
    assert mxfp8["range_in_block"] == 448 * 2**9 and mxfp8["decibels"]["up"] > mxfp8["decibels"]["floor"]
    small, infinite = data["values"]
    assert small["value"] == 1.2e-7
    fp16 = small["stored"]["fp16"]
    assert (fp16["value"], fp16["bits"], fp16["state"]) == (2 * 2**-24, "0000000000000010", "subnormal")
    assert fp16["relative_error"] == pytest.approx(0.00659, rel=1e-3)
    assert infinite["value"] == "inf"
    assert infinite["stored"]["fp8_e4m3"]["value"] == "nan" and infinite["stored"]["fp8_e4m3"]["state"] == "overflow"
    fp4 = infinite["stored"]["fp4_e2m1"]
    assert (fp4["value"], fp4["bits"], fp4["state"], fp4["relative_error"]) == (6.0, "0111", "overflow", "inf")


@pytest.mark.parametrize("value", ["-1.5", "-1e-5", "-inf", "-0x1p-24", "-.5", "-nan", "-0"])
def test_negative_values_are_not_options(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(value, "7", "--json") == 0
    values = json.loads(capsys.readouterr().out)["values"]
    assert [entry["text"] for entry in values] == [value, "7"]


@pytest.mark.parametrize("rich", [True, False])
def test_the_table_shows_bits_and_explanations(
    rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not rich:
        from narrowgauge.cli import formats

        monkeypatch.setattr(terminal, "has_rich", lambda: False)
        monkeypatch.setattr(formats, "has_rich", lambda: False)
    elif not terminal.has_rich():
        pytest.skip("rich is not installed")
    assert call("1.2e-7", "500", "nan") == 0
    text = capsys.readouterr().out
    assert "0|00000|0000000010" in text
    assert "1.19209e-07" in text
    assert "subnormal: 2 × 2^-24, 2 of 11 bits left; 2^-25 and less becomes 0" in text
    assert "overflow: the largest number is 448; narrowgauge's FP8 casts saturate, to 448" in text
    assert "overflow: the largest number is 6; it always saturates, here to 6" in text
    assert "overflow: it has no NaN; it always saturates, here to 6" in text
    row = next(line.split() for line in text.splitlines() if line.split()[:1] == ["NVFP4"])
    cells = "NVFP4 FP4 E2M1 16 E4M3 FP32 4.5 15 1 to 12 2^-9 to 2^8.81 20.4"
    assert row == cells.split()
    assert max(map(len, text.splitlines())) <= 100


def test_without_values_only_the_formats_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    text = capsys.readouterr().out
    assert "FP8 E4M3" in text and "FP4 E2M1" in text and "MXFP8 E5M2" in text and "becomes" not in text


def test_invalid_values_give_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("1", "abc") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "narrowgauge: 'abc' is not a number: expected one such as 1.2e-7, -3, 0x1p-24, inf or nan\n"
    )


def test_it_is_fast_and_does_not_import_torch() -> None:
    program = (
        "import sys; from narrowgauge.cli import main; code = main(['formats', '1.2e-7']); "
        "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    times = []
    for _ in range(3):  # the best of three: the machine may be busy
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        times.append(time.perf_counter() - start)
        assert (done.returncode, done.stderr.strip()) == (0, "False")
    assert min(times) < 1.0
