"""Benchmarks: recipes and baselines take turns and start equally; impossible requests are refused."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from narrowgauge import Task, UsageError, bench, hardware
from narrowgauge.bench.baselines import make_baselines
from narrowgauge.cli import main
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.recipe import parse

pytestmark = pytest.mark.usefixtures("modules_are_not_collected")

TASK_FILE = """
import torch, torch.nn.functional as F
import narrowgauge as ng

def tiny(batch=4):
    def make_batch(step, split):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(batch, 8, generator=g)
        return x, (x.sum(1) > 0).long()
    def loss(model, b):
        return F.cross_entropy(model(b[0]), b[1])
    return ng.Task(name="tiny", model=lambda: torch.nn.Linear(8, 2), batch=make_batch, loss=loss, items_per_batch=batch,
                   flops_per_item=96.0)
"""


def tiny_task(**changes):
    def make_batch(step, split):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        return x, (x.sum(1) > 0).long()

    fields = {
        "name": "tiny",
        "model": lambda: torch.nn.Linear(8, 2),
        "batch": make_batch,
        "loss": lambda model, b: F.cross_entropy(model(b[0]), b[1]),
        "items_per_batch": 16,
    }
    return Task(**{**fields, **changes})


def measure(recipes=("fp32",), peers=(), task=None, **settings):
    heard = []
    rows = bench.measure(
        task or tiny_task(),
        [parse(text) for text in recipes],
        peers,
        hardware.detect("cpu"),
        bench.Settings(**{"warmup": 1, "steps": 2, "rounds": 3, **settings}),
        heard.append,
    )
    return rows, heard


def test_rows_have_all_fields():
    rows, heard = measure(["fp32", "bf16", "fp16"])
    assert [row.name for row in rows] == ["fp32", "bf16", "fp16"]
    first = rows[0]
    assert first.ratio == 1.0
    assert first.step_ms_low <= first.step_ms <= first.step_ms_high
    assert first.tokens_per_s == pytest.approx(16 / first.step_ms * 1e3)
    assert rows[1].ratio == pytest.approx(rows[1].tokens_per_s / first.tokens_per_s)
    assert first.peak_bytes is None
    assert first.mfu is None
    assert any("round 3 of 3" in line for line in heard)


def test_engine_and_plain_loop_compute_the_same_steps():
    rows, _ = measure(["fp32"], ["torch"])
    assert [row.name for row in rows] == ["fp32", "torch-fp32"]
    assert rows[0].loss == pytest.approx(rows[1].loss, rel=1e-5)
    assert rows[1].twin_ratio is None


def test_ratios_are_medians_over_paired_rounds(monkeypatch):
    times = {"fp32": [2.0, 4.0, 8.0], "torch-fp32": [3.0, 4.0, 9.0]}
    monkeypatch.setattr(bench.compare, "time_round", lambda entry, *_: times[entry.name].pop(0))
    rows, _ = measure(["fp32"], ["torch"])
    assert rows[0].twin_ratio == 9 / 8  # of 3/2, 4/4 and 9/8
    assert (rows[0].step_ms, rows[0].step_ms_low, rows[0].step_ms_high) == (4.0, 2.0, 8.0)
    assert rows[1].ratio == 1.0
    assert rows[1].tokens_per_s == 16 / 4.0 * 1e3


def test_very_slow_baseline_is_left_out_with_a_message():
    slow = [name for name in ("bf16", "fp16") if name not in hardware.detect("cpu").native]
    rows, heard = measure(slow, ["torch"]) if slow else ([], [])
    assert [row.name for row in rows] == slow
    assert len([line for line in heard if "hundreds of times" in line]) == len(slow)


def test_entry_that_changes_attention_backends_is_refused():
    def loss(model, b):
        torch.backends.cuda.enable_mem_efficient_sdp(not torch.backends.cuda.mem_efficient_sdp_enabled())
        return F.cross_entropy(model(b[0]), b[1])

    before = bench.compare.read_attention_backends()
    try:
        with pytest.raises(NarrowgaugeError, match=r"fp32 changed the default attention backends from .* to .*"):
            measure(task=tiny_task(loss=loss), warmup=2)
    finally:
        torch.backends.cuda.enable_mem_efficient_sdp(before[2])
    measure(["fp32", "bf16"], ["torch"])
    assert bench.compare.read_attention_backends() == before


def test_unknown_baseline_and_unsupported_recipe_are_refused():
    with pytest.raises(UsageError, match="unknown baseline 'apex'"):
        measure(peers=["apex"])
    with pytest.raises(UsageError, match="tensor cores"):
        measure(["tf32"])


def test_torchao_has_two_fp8_baselines(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert list(make_baselines("torchao", parse("fp8"))) == ["torchao-tensorwise", "torchao-rowwise"]
    assert make_baselines("torchao", parse("bf16")) == {}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="torchao: it is not installed"):
        make_baselines("torchao", parse("fp8"))


def test_bench_verb_prints_and_saves_json_and_refuses_bad_input(tmp_path: Path, capsys):
    (tmp_path / "mine.py").write_text(TASK_FILE)
    spec = f"{tmp_path}/mine.py:tiny"
    saved = tmp_path / "out" / "base.json"
    arguments = ["bench", spec, "--recipes", "fp32", "--batch", "6", "--device", "cpu", "--steps", "1", "--rounds", "1"]
    assert main([*arguments, "--json", "--save", str(saved)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == json.loads(saved.read_text())
    assert data["items_per_step"] == 6
    assert {"name", "tokens_per_s", "step_ms", "peak_bytes", "mfu", "ratio"} <= set(data["rows"][0])
    assert main(arguments) == 0
    assert "tiny" in capsys.readouterr().out
    for wrong in (["--recipes", "fp31"], ["--steps", "0"], ["--peers", "nobody"], ["--device", "tpu"]):
        assert main([*arguments, *wrong]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("narrowgauge: ")


@pytest.mark.parametrize("several", [False, True])
def test_steps_are_those_of_the_tasks_own_optimizers(several):
    """In the engine and in plain PyTorch. Both must leave the weights where the task's optimizers leave them."""
    made = []

    class Counted(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            return super().step(closure)

    def make(model, rate):
        parts = [[model.weight], [model.bias]] if several else [[model.weight, model.bias]]
        own = [Counted(part, rate) for part in parts]
        made.extend(own)
        return own if several else own[0]

    rows, _ = measure(("fp32",), ("torch",), tiny_task(optimizer=make), rounds=1)
    assert [row.name for row in rows] == ["fp32", "torch-fp32"]
    assert len(made) == (4 if several else 2), "each entry makes its own"
    assert len({one.steps for one in made}) == 1 and made[0].steps >= 4  # the first, a warm-up, two of the round
    assert rows[0].loss == pytest.approx(rows[1].loss, rel=1e-5)
