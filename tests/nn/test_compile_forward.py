"""Compiled FP8 models: one graph for training and one for evaluation; the first update runs uncompiled.

Equal blocks share these graphs.
"""

import contextlib
import copy
import functools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from narrowgauge.hardware import detect
from narrowgauge.nn.compile_forward import CompiledForward, compile_forward, run_uncompiled
from narrowgauge.nn.convert import convert
from narrowgauge.nn.module_changes import find_change
from narrowgauge.nn.step_context import StepContext
from narrowgauge.recipe import parse

pytestmark = [  # raised by torch._dynamo itself
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


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


class Block(nn.Module):
    def __init__(self, width=32, number=0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q_proj, self.k_proj = nn.Linear(width, 48), nn.Linear(width, 48, bias=False)
        self.down = nn.Linear(48, width)
        self.number = number

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(torch.tanh(self.q_proj(y)) * self.k_proj(y))


class NumberedBlock(Block):
    def forward(self, x):
        return super().forward(x) * (1 + self.number)


class Net(nn.Module):
    def __init__(self, block, depth):
        super().__init__()
        self.embedding = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(block(number=number) for number in range(depth))

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x


def make_net(monkeypatch, block=Block, depth=4, recipe="fp8[products=all]", compiled=True, net=Net):
    torch.manual_seed(0)
    model = net(block, depth)
    scales = convert(model, recipe).scales
    if compiled:
        torch._dynamo.reset()
        counters.clear()
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
        context = StepContext(parse("fp8", detect("cpu")), torch.device("cpu"), False)
        compile_forward(model, context, scales=scales, blocks=list(model.blocks))
    return model, scales


def train_net(model, scales, microbatches=1):
    for seed in range(microbatches):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
        model(x).float().square().sum().backward()
    scales.update()
    grads = [parameter.grad.clone() for parameter in model.blocks.parameters()]
    model.zero_grad()
    return grads


@pytest.mark.parametrize(
    "recipe",
    [
        "fp8[products=all]",
        "fp8-lean[products=all]",
        "fp8[products=all,scaling=current]",
        "fp8[products=all,granularity=row]",
        "fp8[products=all,granularity=block]",
    ],
)
def test_equal_blocks_share_one_graph_and_each_has_its_own_scales(monkeypatch, recipe):
    plain, compiled = make_net(monkeypatch, recipe=recipe, compiled=False), make_net(monkeypatch, recipe=recipe)
    first = 1 if "current" in recipe or "granularity" in recipe else 0
    for graphs in (first, 1, 1):
        for ours, theirs in zip(train_net(*compiled, 2), train_net(*plain, 2), strict=True):
            assert torch.equal(ours, theirs)
        assert count_graphs() == graphs
    assert torch.equal(compiled[1].scale, plain[1].scale)
    assert torch.equal(compiled[1].counts, plain[1].counts)
    with torch.no_grad():
        assert torch.equal(compiled[0](torch.ones(16, 32)), plain[0](torch.ones(16, 32)))
    assert count_graphs() == 2


@pytest.mark.parametrize("recipe", ["fp8[products=all]", "fp8[products=all,granularity=row]"])
def test_a_first_block_with_its_forward_in_bf16_has_a_graph_of_its_own(monkeypatch, recipe):
    plain, compiled = (make_net(monkeypatch, depth=6, recipe=recipe, compiled=on) for on in (False, True))
    for _ in range(3):
        for ours, theirs in zip(train_net(*compiled), train_net(*plain), strict=True):
            assert torch.equal(ours, theirs)
    assert count_graphs() == 2


def test_more_blocks_with_graphs_of_their_own_than_torch_compiles_are_all_compiled(monkeypatch):
    plain, compiled = (make_net(monkeypatch, NumberedBlock, 4, compiled=on) for on in (False, True))
    with torch._dynamo.config.patch(recompile_limit=2):  # instead of 8: graphs take a second each
        for _ in range(3):
            for ours, theirs in zip(train_net(*compiled), train_net(*plain), strict=True):
                assert torch.equal(ours, theirs)
    assert count_graphs() == 4


def test_blocks_run_uncompiled_in_a_copy_and_while_they_are_watched(monkeypatch):
    model, scales = make_net(monkeypatch)
    train_net(model, scales)
    with run_uncompiled(model):
        train_net(model, scales)
    train_net(copy.deepcopy(model), scales)
    assert count_graphs() == 0
    train_net(model, scales)
    assert count_graphs() == 1


class RecomputedNet(Net):
    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_recomputation_by_the_model_runs_its_blocks_as_its_forward_did(monkeypatch):
    plain, compiled = (make_net(monkeypatch, net=RecomputedNet, compiled=on) for on in (False, True))
    x = torch.randn(16, 32)
    for watched, graphs in ((False, 0), (False, 1), (True, 1)):
        for model, scales in (plain, compiled):
            with run_uncompiled(model) if watched else contextlib.nullcontext():
                loss = model(x).float().square().sum()
            loss.backward()
            scales.update()
        assert count_graphs() == graphs
        for ours, theirs in zip(compiled[0].blocks.parameters(), plain[0].blocks.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
