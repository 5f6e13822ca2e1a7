"""Blocks are described together only if they compute the same, in a model and across the models of a process."""

from __future__ import annotations

import copy
import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge import Engine
from narrowgauge.nn.blocks import find as find_module
from narrowgauge.nn.blocks.find import find_blocks
from narrowgauge.nn.blocks.kinds import make_key
from narrowgauge.nn.fused.modules import FusedBlock, mark_parts
from narrowgauge.nn.fused.verify import find_difference, make_fp32_plan
from narrowgauge.nn.module_changes import apply_change

CPU, WIDTH, LENGTH = torch.device("cpu"), 64, 24


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Act(enum.Enum):
    GELU, RELU = 1, 2


@dataclass
class Args:
    act: str = "gelu"
    causal: bool = True


class Holder:
    """An object without a type that anybody knows."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Block(nn.Module):
    """A block whose activation and mask are held in all ways that are common."""

    def __init__(self, how: str, special: bool, number: int = 0) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.how, self.n_head, self.layer_id = how, 4, number
        mask = torch.zeros(LENGTH, LENGTH).masked_fill(torch.ones(LENGTH, LENGTH).triu(1) > 0, -torch.inf)
        mask = torch.zeros_like(mask) if special else mask
        if how == "dataclass":
            self.args = Args("relu" if special else "gelu")
        elif how == "nested":
            self.settings = {"inner": [Holder(args=Args(causal=not special))]}
        elif how == "enum":
            self.kind = Act.RELU if special else Act.GELU
        elif how == "numpy":
            self.flag = np.int64(special)
        elif how == "private enum":
            self._kind = Act.RELU if special else Act.GELU
        elif how == "tensor":
            self.mask = mask
        elif how == "private tensor":
            self._mask = mask
        elif how == "buffer":
            self.register_buffer("mask", mask)
        elif how == "array":
            self.mask = mask.numpy()

    def uses_relu(self) -> bool:
        if self.how == "number":
            return self.layer_id % 4 == 2
        kind = getattr(self, "kind", getattr(self, "_kind", Act.GELU))
        return (
            (self.how == "dataclass" and self.args.act == "relu") or kind is Act.RELU or getattr(self, "flag", 0) == 1
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.ln1(x)).chunk(3, -1))
        mask = getattr(self, "mask", getattr(self, "_mask", None))
        causal = self.settings["inner"][0].args.causal if self.how == "nested" else mask is None
        if mask is not None:
            mask = torch.as_tensor(mask)[: x.shape[1], : x.shape[1]]
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        h = self.fc(self.ln2(x))
        made: Tensor = x + self.out(F.relu(h) if self.uses_relu() else F.gelu(h))
        return made


WAYS = [
    "dataclass", "nested", "enum", "numpy", "private enum", "tensor", "private tensor", "buffer", "array",
]  # fmt: skip


def fuse(model: nn.Module) -> nn.Module:
    found = find_blocks(model, CPU, find_difference)
    assert not found.reasons
    for path, spec in found.specs.items():
        block = model.get_submodule(path)
        mark_parts(block, spec)
        apply_change(block, FusedBlock(make_fp32_plan(block, spec)))
    return model


def compute(model: nn.Sequential) -> list[Tensor]:
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def check(model: nn.Sequential) -> None:
    """The fused model computes what the model does."""
    with torch.no_grad():
        for block in model:
            block.fc.weight.mul_(3)
            block.qkv.weight.mul_(3)
    expected, found = compute(copy.deepcopy(model)), compute(fuse(model))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-3 * other.norm()  # a ReLU's gradient may jump where its input is near zero


@pytest.mark.parametrize("how", WAYS)
def test_a_second_model_with_another_setting(how: str) -> None:
    check(nn.Sequential(*(Block(how, False) for _ in range(2))))
    check(nn.Sequential(*(Block(how, True) for _ in range(2))))


@pytest.mark.parametrize("how", WAYS)
def test_one_block_of_many_with_another_setting(how: str) -> None:
    """Not the first, the second or the last one."""
    check(nn.Sequential(*(Block(how, number == 2) for number in range(5))))


@pytest.mark.parametrize("count", [3, 6, 9])
def test_blocks_that_read_their_number(count: int) -> None:
    check(nn.Sequential(*(Block("number", False, number) for number in range(count))))
    check(nn.Sequential(*(Block("number", False, count - number) for number in range(count))))


def test_models_of_one_block_with_different_numbers() -> None:
    check(nn.Sequential(Block("number", False, 6)))
    check(nn.Sequential(Block("number", False, 7)))
    check(nn.Sequential(Block("number", False, 10)))


def test_numbers_that_make_no_difference_are_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    described = []
    describe = find_module._describe_members
    monkeypatch.setattr(find_module, "_known", {})
    monkeypatch.setattr(find_module, "_describe_members", lambda *args: described.append(args[0]) or describe(*args))
    find_blocks(nn.Sequential(*(Block("plain", False, number) for number in range(6))), CPU, find_difference)
    find_blocks(nn.Sequential(*(Block("plain", False, number + 3) for number in range(4))), CPU, find_difference)
    assert [len(members) for members in described] == [6]


def test_what_contains_itself_or_has_no_value() -> None:
    block = Block("plain", False)
    block.self_made = [block.__dict__]
    block.holder = Holder()
    block.holder.again = block.holder
    block.later = torch.empty(3, device="meta")
    block.opener = open  # a function of Python
    block.empty, block.one = torch.empty(0, 3), torch.tensor(1.5)
    block.wave, block.bits = torch.randn(3, dtype=torch.complex64).conj(), torch.tensor([True, False])
    block.sparse = torch.eye(3).to_sparse()
    block.names = np.array(["a", None], dtype=object)
    assert make_key(block) == make_key(block)
    other = copy.deepcopy(block)
    other.lock = object()
    assert make_key(other) != make_key(block)


def test_an_object_that_is_gone_is_not_taken_for_a_later_one() -> None:
    """Keys stay in a process, and Python uses addresses again."""
    block, keys = Block("plain", False), set()
    for _ in range(50):
        block.hidden = [nn.Identity()]
        keys.add(make_key(block))
        assert make_key(block) in keys
    assert len(keys) == 50


def test_towers_of_one_model_train_as_they_are() -> None:
    """As in CLIP: an image tower sees everything, a text tower of the same size what came before."""
    torch.manual_seed(0)
    towers = nn.ModuleDict(
        {
            name: nn.Sequential(*(Block("buffer", special) for _ in range(2)))
            for name, special in (("a", True), ("b", False))
        }
    )
    x = torch.randn(2, LENGTH, WIDTH)
    losses = []
    for fused in (False, True):
        model = copy.deepcopy(towers)
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", fused=fused)
        assert len(engine.conversion.blocks) == (4 if fused else 0)
        with engine.forward():
            losses.append((model["a"](x) * model["b"](x)).float().square().mean().item())
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
