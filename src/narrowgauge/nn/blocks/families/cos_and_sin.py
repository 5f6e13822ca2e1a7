"""Blocks that take cosines and sines as two arguments: the built-in Llama and llama2.c [T, S/2], litGPT [B, T, S]."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from narrowgauge.nn.blocks.angles import PAIRS
from narrowgauge.nn.blocks.example import Example, list_likely_head_sizes, make_turns, read_signature


def make_examples(block: nn.Module, x: Tensor) -> list[Example] | None:
    """Return calls to try, or None for blocks with other arguments."""
    required, optional = read_signature(block)
    names = [*required, *optional]
    pair = next((pair for pair in PAIRS if set(pair) <= set(names)), None)
    if pair is None:
        return None
    others = {name: None for name in required[1:] if name not in pair}
    made = []
    for size in list_likely_head_sizes(block):
        half = make_turns(x, size // 2)
        whole = torch.cat([half, half], -1)
        for turns in (half, whole, whole.expand(len(x), -1, -1)):
            made.append(Example((x,), {pair[0]: turns.cos(), pair[1]: turns.sin(), **others}))
    return made if pair[0] in required else [*made, Example((x,), others)]
