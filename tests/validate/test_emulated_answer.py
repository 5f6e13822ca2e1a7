"""Would it train in NVFP4? A verdict in a sentence, which says that it is emulated and claims no speed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

import narrowgauge as ng
from narrowgauge import cli
from narrowgauge.recipe import EMULATED, NAMED, find_emulation
from narrowgauge.validate.emulated_answer import make_answer
from narrowgauge.validate.statistics.verdict import judge

REFERENCE = [2.0, 2.1, 2.2, 2.05, 2.15]
CASES: list[tuple[list[float], str]] = [
    (
        [x * 1.0005 for x in REFERENCE],
        "yes, in runs of 1,500 steps: equivalent compared with fp32; gap +0.050%, interval +0.0",
    ),
    (
        [x * (0.98 + i / 5000) for i, x in enumerate(REFERENCE)],
        "yes, in runs of 1,500 steps: better compared with fp32; gap -1.",
    ),
    (
        [x * (1.03 + i / 5000) for i, x in enumerate(REFERENCE)],
        "no, in runs of 1,500 steps: worse compared with fp32; gap +3.",
    ),
    ([2.2, 1.9, 2.4, 2.0, 2.2], "not decided, in runs of 1,500 steps: the gap is between"),
    ([math.nan] * 5, "no, in runs of 1,500 steps: worse compared with fp32; 5 of 5 runs diverged"),
]


@pytest.mark.parametrize(("losses", "wanted"), CASES)
def test_each_verdict_is_an_answer(losses: list[float], wanted: str) -> None:
    verdict = judge(REFERENCE, losses)
    answer = make_answer("emulated-nvfp4[hadamard=random]", verdict, "fp32", 1500)
    assert answer is not None and answer.startswith(f"Would it train in NVFP4? {wanted}")
    assert "5 pairs, margin 0.50%" in answer
    assert "Emulated (emulated-nvfp4[hadamard=random])" in answer and "nothing about its speed" in answer
    assert make_answer("bf16", verdict, "fp32", 1500) is None


def test_a_single_pair_decides_nothing() -> None:
    answer = make_answer("emulated-mxfp4", judge([2.0], [2.0]), "fp32", 10)
    assert answer is not None
    wanted = "Would it train in MXFP4? not decided, in runs of 10 steps: a single pair of runs does not show the noise"
    assert answer.startswith(wanted) and "1 pair, margin" in answer


def test_which_recipes_emulate() -> None:
    for name in EMULATED:
        title = NAMED[name].emulate.upper()
        short = name.removeprefix("emulated-")
        for text in (name, short, f"{name}[keep=head]", f"{short}@task.py:make", f" {short} "):
            assert find_emulation(text) == title
    assert find_emulation("bf16[checkpoint=full, emulate=nvfp4]") == "NVFP4"
    assert find_emulation("bf16@emulated-nvfp4.py:make") is None
    for text in ("bf16", "fp8", "auto", "", "no recipe[", "bf16[keep=emulate]", "emulated-nvfp5"):
        assert find_emulation(text) is None
    assert find_emulation(str(ng.recipe("mxfp8[gradients_format=e5m2]"))) == "MXFP8"


def test_one_command_gives_a_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    command = ["validate", "gpt:1x64", "--candidates", "bf16,nvfp4", "--steps", "4", "--batch", "2", "--context", "32"]
    command += ["--seeds", "3", "--device", "cpu", "--out", str(tmp_path)]
    code = cli.main([*command, "--json"])
    found = json.loads(capsys.readouterr().out)["candidates"]
    assert (found["bf16"]["emulated"], found["bf16"]["answer"]) == (None, None)
    nvfp4 = found["emulated-nvfp4"]
    assert nvfp4["emulated"] == "NVFP4" and nvfp4["speed"] is None
    assert "Would it train in NVFP4? " in nvfp4["answer"] and f"{nvfp4['gap']:+.3%}" in nvfp4["answer"]
    assert cli.main([*command, "--no-layers"]) == code  # cached
    text = capsys.readouterr().out
    assert nvfp4["answer"] in text.replace("\n", " ") or nvfp4["answer"][:60] in text
    assert cli.main([*command, "--time"]) == 2


def test_the_summary_of_a_run_claims_no_speed(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    command = ["train", "gpt:1x64", "--steps", "2", "--batch", "2", "--context", "32", "--device", "cpu", "--predict"]
    assert cli.main([*command, "--recipe", "nvfp4", "--out", str(tmp_path / "a")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "emulated NVFP4: its numbers on any machine, nothing about the speed" in text
    assert "tokens/s of the emulation" in text
    assert cli.main([*command, "--recipe", "bf16", "--out", str(tmp_path / "b")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in ("mxfp8", "mxfp4", "nvfp4"):
        assert f'to test it: narrowgauge validate TASK --candidates "emulated-{name}" (emulated)' in text
    assert "of the emulation" not in text and "flushed to zero" in text
    assert cli.main([*command, "--recipe", "bf16", "--out", str(tmp_path / "c"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["format"] for one in found["predictions"]] == ["fp16", "fp8", "mxfp8", "mxfp4", "nvfp4"]
    assert len(found["predictions"][-1]["tensors"]) == 4 * 6 and found["emulated"] is None


def test_a_resumed_run_may_ask_for_predictions(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    from narrowgauge.runs import record

    command = ["train", "gpt:1x64", "--steps", "2", "--batch", "2", "--context", "32", "--device", "cpu"]
    assert cli.main([*command, "--recipe", "bf16", "--out", str(tmp_path / "a")]) == 0
    assert "mxfp4" not in capsys.readouterr().out
    kinds = [event["format"] for event in record.read(tmp_path / "a") if event["kind"] == "prediction"]
    assert kinds == ["fp16", "fp8"], "block formats are measured only if asked for"
    assert cli.main(["train", "--resume", str(tmp_path / "a"), "--predict"]) == 0
