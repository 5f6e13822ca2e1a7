"""GPT: learned positions, pre-norm blocks, exact GELU, a head that shares the embedding's weights, no biases.

The residual stream is FP32, whatever the embedding is, and stays so under autocast by promotion: each block adds a
16-bit branch to a 32-bit trunk. Shapes: B batch, T context, D width, H heads, V padded vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.errors import UsageError
from narrowgauge.models import draw_weights, pad_vocab, widened


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The sizes of a GPT."""

    layers: int
    width: int
    heads: int
    context: int
    """Longest sequence: one learned position each."""
    vocab: int
    """Tokens there are; the embedding is padded beyond it."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "vocab"):
            if getattr(self, name) < 1:
                raise UsageError(f"a GPT with {name} {getattr(self, name)} was asked for; {name} must be at least 1")
        if self.width % self.heads:
            raise UsageError(f"a width of {self.width} does not divide into {self.heads} heads; change one of the two")

    @property
    def padded_vocab(self) -> int:
        return pad_vocab(self.vocab)

    def parameters(self) -> int:
        """How many parameters there are, the shared embedding and head once."""
        block = 12 * self.width**2 + 2 * self.width  # qkv 3, out 1, up 4, down 4; two norms
        return (self.padded_vocab + self.context) * self.width + self.layers * block + self.width

    def flops_per_token(self) -> float:
        """Forward and backward: 6 for each parameter that multiplies (positions are looked up), and attention's 12LDT.

        Attention counts the whole square of scores, as is usual, though the causal half suffices.
        """
        multiplied = self.parameters() - self.context * self.width
        return 6.0 * multiplied + 12.0 * self.layers * self.width * self.context


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attend(self.qkv(self.norm1(x))))
        branch: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + branch

    def attend(self, qkv: Tensor) -> Tensor:
        batch, length, triple = qkv.shape  # B, T, 3D
        q, k, v = qkv.view(batch, length, 3, self.heads, triple // 3 // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # B, H, T, D/H
        return mixed.transpose(1, 2).reshape(batch, length, triple // 3)


class GPT(nn.Module):
    """Tokens in, logits out; or, with targets, their mean cross-entropy in nats."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tok = nn.Embedding(config.padded_vocab, config.width)
        self.pos = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.lm_head = nn.Linear(config.width, config.padded_vocab, bias=False)
        self.lm_head.weight = self.tok.weight
        draw_weights(self, config.layers)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        x: Tensor = widened(self.tok(inputs)) + self.pos(torch.arange(inputs.shape[1], device=inputs.device))  # B, T, D
        return self.trunk(x, targets)

    def trunk(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Everything behind the embedding: the blocks, one after the other, and the end."""
        for block in self.blocks:
            x = block(x)
        return self.finish(x, targets)

    def finish(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """From the last block's output to logits, or to the loss where there are targets."""
        logits: Tensor = self.lm_head(self.norm(x))  # B, T, V
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
