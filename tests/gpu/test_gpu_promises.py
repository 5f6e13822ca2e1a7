"""Guarantees on a GPU: no inf or NaN reaches a weight, no write to a weight is missed, copies use their own weights."""

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge import Engine, UsageError
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.llama import Llama, LlamaConfig

pytestmark = [
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]
RECIPES = [
    "bf16",
    "fp16",
    "fp8[products=all]",
    "fp8[products=all,scaling=current]",
    "bf16-lean",
    "fp8-lean[products=all]",
]
WIDTH = 256


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.out(x)


BUILD = {
    "net": Net,
    "gpt": lambda: GPT(GPTConfig(layers=2, width=WIDTH, heads=4, vocab=512, context=128)),
    "llama": lambda: Llama(LlamaConfig(layers=2, width=WIDTH, heads=4, kv_heads=2, hidden=384, vocab=512, context=128)),
}


def make(name, recipe, **options):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = BUILD[name]()
    return Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), recipe, **options)


def data(name, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if name == "net":
        return (torch.randn(256, WIDTH, generator=generator).cuda(),)
    ids = torch.randint(0, 512, (4, 128), generator=generator).cuda()
    return ids, ids


def loss_of(model, name, seed=0):
    output = model(*data(name, seed))
    return output.float().square().mean() if output.dim() else output


def step(engine, name, factor=1.0, seed=0):
    with engine.forward():
        loss = loss_of(engine.model, name, seed) * factor
    engine.backward(loss)
    return engine.step()


def evaluated(engine, model, name):
    with engine.evaluating():
        return loss_of(model, name).item()


def exact(model, name):
    with torch.device("cuda"):
        plain = BUILD[name]()
    plain.load_state_dict({key: value.float() for key, value in model.state_dict().items()})
    with torch.no_grad():
        return loss_of(plain, name).item()


def inject(engine, name, value, where):
    """Inject a value by hooks into one element of the input of a layer or block, or of the gradient of its output."""
    module = engine.model.get_submodule("layers.1" if name == "net" else "blocks.1")

    def one(x):
        x = x.clone()
        x.view(-1)[x.numel() // 3] = value
        return x

    if where == "activation":
        return module.register_forward_pre_hook(lambda _, args: (one(args[0]), *args[1:]))
    return module.register_full_backward_pre_hook(lambda _, grads: tuple(g if g is None else one(g) for g in grads))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("where", ["loss", "activation", "gradient"])
def test_a_bad_value_skips_the_update(name, recipe, where):
    engine = make(name, recipe, clip_norm=1.0)
    for seed in range(2):
        assert step(engine, name, seed=seed).applied
    for value in (math.inf, math.nan):
        before = {key: tensor.clone() for key, tensor in engine.state_dict()["model"].items()}
        scales = engine.conversion.scales
        moved = None if scales is None else scales.scale.clone()
        handle = None if where == "loss" else inject(engine, name, value, where)
        report = step(engine, name, value if where == "loss" else 1.0)
        if handle is not None:
            handle.remove()
        assert not report.applied
        after = engine.state_dict()["model"]
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert moved is None or torch.equal(moved, scales.scale)
    assert step(engine, name, seed=5).applied


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]"])
def test_a_bad_value_skips_the_update_when_compiled(recipe):
    engine = make("net", recipe, compile=True, clip_norm=1.0)
    for seed in range(3):
        assert step(engine, "net", seed=seed).applied
    before = copy.deepcopy(engine.model.state_dict())
    assert not step(engine, "net", math.inf).applied
    with engine.forward():
        x = data("net")[0]
        x[3, 5] = math.inf
        loss = engine.model(x).float().square().mean()
    engine.backward(loss)
    assert not engine.step().applied
    assert all(torch.equal(before[key], value) for key, value in engine.model.state_dict().items())
    twin = copy.deepcopy(engine.model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    assert evaluated(engine, twin, "net") == pytest.approx(exact(twin, "net"), rel=6e-2)
    engine.model.layers[0].weight.data.mul_(0)
    assert evaluated(engine, engine.model, "net") == pytest.approx(exact(engine.model, "net"), rel=6e-2)
    assert step(engine, "net", seed=5).applied


def test_the_check_does_not_synchronize():
    engine = make("gpt", "fp8[products=all]", clip_norm=1.0)
    for seed in range(3):
        step(engine, "gpt", seed=seed)
    batch = data("gpt")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            with engine.forward():
                loss = engine.model(*batch)
            engine.backward(loss)
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("make_copy", [copy.deepcopy, by_torch_save])
def test_copies_compute_with_their_own_weights(name, recipe, make_copy):
    engine = make(name, recipe)
    for seed in range(3):
        step(engine, name, seed=seed)
    live = evaluated(engine, engine.model, name)
    twin = make_copy(engine.model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.3)
    assert evaluated(engine, twin, name) == pytest.approx(exact(twin, name), rel=6e-2)
    assert evaluated(engine, engine.model, name) == live


WRITES = {
    "copy_": lambda weight, new: weight.detach().copy_(new),
    "data": lambda weight, new: weight.data.copy_(new),
    "data =": lambda weight, new: setattr(weight, "data", new.to(weight.dtype)),
    "foreach": torch.no_grad()(lambda weight, new: torch._foreach_copy_([weight], [new])),
    "set_": torch.no_grad()(lambda weight, new: weight.set_(new.to(weight.dtype).clone())),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(("name", "path"), [("net", "layers.0"), ("gpt", "blocks.1.up"), ("llama", "blocks.0.gate")])
def test_no_write_to_a_weight_is_missed(recipe, write, name, path):
    engine = make(name, recipe)
    for seed in range(3):
        step(engine, name, seed=seed)
    evaluated(engine, engine.model, name)
    weight = engine.model.get_submodule(path).weight
    for size in (0.0, 0.2, 3.0):
        torch.manual_seed(1)
        WRITES[write](weight, torch.randn(weight.shape, device="cuda") * size)
        assert evaluated(engine, engine.model, name) == pytest.approx(exact(engine.model, name), rel=6e-2)
    assert step(engine, name).applied or recipe == "fp16"  # its loss scale may be too large for these weights


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]"])
def test_gradient_penalties(recipe):
    engine = make("net", recipe)
    x = data("net")[0].requires_grad_()
    if "fp8" in recipe:
        with engine.forward():
            output = engine.model(x).float().sum()
        with pytest.raises(UsageError, match="double_backward=True"):
            torch.autograd.grad(output, x, create_graph=True)
    with engine.forward(double_backward=True):
        (slope,) = torch.autograd.grad(engine.model(x).float().sum(), x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
    engine.backward(penalty)
    assert engine.step().applied


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8-lean[products=all]"])
@pytest.mark.parametrize("name", BUILD)
def test_a_retained_graph_runs_twice(name, recipe):
    engine = make(name, recipe)
    step(engine, name)
    grads = []
    for times in (1, 2):
        with engine.forward():
            loss = loss_of(engine.model, name)
        for index in range(times):
            engine.backward(loss, retain_graph=index + 1 < times)
        grads.append([p.grad.float().clone() for p in engine.model.parameters()])
        for parameter in engine.model.parameters():
            parameter.grad = None
    for once, twice in zip(*grads, strict=True):
        torch.testing.assert_close(twice, 2 * once, rtol=3e-2, atol=1e-2 * once.abs().max().item())


def test_an_empty_batch_of_tokens_passes_a_layer():
    engine = make("net", "fp8[products=all]")
    step(engine, "net")
    with engine.forward():
        layer = engine.model.layers[0]
        loss = loss_of(engine.model, "net") + layer(torch.randn(0, WIDTH, device="cuda")).float().sum()
    engine.backward(loss)
    assert engine.step().applied


def test_recurrent_and_computed_weights_train():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            self.form = nn.Bilinear(64, 64, 64)
            self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 64))

        def forward(self, x):
            x = self.normed(self.rnn(x)[0])
            return self.form(x, x)

    for recipe in RECIPES:
        torch.manual_seed(0)
        model = Mixed().cuda()
        engine = Engine(model, torch.optim.AdamW(model.parameters()), recipe)
        for _ in range(3):
            with engine.forward():
                loss = model(torch.randn(4, 16, WIDTH, device="cuda")).float().square().mean()
            engine.backward(loss)
            assert engine.step().applied, recipe
