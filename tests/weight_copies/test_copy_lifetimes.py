"""Copies of weights are freed by the backward of the forward that made them; every forward reads current weights."""

import contextlib

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from narrowgauge import Engine, events
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.llama import Llama, LlamaConfig

FP8 = torch.float8_e4m3fn
VOCAB = 136  # a multiple of 8 and not of 64: the head's BF16 weight is padded


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def make(name):
    torch.manual_seed(0)
    if name == "net":
        return Net(), (torch.randn(32, 64),)
    sizes = {"layers": 2, "width": 32, "heads": 2, "context": 16, "vocab": VOCAB}
    model = GPT(GPTConfig(**sizes)) if name == "gpt" else Llama(LlamaConfig(**sizes, kv_heads=1, hidden=64))
    return model, (torch.randint(0, VOCAB, (2, 16)),) * 2


def make_engine(name, recipe, optimizer=torch.optim.AdamW, **options):
    model, batch = make(name)
    return Engine(model, optimizer(model.parameters(), lr=1e-2), recipe, **options), batch


class CopyLog(events.Listener):
    """Remembers the memory of every copy that is reported, and does not keep it alive."""

    def __init__(self):
        self.copies = []

    def report_copy(self, weights, copies):
        memory = {weight.untyped_storage().data_ptr() for weight in weights}
        for copy in copies:
            if copy.untyped_storage().data_ptr() not in memory:  # a BF16 weight is its own BF16 copy
                self.copies.append((copy.dtype, StorageWeakRef(copy.untyped_storage())))

    def list_alive(self):
        return [dtype for dtype, memory in self.copies if not memory.expired()]


RECIPES = [
    "bf16", "fp8[products=all]", "fp8[products=all,scaling=current]", "fp8-lean[products=all]",
    "fp8[products=all,checkpoint=full]", "fp8[products=all,checkpoint=selective]",
]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["net", "gpt", "llama"])
def test_no_copy_outlives_the_backward_of_its_forward(name, recipe):
    engine, batch = make_engine(name, recipe, fused=True)
    for _ in range(2):  # the first step has current scaling
        log = CopyLog()
        with events.listening(log):
            with engine.forward():
                loss = engine.model(*batch)
            engine.backward(loss)
        assert log.copies or (name, recipe) == ("net", "bf16"), "autocast casts these layers"
        assert not log.list_alive()
        engine.step()
    log = CopyLog()
    with events.listening(log), engine.evaluating():
        engine.model(*batch)
        assert not log.list_alive()


@pytest.mark.parametrize("name", ["net", "gpt"])
def test_a_lean_recipe_keeps_no_fp8_copy_for_backward(name):
    kept = {}
    for recipe in ("fp8[products=all,activations=bf16]", "fp8-lean[products=all,activations=bf16,checkpoint=none]"):
        engine, batch = make_engine(name, recipe)
        log = CopyLog()
        with events.listening(log), engine.forward():
            loss = engine.model(*batch)
        assert FP8 in {dtype for dtype, _ in log.copies}
        kept[recipe] = FP8 in log.list_alive()
        engine.backward(loss)
    assert list(kept.values()) == [True, False]


class HandWritten(torch.optim.Optimizer):
    """A user's optimizer, which writes weights where neither torch nor narrowgauge sees it."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                values = parameter.data.numpy()
                values -= group["lr"] * parameter.grad.sign().numpy()


def compute_exact_loss(engine, name, batch):
    """Return the loss of an unconverted model with the engine's weights."""
    plain, _ = make(name)
    plain.load_state_dict({key: value.float() for key, value in engine.model.state_dict().items()})
    with torch.no_grad():
        return plain(*batch).item()


def train(engine, batch, steps=1):
    losses = []
    for _ in range(steps):
        with engine.forward():
            loss = engine.model(*batch)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "fused AdamW": lambda parameters, lr: torch.optim.AdamW(parameters, lr, fused=True),
    "SGD": lambda parameters, lr: torch.optim.SGD(parameters, 10 * lr),
    "one of the user's own": HandWritten,
}


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["net", "gpt"])
def test_every_forward_reads_what_any_optimizer_wrote(name, optimizer, recipe):
    engine, batch = make_engine(name, recipe, OPTIMIZERS[optimizer])
    before = compute_exact_loss(engine, name, batch)
    for _ in range(3):
        (loss,) = train(engine, batch)
        assert loss == pytest.approx(before, rel=2e-2)
        before, last = compute_exact_loss(engine, name, batch), before
        assert abs(before - last) > 1e-3 * last, "the optimizer has changed the weights"
        with engine.evaluating():
            assert engine.model(*batch).item() == pytest.approx(before, rel=2e-2)


@pytest.mark.parametrize("name", ["net", "gpt"])
def test_every_forward_reads_what_gradient_release_wrote(name):
    """The optimizer steps each parameter during backward; an evaluation may follow before engine.step."""
    engine, batch = make_engine(name, "fp8-lean[products=all,gradients=released]")
    for _ in range(3):
        with engine.forward():
            loss = engine.model(*batch)
        engine.backward(loss)
        for _ in range(2):
            with engine.evaluating():
                found = engine.model(*batch).item()
            assert found == pytest.approx(compute_exact_loss(engine, name, batch), rel=3e-2) != loss.item()
        engine.step()


@pytest.mark.parametrize(
    "recipe",
    [
        "bf16",
        "fp8[products=all]",
        "fp8-lean[products=all]",
        "fp8[products=all,granularity=row]",
        "fp8[products=all,granularity=block]",
    ],
)
@pytest.mark.parametrize("name", ["net", "gpt"])
def test_weights_may_be_written_between_microbatches(name, recipe):
    engine, batch = make_engine(name, recipe, accumulate=2)
    for factor in (0.9, 0.8, 1.1, 1.2):
        exact = compute_exact_loss(engine, name, batch)
        assert train(engine, batch) == pytest.approx([exact], rel=4e-2)
        for parameter in engine.model.parameters():
            parameter.data.mul_(factor)
        with engine.forward():
            assert engine.model(*batch).item() == pytest.approx(compute_exact_loss(engine, name, batch), rel=4e-2)


def test_two_optimizers_step_parts_of_a_model_in_turn():
    model, batch = make("net")
    optimizers = [torch.optim.SGD(layer.parameters(), 1.0) for layer in model.layers]
    engine = Engine(model, optimizers, "fp8[products=all]")
    for turn in range(6):
        before = [layer.weight.detach().clone() for layer in model.layers]
        with engine.forward():
            loss = model(*batch)
        assert loss.item() == pytest.approx(compute_exact_loss(engine, "net", batch), rel=2e-2)
        engine.backward(loss)
        engine.step(optimizers[turn % 3])
        changed = [not torch.equal(layer.weight, weight) for layer, weight in zip(model.layers, before, strict=True)]
        assert changed == [turn % 3 == number for number in range(3)]


def test_kept_copies_are_those_of_the_forward():
    """A weight that is written between a forward and its backward does not change grad_input."""
    grads = {}
    for written in (False, True):
        engine, (x,) = make_engine("net", "fp8[products=all]")
        x = x.clone().requires_grad_()
        with engine.forward():
            loss = engine.model(x)
        if written:
            for layer in engine.model.layers:
                layer.weight.data.zero_()
        engine.backward(loss)
        grads[written] = x.grad
    assert torch.equal(grads[False], grads[True]) and grads[True].any()


@pytest.mark.parametrize("name", ["net", "gpt"])
def test_torch_finds_a_change_in_place_of_a_weight_that_backward_reads_again(name):
    engine, batch = make_engine(name, "fp8-lean[products=all,checkpoint=none]")
    with engine.forward():
        loss = engine.model(*batch)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)


EVERY = ["fp32", "bf16", "fp16", "bf16-lean", "fp8", "fp8[products=all]", "fp8-lean[products=all]"]


@pytest.mark.parametrize(
    ("recipe", "fused"),
    [*((recipe, True) for recipe in (*EVERY, "bf16[keep=lm_head]")), *((recipe, False) for recipe in EVERY[1::2])],
)
def test_updates_inside_of_the_forward_context_change_no_bit(recipe, fused):
    """Some loops run backward and step in engine.forward(): autocast must neither reuse its casts of the first weights,
    nor cast gradients of layers in FP32."""
    losses = []
    for inside in (False, True):
        engine, batch = make_engine("gpt", recipe, fused=fused)
        with engine.forward() if inside else contextlib.nullcontext():
            losses.append(train(engine, batch, 4))
    assert losses[1] == losses[0] and losses[0][-1] < 0.9 * losses[0][0]


@pytest.mark.parametrize("recipe", EVERY)
def test_weights_loaded_inside_of_a_context_are_read(recipe):
    engine, batch = make_engine("net", recipe)
    states, losses = [], []
    for _ in range(2):
        states.append(engine.state_dict())
        states[-1] = {**states[-1], "model": {key: value.clone() for key, value in states[-1]["model"].items()}}
        with engine.evaluating():
            losses.append(engine.model(*batch).item())
        train(engine, batch, 3)
    assert losses[1] < 0.9 * losses[0]
    with engine.evaluating():
        for number in (0, 1, 0):
            engine.load_state_dict(states[number])
            assert engine.model(*batch).item() == losses[number]


@pytest.mark.parametrize("recipe", EVERY)
def test_weights_perturbed_after_a_backward_inside_of_the_context_are_read(recipe):
    """As in sharpness-aware minimization: two forwards and backwards at different weights, then one step."""
    engine, batch = make_engine("net", recipe, accumulate=2)
    losses = []
    with engine.forward():
        for factor in (0.5, 1.0):
            loss = engine.model(*batch)
            losses.append(loss.item())
            assert losses[-1] == pytest.approx(compute_exact_loss(engine, "net", batch), rel=2e-2)
            engine.backward(loss)
            for parameter in engine.model.parameters():
                parameter.data.mul_(factor)
    assert abs(losses[1] - losses[0]) > 0.05 * losses[0]


@pytest.mark.parametrize("recipe", EVERY)
def test_a_new_context_reads_weights_that_were_swapped_in(recipe):
    engine, batch = make_engine("net", recipe)
    for factor in (1.0, 0.5, 2.0):
        for parameter in engine.model.parameters():
            parameter.data.mul_(factor)
        with engine.evaluating():
            found = engine.model(*batch).item()
        assert found == pytest.approx(compute_exact_loss(engine, "net", batch), rel=2e-2)


@pytest.mark.parametrize("recipe", EVERY)
def test_no_hook_is_left_on_optimizers(recipe):
    """Neither on all optimizers of the process, nor on those of the user."""
    engine, batch = make_engine("gpt", recipe)
    train(engine, batch, 2)
    (optimizer,) = engine.optimizers
    assert not _global_optimizer_pre_hooks and not _global_optimizer_post_hooks
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
