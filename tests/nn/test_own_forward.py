"""A subclass of nn.Linear runs in FP8 if its own forward computes what nn.Linear computes, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from speech_model import CastLinear
from torch import Tensor, nn

from narrowgauge import Engine
from narrowgauge.nn.products.linear import is_linear
from narrowgauge.nn.products.own_forward import computes_as_linear

SEEN: list[Tensor] = []


class Typed(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight.type_as(input), self.bias.type_as(input))


class Matmul(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype).T + self.bias.to(dtype=x.dtype)


class Parent(CastLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Named(CastLinear):
    def forward(self, x: Tensor) -> Tensor:
        return CastLinear.forward(self, x)


class Torchs(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.Linear.forward(self, x)


@pytest.mark.parametrize("cls", [nn.Linear, CastLinear, Typed, Matmul, Parent, Named, Torchs])
def test_forms_of_the_same_product(cls: type[nn.Linear]) -> None:
    assert computes_as_linear(cls, True)
    assert is_linear(cls(32, 48))


class NoBias(nn.Linear):
    """Leaves out the bias, if there is one."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def test_without_a_bias() -> None:
    assert computes_as_linear(NoBias, False)
    assert not computes_as_linear(NoBias, True)
    assert not computes_as_linear(Typed, False)  # fails on a layer without a bias


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.linear(x, self.weight, self.bias)


class Factor(nn.Linear):
    """A factor of 1 may change later."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(x, self.weight, self.bias)


class Wide(nn.Linear):
    """A router: wants FP32 whatever comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float(), self.bias).to(x.dtype)


class Collects(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(x)
        return F.linear(x, self.weight, self.bias)


class Stores(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.last = x
        return F.linear(x, self.weight, self.bias)


class Switched(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight)


class Optional(nn.Linear):
    """Takes more than its input."""

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def scaled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


class Calls(nn.Linear):
    """Calls code of somebody, which may do anything."""

    def forward(self, x: Tensor) -> Tensor:
        return scaled(x, self.weight, self.bias)


class ChildOfDoubled(Doubled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Nested(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (lambda: F.linear(x, self.weight, self.bias))()


class Prints(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        print(x)
        return F.linear(x, self.weight, self.bias)


def make_closure() -> type[nn.Linear]:
    settings = {"scale": 1.0}

    class Closed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return settings["scale"] * F.linear(x, self.weight, self.bias)

    return Closed


@pytest.mark.parametrize(
    "cls",
    [
        Doubled, Factor, Wide, Collects, Stores, Switched, Optional, Calls, ChildOfDoubled, Nested, Prints,
        make_closure(),
    ],
)  # fmt: skip
def test_what_computes_or_does_something_else_is_left_alone(cls: type[nn.Linear]) -> None:
    SEEN.clear()
    assert not computes_as_linear(cls, True)
    assert not is_linear(cls(32, 48))
    assert not SEEN


def test_a_forward_on_the_instance_and_a_later_one_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = CastLinear(32, 48)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    assert not is_linear(layer)
    assert computes_as_linear(CastLinear, True)
    monkeypatch.setattr(CastLinear, "forward", Doubled.forward)
    assert not computes_as_linear(CastLinear, True)


def test_inside_of_other_modes() -> None:
    """Forecasts look at models without values, and on devices that do not exist."""

    class Fresh(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))

    with torch.device("meta"), torch._subclasses.FakeTensorMode():
        assert computes_as_linear(Fresh, True)


class Mixer(nn.Module):
    """A layer in nanochat's style: norms without parameters, squared ReLU, all linear layers cast their weights."""

    def __init__(self, width: int, make: Any) -> None:
        super().__init__()
        self.c_q, self.c_k, self.c_v = (make(width, width, bias=False) for _ in range(3))
        self.c_proj = make(width, width, bias=False)
        self.c_fc, self.c_out = make(width, 4 * width, bias=False), make(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.rms_norm(x, (x.shape[-1],))
        q, k, v = (
            layer(h).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.c_q, self.c_k, self.c_v)
        )  # fmt: skip
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.c_proj(mixed)
        made: Tensor = x + self.c_out(F.relu(self.c_fc(F.rms_norm(x, (x.shape[-1],)))).square())
        return made


def train(make: Any, recipe: str) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(96, 64), Mixer(64, make), Mixer(64, make), make(64, 96, bias=False))
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe, clip_norm=1.0)
    losses, generator = [], torch.Generator().manual_seed(0)
    for _ in range(4):
        tokens = torch.randint(0, 96, (2, 17), generator=generator)
        with engine.forward():
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        assert engine.step().applied
        losses.append(loss.item())
    return losses, engine


@pytest.mark.parametrize("recipe", ["fp8[products=all]", "fp8-lean[products=all]", "nvfp4", "bf16"])
def test_a_model_with_such_layers_trains_as_with_torchs(recipe: str) -> None:
    """To the bit: the same layers are converted in the same way, and share the cast of their input."""
    own, engine = train(CastLinear, recipe)
    torchs, other = train(nn.Linear, recipe)
    assert own == torchs
    assert engine.conversion.summary() == other.conversion.summary()
    assert engine.conversion.layers == other.conversion.layers
    if recipe.startswith("fp8"):
        assert len(engine.conversion.layers) == 13
        assert {layer.choice.output for layer in engine.conversion.layers} == {"fp8"}


def test_copies_and_detached_models_compute_as_written() -> None:
    _, engine = train(CastLinear, "fp8[products=all]")
    twin = copy.deepcopy(engine.model)
    engine.detach()
    tokens = torch.arange(32).view(2, 16)
    assert type(engine.model[3]) is CastLinear
    with torch.no_grad():
        torch.testing.assert_close(twin(tokens), engine.model(tokens), rtol=0.2, atol=0.2, check_dtype=False)
