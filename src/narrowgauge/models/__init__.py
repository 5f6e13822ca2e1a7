"""Plain, readable language models: what precision does to them is decided elsewhere."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

VOCAB_MULTIPLE = 128
"""Vocabularies are padded to a multiple of this: the head's GEMM then meets the tensor cores' tiles in every format."""


def pad_vocab(vocab: int) -> int:
    """The size of the embedding for a vocabulary. Entries beyond it are never targets, and learn to be unlikely."""
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@torch.no_grad()
def draw_weights(model: nn.Module, layers: int) -> None:
    """Draw the weights as GPT-2 does: what is added to the residual stream shrinks with the number of additions."""
    for name, parameter in model.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            parameter.normal_(std=0.02 / math.sqrt(2 * layers))
        elif parameter.dim() == 2:
            parameter.normal_(std=0.02)


def widened(x: Tensor) -> Tensor:
    """A residual stream's beginning: FP32 where the embedding is of 16 bits."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
