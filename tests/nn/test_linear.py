"""FP8 linear layers in any model: accurate within the format, delayed scales, unsupported shapes not converted."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge import Engine
from narrowgauge.nn.convert import convert
from narrowgauge.nn.module_changes import find_change
from narrowgauge.nn.products import gemm
from narrowgauge.nn.products.gemm import FAST_DEPTH, Fp8Caster, GemmChoice
from narrowgauge.nn.products.linear import ConvertedLinear


def mlp(inputs=32, hidden=48, outputs=16, bias=True):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, hidden, bias=bias), torch.nn.GELU(), torch.nn.Linear(hidden, outputs, bias=bias)
    )


def sqnr(value, reference):
    return 10 * torch.log10(reference.square().sum() / (value.double() - reference).square().sum()).item()


@pytest.mark.parametrize("rows", [(16,), (5,), (3, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_right_within_the_format(rows, bias):
    model, exact = mlp(bias=bias), mlp(bias=bias).double()
    x = torch.randn(*rows, 32, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    conversion = convert(model, "fp8")
    for _ in range(2):
        x.grad = None
        model.zero_grad()
        out = model(x)
        out.float().square().sum().backward()
        conversion.scales.update()
    exact(wide).square().sum().backward()
    assert out.dtype is torch.bfloat16
    assert sqnr(out, exact(wide).detach()) > 20
    assert sqnr(x.grad, wide.grad) > 15
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert sqnr(ours.grad, theirs.grad) > 15


@pytest.mark.parametrize("recipe", ["fp8", "fp8[scaling=current]"])
def test_a_llama_feed_forward_keeps_20_db_in_outputs_and_all_gradients(recipe):
    class FeedForward(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = (torch.nn.Linear(128, 352, bias=False) for _ in range(2))
            self.down = torch.nn.Linear(352, 128, bias=False)

        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    torch.manual_seed(0)
    model = FeedForward()
    exact = FeedForward().double()
    exact.load_state_dict(model.state_dict())
    x, direction = torch.randn(512, 128), torch.randn(512, 128) * 1e-4
    wide = x.double().requires_grad_()
    (exact(wide) * direction.double()).sum().backward()
    report = convert(model, recipe)
    for _ in range(2):
        model.zero_grad()
        narrow = x.bfloat16().requires_grad_()
        out = model(narrow)
        (out * direction.bfloat16()).sum().backward()
        report.scales.update()
    ratios = [sqnr(out.detach(), exact(wide).detach()), sqnr(narrow.grad, wide.grad)]
    ratios += [sqnr(a.grad, b.grad) for a, b in zip(model.parameters(), exact.parameters(), strict=True)]
    assert min(ratios) >= 20, ratios


def test_unconverted_layers_have_a_reason():
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    report = convert(model, "fp8[keep=2]")
    assert [layer.part_of for layer in report.layers] == ["kept", "linear", "kept"]
    assert "20 inputs are not a multiple of 16" in report.layers[0].reason
    assert "keep=2" in report.layers[2].reason
    assert list(report.scales.sites) == ["1.input", "1.weight", "1.grad_output"]
    assert "fp8/fp8/fp8" in str(report)
    assert report.summary() == (
        "FP8 in 3 of 9 products of 3 layers: 38% of the multiplied parameters; "
        "the rest: 1 linear layer in FP32 (38%: 2), 1 linear layer in BF16 (24%: 0)"
    )
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp8[keep=2]")
    with engine.forward():
        loss = model(torch.randn(4, 20)).float().sum()
    engine.backward(loss)
    assert engine.step().applied


@pytest.mark.parametrize(
    "choice",
    [GemmChoice("fp8", "fp8", "bf16"), GemmChoice("bf16", "fp8", "fp8"), GemmChoice("fp8", "bf16", "fp8")],
)
def test_products_can_be_mixed(choice, monkeypatch):
    from narrowgauge.nn.products.choose_formats import Decision

    monkeypatch.setattr("narrowgauge.nn.survey.decide", lambda *_: Decision(choice, "told so", {}))
    model, exact = mlp(), mlp().double()
    convert(model, "fp8")
    x = torch.randn(16, 32)
    model(x).float().square().sum().backward()
    exact(x.double()).square().sum().backward()
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert sqnr(ours.grad, theirs.grad) > 15


@pytest.mark.parametrize(("outputs", "quick"), [(64, True), (FAST_DEPTH, True), (FAST_DEPTH + 16, False)])
def test_only_short_sums_of_gradients_are_left_to_the_tensor_cores(outputs, quick, monkeypatch):
    seen, product = [], gemm.multiply_fp8

    def watched(*operands, fast=True, **more):
        seen.append(fast)
        return product(*operands, fast=fast, **more)

    monkeypatch.setattr(gemm, "multiply_fp8", watched)
    model = nn.Sequential(nn.Linear(32, outputs, bias=False))
    convert(model, "fp8[products=all]", compile=True)  # not a head that computes no logits
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert seen == [True, quick, False]  # output, grad_input, grad_weight


def test_a_sudden_jump_is_counted_as_saturation_and_updates_the_scale():
    layer = torch.nn.Sequential(torch.nn.Linear(32, 32))
    report = convert(layer, "fp8")
    site = report.scales.sites["0.input"]
    x = torch.randn(16, 32)
    for _ in range(3):
        layer(x).float().sum().backward()
        report.scales.update()
    assert site.counts[0] == 0
    layer(x * 100).float().sum().backward()
    saturated = int(site.counts[0])
    assert saturated == int((x.abs() * 100 * site.scale > 464).sum()) > 0
    report.scales.update()
    layer(x * 100).float().sum().backward()
    assert int(site.counts[0]) == saturated


def test_microbatches_share_one_amax():
    layer = torch.nn.Sequential(torch.nn.Linear(16, 16))
    report = convert(layer, "fp8")
    for factor in (1.0, 8.0, 2.0):
        layer(torch.full((4, 16), factor)).float().sum().backward()
    assert report.scales.sites["0.input"].amax == 8.0


def test_conv1d_of_transformers_is_a_linear_with_a_transposed_weight():
    class Conv1D(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(32, 48) * 0.1)
            self.bias = torch.nn.Parameter(torch.randn(48))

        def forward(self, x):
            return x @ self.weight + self.bias

    model = torch.nn.Sequential(Conv1D())
    x = torch.randn(16, 32)
    wanted = F.linear(x.double(), model[0].weight.detach().double().t(), model[0].bias.detach().double())
    report = convert(model, "fp8")
    assert report.layers[0].shape == (48, 32)
    out = model(x)
    out.float().sum().backward()
    assert sqnr(out.detach(), wanted) > 20
    assert model[0].weight.grad.shape == (32, 48)
    expected = x.double().t() @ torch.ones(16, 48, dtype=torch.float64)
    assert sqnr(model[0].weight.grad, expected) > 20


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by torch._dynamo itself
def test_torch_compile_sees_one_graph_with_the_same_numbers():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    plain, compiled = mlp(), mlp()
    reports = [convert(plain, "fp8"), convert(compiled, "fp8")]
    x = torch.randn(16, 32)
    graph = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for _ in range(4):
        outputs = []
        for model, run, report in zip((plain, compiled), (plain, graph), reports, strict=True):
            model.zero_grad()
            outputs.append(run(x))
            outputs[-1].float().square().sum().backward()
            report.scales.update()
        assert torch.equal(*outputs)
        for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert torch.equal(reports[0].scales.scale, reports[1].scales.scale)
    assert counters["stats"]["unique_graphs"] == 2  # one before there are delayed scales, one for all later steps


@pytest.mark.parametrize("recipe", ["fp8[products=all]", "nvfp4"])
@pytest.mark.parametrize("rows", [16, 5])
def test_a_layers_output_can_be_changed_in_place(rows, recipe):
    torch.manual_seed(0)
    bias = recipe != "nvfp4"  # it adds a bias to what can be changed
    model = nn.Sequential(nn.Linear(32, 64, bias), nn.ReLU(inplace=True), nn.Linear(64, 32))
    twin = nn.Sequential(nn.Linear(32, 64, bias), nn.ReLU(), nn.Linear(64, 32))
    twin.load_state_dict(model.state_dict())
    x, grads = torch.randn(rows, 32), []
    for one in (model, twin):
        engine = Engine(one, torch.optim.SGD(one.parameters(), lr=0.1), recipe)
        with engine.forward():
            torch.manual_seed(1)
            loss = one(x).float().square().mean()
        engine.backward(loss)
        grads.append([parameter.grad for parameter in one.parameters()])
    for mine, theirs in zip(*grads, strict=True):
        assert torch.equal(mine, theirs) and mine.any()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_torch_compile_sees_converted_layers_as_one_graph():
    """Trace without the CPU's emulation, whose modes a GPU does not have: torch.compile skips code under them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 32, bias=False))
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "fp8[products=all]")
    x = torch.randn(32, 64)
    with engine.forward():
        loss = model(x).square().mean()
    engine.backward(loss)
    engine.step()
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):  # as the compiled model opens it, where the engine does not
        loss = model(x).square().mean()
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(x).square().mean(), list(model.parameters()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_inductor_compiles_an_evaluation():
    """An evaluation updates no statistics, and Inductor fails on an op whose mutable arguments are all None."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 48)), torch.randn(16, 32)
    report = convert(model, "fp8[products=all]")
    model(x).float().sum().backward()
    report.scales.update()
    torch._dynamo.reset()
    with torch.no_grad():
        assert sqnr(torch.compile(model)(x), model(x).double()) > 25  # fusion rounds sums differently


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 48, bias=False) for _ in range(3))

    def forward(self, x, memory=None, shift=False):
        q = self.q_proj(x)
        if shift:
            with torch.no_grad():
                x.mul_(2)
        other = x if memory is None else memory
        return q * self.k_proj(other) * self.v_proj(other)


def counted(monkeypatch):
    casts = []
    plain = Fp8Caster.cast
    monkeypatch.setattr(Fp8Caster, "cast", lambda self, x, site, t: casts.append(site) or plain(self, x, site, t))
    return casts


def test_one_input_of_several_layers_is_cast_once(monkeypatch):
    torch.manual_seed(0)
    model = Attention()
    report, casts = convert(model, "fp8[products=all]"), counted(monkeypatch)
    assert [name for name in report.scales.sites if name.endswith(".input")] == ["q_proj.input"]
    x = torch.randn(16, 32)
    out = model(x)
    assert len(casts) == 1
    alone = nn.ModuleList(model.children())  # the same weights and sites, but each with its own input
    wanted = alone[0](x.clone()) * alone[1](x.clone()) * alone[2](x.clone())
    assert len(casts) == 4 and torch.equal(out, wanted)
    model(x, memory=torch.randn(16, 32))
    assert len(casts) == 6, "query reads another input than key and value"
    model(x)
    (shared_input,) = {linear_plan(layer).shared_input for layer in model.children()}
    assert shared_input.x is None, "nothing is held behind the last reader"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_a_graph_casts_one_input_of_several_layers_once():
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch.manual_seed(0)
    model, x, graphs = Attention(), torch.randn(16, 32), []
    report = convert(model, "fp8[products=all]")
    model(x).sum().backward()
    report.scales.update()
    wanted = model(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    assert torch.equal(compiled(x), wanted) and torch.equal(compiled(x), wanted)
    casts = [node for node in graphs[0].graph.nodes if "narrowgauge.cast_rows" in str(node.target)]
    assert len(graphs) == 1 and len(casts) == 1


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize(("recipe", "per_layer"), [("fp8[products=all]", 3), ("fp8-lean[products=all]", 4)])
def test_a_graph_casts_a_weight_once_unless_the_recipe_is_lean(recipe, per_layer):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch.manual_seed(0)
    model, x, casts = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)), torch.randn(16, 32), []
    report = convert(model, recipe)
    model(x).float().square().sum().backward()
    report.scales.update()
    x.requires_grad_()
    wanted = torch.autograd.grad(model(x).float().square().sum(), [x, *model.parameters()])

    def count(graph, _):
        # a row of a table would be a constant in a kernel's code, and equal layers would not share their kernels
        arithmetic = [node for node in graph.graph.nodes if "aten.mul" in str(node.target) or "cast_rows" in node.name]
        assert not [n for node in arithmetic for n in node.all_input_nodes if "aten.select" in str(n.target)]
        casts.extend(node for node in graph.graph.nodes if "narrowgauge.cast" in str((node.target, *node.args[:1])))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=count, bw_compiler=count), fullgraph=True)
    found = torch.autograd.grad(compiled(x).float().square().sum(), [x, *model.parameters()])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert len(casts) == 2 * per_layer


def test_an_input_changed_in_place_between_its_readers_is_cast_again(monkeypatch):
    model = Attention()
    convert(model, "fp8[products=all]")
    casts, x = counted(monkeypatch), torch.randn(16, 32)
    model(x, shift=True)
    assert len(casts) == 2


def test_a_cast_does_not_outlive_its_scale():
    """Key and value read the same memory in every step and leave its cast behind. Query reads another tensor and cannot
    remove it."""
    torch.manual_seed(0)
    model, memory, x = Attention(), torch.randn(16, 32), torch.randn(16, 32)
    report = convert(model, "fp8[products=all]")
    for factor in (1, 8, 8):
        model.k_proj(memory), model.v_proj(memory)
        assert report.shared_input.x is memory
        model(factor * x).sum().backward()
        model.k_proj(memory), model.v_proj(memory)
        report.scales.update()
        found = model.k_proj(memory)
        assert torch.equal(found, model.k_proj(memory.clone()))


@pytest.mark.parametrize("recipe", ["fp8[products=all]", "fp8-lean[products=all]"])
def test_layers_with_one_input_in_inference_mode(recipe):
    """Such tensors do not say whether they were changed: nothing is shared, and the result is the same."""
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(16, 32)
    engine = Engine(model, torch.optim.AdamW(model.parameters()), recipe)
    with torch.no_grad(), engine.evaluating():
        expected, shifted = model(x), model(x.clone(), shift=True)
    with torch.inference_mode(), engine.evaluating():
        assert torch.equal(model(x.clone()), expected)
        assert torch.equal(model(x.clone(), shift=True), shifted)
    assert engine.conversion.shared_input.x is None


def test_the_engine_clears_shared_casts():
    model, memory = Attention(), torch.randn(16, 32)
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "fp8[products=all]")
    with engine.forward():
        model(torch.randn(16, 32), memory)
        assert engine.conversion.shared_input.x is memory
    assert engine.conversion.shared_input.x is None


def linear_plan(layer):
    return find_change(layer, ConvertedLinear).plan
