"""``narrowgauge break``: lists its faults, runs one, rejects unknown ones."""

import json

import pytest

from narrowgauge.cli import main


def test_lists_its_faults(capsys):
    assert main(["break", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["faults"]) >= 14 and all(set(fault) == {"name", "about"} for fault in data["faults"])
    assert main(["break"]) == 0
    assert "fp8-stale-scale" in capsys.readouterr().out


def test_runs_a_fault_and_its_healthy_counterpart(capsys):
    assert main(["break", "nan-in-batch", "--json"]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["fault"] == "nan-in-batch" and data["caught"] and data["expected"] == ["bad-batch"]
    found = next(finding for finding in data["findings"] if finding["rule"] == "bad-batch")
    assert found["where"] == "step 31" and data["twin"]["findings"] == []
    assert "mistake" in captured.err and "healthy" in captured.err and "-> inspect that batch" in captured.err


def test_an_unknown_fault_is_a_one_line_error(capsys):
    assert main(["break", "nan-in-bach"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "did you mean nan-in-batch?" in err


@pytest.mark.parametrize("losses", [[], [1.0], [float("nan")], [3.0, 2.0, float("inf"), 1.0]])
def test_curve_has_one_bar_per_loss(losses):
    from narrowgauge.cli.break_ import _draw_curve

    assert len(_draw_curve(losses)) == len(losses)
