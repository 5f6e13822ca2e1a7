"""Records written before kinds and fields were renamed still render."""

import json
from pathlib import Path

import example_run

from narrowgauge.report.run_data import RunData
from narrowgauge.runs import record
from narrowgauge.runs.result import Result

PREDICTION = {"format": "fp16", "survives": False, "recipe": "fp16[keep=a]", "loss_scale": 8.0,
              "breaks": [{"module": "a", "kind": "activation", "detail": "too large"}]}  # fmt: skip
FINDING = {"rule": "underflow", "severity": "serious", "where": "a", "detail": "d", "fix": "f"}


def describe(folder: Path, *events: dict[str, object]) -> dict[str, object]:
    example_run.write_run(folder, 5, end=False)
    with (folder / record.EVENTS).open("a") as file:
        file.writelines(json.dumps({"step": 5, **event}) + "\n" for event in events)
    data = RunData(folder)
    data.update()
    assert data.damaged == 0
    return data.describe(100, 10**5, 100)


def test_an_old_record_describes_the_same_run(tmp_path: Path) -> None:
    old = describe(
        tmp_path / "old",
        {"kind": "foretelling", **PREDICTION},
        {"kind": "finding", **FINDING, "consequence": "it stops learning"},
    )
    new = describe(
        tmp_path / "new",
        {"kind": "prediction", **PREDICTION},
        {"kind": "finding", **FINDING, "why": "it stops learning"},
    )
    assert old["predictions"] == new["predictions"] and len(old["predictions"]) == 1
    assert old["findings"] == new["findings"] and "it stops learning" in json.dumps(old["findings"])


def test_a_prediction_tells_why_a_format_is_not_used(tmp_path: Path) -> None:
    found = describe(tmp_path / "new", {"kind": "prediction", **PREDICTION, "unused": "7 inputs are too few"})
    assert found["predictions"][0]["unused"] == "7 inputs are too few"  # type: ignore[index]
    old = describe(tmp_path / "old", {"kind": "prediction", **PREDICTION})
    assert old["predictions"][0]["unused"] == ""  # type: ignore[index]


def test_an_old_summary_is_read() -> None:
    end = {"run": "run", "recipe": "fp32", "step": 3, "steps": 3, "parameters": 9}
    result = Result.from_event({**end, "foretold": [PREDICTION], "findings": [{**FINDING, "consequence": "c"}]})
    assert result.predictions == [PREDICTION] and result.findings[0].why == "c"
    assert Result.from_event(result.describe()) == result


def test_resuming_removes_predictions_of_either_name(tmp_path: Path) -> None:
    describe(tmp_path, {"kind": "foretelling", **PREDICTION}, {"kind": "prediction", **PREDICTION})
    record.truncate_after(tmp_path, 5)
    assert not {"foretelling", "prediction"} & {event["kind"] for event in record.read(tmp_path)}
