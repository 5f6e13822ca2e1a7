"""GPT: learned positions, pre-norm blocks, exact GELU, a head that shares the embedding's weights, no biases.

The residual stream is FP32 for any format of the embedding. Under autocast, type promotion keeps it FP32: each block
adds a 16-bit branch to it. Shapes: B batch, T context, D width, H heads, V padded vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.errors import UsageError
from narrowgauge.models.weights import init_weights, pad_vocab, widen


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The dimensions of a GPT."""

    layers: int
    width: int
    heads: int
    context: int
    """Maximum sequence length: each position has a learned embedding."""
    vocab: int
    """Number of tokens. The embedding is padded to a multiple of 128."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "vocab"):
            if getattr(self, name) < 1:
                raise UsageError(f"GPT with {name} {getattr(self, name)}: {name} must be at least 1")
        if self.width % self.heads:
            raise UsageError(f"a width of {self.width} does not divide into {self.heads} heads; change one of the two")

    @property
    def padded_vocab(self) -> int:
        """The size of the embedding."""
        return pad_vocab(self.vocab)

    def parameters(self) -> int:
        """Return the number of parameters. The shared embedding and head count once."""
        block = 12 * self.width**2 + 2 * self.width  # qkv 3, out 1, up 4, down 4; two norms
        return (self.padded_vocab + self.context) * self.width + self.layers * block + self.width

    def flops_per_token(self) -> float:
        """Return the FLOPs of forward and backward: 6 per parameter in a GEMM, and 12LDT for attention.

        Position embeddings are looked up, so they do not count. Attention counts the full square of scores, as is
        usual, although half of it is masked.
        """
        multiplied = self.parameters() - self.context * self.width
        return 6.0 * multiplied + 12.0 * self.layers * self.width * self.context


class Block(nn.Module):
    """Attention and a two-layer MLP, each after a norm and added to the residual stream."""

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
        """Causal attention of the projected queries, keys and values."""
        batch, length, triple = qkv.shape  # B, T, 3D
        q, k, v = qkv.view(batch, length, 3, self.heads, triple // 3 // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # B, H, T, D/H
        return mixed.transpose(1, 2).reshape(batch, length, triple // 3)


class GPT(nn.Module):
    """A GPT language model. Maps tokens to logits or, with targets, to the mean cross-entropy in nats."""

    def __init__(self, config: GPTConfig) -> None:
        """Make the model with initialized weights.

        Args:
            config: The dimensions of the model.
        """
        super().__init__()
        self.config = config
        self.tok = nn.Embedding(config.padded_vocab, config.width)
        self.pos = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.lm_head = nn.Linear(config.width, config.padded_vocab, bias=False)
        self.lm_head.weight = self.tok.weight
        init_weights(self, config.layers)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Run the model.

        Args:
            inputs: Tokens, shape (B, T).
            targets: The next tokens, shape (B, T), or None.

        Returns:
            Logits of shape (B, T, V), or the mean cross-entropy if there are targets.
        """
        x: Tensor = widen(self.tok(inputs)) + self.pos(torch.arange(inputs.shape[1], device=inputs.device))  # B, T, D
        return self.trunk(x, targets)

    def trunk(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run everything after the embedding: the blocks and the head."""
        for block in self.blocks:
            x = block(x)
        return self.finish(x, targets)

    def finish(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Compute logits from the output of the last block, or the loss if there are targets."""
        logits: Tensor = self.lm_head(self.norm(x))  # B, T, V
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
