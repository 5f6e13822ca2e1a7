"""Blocks of transformers that take rotary angles as ``position_embeddings``, a pair of cosines and sines [B, T, S].

Others under the same name: [B, T, S/2] (GPT-OSS), complex numbers [B, T, S/2] (Llama 4), [T, S] (minimind).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from narrowgauge.nn.blocks.example import Example, list_head_sizes, make_positions, make_turns, read_signature


def make_examples(block: nn.Module, x: Tensor) -> list[Example] | None:
    """Return calls to try, or None for blocks with other arguments."""
    required, optional = read_signature(block)
    if "position_embeddings" not in (*required, *optional):
        return None
    masks = {"attention_mask": None} if "attention_mask" in required else {}
    others = {**masks, **make_positions([*required, *optional], x)}
    made = []
    for size in list_head_sizes(block):
        half = make_turns(x, size // 2)
        turns, batch = torch.cat([half, half], -1), half.expand(len(x), -1, -1)
        for form in (turns.expand(len(x), -1, -1), batch, turns):
            made.append(Example((x,), {"position_embeddings": (form.cos(), form.sin()), **others}))
        made.append(Example((x,), {"position_embeddings": torch.polar(torch.ones_like(batch), batch), **others}))
    return made
