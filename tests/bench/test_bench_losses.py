"""Losses of contestants are compared step for step; benchmarks that cannot fit into memory are refused."""

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from narrowgauge import UsageError, hardware
from narrowgauge.bench.baselines import make_baselines
from narrowgauge.bench.compare import Row
from narrowgauge.bench.losses import compare_losses
from narrowgauge.bench.memory_check import refuse_too_large
from narrowgauge.recipe import parse


def make_row(name, recipe, first, last, rounds=2):
    return Row(
        name=name, recipe=recipe, tokens_per_s=1.0, step_ms=1.0, step_ms_low=1.0, step_ms_high=1.0, peak_bytes=None,
        mfu=None, loss=last, times_ms=(1.0,) * rounds, cpu_ms=(), ratio=1.0, loss_first=first,
    )  # fmt: skip


def test_a_recipe_is_compared_with_its_own_baseline():
    rows = [
        make_row("bf16", "bf16", 10.0, 8.0),
        make_row("torch-bf16", "bf16", 10.0, 8.1),
        make_row("fp8", "fp8", 10.05, 8.3, rounds=3),
        make_row("torch-bf16", "fp8", 10.0, 8.0, rounds=3),
        make_row("torchao-rowwise", "fp8", 10.0, 6.9, rounds=3),
    ]
    gaps = compare_losses(rows)
    assert [gap.name for gap in gaps] == ["bf16", "fp8", "torchao-rowwise"]
    assert [gap.comparable for gap in gaps] == [True, True, False]
    assert gaps[1].first == pytest.approx(0.005)
    assert gaps[1].last == pytest.approx(0.03)  # of the first loss: the last may be almost 0


def test_equal_losses_of_zero_are_comparable():
    """A hinge loss that all contestants start without: 0 relative to 0 is no difference."""
    (gap,) = compare_losses([make_row("bf16", "bf16", 0.0, 0.0), make_row("torch-bf16", "bf16", 0.0, 0.0)])
    assert gap.comparable and str(gap).endswith("+0.00% at the first step, +0.00% at the last")
    (gap,) = compare_losses([make_row("bf16", "bf16", 0.1, 0.0), make_row("torch-bf16", "bf16", 0.0, 0.0)])
    assert not gap.comparable


@pytest.mark.parametrize(("first", "last"), [(10.3, 8.0), (10.0, math.nan), (math.inf, 8.0), (10.0, 9.5)])
def test_losses_that_differ_or_are_not_finite_are_not_comparable(first, last):
    gaps = compare_losses([make_row("torch-bf16", "bf16", 10.0, 8.0), make_row("fp8", "fp8", first, last)])
    assert [gap.comparable for gap in gaps] == [False]
    assert "loss of fp8 compared with torch-bf16" in str(gaps[0])


def test_last_losses_after_different_numbers_of_steps_are_not_compared():
    rows = [make_row("fp32", "fp32", 10.0, 8.0), make_row("fp8", "fp8", 10.0, 7.0, rounds=3)]
    gaps = compare_losses(rows)
    assert [(gap.reference, gap.last) for gap in gaps] == [("fp32", None)]
    assert not gaps[0].comparable


def test_a_model_that_cannot_fit_with_its_baselines_is_refused():
    device = hardware.describe_gpu("NVIDIA H200", 0, (9, 0), 140 << 30)
    task = SimpleNamespace(name="mine", facts={"parameters": 8_000_000_000})
    refuse_too_large(task, parse("fp8", device), 0, device)
    refuse_too_large(task, parse("fp8-lean", device), 0, device)
    with pytest.raises(UsageError, match=r"8,000 million parameters: fp8 and 1 baseline.*238 GiB.*--peers ''"):
        refuse_too_large(task, parse("fp8", device), 1, device)
    refuse_too_large(SimpleNamespace(name="mine", facts={}), parse("fp8", device), 9, device)


def test_torchao_converts_layers_that_fit_but_not_the_head(monkeypatch):
    converted = []

    def convert_to_float8_training(model, config, module_filter_fn):
        converted.extend(path for path, module in model.named_modules() if module_filter_fn(module, path))

    fake = ModuleType("torchao.float8")
    fake.Float8LinearConfig = SimpleNamespace(from_recipe_name=lambda name: name)
    fake.convert_to_float8_training = convert_to_float8_training
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    model = nn.ModuleDict({"up": nn.Linear(16, 32), "decoder": nn.Linear(32, 64), "score": nn.Linear(32, 2)})
    model["norm"] = nn.LayerNorm(16)
    model.get_output_embeddings = lambda: model["decoder"]
    optimizer = torch.optim.AdamW(model.parameters())
    make_baselines("torchao", parse("fp8"))["torchao-rowwise"].make(None, model, optimizer, 1.0, False)
    assert converted == ["up"]
