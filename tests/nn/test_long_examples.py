"""Attention in a window that is longer than a short example is not taken for attention to all tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from model_families import LANGUAGE
from torch import Tensor, nn

from narrowgauge import Engine
from narrowgauge.nn.blocks.find import find_blocks
from narrowgauge.nn.blocks.long_examples import list_lengths
from narrowgauge.nn.fused.verify import find_difference

CPU, WIDTH = torch.device("cpu"), 64


@dataclass
class Settings:
    window: int = 10**6


class Windowed(nn.Module):
    """Attention in a window, which is held in one of several ways."""

    def __init__(self, how: str, window: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.how, self.n_head = how, 4
        if how == "attribute":
            self.local = window
        elif how == "object":
            self.settings = Settings(window)
        elif how == "list":
            self.windows = [window, window]
        elif how == "buffer":
            self.register_buffer("mask", self.make_mask(96, window))
        elif how == "scores":
            self.span = window

    @staticmethod
    def make_mask(length: int, window: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)

    def find_mask(self, length: int) -> Tensor | None:
        if self.how == "buffer":
            assert isinstance(self.mask, Tensor)
            if length > len(self.mask):
                raise ValueError("the sequence is too long")
            return self.mask[:length, :length]
        if self.how == "constant":
            return self.make_mask(length, 20)
        if self.how == "branch" and length <= 48:
            return None
        held = {"attribute": "local", "scores": "span"}.get(self.how)
        window = getattr(self, held) if held else 40
        window = self.settings.window if self.how == "object" else self.windows[0] if self.how == "list" else window
        return self.make_mask(length, window)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.ln1(x)).chunk(3, -1))
        mask = self.find_mask(x.shape[1])
        if self.how == "scores" and mask is not None:
            scores = (q @ k.mT / 4).masked_fill(~mask, -torch.inf)
            mixed = scores.softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        made: Tensor = x + self.out(F.gelu(self.fc(self.ln2(x))))
        return made


WAYS = ["attribute", "object", "list", "buffer", "scores", "constant", "branch"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("window", [8, 13, 20, 33])
def test_a_window_is_the_blocks_own_attention(how: str, window: int) -> None:
    blocks = nn.ModuleList(Windowed(how, window) for _ in range(2))
    found = find_blocks(blocks, CPU, find_difference)
    assert not found.reasons
    assert {spec.attention.kind for spec in found.specs.values()} == {"own"}


@pytest.mark.parametrize("how", ["attribute", "object", "list", "scores"])
def test_a_window_that_no_sequence_fills_is_not_seen(how: str) -> None:
    """With the largest numbers there is nothing to compare: they are context lengths, vocabularies, or no limit."""
    found = find_blocks(nn.ModuleList(Windowed(how, 10**6) for _ in range(2)), CPU, find_difference)
    assert {spec.attention.kind for spec in found.specs.values()} == {"plain"}


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8-lean"])
@pytest.mark.parametrize("how", WAYS)
def test_no_gradient_leaves_the_window(how: str, recipe: str) -> None:
    """Two blocks with windows of 20 tokens reach 38 tokens back; those of one way have 40."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Windowed(how, 20) for _ in range(2)))
    engine = Engine(model, torch.optim.AdamW(model.parameters()), recipe, fused=True)
    assert len(engine.conversion.blocks) == 2
    reach = 78 if how == "branch" else 38
    for token, reaches in ((10, True), (reach + 1, False), (89, False)):
        x = torch.randn(1, 90, WIDTH).requires_grad_()
        with engine.forward():
            loss = model(x)[0, token].float().square().sum()
        engine.backward(loss)
        assert x.grad is not None and bool(x.grad[0, 0].any()) is reaches
        assert engine.step().applied


def test_lengths_are_longer_than_all_numbers_and_at_most_a_masks() -> None:
    block = nn.Sequential(nn.Linear(48, 200))
    block.settings = Settings(100)  # type: ignore[assignment]
    block.register_buffer("mask", torch.zeros(1, 1, 90, 90))
    lengths = list_lengths(block, 12, CPU)
    assert lengths == [267, 142, 90, 77]
    assert not any(length % 16 == 0 for length in lengths)
    assert list_lengths(nn.Linear(10**4, 10**4), 12, CPU) == []  # too much work on a CPU


@pytest.mark.parametrize("family", ["llama", "gpt2", "nano", "litgpt-style", "torch-pre"])
def test_families_without_a_window_keep_their_fast_form(family: str) -> None:
    found = find_blocks(LANGUAGE[family](), CPU, find_difference)
    assert "own" not in {spec.attention.kind for spec in found.specs.values()}


class Masked(nn.Module):
    """A block as in OpenAI's CLIP: torch's attention, sequence first, and a mask of which it uses all, or none."""

    def __init__(self, length: int | None) -> None:
        super().__init__()
        self.attn, self.ln_1, self.ln_2 = nn.MultiheadAttention(WIDTH, 4), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.fc, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.attn_mask = None if length is None else torch.full((length, length), -torch.inf).triu(1)

    def forward(self, x: Tensor) -> Tensor:
        self.attn_mask = None if self.attn_mask is None else self.attn_mask.to(x.dtype)
        h = self.ln_1(x)
        x = x + self.attn(h, h, h, need_weights=False, attn_mask=self.attn_mask)[0]
        made: Tensor = x + self.out(F.gelu(self.fc(self.ln_2(x))))
        return made


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "bf16-lean"])
def test_blocks_that_take_sequences_of_one_length(recipe: str) -> None:
    """A tower with such a mask beside one without."""
    losses = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict({
            "image": nn.Sequential(*(Masked(None) for _ in range(2))),
            "text": nn.Sequential(*(Masked(40) for _ in range(2))),
        })  # fmt: skip
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe, fused=fused)
        assert len(engine.conversion.blocks) == (4 if fused else 0)
        generator = torch.Generator().manual_seed(0)
        text, image = (torch.randn(n, 2, WIDTH, generator=generator) for n in (40, 17))
        with engine.forward():
            loss = (model["text"](text).float().mean(0) * model["image"](image).float().mean(0)).square().mean()
        engine.backward(loss)
        assert engine.step().applied
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
