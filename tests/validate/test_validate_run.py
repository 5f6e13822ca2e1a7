"""Validations with real training: bad candidates are worse, good ones are equivalent, runs are cached."""

import dataclasses
import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

import forked
import narrowgauge as ng
from narrowgauge import hardware
from narrowgauge.runs import checkpoint_times, record
from narrowgauge.runs.checkpoint_times import CheckpointTimes
from narrowgauge.runs.trainer import Trainer
from narrowgauge.validate.curves import paired_runs, run_length
from pace import at_most

FAULTY_TASKS = Path(__file__).with_name("faulty_tasks.py")


def task(name):
    return f"{FAULTY_TASKS}:{name}"


def validate(tmp_path, name, *candidates, **options):
    return ng.validate(task(name), candidates, device="cpu", out=tmp_path, **{"budget_s": 120} | options)


def test_good_recipes_are_equivalent_and_faulty_ones_worse(tmp_path):
    unscaled, coarse = "fp16[loss_scale=none]", f"fp32@{task('e5m2')}"
    found = validate(tmp_path, "healthy", "bf16", unscaled, "fp8[scaling=none]", coarse, steps=80)
    verdicts = {name: one.verdict for name, one in found.items()}
    worse = {unscaled: "worse", "fp8[scaling=none]": "worse", coarse: "worse"}
    assert verdicts == {"bf16": "equivalent"} | worse
    assert not found.good and found[unscaled].interval[0] > 0.005
    described = found.describe()
    assert described["candidates"]["bf16"]["skipped"] == 0 and described["noise_band"] > 0
    assert described["candidates"][unscaled]["curve_gap_largest"] > 0.05
    assert described["candidates"]["bf16"]["grad_norm_ratio"] == pytest.approx(1, abs=0.05)
    assert described["candidates"][coarse]["best_gap"] > 0.005


def test_bf16_without_master_weights_is_worse_at_a_small_learning_rate(tmp_path):
    bad = f"fp32@{task('slow_no_masters')}"
    found = validate(tmp_path, "slow", "bf16", bad, steps=40)
    assert {name: one.verdict for name, one in found.items()} == {"bf16": "equivalent", bad: "worse"}


def test_softmax_in_fp16_diverges(tmp_path):
    bad = f"fp16@{task('softmax_fp16')}"
    found = validate(tmp_path, "softmax", bad, steps=8)
    assert found[bad].verdict == "worse" and found[bad].diverged == (0, 3)


def test_two_noisy_pairs_are_inconclusive_and_more_decide(tmp_path):
    first = validate(tmp_path, "noisy", "bf16", seeds=2, steps=8, margin=0.02)
    needed = first.tests["bf16"].pairs_needed
    assert first["bf16"].verdict == "inconclusive" and 2 < needed < 100
    second = validate(tmp_path, "noisy", "bf16", seeds=needed, steps=8, margin=0.02)
    assert second["bf16"].verdict == "equivalent"
    assert second.describe()["losses"][:2] == first.describe()["losses"]
    assert not second.runs["fp32", 1].fresh and second.runs["fp32", 2].fresh


def test_task_object_or_function_of_the_seed(tmp_path):
    import importlib.util

    spec = importlib.util.spec_from_file_location("faulty_tasks_module", FAULTY_TASKS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    by_name = validate(tmp_path, "healthy", "bf16", steps=12, seeds=2)
    by_function = ng.validate(module.healthy, ["bf16"], device="cpu", steps=12, seeds=2)
    assert by_function.describe()["losses"] == by_name.describe()["losses"]
    one = ng.validate(module.healthy(0), ["bf16"], device="cpu", steps=12, seeds=2)
    assert one.describe()["losses"][0] == by_name.describe()["losses"][0]


def test_run_length_is_chosen_once(tmp_path, monkeypatch):
    said = []
    found = validate(tmp_path, "healthy", "bf16", seeds=1, budget_s=1e-3, tell=said.append)
    assert found.experiment.settings["steps"] == run_length.LENGTHS[0] and "an update takes" in said[0]
    monkeypatch.setattr(run_length, "train", None)  # not timed again
    again = validate(tmp_path, "healthy", "bf16", seeds=1, budget_s=1e-3)
    assert again.experiment.settings["steps"] == run_length.LENGTHS[0] and not again.runs["bf16", 0].fresh


def test_the_budget_covers_candidates_that_are_slower_than_the_reference(tmp_path):
    """FP8 is emulated on a CPU and takes several times as long as FP32."""
    said, small = [], {"batch": 2, "context": 32}
    with at_most(12 * 1.5 + 6):  # the tests of the other process slow this one down
        found = ng.validate(
            "gpt:1x64", ["fp8", "bf16"], device="cpu", out=tmp_path, budget_s=12, tell=said.append, options=small
        )
    times = dict(re.findall(r"(\w+) ([\d.e-]+) s", said[0].split(";")[0]))
    assert list(times) == ["fp32", "fp8", "bf16"] and float(times["fp8"]) > float(times["fp32"])
    assert "3 pairs first, about" in said[0] and "(budget 0.2)" in said[0]
    assert found["fp8"].seeds >= 1 and found.experiment.settings["steps"] in run_length.LENGTHS


def test_pairs_that_would_exceed_the_budget_are_not_started(tmp_path):
    said = []
    found = validate(tmp_path, "healthy", "bf16", steps=40, budget_s=1e-3, tell=said.append)
    assert found["bf16"].seeds == 1 and found["bf16"].verdict == "inconclusive"
    assert any("the next pair would exceed the budget" in line for line in said)
    assert found.describe()["candidates"]["bf16"]["seeds_needed"]
    fixed = validate(tmp_path, "healthy", "bf16", steps=40, budget_s=1e-3, seeds=2)
    assert fixed["bf16"].seeds == 2, "a given number of pairs is trained"


def test_overhead_of_a_run_is_counted(tmp_path):
    assert run_length.Pilot(update_s=0.25, overhead_s=5.0, evaluations=8).seconds_for(320 - 8) == 85
    said = []
    found = validate(tmp_path, "noisy", "bf16", seeds=1, budget_s=600, tell=said.append)
    assert found.experiment.settings["steps"] == 30
    saved = [
        event["step"]
        for run in tmp_path.iterdir()
        if run.is_dir()
        for event in record.read(run)
        if event["kind"] == "checkpoint"
    ]
    assert not saved, "only the numbers of a short run are kept"
    assert " s of overhead" in said[0]


def test_long_runs_write_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr(paired_runs, "CHECKPOINT_S", 0.0)
    written = []
    save = Trainer._save_checkpoint
    monkeypatch.setattr(Trainer, "_save_checkpoint", lambda self: (written.append(self.result.step), save(self)))
    validate(tmp_path, "healthy", "bf16", seeds=1, steps=6)
    assert written == [*range(1, 7)] * 2
    assert not list(tmp_path.glob("*/checkpoints"))


def test_checkpoint_times(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(checkpoint_times.time, "monotonic", lambda: now[0])
    times = CheckpointTimes(2, least_s=10.0)
    due = []
    for step in range(1, 13):
        now[0] += 3.0
        due.append(times.is_due(step))
    assert [step for step, is_due in enumerate(due, 1) if is_due] == [4, 8, 12]
    assert not any(CheckpointTimes(0).is_due(step) for step in range(5))


def test_interrupted_validation_resumes(tmp_path):
    command = ["validate", task("healthy"), "--candidates", "bf16", "--seeds", "1"]
    command += ["--steps", "80", "--no-layers", "--device", "cpu", "--out", str(tmp_path), "--json"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with forked.start_cli(command, **streams) as process:
        while process.poll() is None and not any('"step":1' in f.read_text() for f in tmp_path.glob("*/events.jsonl")):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode != 0 and "Traceback" not in err
    with forked.start_cli(command, **streams) as process:
        out, err = process.communicate(timeout=120)
    assert "Traceback" not in err and process.returncode in (0, 1), err
    losses = json.loads(out)["losses"]
    straight = ng.validate(task("healthy"), ["bf16"], device="cpu", seeds=1, steps=80, out=tmp_path / "straight")
    assert losses == straight.describe()["losses"]


def test_the_hosts_threads_matter_to_a_run_on_a_cpu_only(monkeypatch):
    def describe(kind, threads):
        monkeypatch.setattr(paired_runs, "read_versions", lambda: {"torch": "2", "threads": threads})
        device = dataclasses.replace(hardware.detect("cpu"), kind=kind)
        return paired_runs.Experiment(spec="gpt-tiny", device=device).describe_content()

    assert describe("cpu", 2) != describe("cpu", 4)
    assert describe("cuda", 2) == describe("cuda", 4)
