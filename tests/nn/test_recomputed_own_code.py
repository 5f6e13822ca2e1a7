"""Code of the model's own that backward runs again computes the same numbers, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.nn.side_effects import LARGEST_BUFFER, undo_side_effects

WIDTH = 64
ENTROPIES: list[Tensor] = []


class Attention(nn.Module):
    """Attention as nanoGPT writes it without FlashAttention, with a statistic of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(32, 32).tril()[None, None])
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(()))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, 4, -1).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, -1))
        scores = (q @ k.transpose(-2, -1) * 3.0).masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        share = F.softmax(scores, -1)  # in BF16 unless something keeps it in FP32
        if self.training:
            self.count += 1
            self.calls += 1
            self.largest = torch.maximum(self.largest, share.detach().float().amax())
            ENTROPIES.append(share.detach().float().square().sum())
        return self.c_proj((share @ v).transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.c_fc, self.c_out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class Convolution(nn.Module):
    """A block with the running statistics of batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=False), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)


class Model(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def train(recipe: str | None, block: type[nn.Module], **options: Any) -> tuple[list[Tensor], nn.Module, int]:
    """Train three steps; return all gradients."""
    torch.manual_seed(0)
    model = Model(block)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    engine = None if recipe is None else ng.Engine(model, optimizer, recipe, **options)
    ENTROPIES.clear()
    found = []
    for step in range(3):
        tokens = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(step))
        if engine is None:
            model(tokens).backward()
        else:
            with engine.forward():
                loss = model(tokens)
            engine.backward(loss)
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if engine is None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.step()
    return found, model, 0 if engine is None else len(engine.conversion.blocks)


@pytest.mark.parametrize("offload", ["none", "activations"])
@pytest.mark.parametrize("recipe", ["bf16[activations=bf16]", "fp8[products=all,activations=bf16]"])
def test_attention_of_the_model_is_recomputed_as_in_forward(recipe: str, offload: str) -> None:
    """On a CPU too, softmax is in FP32 in both."""
    kept, model, fused = train(recipe, Block, fused=True)
    again, other, _ = train(f"{recipe[:-1]},checkpoint=full,offload={offload}]", Block, fused=True)
    assert fused == 2
    assert all(torch.equal(one, two) for one, two in zip(kept, again, strict=True))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, other.get_buffer(name)), name


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_attention_of_the_model_leaves_nothing_behind(checkpoint: str, fused: bool) -> None:
    _, model, _ = train(f"bf16[checkpoint={checkpoint}]", Block, fused=fused)
    assert len(ENTROPIES) == 6
    for block in model.blocks:  # type: ignore[union-attr]
        assert (block.attn.count, block.attn.calls) == (3, 3)  # type: ignore[union-attr]


@pytest.mark.parametrize("checkpoint", ["selective", "full"])
def test_running_statistics_are_updated_once(checkpoint: str) -> None:
    wanted, plain, _ = train(None, Convolution)
    found, model, _ = train(f"fp32[checkpoint={checkpoint}]", Convolution)
    assert all(torch.equal(one, two) for one, two in zip(wanted, found, strict=True))
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), name


def test_buffers_are_those_of_before() -> None:
    module, shared = nn.Module(), torch.zeros(3)
    module.register_buffer("mine", shared)
    module.register_buffer("nothing", None)
    module.register_buffer("table", torch.zeros(LARGEST_BUFFER + 1, dtype=torch.int8))
    module.other = nn.Module()
    module.other.register_buffer("mine", shared)
    before = dict(module.named_buffers(remove_duplicate=False))
    with undo_side_effects(module):
        assert module.mine is module.other.mine and module.mine is not shared
        assert module.table is before["table"]
        module.mine += 1
        module.nothing = torch.ones(())
        module.register_buffer("new", torch.ones(()))
    after = dict(module.named_buffers(remove_duplicate=False))
    assert after.keys() == before.keys() and all(after[name] is one for name, one in before.items())
    assert not shared.any()
