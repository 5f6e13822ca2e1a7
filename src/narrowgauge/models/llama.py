"""Llama: RMSNorm, rotary position embedding, grouped-query attention, a gated MLP (SwiGLU), an untied head.

Rotation angles and norms are computed in FP32 for any format of the model: in BF16, position 2,000 times a frequency
near 1 has lost its fraction.

Shapes: B batch, T context, D width, H heads, K key-value heads, S head size, V padded vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.errors import UsageError
from narrowgauge.models.weights import init_weights, pad_vocab, widen


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The dimensions of a Llama."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    """Heads of keys and values. Each is shared by heads / kv_heads query heads."""
    hidden: int
    """Width of the MLP."""
    context: int
    """Sequence length in training. Rotary position embedding itself has no limit."""
    vocab: int
    """Number of tokens. The embedding is padded to a multiple of 128."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "hidden", "context", "vocab"):
            if getattr(self, name) < 1:
                raise UsageError(f"Llama with {name} {getattr(self, name)}: {name} must be at least 1")
        if self.width % (2 * self.heads):
            raise UsageError(f"a width of {self.width} does not divide into {self.heads} heads of an even size")
        if self.heads % self.kv_heads:
            raise UsageError(
                f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly; change one of them"
            )

    @property
    def padded_vocab(self) -> int:
        """The size of the embedding."""
        return pad_vocab(self.vocab)

    @property
    def head_size(self) -> int:
        """The width of one head."""
        return self.width // self.heads

    def parameters(self) -> int:
        """Return the number of parameters."""
        attention = self.width * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        block = attention + 3 * self.width * self.hidden + 2 * self.width
        return 2 * self.padded_vocab * self.width + self.layers * block + self.width

    def flops_per_token(self) -> float:
        """Return the FLOPs of forward and backward: 6 per parameter in a GEMM, and 12LDT for attention."""
        multiplied = self.parameters() - self.padded_vocab * self.width
        return 6.0 * multiplied + 12.0 * self.layers * self.width * self.context


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in FP32 and returned in the input's dtype."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class Block(nn.Module):
    """Attention and a gated MLP, each after a norm and added to the residual stream."""

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
        x = x + self.out(attend(self.qkv(self.norm1(x)), self.heads, self.kv_heads, cos, sin))
        hidden = self.norm2(x)
        branch: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return x + branch


class Llama(nn.Module):
    """A Llama language model. Maps tokens to logits or, with targets, to the mean cross-entropy in nats."""

    def __init__(self, config: LlamaConfig) -> None:
        """Make the model with initialized weights.

        Args:
            config: The dimensions of the model.
        """
        super().__init__()
        self.config = config
        self.tok = nn.Embedding(config.padded_vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.padded_vocab, bias=False)
        init_weights(self, config.layers)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Run the model.

        Args:
            inputs: Tokens, shape (B, T).
            targets: The next tokens, shape (B, T), or None.

        Returns:
            Logits of shape (B, T, V), or the mean cross-entropy if there are targets.
        """
        x = widen(self.tok(inputs))  # B, T, D
        # Computed at each forward: a buffer would become BF16 in model.to(bfloat16), and be lost on the meta device.
        cos, sin = compute_angles(inputs.shape[1], self.config.head_size, self.config.rope_base, inputs.device)
        return self.trunk(x, targets, cos, sin)

    def trunk(self, x: Tensor, targets: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        """Run everything after the embedding: the blocks and the head."""
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.finish(x, targets)

    def finish(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Compute logits from the output of the last block, or the loss if there are targets."""
        logits: Tensor = self.lm_head(self.norm(x))  # B, T, V
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def attend(qkv: Tensor, heads: int, kv_heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Causal attention of the projected queries, keys and values (B, T, (H + 2K)S), with rotary position embedding."""
    batch, length, width = qkv.shape
    split = qkv.view(batch, length, -1, width // (heads + 2 * kv_heads)).transpose(1, 2)  # B, H + 2K, T, S
    q, k, v = split.split([heads, kv_heads, kv_heads], dim=1)
    mixed = F.scaled_dot_product_attention(
        rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=kv_heads != heads
    )
    return mixed.transpose(1, 2).reshape(batch, length, -1)


def compute_angles(length: int, head_size: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Compute cosine and sine (T, S/2) of position times frequency. Frequencies decrease from 1 towards 1/base."""
    exponents = torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
    turns = torch.arange(length, device=device, dtype=torch.float32)[:, None] * base**-exponents
    return turns.cos(), turns.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + S/2]) of a head by the angle of its position, in FP32."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)
