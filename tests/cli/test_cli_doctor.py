"""``narrowgauge doctor``: it checks the real machine, and a failing part is a result, not a crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from narrowgauge import cli
from narrowgauge.cli import doctor
from narrowgauge.hardware import Device, describe_gpu, detect


def cpu(*features: str) -> Device:
    native = ("fp32", "bf16") if features else ("fp32",)
    return Device(kind="cpu", name="some CPU", torch_device="cpu", capability=None, memory_bytes=None, native=native,
                  gpu=None, features=features)  # fmt: skip


def test_json_has_the_documented_fields(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = cli.main(["doctor", "--json", "--device", "cpu", "--out", str(tmp_path / "not" / "there")])
    data = json.loads(capsys.readouterr().out)
    machine = detect("cpu")
    assert code == 0, [check for check in data["checks"] if not check["ok"]]
    assert data["device"] == machine.name and data["native"] == list(machine.native)
    assert data["recipe"] == ("bf16" if "bf16" in machine.native else "fp32")
    assert machine.name in data["reason"]
    checks = {check["name"]: check for check in data["checks"]}
    assert {"python", "torch", "rich", "fp32 product", "bf16 product", "training step", "disk"} <= set(checks)
    assert all(set(check) == {"name", "ok", "detail", "needed"} for check in data["checks"])
    assert "FLOP/s" in checks["fp32 product"]["detail"]
    assert str(tmp_path) in checks["disk"]["detail"]  # the nearest folder that exists
    assert data["cores"] >= 1 and data["devices"][-1] == "cpu"


def test_the_text_names_device_recipe_and_each_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(doctor.OPTIONAL_LIBRARIES, "no_such_library", "this test")
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert detect("cpu").name in text
    assert "Recipe   " in text and "training step" in text
    assert "not installed; it is for this test" in text
    assert "Everything needed works." in text


def test_a_missing_needed_library_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "NEEDED_LIBRARIES", ("numpy", "no_such_library"))
    assert cli.main(["doctor", "--device", "cpu"]) == 1
    assert "Needed and not working: no_such_library." in capsys.readouterr().out


def test_a_device_that_does_not_exist_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--device", "tpu"]) == 2
    assert capsys.readouterr().err == "narrowgauge: unknown device 'tpu': expected cpu, cuda or cuda:N\n"


def test_any_error_of_a_check_is_its_result() -> None:
    def explode() -> str:
        raise RuntimeError("no kernel image\nand a page of more")

    assert doctor.attempt("part", explode, needed=False) == doctor.Check(
        "part", False, "RuntimeError: no kernel image", False
    )


def test_a_rate_above_the_datasheet_is_an_error() -> None:
    h200 = describe_gpu("NVIDIA H200", 0, (9, 0), 2**37)
    assert doctor.judge_rate("bf16", 700e12, 50e12, h200) == (
        "700 TFLOP/s, 14 x FP32, 71% of the datasheet's 989 TFLOP/s"
    )
    with pytest.raises(doctor.Failure, match="above the 989 TFLOP/s of NVIDIA H200 datasheet"):
        doctor.judge_rate("bf16", 1000e12, 50e12, h200)


def test_rates_of_unknown_hardware_have_no_comparison() -> None:
    assert doctor.judge_rate("fp32", 5e10, None, cpu()) == "50 GFLOP/s"
    assert "0.1 x FP32; not native" in doctor.judge_rate("bf16", 5e9, 5e10, cpu())
    assert doctor.judge_rate("bf16", 2e11, 5e10, cpu("amx_bf16")) == "200 GFLOP/s, 4 x FP32"


def test_an_old_python_or_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(doctor.Failure, match=r"3\.11 or later is needed"):
        doctor._python((3, 10))
    monkeypatch.setattr(doctor, "LEAST_DISK_BYTES", 1 << 62)
    with pytest.raises(doctor.Failure, match=r"free in .*; checkpoints need"):
        doctor._disk(tmp_path)
