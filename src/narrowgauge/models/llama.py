"""Llama: RMSNorm, rotary positions, grouped-query attention, a gated perceptron (SwiGLU), a head of its own.

Rotation angles and norms are computed in FP32 whatever the model runs in: position 2,000 times a frequency near 1 has
lost its fraction in BF16. Shapes: B batch, T context, D width, H heads, K key-value heads, S head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.errors import UsageError
from narrowgauge.models import draw_weights, pad_vocab, widened


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The sizes of a Llama."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    """Heads of keys and values; each serves heads / kv_heads heads of queries."""
    hidden: int
    """Width of the perceptron."""
    context: int
    """The sequence length it is trained on; rotary positions themselves have no end."""
    vocab: int
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "hidden", "context", "vocab"):
            if getattr(self, name) < 1:
                raise UsageError(f"a Llama with {name} {getattr(self, name)} was asked for; {name} must be at least 1")
        if self.width % (2 * self.heads):
            raise UsageError(f"a width of {self.width} does not divide into {self.heads} heads of an even size")
        if self.heads % self.kv_heads:
            raise UsageError(
                f"{self.heads} heads do not share {self.kv_heads} key-value heads evenly; change one of them"
            )

    @property
    def padded_vocab(self) -> int:
        return pad_vocab(self.vocab)

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    def parameters(self) -> int:
        """How many parameters there are."""
        attention = self.width * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        block = attention + 3 * self.width * self.hidden + 2 * self.width
        return 2 * self.padded_vocab * self.width + self.layers * block + self.width

    def flops_per_token(self) -> float:
        """Forward and backward: 6 for each parameter that multiplies (the embedding is looked up), and 12LDT."""
        multiplied = self.parameters() - self.padded_vocab * self.width
        return 6.0 * multiplied + 12.0 * self.layers * self.width * self.context


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in FP32 inside and in the input's type outside."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class Block(nn.Module):
    """Attention and a gated perceptron, each behind a norm and beside the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        self.norm1 = RMSNorm(config.width)
        self.qkv = nn.Linear(config.width, (config.heads + 2 * config.kv_heads) * config.head_size, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.norm2 = RMSNorm(config.width)
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.out(self.attend(self.qkv(self.norm1(x)), cos, sin))
        hidden = self.norm2(x)
        branch: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return x + branch

    def attend(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = qkv.shape
        heads = qkv.view(batch, length, -1, self.head_size).transpose(1, 2)  # B, H + 2K, T, S
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=self.kv_heads != self.heads
        )
        return mixed.transpose(1, 2).reshape(batch, length, -1)


class Llama(nn.Module):
    """Tokens in, logits out; or, with targets, their mean cross-entropy in nats."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok = nn.Embedding(config.padded_vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.padded_vocab, bias=False)
        draw_weights(self, config.layers)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        x = widened(self.tok(inputs))  # B, T, D
        # Made anew rather than kept in a buffer: a buffer follows model.to(bfloat16) and is lost on the meta device.
        cos, sin = angles(inputs.shape[1], self.config.head_size, self.config.rope_base, inputs.device)
        return self.trunk(x, targets, cos, sin)

    def trunk(self, x: Tensor, targets: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        """Everything behind the embedding: the blocks, one after the other, and the end."""
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.finish(x, targets)

    def finish(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """From the last block's output to logits, or to the loss where there are targets."""
        logits: Tensor = self.lm_head(self.norm(x))  # B, T, V
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def angles(length: int, head_size: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine (T, S/2) of position times frequency, the frequencies falling from 1 towards 1/base."""
    exponents = torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
    turns = torch.arange(length, device=device, dtype=torch.float32)[:, None] * base**-exponents
    return turns.cos(), turns.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + S/2]) of a head by its position's angle, in FP32."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)
