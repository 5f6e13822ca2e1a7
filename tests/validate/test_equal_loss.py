"""Speed at equal loss: found for curves whose answer is known, with intervals that cover it as often as they say."""

import json
import math

import numpy as np
import pytest

from narrowgauge.cli import main
from narrowgauge.validate.statistics.equal_loss import SHARE, compare_at_equal_loss


def final_loss(steps, behind=0.0):
    """A loss that falls with the length of a run; a candidate that is behind learns from fewer steps."""
    return 2.0 + 4.0 * (steps * (1 - behind)) ** -0.3


def make_losses(rng, seeds, behind, noise, steps=2000):
    """Final losses of reference, candidate and shorter runs: noise of seeds, and a fifth of it for each run."""
    shared = rng.normal(0, noise, seeds)
    return [
        [value + shift + rng.normal(0, noise / 5) for shift in shared]
        for value in (final_loss(steps), final_loss(steps, behind), final_loss(SHARE * steps))
    ]


@pytest.mark.parametrize("behind", [0.0, 0.02, 0.1, -0.05])
def test_the_known_answer_is_found(behind):
    losses = make_losses(np.random.default_rng(0), 3, behind, 0.0)
    found = compare_at_equal_loss(*losses, [150.0] * 4, [100.0] * 4)
    assert found.step_ratio == pytest.approx(1.5)
    assert found.steps_needed == pytest.approx(1 / (1 - behind), rel=0.01)
    assert found.ratio == pytest.approx(1.5 * (1 - behind), rel=0.01)
    assert found.interval == pytest.approx((found.ratio, found.ratio))
    beside = found.beside_plain([150.0] * 4, [165.0] * 4)  # the reference is already faster than PyTorch alone
    assert beside.plain_ratio == pytest.approx(1.1 * found.ratio) and beside.ratio == found.ratio
    assert beside.reason.endswith("times as fast as PyTorch alone")


@pytest.mark.parametrize(
    ("shorter", "of_losses", "of_times", "rounds"),
    [(5, 0.005, 0.01, 6), (3, 0.005, 0.01, 6), (5, 1e-5, 0.03, 6), (5, 1e-5, 0.03, 20)],
)
def test_intervals_cover_the_answer_as_often_as_they_say(shorter, of_losses, of_times, rounds):
    rng, behind, hits, runs = np.random.default_rng(1), 0.03, 0, 600
    for _ in range(runs):
        losses = make_losses(rng, 5, behind, of_losses)
        losses[2] = losses[2][:shorter]
        times = (
            [150 * math.exp(rng.normal(0, of_times)) for _ in range(rounds)],
            [100 * math.exp(rng.normal(0, of_times)) for _ in range(rounds)],
        )
        low, high = compare_at_equal_loss(*losses, *times).interval
        hits += low <= 1.5 * (1 - behind) <= high
    assert 0.87 < hits / runs < 0.97  # 0.90, with 600 runs


def test_without_an_answer_it_says_why():
    flat = [2.0, 2.1, 1.9]
    found = compare_at_equal_loss(flat, flat, [2.05, 1.95, 2.0], [2.0], [1.0])
    assert found.ratio is None and found.interval is None and found.step_ratio == 2.0
    assert "longer runs of the reference do not show a lower loss" in found.reason
    found = compare_at_equal_loss([2.0], [math.nan], [2.2], [2.0], [1.0])
    assert found.ratio is None and "no seed" in found.reason and found.beside_plain([1.0], [2.0]) == found
    found = compare_at_equal_loss([2.0], [2.01], [2.2], [2.0], [1.0])
    assert found.interval is None and found.ratio < 2.0 and "one seed" in found.reason


def test_validate_measures_it(tmp_path, capsys):
    command = ["validate", "gpt:1x64", "--reference", "fp32", "--candidates", "bf16", "--steps", "20", "--seeds", "2"]
    command += ["--device", "cpu", "--no-layers", "--time", "--out", str(tmp_path)]
    assert main([*command, "--json"]) in (0, 1)
    speed = json.loads(capsys.readouterr().out)["candidates"]["bf16"]["speed"]
    assert speed["step_ratio"] > 0 and speed["slope"] > 0 and speed["ratio"] > 0
    low, high = speed["interval"]
    assert low <= speed["ratio"] <= high and speed["plain_ratio"] > 0
    main(command)
    out = capsys.readouterr().out
    assert "12 steps: loss" in out and "cached" in out and "times as fast at equal loss, between" in out


def test_validate_reads_the_users_data(tmp_path, capsys):
    """And trains again if the data change, but not if they stay the same."""
    text = tmp_path / "text.txt"
    command = ["validate", "gpt:2x64", "--candidates", "bf16", "--steps", "3", "--seeds", "1", "--no-layers"]
    command += ["--device", "cpu", "--out", str(tmp_path / "runs"), "--data", str(text), "--json"]
    losses = []
    for content in ("to be or not to be " * 4000, None, "abcdefghijklmnop" * 9000):
        if content is not None:
            text.write_text(content)
        assert main(command) in (0, 1)
        losses.append(json.loads(capsys.readouterr().out)["losses"])
    assert losses[0] == losses[1] != losses[2]
    assert main(["validate", "digits", "--candidates", "bf16", "--data", str(text)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_emulation_has_no_speed(capsys):
    assert main(["validate", "gpt:2x64", "--candidates", "nvfp4", "--time"]) == 2
    assert "--time: emulated-nvfp4 is an emulation" in capsys.readouterr().err


def test_runs_of_one_step_have_no_shorter_ones():
    """``validate --time --steps 1``: 60% of one step, rounded, is one step."""
    found = compare_at_equal_loss([2.0, 2.1], [2.0, 2.1], [2.0, 2.1], [2.0, 2.0], [1.0, 1.0], share=1.0)
    assert found.step_ratio == pytest.approx(2) and found.ratio is None and "one step" in found.reason
