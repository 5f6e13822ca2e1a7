"""Emulated formats: linear layers round their operands exactly and multiply in BF16."""

import copy

import pytest
import torch
from model_families import LANGUAGE, VOCAB
from torch import nn

from narrowgauge import Engine, UsageError, convert, events, recipe
from narrowgauge.block_formats import BLOCK_FORMATS
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.nn.module_changes import find_change
from narrowgauge.nn.products.emulated import EmulatedLinear, Emulation
from narrowgauge.recipe import EMULATED, NAMED
from narrowgauge.scaling.block_quantize import quantize_blocks, random_hadamard

TRICKS = "emulated-nvfp4[gradient_rounding=stochastic,hadamard=random]"
RECIPES = [*EMULATED, "emulated-mxfp8[gradients_format=e5m2]"]
FORMATS = {
    "emulated-mxfp8": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "emulated-mxfp8[gradients_format=e5m2]": ("mxfp8_e4m3", "mxfp8_e5m2"),
    "emulated-mxfp4": ("mxfp4", "mxfp4"),
    "emulated-nvfp4": ("nvfp4", "nvfp4"),
}


def make_gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=2, width=64, heads=4, vocab=256, context=32))


def make_engine(text, model=None, rate=1e-3):
    model = model or make_gpt()
    return Engine(model, torch.optim.AdamW(model.parameters(), rate), text)


def run_steps(engine, steps=3, first=0):
    losses = []
    for step in range(first, first + steps):
        tokens = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(step % 2))
        with engine.forward():
            loss = engine.model(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def round_to(x, name):
    """Quantize along the last dimension and read back in FP64."""
    rule = "up" if name.startswith("mxfp8") else "floor"
    return quantize_blocks(x, name, scale_rule=rule).dequantize(torch.float32).double()


@pytest.mark.parametrize("text", RECIPES)
def test_the_three_products_are_those_of_rounded_operands(text):
    """Summed in FP32 and rounded once: in FP64 the same within FP32's and the result's rounding."""
    forward, gradients = FORMATS[text]
    torch.manual_seed(0)
    layer = nn.Linear(96, 64)
    engine = make_engine(text, nn.Sequential(layer))
    x = (torch.randn(3, 40, 96) * torch.randn(96).exp()).bfloat16().requires_grad_()
    grad = (torch.randn(3, 40, 64) * torch.randn(40, 1).exp()).bfloat16()
    with engine.forward():
        out = engine.model(x)
    out.backward(grad)
    rows, g, weight = x.detach().reshape(-1, 96), grad.reshape(-1, 64), layer.weight.detach()
    exact = round_to(rows, forward) @ round_to(weight, forward).t() + layer.bias.detach().bfloat16().double()
    of_input = round_to(g, gradients) @ round_to(weight.t().contiguous(), forward).t()
    of_weight = round_to(g.t().contiguous(), gradients) @ round_to(rows.t().contiguous(), forward).t()
    torch.testing.assert_close(
        out.detach().double().view(-1, 64), exact, rtol=1e-2, atol=2e-2 * exact.abs().mean().item()
    )
    torch.testing.assert_close(
        x.grad.double().view(-1, 96), of_input, rtol=5e-3, atol=1e-5 * of_input.abs().max().item()
    )
    torch.testing.assert_close(
        layer.weight.grad.double(), of_weight, rtol=1e-5, atol=1e-6 * of_weight.abs().max().item()
    )


@pytest.mark.parametrize("text", [*RECIPES, TRICKS])
def test_training_works_and_says_that_it_is_emulated(text):
    engine = make_engine(text)
    losses = run_steps(engine, 6)
    assert losses[-1] < losses[0]
    assert str(engine.recipe) == text and "(emulated)" in engine.conversion.summary()
    changed = [path for path, module in engine.inner.named_modules() if find_change(module, EmulatedLinear)]
    assert len(changed) == 8 and "lm_head" not in changed
    name = engine.recipe.emulate
    assert f"emulated: operands rounded to {name.upper()}, multiplied in BF16" in str(engine.conversion)
    assert f"heads stay in BF16 in the emulation of {name.upper()}" in str(engine.conversion)


def test_emulated_models_are_not_compiled():
    """torch.compile does not see into their layers."""
    model = make_gpt()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), "emulated-nvfp4", compile=True)
    assert not engine.compiled and engine.speed_advice is None
    assert run_steps(engine) == run_steps(make_engine("emulated-nvfp4"))


class Products(events.Listener):
    def __init__(self):
        self.found = []

    def begin_product(self, product, path):
        self.found.append((product, path))


def test_listeners_hear_of_every_product():
    engine, log = make_engine("emulated-nvfp4"), Products()
    with events.listening(log):
        run_steps(engine, 1)
    names = [f"blocks.{i}.{name}" for i in range(2) for name in ("qkv", "out", "up", "down")]
    wanted = [(product, name) for product in ("output", "grad_input", "grad_weight") for name in names]
    assert sorted(log.found) == sorted(wanted)


@pytest.mark.parametrize("text", EMULATED)
def test_recomputation_copies_and_checkpoints(text, tmp_path):
    plain = run_steps(make_engine(text))
    assert run_steps(make_engine(str(recipe(text).replace(checkpoint="full")))) == plain
    engine = make_engine(text)
    run_steps(engine, 2)
    other = make_engine(text)
    other.load_state_dict(engine.state_dict())
    assert run_steps(other, 1, first=2) == run_steps(engine, 1, first=2) == plain[2:]
    twin = copy.deepcopy(engine.inner)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with engine.evaluating():
        assert torch.equal(twin(tokens), engine.inner(tokens))


@pytest.mark.parametrize("text", RECIPES)
def test_conversion_without_an_engine_emulates_too(text):
    """``ng.convert`` is public: it must round what it reports, as an engine does."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32)), torch.randn(8, 64)
    engine = make_engine(text, copy.deepcopy(model))
    report = convert(model, text)
    assert str(report) == str(engine.conversion) and "in 100% of" in report.summary()
    with engine.forward():
        assert torch.equal(model(x), engine.model(x))


@pytest.mark.parametrize("text", ["emulated-nvfp4", "fp8[products=all]", "fp8[granularity=row,products=all]"])
def test_second_derivatives_and_transforms_are_refused_with_what_to_do(text):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    engine, x = make_engine(text, model), torch.randn(8, 64, requires_grad=True)

    def compute(x):
        return engine.model(x).float().square().sum()

    def penalize():
        (slope,) = torch.autograd.grad(compute(x), x, create_graph=True)
        slope.square().sum().backward()

    for run in (penalize, lambda: torch.func.grad(compute)(x), lambda: torch.vmap(engine.model)(x[None])):
        with pytest.raises(UsageError, match=r"engine.forward\(double_backward=True\)"), engine.forward():
            run()
        with engine.forward(double_backward=True):
            run()


def test_stochastic_rounding_follows_the_seed():
    found = []
    for seed in (0, 0, 1):
        engine = make_engine(TRICKS)
        torch.manual_seed(seed)
        found.append(run_steps(engine, 4))
    assert found[0] == found[1] != found[2]


def test_the_hadamard_matrix_cancels():
    emulation = Emulation.of(recipe(TRICKS))
    a, b = torch.randn(8, 50, dtype=torch.float64), torch.randn(6, 50, dtype=torch.float64)
    torch.testing.assert_close(emulation.spread(a) @ emulation.spread(b).t(), a @ b.t())
    assert emulation.spread(a).shape == (8, 64)
    assert not torch.equal(emulation.spread(a)[:, :50], a)
    signs = torch.ones(16)
    assert random_hadamard(torch.eye(16), signs=signs).abs().unique().tolist() == [0.25]


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "nano"])
@pytest.mark.parametrize("text", ["emulated-nvfp4", "emulated-mxfp8"])
def test_other_peoples_models(family, text):
    """GPT-2 stores its weights transposed."""
    engine = make_engine(text, LANGUAGE[family]().train(), 1e-2)
    ids, losses = torch.randint(3, VOCAB, (4, 32), generator=torch.Generator().manual_seed(0)), []
    for _ in range(4):
        with engine.forward():
            out = engine.model(input_ids=ids, labels=ids)
            loss = out.loss if hasattr(out, "loss") else out[1]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert any(find_change(module, EmulatedLinear) for module in engine.inner.modules())


def test_layers_that_do_not_fit_stay_in_bf16():
    model = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    engine = make_engine("emulated-mxfp8[keep=3]", model)
    found = [find_change(layer, EmulatedLinear) is not None for layer in model]
    assert found == [False, False, True, False]
    assert "24 is not a multiple of MXFP8's block of 32" in str(engine.conversion)


def test_texts():
    for name in EMULATED:
        short = name.removeprefix("emulated-")
        assert recipe(short) == recipe(name) == NAMED[name] and str(recipe(short)) == name
    assert str(recipe("nvfp4[hadamard=random,checkpoint=full]")) == "emulated-nvfp4[checkpoint=full,hadamard=random]"
    for text, message in (
        ("fp8[emulate=nvfp4]", "it needs compute=bf16"),
        ("bf16[hadamard=random]", "belong to emulations"),
        ("fp8[gradient_rounding=stochastic]", "belong to emulations"),
        ("nvfp4[gradients_format=e4m3]", "belongs to fp8"),
        ("nvfp4[activations=recompute]", "no fused blocks"),
        ("mxfp6", "unknown recipe"),
    ):
        with pytest.raises(UsageError, match=message):
            recipe(text)
    assert {BLOCK_FORMATS[name].block for name in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4")} == {32}


@pytest.mark.parametrize("verb", ["bench", "roofline", "memory"])
def test_verbs_about_speed_and_memory_refuse(verb, capsys):
    from narrowgauge.cli import main

    assert main([verb, "gpt:2x64", "--recipes", "bf16,nvfp4"]) == 2
    assert "emulated-nvfp4 is an emulation in BF16, whose time and memory say nothing" in capsys.readouterr().err


def test_a_layers_error_is_explained_by_its_format(capsys):
    import json

    from narrowgauge.cli import main

    command = ["validate", "gpt:2x64", "--candidates", "nvfp4", "--steps", "2", "--seeds", "1", "--device", "cpu"]
    assert main([*command, "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert list(found["candidates"]) == ["emulated-nvfp4"]
    assert "rounding of its operands to NVFP4 (emulated)" in json.dumps(found)
