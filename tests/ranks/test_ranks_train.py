"""Training on several ranks from the command line: equal losses, checkpoints for any number of ranks, no hangs."""

import contextlib
import io
import json
import os
import signal
import subprocess
import threading
import time

import pytest
import torch
from processes import run_ranks
from safetensors.torch import load_file

from narrowgauge.cli import main
from narrowgauge.optim import full_precision
from narrowgauge.parameters import is_sharded
from narrowgauge.ranks import init_model
from narrowgauge.ranks.world import join_world
from narrowgauge.runs import record
from narrowgauge.runs.checkpoints import checkpoint
from narrowgauge.runs.settings import restore_settings
from narrowgauge.runs.trainer import Observer, Trainer
from narrowgauge.tasks import find

TASK = ["gpt:2x64", "--context", "16", "--batch", "8", "--device", "cpu"]
STEPS = ["--steps", "4", "--eval-every", "2", "--checkpoint-every", "2"]


def cli(*arguments):
    """Return the exit code, stdout and stderr of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


def losses(folder, kind="step"):
    return [event["loss"] for event in record.read(folder) if event["kind"] == kind]


def masters(folder, step):
    """Load a checkpoint on these ranks, and save its full weights."""
    with join_world("cpu") as world:
        settings = restore_settings(record.read_configuration(folder)["settings"], parallel="fsdp")
        options = record.read_configuration(folder)["options"]
        trainer = Trainer(find("gpt:2x64", **options), settings, folder, Observer(), world)
        path = checkpoint.make_path(folder, step)
        saved = checkpoint.read(path, trainer.engine)
        trainer.engine.load_state_dict({**saved.state["engine"], "model": saved.weights})
        whole = full_precision(trainer.engine.inner)
        whole = {name: value.full_tensor() if is_sharded(value) else value for name, value in whole.items()}
        if world.is_first:
            torch.save(whole, folder / f"masters-{world.size}.pt")
    return True


@pytest.mark.parametrize(("recipe", "most", "fewer"), [("fp32", 2, [1]), ("fp8-lean", 4, [2, 1])])
def test_resume_on_another_number_of_ranks(tmp_path, recipe, most, fewer):
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert cli("train", *TASK, *STEPS, "--recipe", recipe, "--out", str(alone))[0] == 0
    asked = ["train", *TASK, *STEPS, "--recipe", recipe, "--out", str(run), "--parallel", "fsdp", "--json"]
    answers = run_ranks(most, cli, tmp_path / "most", *asked)
    assert [code for code, _, _ in answers] == [0] * most
    assert json.loads(answers[0][1])["steps"] == 4 and all(out == err == "" for _, out, err in answers[1:])
    close = {"rel": 1e-6 if recipe == "fp32" else 2e-3}
    assert losses(run) == pytest.approx(losses(alone), **close)
    assert losses(run, "eval") == pytest.approx(losses(alone, "eval"), **close)

    saved = checkpoint.load(checkpoint.make_path(run, 2))  # in one process, unsharded
    for ranks in fewer:
        run_ranks(ranks, masters, tmp_path / f"masters-{ranks}", run, 2)
        loaded = torch.load(run / f"masters-{ranks}.pt")
        assert loaded.keys() == saved.weights.keys()
        assert all(torch.equal(loaded[name], saved.weights[name]) for name in loaded)

    for ranks in fewer:  # an interrupted run is resumed on fewer ranks
        resumed = tmp_path / f"resumed-{ranks}"
        subprocess.run(["cp", "-r", str(run), str(resumed)], check=True)
        subprocess.run(["rm", "-r", str(checkpoint.make_path(resumed, 4))], check=True)
        record.truncate_after(resumed, 2)
        answers = run_ranks(ranks, cli, tmp_path / f"on-{ranks}", "train", "--resume", str(resumed))
        assert [code for code, _, _ in answers] == [0] * ranks, answers
        assert losses(resumed) == pytest.approx(losses(run), rel=1e-5 if recipe == "fp32" else 2e-3)

    code, out, _ = cli("export", str(run), "--json")
    plain = load_file(json.loads(out)["path"])
    end = checkpoint.load(checkpoint.make_path(run, 4)).weights
    assert code == 0 and all(torch.equal(plain[name], end[name]) for name in plain) and set(plain) <= set(end)


def in_turns(folder):
    """Train as on a GPU that is too small for the model: one rank after the other initializes it."""
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    init_model.is_too_large = lambda parameters, device: True
    return cli("train", *TASK, "--steps", "3", "--recipe", "bf16", "--parallel", "fsdp", "--out", str(folder))


def test_a_model_too_large_for_a_gpu_is_initialized_in_turns(tmp_path):
    assert cli("train", *TASK, "--steps", "3", "--recipe", "bf16", "--out", str(tmp_path / "alone"))[0] == 0
    (code, _, said), (other, *_) = run_ranks(2, in_turns, tmp_path / "two", tmp_path / "run")
    assert code == other == 0 and "in host memory" in said
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-3)


def test_an_error_is_printed_once(tmp_path):
    answers = [run_ranks(2, cli, tmp_path / "a", "train", *TASK, "--steps", "2")]
    odd = ["train", "gpt:2x64", "--context", "16", "--device", "cpu", "--steps", "2", "--batch", "3"]
    answers.append(run_ranks(2, cli, tmp_path / "b", *odd, "--out", str(tmp_path / "odd")))
    for (first, second), words in zip(answers, ("--out RUN", "multiple of 2"), strict=True):
        assert first[0] == 2 and words in first[2] and first[2].count("narrowgauge:") == 1
        assert second == [2, "", ""]
    assert not (tmp_path / "odd").exists()


def signalled(folder):
    """Send a signal to one rank of two during training: both must stop at the same step, and save it."""
    if os.environ["RANK"] == "1":
        threading.Thread(target=_stop_after_first_step, args=(folder,), daemon=True).start()
    return cli("train", *TASK, "--steps", "5000", "--checkpoint-every", "0", "--out", str(folder), "--watch", "0")[0]


def _stop_after_first_step(folder):
    while not any(event["kind"] == "step" for event in record.read(folder)):
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_to_one_rank_stops_all_and_saves(tmp_path):
    run = tmp_path / "run"
    assert run_ranks(2, signalled, tmp_path / "two", run) == [0, 0]
    end = list(record.read(run))[-1]
    assert end["kind"] == "end" and end["interrupted"] and 0 < end["step"] < 5000
    assert checkpoint.list_steps(run) == [end["step"]]
