"""``narrowgauge break``: lists its faults, runs one, refuses what it does not know."""

import json

import pytest

from narrowgauge.cli import main


def test_lists_its_faults(capsys):
    assert main(["break", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["faults"]) >= 14 and all(set(fault) == {"name", "about"} for fault in data["faults"])
    assert main(["break"]) == 0
    assert "fp8-stale-scale" in capsys.readouterr().out


def test_runs_one_and_shows_both(capsys):
    assert main(["break", "nan-in-batch", "--json"]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["fault"] == "nan-in-batch" and data["caught"] and data["expected"] == ["bad-batch"]
    found = next(finding for finding in data["findings"] if finding["rule"] == "bad-batch")
    assert found["where"] == "step 31" and data["twin"]["findings"] == []
    assert "mistake" in captured.err and "healthy" in captured.err and "-> look at that batch" in captured.err


def test_an_unknown_fault_is_one_line(capsys):
    assert main(["break", "nan-in-bach"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "did you mean nan-in-batch?" in err


@pytest.mark.parametrize("losses", [[], [1.0], [float("nan")], [3.0, 2.0, float("inf"), 1.0]])
def test_curves(losses):
    from narrowgauge.cli.break_ import _curve

    assert len(_curve(losses)) == len(losses)
