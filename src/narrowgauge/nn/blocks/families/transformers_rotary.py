"""Blocks of transformers that take rotary angles as ``position_embeddings``, a pair of cosines and sines [B, T, S].

minimind passes [T, S] under the same name.
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
        turns = make_turns(x, size // 2)
        turns = torch.cat([turns, turns], -1)
        for form in (turns.expand(len(x), -1, -1), turns):
            made.append(Example((x,), {"position_embeddings": (form.cos(), form.sin()), **others}))
    return made
