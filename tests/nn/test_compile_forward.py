"""Compiled FP8 models: one graph for training and one for evaluation; the first update runs uncompiled."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from narrowgauge.hardware import detect
from narrowgauge.nn.compile_forward import CompiledForward, compile_forward
from narrowgauge.nn.convert import convert
from narrowgauge.nn.module_changes import find_change
from narrowgauge.nn.step_context import StepContext
from narrowgauge.recipe import parse

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # raised by torch._dynamo itself


def make(monkeypatch, *, compiled=True):
    """Return a converted model and its scales. The graph runs in plain torch, without inductor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32, bias=False))
    scales = convert(model, "fp8[products=all]").scales
    if compiled:
        torch._dynamo.reset()
        counters.clear()
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
        context = StepContext(parse("fp8", detect("cpu")), torch.device("cpu"), False)
        compile_forward(model, context, scales=scales)
    return model, scales


def train(model, scales, microbatches=1, rows=16):
    for seed in range(microbatches):
        x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))
        model(x).float().square().sum().backward()
    scales.update()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return grads


def count_graphs():
    return counters["stats"]["unique_graphs"]


def test_the_first_update_runs_uncompiled_and_all_others_in_one_graph(monkeypatch):
    plain, compiled = make(monkeypatch, compiled=False), make(monkeypatch)
    for graphs in (0, 1, 1):
        for ours, theirs in zip(train(*compiled, 2), train(*plain, 2), strict=True):
            assert torch.equal(ours, theirs)
        assert count_graphs() == graphs
    assert torch.equal(compiled[1].scale, plain[1].scale)
    assert torch.equal(compiled[1].counts, plain[1].counts)


def test_evaluation_is_one_more_graph_before_and_after_the_first_update(monkeypatch):
    model, scales = make(monkeypatch)
    for graphs in (1, 2):
        with torch.no_grad():
            model(torch.randn(16, 32))
        assert count_graphs() == graphs
        train(model, scales)
        train(model, scales)
    assert count_graphs() == 2


def test_two_forwards_may_precede_their_backwards(monkeypatch):
    plain, compiled = make(monkeypatch, compiled=False), make(monkeypatch)
    x = torch.randn(2, 16, 32)
    for model, scales in (plain, compiled):
        train(model, scales)
        first, second = (model(part).float().square().sum() for part in (3 * x[0], x[1]))
        (first + 2 * second).backward()
    for ours, theirs in zip(compiled[0].parameters(), plain[0].parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert torch.equal(compiled[1].amax, plain[1].amax) and torch.equal(compiled[1].counts, plain[1].counts)


def test_a_first_update_that_does_not_fit_uncompiled_is_compiled_and_later_ones_have_any_length(monkeypatch):
    model, scales = make(monkeypatch)

    def fail(*_, **__):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(find_change(model, CompiledForward), "_run_uncompiled", fail)
    for rows, graphs in ((16, 1), (16, 2), (32, 3), (48, 3), (80, 3)):
        assert all(grad.any() for grad in train(model, scales, rows=rows))
        assert count_graphs() == graphs, rows


def test_a_copy_of_a_compiled_model_computes_with_its_own_scales(monkeypatch):
    model, scales = make(monkeypatch)
    train(model, scales)
    train(model, scales)
    other = copy.deepcopy(model)
    find_change(other, CompiledForward).paused = False
    before = scales.amax.clone()
    other(100 * torch.randn(16, 32)).float().sum().backward()
    assert torch.equal(scales.amax, before)
    assert count_graphs() == 2
