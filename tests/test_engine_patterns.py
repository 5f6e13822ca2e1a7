"""Common training patterns (docs/patterns.md): each works under an engine, or raises a clear error."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge import Engine, UsageError
from narrowgauge.engine.updates import REWRITES

RECIPES = ["fp32", "bf16", "fp16", "fp8", "bf16-lean", "fp8-lean", "fp8[granularity=row]", "fp8[granularity=block]"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])
        self.out = nn.Linear(32, 32)

    def forward(self, x):
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.out(x)


def make(recipe="bf16", **options):
    torch.manual_seed(0)
    model = Net()
    return Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe, **options)


def step(engine, seed=0, **options):
    torch.manual_seed(seed)
    with engine.forward():
        loss = engine.model(torch.randn(8, 32)).float().square().mean()
    engine.backward(loss, **options)
    return engine.step()


@pytest.mark.parametrize("recipe", RECIPES)
def test_evaluation_inside_and_outside_of_the_engines_context(recipe):
    engine, x = make(recipe), torch.randn(8, 32)
    step(engine)
    with engine.evaluating():
        assert not engine.model.training
        inside = engine.model(x).float()
    assert engine.model.training
    with torch.no_grad():
        outside = engine.model(x).float()
    if "fp8" in recipe:  # evaluations multiply in BF16
        engine.model.eval()
        with torch.no_grad(), engine.forward():
            inside = engine.model(x).float()
        engine.model.train()
    torch.testing.assert_close(inside, outside, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("recipe", [*RECIPES, "nvfp4", "fp8[products=all]"])
def test_models_with_layers_in_two_formats_run_outside_of_the_engines_context(recipe):
    """A converted layer returns BF16, and the weights of a layer with an odd width are FP32."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 10)), torch.randn(8, 32)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe)
    step(engine)
    with engine.evaluating():
        inside = model(x).float()
    with torch.no_grad():
        for outside in (model(x), copy.deepcopy(model)(x)):
            torch.testing.assert_close(outside.float(), inside, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("recipe", RECIPES)
def test_state_survives_torch_save_and_weights_only_load(recipe):
    engine, file = make(recipe), io.BytesIO()
    step(engine)
    torch.save(engine.state_dict(), file)
    file.seek(0)
    other = make(recipe)
    other.load_state_dict(torch.load(file, weights_only=True))
    for seed in range(2):
        a, b = step(engine, seed), step(other, seed)
        assert a.grad_norm == b.grad_norm
    saved = other.state_dict()["model"]
    assert all(torch.equal(value, saved[name]) for name, value in engine.state_dict()["model"].items())
    plain = Net()
    plain.load_state_dict(saved)
    assert all(value.dtype is torch.float32 for value in saved.values())


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8", "bf16-lean"])
def test_gradients_of_several_backwards_add_up(recipe):
    engine = make(recipe, clip_norm=1e9)
    norms = []
    for times in (1, 3):
        for _ in range(times):
            torch.manual_seed(0)
            with engine.forward():
                loss = engine.model(torch.randn(8, 32)).float().square().mean()
            engine.backward(loss)
        if times == 1:
            first = [p.grad.clone() for p in engine.model.parameters()]
            for parameter in engine.model.parameters():
                parameter.grad = None
            engine._microbatches = 0
        else:
            norms.append(engine.step().grad_norm)
    alone = torch.stack([gradient.float().norm() for gradient in first]).norm().item()
    assert norms[0] == pytest.approx(3 * alone, rel=0.02)


@pytest.mark.parametrize("recipe", RECIPES)
def test_retain_graph_allows_a_second_backward(recipe):
    engine = make(recipe)
    step(engine)
    torch.manual_seed(1)
    with engine.forward():
        loss = engine.model(torch.randn(8, 32)).float().square().mean()
    engine.backward(loss, retain_graph=True)
    once = [p.grad.float().clone() for p in engine.model.parameters()]
    engine.backward(loss)
    for parameter, before in zip(engine.model.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad.float(), 2 * before, rtol=0.02, atol=1e-2 * before.abs().max().item())
    assert engine.step().applied


@pytest.mark.parametrize("recipe", RECIPES)
def test_backward_with_inputs_trains_only_those_parameters(recipe):
    engine = make(recipe)
    before = engine.state_dict()["model"]["layers.0.weight"].clone()
    with engine.forward():
        loss = engine.model(torch.randn(8, 32)).float().square().mean()
    engine.backward(loss, inputs=list(engine.model.out.parameters()))
    assert engine.model.layers[0].weight.grad is None
    assert engine.step().applied
    assert torch.equal(engine.state_dict()["model"]["layers.0.weight"], before)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradient_penalties(recipe):
    recipe = "fp16[loss_scale=64]" if recipe == "fp16" else recipe  # the gradients of a penalty are large
    engine, points = make(recipe), torch.randn(8, 32, requires_grad=True)
    step(engine)
    with engine.forward(double_backward=True):
        (slope,) = torch.autograd.grad(engine.model(points).float().sum(), points, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
    engine.backward(penalty)
    wanted = Net()
    wanted.load_state_dict({k: v.float() for k, v in engine.model.state_dict().items()})
    (slope,) = torch.autograd.grad(wanted(points).sum(), points, create_graph=True)
    (slope.norm(dim=1) - 1).square().mean().backward()
    scale = 1.0 if engine.scaler is None else engine.scaler.get_scale()
    for ours, theirs in zip(engine.model.layers.parameters(), wanted.layers.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(
                ours.grad.float() / scale, theirs.grad, rtol=0.1, atol=0.05 * theirs.grad.abs().max().item()
            )
    assert engine.step().applied


def test_fp8_explains_how_to_differentiate_twice():
    engine, points = make("fp8"), torch.randn(8, 32, requires_grad=True)
    with engine.forward():
        output = engine.model(points).float().sum()
    with pytest.raises(UsageError, match="double_backward=True"):
        torch.autograd.grad(output, points, create_graph=True)


class TestGan:
    def make(self, recipe, kind=torch.optim.AdamW):
        torch.manual_seed(0)
        nets = nn.ModuleDict({"g": nn.Linear(16, 32), "d": nn.Linear(32, 16)})
        optimizers = [kind(nets["g"].parameters(), lr=0.1), kind(nets["d"].parameters(), lr=0.1)]
        return nets, optimizers, Engine(nets, optimizers, recipe, clip_norm=1.0)

    def train_backward(self, nets, engine, detach):
        with engine.forward():
            made = nets["g"](torch.randn(8, 16))
            loss = nets["d"](made.detach() if detach else made).float().square().mean()
        engine.backward(loss)

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_only_the_chosen_optimizer_is_stepped(self, recipe):
        nets, (opt_g, opt_d), engine = self.make(recipe)
        for number in range(4):
            before = copy.deepcopy(engine.state_dict()["model"])
            self.train_backward(nets, engine, detach=number % 2 == 0)
            engine.step(opt_d if number % 2 == 0 else opt_g)
            after = engine.state_dict()["model"]
            moved = {name for name in before if not torch.equal(before[name], after[name])}
            assert moved == ({"d.weight", "d.bias"} if number % 2 == 0 else {"g.weight", "g.bias"})
            assert all(parameter.grad is None for parameter in nets.parameters())

    def test_norm_and_check_cover_the_chosen_optimizer(self):
        nets, (opt_g, _), engine = self.make("fp32", torch.optim.SGD)
        self.train_backward(nets, engine, detach=False)
        own = torch.stack([p.grad.norm() for p in nets["g"].parameters()]).norm().item()
        nets["d"].weight.grad[0, 0] = torch.inf
        report = engine.step(opt_g)
        assert report.applied and report.grad_norm == pytest.approx(own)

    def test_optimizers_without_gradients_are_not_stepped_and_alternation_warns(self):
        nets, (opt_g, _), engine = self.make("bf16")
        self.train_backward(nets, engine, detach=True)
        engine.step()
        assert not opt_g.state, "it had no gradients"
        self.train_backward(nets, engine, detach=False)
        with pytest.warns(UserWarning, match=r"engine\.step\(optimizer\)"):
            engine.step()

    def test_an_optimizer_of_another_engine_is_refused(self):
        nets, _, engine = self.make("bf16")
        self.train_backward(nets, engine, detach=True)
        with pytest.raises(UsageError, match="not one of this engine's"):
            engine.step(torch.optim.SGD(nets.parameters(), lr=0.1))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_unfrozen_parameters_train(recipe, kind):
    torch.manual_seed(0)
    model = Net()
    model.layers.requires_grad_(False)
    engine = Engine(model, kind(model.parameters(), lr=1e-2), recipe)
    start = engine.state_dict()["model"]["layers.0.weight"].clone()
    for seed in range(2):
        assert step(engine, seed).applied
    assert torch.equal(engine.state_dict()["model"]["layers.0.weight"], start)
    model.layers.requires_grad_(True)
    for seed in range(2):
        report = step(engine, seed)
        assert report.applied and all(parameter.grad is None for parameter in model.parameters())
    assert not torch.equal(engine.state_dict()["model"]["layers.0.weight"], start)
    before = copy.deepcopy(engine.state_dict()["model"])
    with engine.forward():
        loss = model(torch.randn(8, 32)).float().square().mean()
    engine.backward(loss)
    model.layers[0].weight.grad[0, 0] = torch.inf
    assert not engine.step().applied
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict()["model"].items())


def test_unfrozen_parameters_train_with_released_gradients():
    torch.manual_seed(0)
    model = Net()
    model.layers.requires_grad_(False)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), "bf16-lean[gradients=released]")
    step(engine)
    model.layers.requires_grad_(True)
    start = model.layers[0].weight.clone()
    assert step(engine).applied
    assert not torch.equal(model.layers[0].weight, start) and model.layers[0].weight.grad is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_bias_only_training(recipe):
    torch.manual_seed(0)
    model = Net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    engine = Engine(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), recipe)
    before = model.out.bias.clone()
    assert step(engine).applied and not torch.equal(model.out.bias, before)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(0, 32), (3, 0, 32)])
def test_empty_inputs_give_zero_gradients(recipe, shape):
    engine = make(recipe)
    with engine.forward():
        empty = engine.model.out(torch.zeros(shape))
        assert empty.shape == shape
        loss = engine.model.layers[0](torch.randn(8, 32)).float().mean() + empty.float().sum()
    engine.backward(loss)
    assert engine.model.out.weight.grad is not None and not engine.model.out.weight.grad.any()
    assert engine.step().applied


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_train_on_any_cpu(recipe, kind):
    torch.manual_seed(0)
    model = nn.ModuleDict({"rnn": kind(32, 32, batch_first=True), "out": nn.Linear(32, 32)})
    engine = Engine(model, torch.optim.AdamW(model.parameters()), recipe)
    for _ in range(2):
        with engine.forward():
            loss = model["out"](model["rnn"](torch.randn(4, 5, 32))[0]).float().square().mean()
        engine.backward(loss)
        assert engine.step().applied


@pytest.mark.parametrize(
    ("recipe", "formats", "kept"),
    [("fp16", ("fp32", "fp16", "bf16"), True), ("fp16", ("fp32", "bf16"), True), ("bf16", ("fp32",), True),
     ("bf16", ("fp32", "bf16"), False)],
)  # fmt: skip
def test_recurrent_layers_stay_in_fp32_where_torch_has_none_in_16_bits(recipe, formats, kept, set_cpu_formats):
    set_cpu_formats(*formats)
    model = nn.ModuleDict({"rnn": nn.LSTM(32, 32), "out": nn.Linear(32, 32)})
    assert Engine(model, torch.optim.AdamW(model.parameters()), recipe).kept == ["rnn"] * kept


def test_closures_are_refused():
    model = Net()
    with pytest.raises(UsageError, match="LBFGS evaluates the loss several times"):
        Engine(model, torch.optim.LBFGS(model.parameters()), "fp32")
    engine = make()
    with pytest.raises(UsageError, match="takes no closure"):
        engine.step(lambda: None)


@pytest.mark.parametrize("given", [None, 1e-3, [None], "adamw", iter([3])])
def test_something_else_than_an_optimizer(given):
    with pytest.raises(UsageError, match="expected an optimizer or a list of them"):
        Engine(nn.Linear(4, 4), given, "fp32")


def test_dtype_errors_name_the_module():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32))
            self.register_buffer("start", torch.randn(32, 32))

        def forward(self, x):
            return x @ torch.lerp(self.weight, self.start, 0.5)

    model = nn.Sequential(nn.Linear(32, 32), Odd())
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "bf16-lean")
    with pytest.raises(UsageError, match=r"1 \(Odd\) .*keep=1"), engine.forward():
        model(torch.randn(8, 32))
    engine = Engine(model.float(), torch.optim.AdamW(model.parameters()), "bf16-lean[keep=1]")
    with engine.forward():
        loss = model(torch.randn(8, 32)).float().square().mean()
    engine.backward(loss)
    assert engine.step().applied


def test_rewriting_weights_every_step_warns_and_pruning_once_does_not():
    engine = make("bf16-lean")
    for seed in range(3):
        step(engine, seed)
        engine.model.out.weight.data.mul_(torch.rand(32, 32) > 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(REWRITES):
            step(engine, seed)
    with pytest.warns(UserWarning, match="use master=fp32"):
        for seed in range(REWRITES + 2):
            engine.model.out.weight.data.mul_(torch.rand(32, 32) > 0.5)
            step(engine, seed)


def test_repr():
    engine = make("bf16")
    step(engine)
    text = repr(engine)
    for part in ("Engine(Net, AdamW", "recipe='bf16", "device='cpu'", "updates=1", "skipped=0"):
        assert part in text
