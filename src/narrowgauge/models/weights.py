"""What the models share: the padded vocabulary, the initialization of the weights, the FP32 residual stream."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

VOCAB_MULTIPLE = 128
"""Vocabularies are padded to a multiple of this, so that the head's GEMM fits tensor core tiles in every format."""


def pad_vocab(vocab: int) -> int:
    """Return the size of the embedding for a vocabulary. The padding is never a target, and learns to be unlikely."""
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@torch.no_grad()
def init_weights(model: nn.Module, layers: int) -> None:
    """Initialize the weights as GPT-2 does: layers that add to the residual stream start smaller in deeper models."""
    for name, parameter in model.named_parameters():
        if name.endswith(("out.weight", "down.weight", "down_proj")):
            parameter.normal_(std=0.02 / math.sqrt(2 * layers))
        elif parameter.dim() >= 2:
            parameter.normal_(std=0.02)


def widen(x: Tensor) -> Tensor:
    """Convert a 16-bit embedding to FP32, the format of the residual stream."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
