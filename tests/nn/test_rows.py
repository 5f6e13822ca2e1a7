"""Rows of equal blocks are found in a ModuleList, a Sequential and a ModuleDict; rows of single layers are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_families import NanoBlock
from torch import nn

from narrowgauge import Engine
from narrowgauge.nn.module_changes import find_change
from narrowgauge.nn.recompute import Recomputed, count_blocks, find_blocks, shorten_row

WIDTH = 64
KINDS: dict[str, Any] = {
    "list": nn.ModuleList,
    "sequential": lambda blocks: nn.Sequential(*blocks),
    "dictionary": lambda blocks: nn.ModuleDict({str(number): block for number, block in enumerate(blocks)}),
}


class Model(nn.Module):
    def __init__(self, kind: str, count: int) -> None:
        super().__init__()
        self.layers = KINDS[kind](NanoBlock(WIDTH, 4, False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            x = block(x)
        return x


def train(kind: str, recipe: str, **options: Any) -> tuple[list[float], Engine]:
    torch.manual_seed(0)
    model, losses = Model(kind, 6), []
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe, **options)
    for seed in range(2):
        x = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(seed))
        with engine.forward():
            loss = engine.model(x).float().square().mean()
        engine.backward(loss)
        assert engine.step().applied
        losses.append(loss.item())
    return losses, engine


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_by_path(kind: str) -> None:
    model = Model(kind, 3)
    assert list(find_blocks(model)) == [f"layers.{number}" for number in range(3)]
    assert count_blocks(model) == {"layers": 3}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["bf16-lean", "fp32[checkpoint=full]", "bf16[checkpoint=selective]"])
def test_they_are_recomputed(kind: str, recipe: str) -> None:
    losses, engine = train(kind, recipe, fused=False)
    assert losses == train("list", recipe, fused=False)[0]
    blocks = find_blocks(engine.inner).values()
    assert all(find_change(block, Recomputed) is not None for block in blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_of_six_multiplies_mostly_in_bf16(kind: str) -> None:
    losses, engine = train(kind, "fp8[products=all]")
    wide = {layer.path for layer in engine.conversion.layers if layer.choice.output == "bf16"}
    assert wide == {f"layers.0.{name}" for name in ("c_attn", "c_proj", "c_fc")}
    assert losses == train("list", "fp8[products=all]")[0]


def test_single_layers_and_different_blocks_are_no_row() -> None:
    class Other(NanoBlock):
        pass

    make = NanoBlock(WIDTH, 4, False), Other(WIDTH, 4, False)
    for row in (
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))),
        nn.Sequential(*make),
        nn.ModuleDict({"one": make[0]}),
    ):
        assert not find_blocks(row)


def test_a_sequential_is_shortened() -> None:
    row = Model("sequential", 6)
    shorten_row(row.layers, 2)
    assert list(find_blocks(row)) == ["layers.0", "layers.1"] and count_blocks(row) == {"layers": 6}
