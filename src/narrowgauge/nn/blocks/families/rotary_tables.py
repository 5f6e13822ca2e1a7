"""Blocks that take rows of a rotary table, one for each token, as one argument: Meta's Llama, lingua, gpt-fast.

The same angles are passed in many forms, of S/2 numbers for a head of size S. Each is tried:

    complex [T, S/2]    Meta's Llama and what derives from it
    [T, S/2, 2]         cosine and sine (gpt-fast)
    [T, S/2, 2, 2]      rotations (lingua)
    pairs               cosines and sines, each [T, S/2] or [T, S]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.nn.blocks.angles import TABLES
from narrowgauge.nn.blocks.example import Example, list_likely_head_sizes, make_turns, read_signature

OTHERS: dict[str, Any] = {
    "start_pos": 0, "input_pos": None, "mask": None, "attn_mask": None, "attention_mask": None, "cache": None,
    "kv_cache": None, "past_kv": None, "past_key_value": None, "past_key_values": None,
}  # fmt: skip
"""Values of other arguments that such blocks need: no mask, no cache."""


def make_examples(block: nn.Module, x: Tensor) -> list[Example] | None:
    """Return calls to try, or None for blocks with other arguments."""
    required, optional = read_signature(block)
    name = next((name for name in (*required, *optional) if name in TABLES), None)
    if name is None:
        return None
    others = {other: OTHERS[other] for other in required[1:] if other in OTHERS}
    if any(other != name and other not in others for other in required[1:]):
        return None
    sizes = list_likely_head_sizes(block)
    made = [Example((x,), {name: form, **others}) for size in sizes for form in _list_forms(x, size)]
    return made if name in required else [*made, Example((x,), others)]


def _list_forms(x: Tensor, size: int) -> Iterator[Any]:
    turns = make_turns(x, size // 2)
    cos, sin = turns.cos(), turns.sin()
    yield torch.complex(cos, sin)
    yield torch.stack([cos, sin], -1)
    yield torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
    yield cos, sin
    yield torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
