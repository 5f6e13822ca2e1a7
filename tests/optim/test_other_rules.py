"""SGD, Lion and Adafactor with masters: torch's bits, exact split masters, states, and lean recipes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import narrowgauge as ng
from narrowgauge.errors import UsageError
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.optim.masters import join_fp32

SHAPES = [(24, 40), (3, 8, 16), (130,)]
RULES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (ng.optim.SGD, {"lr": 0.1}),
    (ng.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (ng.optim.SGD, {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "maximize": True}),
    (ng.optim.Lion, {"lr": 0.01, "weight_decay": 0.1}),
    (ng.optim.Adafactor, {"lr": 0.1, "weight_decay": 0.1}),
    (ng.optim.Adafactor, {"lr": 0.1, "eps": (1e-4, 1e-2), "d": 2.0, "beta2_decay": -0.5}),
]
NAMES = [f"{kind.__name__}-{number}" for number, (kind, _) in enumerate(RULES)]


def make(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_grads(parameters: list[nn.Parameter], step: int, dtype: torch.dtype | None = None) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = (0.1 * torch.randn(parameter.shape, generator=generator)).to(dtype or parameter.dtype)


@pytest.mark.parametrize(("kind", "options"), [rule for rule in RULES if rule[0] is not ng.optim.Lion])
def test_the_bits_are_those_of_torch(kind: type[Optimizer], options: dict[str, Any]) -> None:
    ours, theirs = make(), make()
    mine, others = kind(ours, **options), getattr(torch.optim, kind.__name__)(theirs, foreach=False, **options)
    for step in range(5):
        set_grads(ours, step)
        set_grads(theirs, step)
        mine.step()
        others.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    resumed = kind(ours, **options)
    resumed.load_state_dict(copy.deepcopy(others.state_dict()))
    set_grads(ours, 9)
    set_grads(theirs, 9)
    resumed.step()
    others.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_lion_is_its_formula() -> None:
    (weight,), (twin,) = make()[:1], make()[:1]
    optimizer = ng.optim.Lion([weight], lr=0.01, betas=(0.8, 0.95), weight_decay=0.2)
    exact, momentum = twin.detach().double(), torch.zeros_like(twin, dtype=torch.float64)
    for step in range(4):
        set_grads([weight], step)
        assert weight.grad is not None
        grad = weight.grad.double()
        exact = exact * (1 - 0.01 * 0.2) - 0.01 * torch.sign(0.8 * momentum + 0.2 * grad)
        momentum = 0.95 * momentum + 0.05 * grad
        optimizer.step()
    torch.testing.assert_close(weight.detach(), exact.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "options"), RULES, ids=NAMES)
def test_split_masters_are_exact(kind: type[Optimizer], options: dict[str, Any]) -> None:
    wide = [nn.Parameter(p.detach().bfloat16().float()) for p in make()]
    narrow = [nn.Parameter(p.detach().bfloat16()) for p in wide]
    plain, lean = kind(wide, **options), kind(narrow, master="split", gradients="fp32", **options)
    for step in range(60):
        set_grads(wide, step)
        set_grads(narrow, step, torch.float32)
        plain.step()
        lean.step()
    assert all(torch.equal(join_fp32(b), a) for a, b in zip(wide, narrow, strict=True))


@pytest.mark.parametrize(("kind", "options"), RULES, ids=NAMES)
@pytest.mark.parametrize("formats", [{}, {"master": "split", "moments": "8bit"}, {"master": "none", "moments": "bf16"}])
def test_a_loaded_state_continues_to_the_bit(
    kind: type[Optimizer], options: dict[str, Any], formats: dict[str, str]
) -> None:
    parameters = make(torch.bfloat16 if formats else torch.float32)
    optimizer = kind(parameters, **options, **formats)
    for step in range(3):
        set_grads(parameters, step)
        optimizer.step()
    others = [nn.Parameter(p.detach().clone()) for p in parameters]
    resumed = kind(others, **{**options, "lr": 1.0}, **formats)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3, 6):
        for some, one in ((parameters, optimizer), (others, resumed)):
            set_grads(some, step)
            one.step()
    assert all(torch.equal(join_fp32(a), join_fp32(b)) for a, b in zip(parameters, others, strict=True))


def test_a_skipped_step_changes_nothing() -> None:
    for kind, options in RULES:
        parameters = make()
        optimizer: Any = kind(parameters, **options)
        set_grads(parameters, 0)
        optimizer.step()
        before = [p.detach().clone() for p in parameters]
        states = copy.deepcopy(optimizer.state_dict()["state"])
        parameters[0].grad = torch.full_like(parameters[0], float("nan"))
        optimizer.found_inf = torch.tensor(1.0)
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))
        for number, state in optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, states[number][name]) for name, value in state.items())


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, ng.LossScaler])
def test_scalers_step_and_skip_them(scaler_class: Any, unscales: bool) -> None:
    for kind, options in [*RULES, (ng.optim.AdamW, {}), (ng.optim.Muon, {})]:
        ours, plain = make(), make()
        scaler, optimizer, reference = (
            scaler_class("cpu", init_scale=16.0),
            kind(ours, **options),
            kind(plain, **options),
        )
        for step in range(4):
            set_grads(plain, step)
            set_grads(ours, step)
            for parameter in ours:
                assert parameter.grad is not None
                parameter.grad *= scaler.scale(torch.ones(()))
            if step == 2:
                ours[0].grad = torch.full_like(ours[0], float("inf"))
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if step != 2:
                reference.step()
        assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


def test_wrong_options_are_one_line() -> None:
    for make_it, text in (
        (lambda: ng.optim.SGD(make(), nesterov=True), "SGD: nesterov=True is out of range"),
        (lambda: ng.optim.Lion(make(), betas=(1.0, 0.9)), r"Lion: betas=\(1.0, 0.9\) is out of range"),
        (lambda: ng.optim.Adafactor(make(), beta2_decay=0.5), "Adafactor: beta2_decay=0.5 is out of range"),
        (lambda: ng.optim.Muon(make(), ns_steps=2.5), "Muon: ns_steps=2.5 is out of range"),  # type: ignore[arg-type]
        (lambda: ng.optim.SGD(make(torch.float16)), "SGD: a parameter has dtype torch.float16; supported are FP32 and"),
    ):
        with pytest.raises(UsageError, match=text):
            make_it()


def test_options_of_wrong_types_are_one_line() -> None:
    cases: list[tuple[Any, dict[str, Any]]] = [
        (ng.optim.AdamW, {"weight_decay": None}),
        (ng.optim.AdamW, {"betas": 0.9}),
        (ng.optim.SGD, {"lr": torch.ones(2)}),
        (ng.optim.Lion, {"lr": None}),
        (ng.optim.Adafactor, {"eps": 1e-8}),
        (ng.optim.Muon, {"momentum": None}),
        (ng.optim.Muon, {"ns_coefficients": 3}),
    ]
    for kind, options in cases:
        with pytest.raises(
            UsageError, match=f"{kind.__name__}: an option has a wrong type .*{next(iter(options))}="
        ) as e:
            kind(make(), **options)
        assert "\n" not in str(e.value)


def train(optimizer: Any, recipe: str) -> tuple[list[float], Tensor, Any]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=64, heads=4, context=32, vocab=96))
    made = optimizer(model.parameters())
    engine = ng.Engine(model, made, recipe, clip_norm=1.0)
    losses = []
    for step in range(6):
        tokens = torch.randint(0, 96, (4, 33), generator=torch.Generator().manual_seed(step % 2))
        with engine.forward():
            loss = engine.model(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, model.blocks[0].qkv.weight, made


@pytest.mark.parametrize("recipe", ["bf16-lean", "fp8-lean[products=all]"])
def test_lean_recipes_take_the_optimizers_of_torch(recipe: str) -> None:
    for build in (
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
        lambda p: ng.optim.Lion(p, lr=2e-3),
    ):
        losses, weight, optimizer = train(build, recipe)
        assert losses[-1] < losses[0] - 0.1, (type(optimizer).__name__, losses)
        assert weight.dtype is torch.bfloat16 and "remainder" in optimizer.state[weight]
