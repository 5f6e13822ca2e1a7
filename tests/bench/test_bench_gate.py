"""The performance gate: Yuen's interval, few false alarms, slowdowns of 5% are found, other setups are refused."""

import dataclasses
import json
import math
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from narrowgauge import UsageError
from narrowgauge.bench import compare, gate
from narrowgauge.bench.saved_benchmark import SavedBenchmark
from narrowgauge.cli import main, make_parser

pytestmark = pytest.mark.usefixtures("modules_are_not_collected")

TASK_FILE = """
import torch, torch.nn.functional as F
import narrowgauge as ng

def tiny(batch=4):
    def make_batch(step, split):
        x = torch.randn(batch, 8, generator=torch.Generator().manual_seed(step))
        return x, (x.sum(1) > 0).long()
    loss = lambda model, b: F.cross_entropy(model(b[0]), b[1])
    return ng.Task(name="tiny", model=lambda: torch.nn.Linear(8, 2), batch=make_batch, loss=loss, items_per_batch=batch)
"""


def test_t_quantiles_match_scipy():
    for df in (1, 2.5, 5, 17.3, 94, 400):
        for miss in (0.05, 0.0025, 0.0001):
            assert gate.t_quantile(miss, df) == pytest.approx(stats.t.isf(miss, df), rel=2e-3)


def test_interval_matches_yuens_test():
    rng = np.random.default_rng(1)
    before, now = rng.standard_t(3, 37), 0.4 + 2 * rng.standard_t(3, 52)
    theirs = stats.ttest_ind(now, before, equal_var=False, trim=gate.CUT)
    then, today = gate.TrimmedMean.of(before), gate.TrimmedMean.of(now)
    assert today.mean == pytest.approx(stats.trim_mean(now, gate.CUT))
    df = round(float(theirs.df), 1)
    half = stats.t.isf(0.001, df) * (today.mean - then.mean) / theirs.statistic
    assert today.half_width(0.001, then) == pytest.approx(half, rel=1e-3)


def noise(kind, rng, rounds):
    """Log ratios of rounds A B, B A, ... on a machine with this kind of noise."""
    turns = 2 * rounds
    if kind == "quiet":
        logs = rng.normal(0, 0.003, turns)
    elif kind == "spikes":  # as measured: 1%, and every tenth turn 20% longer
        logs = rng.normal(0, 0.01, turns) + (rng.random(turns) < 0.1) * rng.lognormal(-1.6, 0.5, turns)
    elif kind == "heavy":
        logs = 0.02 * rng.standard_t(2, turns)
    elif kind == "drift":
        logs = rng.normal(0, 0.015, turns) + np.cumsum(rng.normal(0, 0.02, turns))
    elif kind == "neighbour":  # another process that comes and goes, and takes a third of the machine
        logs = rng.normal(0, 0.015, turns) + 0.5 * (np.cumsum(rng.random(turns) < 0.1) % 2)
    else:
        logs = rng.normal(0, 0.05, turns)
    pairs = logs.reshape(-1, 2)
    pairs[1::2] = pairs[1::2, ::-1]
    return pairs[:, 0] - pairs[:, 1]


def simulate(before, now, slower, gates=1000):
    """The number of gates with each verdict."""
    rng = np.random.default_rng(7)
    counts = dict.fromkeys((gate.PASS, gate.FASTER, gate.UNDECIDED, gate.SLOWER), 0)
    ends = compare.plan_analyses(gate.ROUNDS)
    for _ in range(gates):
        base, run = noise(before, rng, ends[-1]), noise(now, rng, ends[-1]) + math.log1p(slower)
        known = (
            n for n in ends if gate.TrimmedMean.of(base[:n]).half_width(gate.divide_level(1, 1)) <= gate.TOLERANCE / 3
        )
        base = list(base[: next(known, ends[-1])])
        found = (gate.judge(base, list(run[:n]), gate.TOLERANCE, gate.divide_level(1, 1)).verdict for n in ends)
        counts[next((one for one in found if one != gate.UNDECIDED), gate.UNDECIDED)] += 1
    return counts


@pytest.mark.parametrize("now", ["quiet", "spikes", "heavy", "drift", "neighbour", "rough"])
def test_noise_fails_at_most_one_gate_in_a_hundred(now):
    counts = simulate(now, now, 0.0)
    assert counts[gate.SLOWER] <= 10, counts
    if now != "rough":
        assert counts[gate.PASS] >= 900, counts


def test_noise_after_saving_does_not_add_false_alarms():
    for now in ("heavy", "rough"):
        assert simulate("quiet", now, 0.0, 500)[gate.SLOWER] <= 5


@pytest.mark.parametrize("now", ["quiet", "spikes", "heavy", "drift", "neighbour"])
def test_slowdown_of_5_percent_is_found(now):
    assert simulate(now, now, 0.05, 300)[gate.SLOWER] >= 285


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the verb with simulated clocks: wall and CPU time relative to the baseline, and their noise."""
    (tmp_path / "mine.py").write_text(TASK_FILE)
    monkeypatch.chdir(tmp_path)
    set_to = SimpleNamespace(wall=1.0, cpu=1.0, noise=0.01, now=0.0)
    rng = np.random.default_rng(3)

    def time_round(entry, *_):
        mine = entry.name == str(entry.recipe)
        wall, cpu = (10.0 * (ratio if mine else 1.0) for ratio in (set_to.wall, set_to.cpu))
        set_to.now += cpu * 5e-3 * math.exp(rng.normal(0, set_to.noise))
        return wall * math.exp(rng.normal(0, set_to.noise))

    monkeypatch.setattr(compare, "time_round", time_round)
    monkeypatch.setattr(compare, "time", SimpleNamespace(process_time=lambda: set_to.now, perf_counter=lambda: 0.0))

    def run(*words, **clocks):
        for name, value in {"wall": 1.0, "cpu": 1.0, "noise": 0.01, **clocks}.items():
            setattr(set_to, name, value)
        return main(["bench", *words, "--device", "cpu", "--json"])

    return run


SAVE = ("mine.py:tiny", "--recipes", "fp32", "--peers", "torch", "--batch", "6", "--save", "base.json")


def test_bench_verb_saves_and_compares(command, capsys):
    assert command(*SAVE) == 0
    saved = json.loads(capsys.readouterr().out)
    assert len(saved["rows"][0]["times_ms"]) >= gate.ROUNDS
    assert command("--against", "base.json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["task"], data["batch"], data["items_per_step"], data["peers"]) == ("mine.py:tiny", 6, 6, ["torch"])
    row = data["gate"]["rows"][0]
    assert data["gate"]["ok"]
    assert (row["name"], row["twin"], row["clock"], row["verdict"]) == ("fp32", "torch-fp32", "cpu", "pass")
    assert row["interval"][0] < row["change"] < row["interval"][1] < gate.TOLERANCE
    assert row["memory_change"] is None
    assert len(data["rows"]) == 2


def test_saving_takes_more_rounds_with_more_noise(command, capsys):
    rounds = []
    for noise in (0.001, 0.01, 0.5):
        assert command(*SAVE, noise=noise) == 0
        rounds.append(len(json.loads(capsys.readouterr().out)["rows"][0]["cpu_ms"]))
    assert rounds[0] == gate.ROUNDS < rounds[1] < rounds[2] == compare.MOST * gate.ROUNDS


def test_slowdown_by_work_or_by_waiting_exits_with_1(command, capsys):
    command(*SAVE)
    capsys.readouterr()
    assert command("--against", "base.json", cpu=1.06, wall=1.06) == 1
    printed = capsys.readouterr()
    ruled = json.loads(printed.out)["gate"]
    assert not ruled["ok"]
    assert ruled["rows"][0]["verdict"] == "slower"
    assert ruled["rows"][0]["now"] == pytest.approx(1.06, abs=0.02)
    assert ruled["failures"][0].startswith("fp32 is slower: +")
    assert f"FAILED: {ruled['failures'][0]}" in printed.err
    assert command("--against", "base.json", wall=1.2) == 1
    assert json.loads(capsys.readouterr().out)["gate"]["rows"][0]["clock"] == "wall"
    assert command("--against", "base.json", "--tolerance", "0.1", cpu=1.06, wall=1.06) == 0
    assert command("--against", "base.json", cpu=0.9, wall=0.9) == 0
    assert '"verdict": "faster"' in capsys.readouterr().out


def test_noisy_result_is_undecided_and_passes(command, capsys):
    command(*SAVE)
    capsys.readouterr()
    assert command("--against", "base.json", "--rounds", "2", noise=0.3) == 0
    printed = capsys.readouterr()
    row = json.loads(printed.out)["gate"]["rows"][0]
    assert (row["verdict"], row["rounds"]) == ("undecided", 16)
    assert "use more --rounds" in printed.err


def refused(run, capsys, *words):
    assert run(*words) == 2
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("narrowgauge: ")]
    assert len(lines) == 1 and "Traceback" not in printed.err
    return lines[0]


def test_other_setups_are_refused(command, capsys, tmp_path):
    command(*SAVE)
    base = json.loads((tmp_path / "base.json").read_text())
    against = ("--against", "base.json")
    assert "with batch 6, not 8" in refused(command, capsys, *against, "--batch", "8")
    assert "with steps 5, not 2" in refused(command, capsys, *against, "--steps", "2")
    assert "with peers torch, not none" in refused(command, capsys, *against, "--peers", "")
    assert "with task mine.py:tiny, not digits" in refused(command, capsys, "digits", *against)
    assert "has no bf16: it has fp32" in refused(command, capsys, *against, "--recipes", "bf16")
    assert "--tolerance 3.0" in refused(command, capsys, *against, "--tolerance", "3")
    for changes, said in [
        ({"device": "NVIDIA H200"}, "with device NVIDIA H200, not"),
        ({"threads": 64}, "with threads 64, not"),
        ({"items_per_step": 7}, "with items_per_step 7, not 6"),
        ({"rows": base["rows"][:1]}, "no plain-torch baseline of fp32"),
        ({"rows": [{**base["rows"][0], "times_ms": [1.0, -1.0]}]}, "is damaged"),
        ({"rows": [base["rows"][0], {**base["rows"][1], "times_ms": [1.0]}]}, "is damaged"),
        ({"rows": [{"name": "fp32"}]}, "is damaged"),
        ({"task": 7}, "is damaged (its task)"),
        ({"format": None}, "is not a benchmark saved by this version"),
    ]:
        (tmp_path / "other.json").write_text(json.dumps({**base, **changes}))
        assert said in refused(command, capsys, "--against", "other.json")
    (tmp_path / "other.json").write_text("{")
    assert "is not JSON" in refused(command, capsys, "--against", "other.json")
    assert "No such file" in refused(command, capsys, "--against", "nowhere.json")
    assert "cannot write base.json/x" in refused(command, capsys, *SAVE[:-1], "base.json/x")


def test_memory_growth_fails_and_is_not_measured_on_a_cpu(command, tmp_path):
    command(*SAVE)
    base = SavedBenchmark.read(tmp_path / "base.json")
    rows = [dataclasses.replace(row, peak_bytes=1000 << 20) for row in base.rows]
    before = dataclasses.replace(base, rows=tuple(rows))
    judge = gate.Gate(before, ["fp32"], 0.03, print)
    assert judge.judge_rows(rows)["ok"]
    grown = [dataclasses.replace(rows[0], peak_bytes=1040 << 20), rows[1]]
    ruled = judge.judge_rows(grown)
    assert ruled["rows"][0]["verdict"] == "pass"
    assert ruled["rows"][0]["memory_change"] == pytest.approx(0.04)
    assert ruled["failures"] == ["fp32 needs more memory: 1.016 GiB, 0.977 before, +4.0%, tolerance 3.0%"]
    assert judge.judge_rows([dataclasses.replace(rows[0], peak_bytes=1020 << 20), rows[1]])["ok"]
    assert gate.Gate(base, ["fp32"], 0.03, print).judge_rows(list(base.rows))["rows"][0]["memory_change"] is None


def test_real_gate_finds_a_doubled_step_and_passes_an_unchanged_one(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(TASK_FILE)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *SAVE, "--device", "cpu"]) == 0
    again = ["bench", "--against", "base.json", "--device", "cpu", "--tolerance", "0.15"]
    assert main(again) == 0
    plain = compare.make_engine_step

    def twice(task, engine):
        step = plain(task, engine)
        return lambda batch: (step(batch), step(batch))[1]

    monkeypatch.setattr(compare, "make_engine_step", twice)
    assert main(again) == 1
    assert "FAILED: fp32 is slower" in capsys.readouterr().out


def test_recipe_without_a_baseline_is_refused():
    judge = gate.Gate(None, ["bf16"], 0.03, print)
    alone = SimpleNamespace(name="bf16", times_ms=[1.0], cpu_ms=[1.0])
    with pytest.raises(UsageError, match="no plain-torch baseline"):
        judge.enough([alone])
    assert gate.make_save_rule(0.03, print)([alone])


def test_commands_of_the_github_workflow_parse():
    text = (Path(__file__).parents[2] / "docs" / "github-actions.yml").read_text()
    commands = [shlex.split(line) for line in text.splitlines() if line.strip().startswith("narrowgauge ")]
    given = [make_parser().parse_args(words[1:]) for words in commands]
    assert [(one.peers, bool(one.save), bool(one.against)) for one in given] == [
        ("torch", True, False),
        (None, True, True),
    ]
