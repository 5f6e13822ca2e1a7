"""``narrowgauge bench --to-loss``: speed at equal loss beside the step times."""

import json

import pytest

from narrowgauge.cli import main

BENCH = ["bench", "gpt:1x64", "--context", "16", "--batch", "4", "--device", "cpu", "--steps", "1", "--rounds", "1"]
TRAIN = ["--to-loss", "--updates", "20", "--seeds", "2"]


def test_recipes_are_trained_to_the_loss_of_the_first(tmp_path, capsys):
    saved = tmp_path / "bench.json"
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 2000)
    command = [*BENCH, *TRAIN, "--recipes", "fp32,bf16,fp8", "--data", str(text), "--out", str(tmp_path / "runs")]
    assert main([*command, "--save", str(saved), "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(saved.read_text())
    assert [row["name"] for row in found["rows"]] == ["fp32", "bf16", "fp8"]
    trained = found["to_loss"]
    assert trained["reference"] == "fp32" and trained["steps"] == 20 and len(trained["losses"]) == 2
    assert list(trained["candidates"]) == ["bf16", "fp8"]
    for one in trained["candidates"].values():
        assert one["speed"]["step_ratio"] > 0 and len(one["losses"]) == one["seeds"] == 2 and one["diverged"] == 0
    runs = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/run.json")]
    assert len(runs) == 8 and all(str(text) in json.dumps(run) for run in runs), "6 runs and 2 shorter ones"
    main(command)
    out = capsys.readouterr().out
    assert "time to the final loss of fp32, runs of 20 updates" in out and out.count("cached") == 8
    assert "steps are" in out or "longer runs of the reference do not show a lower loss" in out


def test_a_benchmark_is_saved_before_runs_are_trained(tmp_path, capsys, monkeypatch):
    from narrowgauge.cli import bench_to_loss

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_to_loss, "train_to_loss", stop)
    saved = tmp_path / "bench.json"
    main([*BENCH, *TRAIN, "--recipes", "fp32,bf16", "--save", str(saved)])
    assert [row["name"] for row in json.loads(saved.read_text())["rows"]] == ["fp32", "bf16"]
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--to-loss", "--recipes", "bf16"], "--to-loss compares recipes with the first one, and bf16 is alone"),
        (["--to-loss", "--recipes", "bf16,nvfp4"], "emulated-nvfp4 is an emulation"),
        (["--to-loss", "--recipes", "fp32,bf16", "--seeds", "0"], "--seeds 0: expected auto, or a whole number"),
        (["--to-loss", "--recipes", "fp32,bf16", "--updates", "0"], "--updates 0: expected a whole number"),
        (["--to-loss", "--recipes", "fp32,bf16", "--margin", "2"], "--margin 2"),
        (["--to-loss", "--recipes", "fp32,bf16", "--budget", "-1"], "--budget -1"),
        (["--to-loss", "--recipes", "fp32,bf16", "--lr", "-1"], "--lr -1.0: expected a positive number"),
        (["--seeds", "3"], "--seeds is for runs that are trained: give --to-loss too, or omit it"),
        (["--updates", "3"], "--updates is for runs that are trained"),
        (["--to-loss", "--fit", "80GB"], "--to-loss does not go with --fit"),
        (["--to-loss", "--against", "x.json"], "--to-loss does not go with --against"),
        (["--data", "nothing-here.txt"], "nothing-here.txt"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(arguments, text, tmp_path, capsys):
    assert main([*BENCH, "--out", str(tmp_path), *arguments]) == 2
    found = capsys.readouterr()
    assert text in found.err and len(found.err.splitlines()) == 1 and not found.out, found


def test_a_model_has_no_data_to_train_on(capsys):
    model = ["bench", "--model", "transformers:GPT2LMHeadModel"]
    for more, text in ((["--to-loss"], "validate --model FOLDER --data FILE --time"), (["--data", "x"], "omit it")):
        assert main([*model, *more]) == 2
        error = capsys.readouterr().err
        assert text in error and len(error.splitlines()) == 1
