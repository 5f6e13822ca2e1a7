"""Norms of any code are recognized by what they compute: their parameters' names, and the epsilon that they add."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model_families import NanoBlock
from torch import Tensor, nn

from narrowgauge import Engine
from narrowgauge.nn.blocks.equations import recognize_norm
from narrowgauge.nn.blocks.find import find_blocks
from narrowgauge.nn.blocks.observe import Call, make_random_copy
from narrowgauge.nn.fused.modules import FusedBlock, mark_parts
from narrowgauge.nn.fused.verify import find_difference, make_fp32_plan
from narrowgauge.nn.module_changes import apply_change

CPU, WIDTH = torch.device("cpu"), 64


class Own(nn.Module):
    """A norm whose parameters have other names, and whose epsilon is in its code only."""

    def __init__(self, kind: str, names: tuple[str, ...], eps: float) -> None:
        super().__init__()
        self.kind, self.names, self.added = kind, names, (eps,)
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.kind == "layer" else x
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.added[0])
        y = y * getattr(self, self.names[0])
        return y + getattr(self, self.names[1]) if len(self.names) > 1 else y


NORMS: dict[str, Any] = {
    "torch, no epsilon": (lambda: nn.RMSNorm(WIDTH), torch.finfo(torch.float32).eps),
    "torch, 1e-8": (lambda: nn.RMSNorm(WIDTH, eps=1e-8), 1e-8),
    "torch's layer norm": (lambda: nn.LayerNorm(WIDTH, eps=1e-3), 1e-3),
    "scale": (lambda: Own("rms", ("scale",), 1e-6), 1e-6),
    "scale and shift": (lambda: Own("layer", ("scale", "shift"), 1e-5), 1e-5),
    "shift first": (lambda: Own("layer", ("gamma", "beta"), 3e-4), 3e-4),
    "an unusual epsilon": (lambda: Own("rms", ("g",), 2.5e-7), 2.5e-7),
    "none": (lambda: Own("rms", ("weight",), 0.0), 1e-12),
}


def observe_norm(norm: nn.Module) -> Any:
    made = make_random_copy(norm, CPU)
    x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(0))
    return recognize_norm(Call("norm", made, x, made(x).detach()))


@pytest.mark.parametrize("name", NORMS)
def test_the_epsilon_is_measured(name: str) -> None:
    make, eps = NORMS[name]
    spec = observe_norm(make())
    assert spec is not None and spec.eps == pytest.approx(eps, rel=0.02)
    assert {spec.weight, spec.bias} >= {own for own, _ in make().named_parameters()}


class Doubled(Own):
    """Computes something else for small inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.abs().max() < 0.01 else 1)


def test_what_is_a_norm_of_large_inputs_only_is_none() -> None:
    assert observe_norm(Doubled("rms", ("weight",), 1e-6)) is None
    assert observe_norm(nn.PReLU(WIDTH)) is None


def make_model(make: Any) -> nn.Module:
    torch.manual_seed(0)
    blocks = [NanoBlock(WIDTH, 4, False) for _ in range(2)]
    for block in blocks:
        block.ln_1, block.ln_2 = make(), make()
    return nn.Sequential(nn.Embedding(96, WIDTH), *blocks, nn.Linear(WIDTH, 96))


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_blocks_with_them_compute_what_they_did(name: str, size: float) -> None:
    """Also with a small residual stream, as small embeddings make it."""
    model = make_model(NORMS[name][0])
    with torch.no_grad():
        model[0].weight.mul_(size)
        for block in model[1:3]:
            block.c_proj.weight.mul_(size)
            block.c_out.weight.mul_(size)
    tokens, fused = torch.arange(24).view(2, 12), copy.deepcopy(model)
    found = find_blocks(fused, CPU, find_difference)
    assert len(found.specs) == 2, found.reasons
    for path, spec in found.specs.items():
        block = fused.get_submodule(path)
        mark_parts(block, spec)
        apply_change(block, FusedBlock(make_fp32_plan(block, spec)))
    gradients = []
    for one in (model, fused):
        one(tokens).square().mean().backward()
        gradients.append({name: p.grad for name, p in one.named_parameters()})
    for key, expected in gradients[0].items():
        apart = (gradients[1][key] - expected).norm() / expected.norm()
        assert apart < 1e-3, key


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8-lean", "bf16-lean"])
@pytest.mark.parametrize("name", ["scale", "scale and shift"])
def test_they_train_in_every_recipe(recipe: str, name: str) -> None:
    losses = []
    for fused in (False, True):
        model = make_model(NORMS[name][0])
        engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe, fused=fused)
        assert len(engine.conversion.blocks) == (2 if fused else 0)
        for _ in range(3):
            with engine.forward():
                loss = nn.functional.cross_entropy(model(torch.arange(24).view(2, 12)).flatten(0, 1), torch.arange(24))
            engine.backward(loss)
            assert engine.step().applied
        losses.append(loss.item())
        for own in (one for one in model.modules() if isinstance(one, Own)):
            assert all(not torch.equal(p.float(), torch.ones(WIDTH)) for p in own.parameters())
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


class Shares(NanoBlock):
    """Blocks get a module that all of them share."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__(WIDTH, 4, False)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if isinstance(self.part, nn.Dropout | nn.GELU) else super().forward(x) + self.part(x)


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8-lean"])
@pytest.mark.parametrize("part", [nn.GELU(), nn.Dropout(0.1)])
def test_blocks_may_share_a_module_without_parameters(recipe: str, part: nn.Module) -> None:
    model = nn.Sequential(nn.Embedding(96, WIDTH), *(Shares(part) for _ in range(2)), nn.Linear(WIDTH, 96))
    engine = Engine(model, torch.optim.AdamW(model.parameters()), recipe, fused=True)
    assert len(engine.conversion.blocks) == 2


def test_blocks_that_share_a_layer_are_not_fused() -> None:
    shared = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(nn.Embedding(96, WIDTH), *(Shares(shared) for _ in range(2)), nn.Linear(WIDTH, 96))
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "fp8[products=all]")
    assert engine.conversion.unfused == dict.fromkeys(("1", "2"), "part is a layer of another block, too")
    with engine.forward():
        loss = model(torch.arange(24).view(2, 12)).float().square().mean()
    engine.backward(loss)
    assert engine.step().applied


class Bare(NanoBlock):
    """A block whose norms have no weights."""

    def __init__(self, kind: str) -> None:
        super().__init__(WIDTH, 4, False)
        norms: dict[str, Any] = {
            "layer": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-3),
            "rms": lambda: nn.RMSNorm(WIDTH, elementwise_affine=False, eps=1e-4),
            "own": lambda: Norm(),
        }
        self.ln_1, self.ln_2 = norms[kind](), norms[kind]()


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 3e-5)


@pytest.mark.parametrize("kind", ["layer", "rms", "own"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8-lean[products=all]", "bf16[checkpoint=full]"])
def test_norms_without_weights(kind: str, recipe: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Bare(kind), Bare(kind))
    written = copy.deepcopy(model)
    engine = Engine(model, torch.optim.AdamW(model.parameters()), recipe, fused=True)
    assert engine.conversion.blocks == ["0", "1"], engine.conversion.unfused
    x = torch.randn(2, 12, WIDTH)
    with engine.forward():
        made = model(x)
        loss = made.float().square().mean()
    engine.backward(loss)
    wanted = written(x)
    wanted.square().mean().backward()
    tolerance = 0.1 if "fp8" in recipe else 0.02
    assert ((made.detach().float() - wanted.detach()).norm() / wanted.detach().norm()).item() < tolerance
    for one, other in zip(model.parameters(), written.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert ((one.grad - other.grad).norm() / other.grad.norm()).item() < 2 * tolerance
    assert engine.step().applied
