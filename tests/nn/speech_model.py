"""A small encoder and decoder of speech in the style of OpenAI's Whisper, with the habits of its file.

Linear layers cast their weights, norms compute in FP32, attention returns two values, and the blocks of the decoder get
the encoder's output as ``xa`` and a mask that only says that attention is causal.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn


class CastLinear(nn.Linear):
    """Multiplies in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class WideNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.value, self.out = (CastLinear(width, width) for _ in range(3))
        self.key = CastLinear(width, width, bias=False)

    def forward(self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None) -> tuple[Tensor, None]:
        source = x if xa is None else xa
        parts = self.query(x), self.key(source), self.value(source)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=mask is not None and x.shape[1] > 1)
        return self.out(mixed.transpose(1, 2).flatten(2)), None


class SpeechBlock(nn.Module):
    def __init__(self, width: int, heads: int, crosses: bool) -> None:
        super().__init__()
        self.attn, self.attn_ln = Attention(width, heads), WideNorm(width)
        self.cross_attn = Attention(width, heads) if crosses else None
        self.cross_attn_ln = WideNorm(width) if crosses else None
        self.mlp = nn.Sequential(CastLinear(width, 2 * width), nn.GELU(), CastLinear(2 * width, width))
        self.mlp_ln = WideNorm(width)

    def forward(self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.attn_ln(x), mask=mask)[0]
        if self.cross_attn is not None and self.cross_attn_ln is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa)[0]
        made: Tensor = x + self.mlp(self.mlp_ln(x))
        return made


class Speech(nn.Module):
    """Maps features [batch, 80, 2 * frames] and tokens to a loss."""

    mask: Tensor

    def __init__(self, vocab: int, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv1d(80, width, 3, stride=2, padding=1)
        self.encoder = nn.ModuleList([SpeechBlock(width, heads, False) for _ in range(2)])
        self.ln_post = WideNorm(width)
        self.tokens = nn.Embedding(vocab, width)
        self.decoder = nn.ModuleList([SpeechBlock(width, heads, True) for _ in range(2)])
        self.ln, self.head = WideNorm(width), CastLinear(width, vocab, bias=False)
        self.register_buffer("mask", torch.full((64, 64), -torch.inf).triu(1), persistent=False)

    def forward(self, input_features: Tensor, labels: Tensor) -> Any:
        x = F.gelu(self.conv(input_features)).transpose(1, 2)
        for block in self.encoder:
            x = block(x)
        source, x = self.ln_post(x), self.tokens(labels)
        for block in self.decoder:
            x = block(x, source, mask=self.mask)
        logits = self.head(self.ln(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return hf.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def speech(vocab: int) -> nn.Module:
    torch.manual_seed(0)
    return Speech(vocab)
