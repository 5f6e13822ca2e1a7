"""Habits of blocks that people write by hand: functions that enclose layers, masks by any name, other arguments."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.nn.blocks.observe import make_random_copy
from narrowgauge.nn.fused.modules import FusedBlock
from narrowgauge.nn.module_changes import find_change

WIDTH, HEADS = 64, 4
RECIPES = ["bf16", "fp8[products=all]"]


class Attention(nn.Module):
    """Attention as textbooks write it: a mask is 0 where a key is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.n_head = HEADS

    def forward(self, x: Tensor, source: Tensor, mask: Tensor | None, needed: bool = False) -> Tensor:
        q, k, v = (
            layer(part).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for layer, part in ((self.q, x), (self.k, source), (self.v, source))
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if needed or mask is not None:
            assert mask is not None
            scores = scores.masked_fill(mask == 0, -1e4)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Norms last, and a mask that is required."""

    needed = weighs = False

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: Tensor, src_mask: Tensor | None) -> Tensor:
        return self.run(x, src_mask)

    def run(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.norm1(x + self.attention(x, x, mask, self.needed))
        x = self.norm2(x + self.down(F.relu(self.up(x))))
        if self.weighs and mask is not None:
            x = x * mask.flatten(1)[:, :1, None].float()
        return x


class OtherName(Encoder):
    def forward(self, x: Tensor, slf_attn_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return self.run(x, slf_attn_mask)


class Needed(OtherName):
    """Does not run without a mask."""

    needed = True

    def forward(self, x: Tensor, my_mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.run(x, my_mask)


class Weighs(OtherName):
    """A mask that is more than attention's."""

    weighs = True


class Enclosing(nn.Module):
    """minGPT's block: a function that encloses the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, 128), "down": nn.Linear(128, WIDTH), "act": nn.GELU()})
        layers = self.mlp
        self.run_mlp = lambda x: layers["down"](layers["act"](layers["up"](x)))
        self.run_attention = self.attend

    def attend(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        return self.attention(h, h, None)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.run_attention(x)
        return x + self.run_mlp(self.norm2(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Cross-attention, with a name for the encoder's output and masks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.crossed = Attention(), Attention()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: Tensor, enc: Tensor | None, trg_mask: Tensor | None, src_mask: Tensor | None) -> Tensor:
        x = self.norm1(x + self.attention(x, x, trg_mask))
        if enc is not None:
            x = self.norm2(x + self.crossed(x, enc, src_mask))
        return self.norm3(x + self.down(F.relu(self.up(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, *args, **kwargs)
        return x


def make(kind: type[nn.Module], recipe: str, count: int = 2) -> tuple[Model, Model, ng.Engine]:
    """Return a model in an engine, and the same one as it was written."""
    model, written = Model(kind), Model(kind)
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe, fused=True)
    assert len(engine.conversion.blocks) == count, engine.conversion.unfused
    return model, written, engine


def expect_equal(model: Model, written: Model, engine: ng.Engine, x: Tensor, *args: Any, **kwargs: Any) -> None:
    wanted = written(x, *args, **kwargs)
    wanted.square().mean().backward()
    with engine.forward():
        made = model(x, *args, **kwargs)
        loss = made.float().square().mean()
    engine.backward(loss)
    tolerance = 0.15 if "fp8" in str(engine.recipe) else 0.02
    assert ((made.float() - wanted).norm() / wanted.norm()).item() < tolerance
    largest = max(float(p.grad.norm()) for p in written.parameters() if p.grad is not None)
    for (name, one), other in zip(model.named_parameters(), written.parameters(), strict=True):
        if other.grad is not None:
            assert one.grad is not None
            size = max(float(other.grad.norm()), 0.05 * largest)
            assert float((one.grad - other.grad).norm()) < 2 * tolerance * size, name
    model.zero_grad()
    written.zero_grad()


def masks(length: int = 12) -> dict[str, Tensor]:
    padding = torch.ones(2, length, dtype=torch.bool)
    padding[0, -4:] = False
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return {
        "causal": causal, "padding": padding[:, None, None], "both": causal & padding[:, None, None],
        "numbers": (causal & padding[:, None, None]).long(),
    }  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [Encoder, OtherName, Needed])
@pytest.mark.parametrize("mask", masks())
def test_masks_by_any_name(kind: type[nn.Module], mask: str, recipe: str) -> None:
    model, written, engine = make(kind, recipe)
    expect_equal(model, written, engine, torch.randn(2, 12, WIDTH), masks()[mask])
    assert not engine.conversion.as_written.reasons
    if kind is not Needed:
        expect_equal(model, written, engine, torch.randn(2, 12, WIDTH), None)


def test_an_argument_that_is_more_than_a_mask_runs_as_written() -> None:
    model, written, engine = make(Weighs, "bf16")
    x, mask = torch.randn(2, 12, WIDTH), torch.ones(2, 1, 12, 12)
    mask[1] = 0.0
    with pytest.warns(ng.errors.SlowRecipeWarning, match="called with slf_attn_mask"):
        expect_equal(model, written, engine, x, mask)
    expect_equal(model, written, engine, x)


@pytest.mark.parametrize("recipe", RECIPES)
def test_functions_that_enclose_layers(recipe: str) -> None:
    model, written, engine = make(Enclosing, recipe)
    expect_equal(model, written, engine, torch.randn(2, 12, WIDTH))


@pytest.mark.parametrize("recipe", RECIPES)
def test_cross_attention_with_names_of_its_own(recipe: str) -> None:
    model, written, engine = make(Decoder, recipe)
    change = find_change(model.blocks[0], FusedBlock)
    assert change is not None and change.plan.spec.cross is not None and change.plan.spec.cross.source == "enc"
    x, enc, all_masks = torch.randn(2, 12, WIDTH), torch.randn(2, 9, WIDTH), masks()
    seen = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    seen[1, ..., -3:] = False
    expect_equal(model, written, engine, x, enc, all_masks["both"], seen)
    expect_equal(model, written, engine, x, enc, None, None)
    assert not engine.conversion.as_written.reasons


def test_copies_of_functions_belong_to_the_copy() -> None:
    block = Enclosing()
    made: Any = make_random_copy(block, torch.device("cpu"))
    assert made.run_attention.__self__ is made and block.run_attention.__self__ is block
    x = torch.randn(2, 5, WIDTH)
    before, mine = block(x), made(x)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
    torch.testing.assert_close(made(x), mine)
    assert not torch.equal(block(x), before)
    assert copy.deepcopy(block) is not block  # and the user's own functions are as they were
    assert block.run_mlp.__closure__ is not None and block.run_mlp.__closure__[0].cell_contents is block.mlp
