"""Variants of an example that a fused block must compute like the original: with masks, and with packed positions.

A block takes masks under the names of its library. Each name has one meaning there, so a mask is made by the name of
the argument. Calls that the block itself cannot run are left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.nn.blocks.angles import NAMES, TABLES
from narrowgauge.nn.blocks.example import Example, find_source, read_signature
from narrowgauge.nn.blocks.multihead import is_batch_first

PADDED = 3
"""Tokens of padding at the end of the first row."""
HIDDEN = -1e4
"""Added to the scores of keys that are not seen."""
PACKED = "packed positions"
MASKS = ("attention_mask", "attn_mask", "mask")
"""Names of masks over queries and keys."""
SOURCE_MASK = "encoder_attention_mask"
"""A mask over queries and the tokens of an encoder's output."""
COMPUTED_IF_MISSING = ("position_bias", "encoder_decoder_position_bias")
"""Arguments that a block computes if it is not given them."""


def make_variants(block: nn.Module, example: Example) -> dict[str, Example]:
    """Return variants of an example by name, of those that the block can run."""
    found = {}
    for name, changes in _list_changes(block, example):
        variant = Example(example.args, {**example.kwargs, **changes})
        try:
            with torch.no_grad():
                block(*variant.args, **variant.kwargs)
        except Exception:  # whatever it raises: the original cannot run this either
            continue
        found[name] = variant
    return found


def list_other_masks(block: nn.Module) -> list[str]:
    """Return the names of a block's arguments that are called masks, and have no meaning known here."""
    known = (*MASKS, SOURCE_MASK, "src_mask", "src_key_padding_mask")
    return [name for group in read_signature(block) for name in group if "mask" in name and name not in known]


def make_mask_variants(block: nn.Module, name: str, example: Example) -> list[Example]:
    """Return the example with masks of some shapes for an argument, of those that the block can run."""
    x = example.args[0]
    rows, length = x.shape[:2]
    seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril().expand(rows, 1, -1, -1)
    padding = torch.ones(rows, length, dtype=torch.bool, device=x.device)
    padding[0, -PADDED:] = False
    added = x.new_zeros(seen.shape).masked_fill_(~seen, HIDDEN)
    forms = (seen, added, seen[:, 0], seen[0, 0], padding, padding[:, None, None], padding[:, None])
    found = []
    for form in forms:
        variant = Example(example.args, {**example.kwargs, name: form})
        with contextlib.suppress(Exception), torch.no_grad():
            block(*variant.args, **variant.kwargs)
            found.append(variant)
    return found


def name_boolean(mask: str) -> str:
    """Return the name of the variant with a boolean mask."""
    return f"boolean {mask}"


def _list_changes(block: nn.Module, example: Example) -> Iterator[tuple[str, dict[str, Any]]]:
    names = [name for group in read_signature(block) for name in group]
    x = example.args[0]
    rows, length = x.shape[:2] if is_batch_first(block) else x.shape[1::-1]
    future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    padding = torch.zeros(rows, length, dtype=torch.bool, device=x.device)
    padding[0, -PADDED:] = True
    both = x.new_zeros(rows, 1, length, length).masked_fill_((future | padding[:, None])[:, None], HIDDEN)
    causal = x.new_zeros(length, length).masked_fill_(future, float("-inf"))
    late = padding.clone()
    late[-1, :2] = True  # the first tokens of the last row see nothing
    seen = ~(future | late[:, None])[:, None]
    masks: dict[str, dict[str, Any]] = {
        **{name: {name: both} for name in MASKS},
        **{name_boolean(name): {name: seen} for name in MASKS},
        "src_mask": {"src_mask": causal},
        "is_causal": {"src_mask": causal, "is_causal": True},
        "src_key_padding_mask": {"src_key_padding_mask": padding},  # True means padding
    }
    source = find_source(example.kwargs)
    if source is not None:
        unseen = torch.zeros(rows, 1, length, source[1].shape[1], dtype=torch.bool, device=x.device)
        unseen[0, ..., -PADDED:] = True
        added = x.new_zeros(unseen.shape).masked_fill_(unseen, HIDDEN)
        masks |= {SOURCE_MASK: {SOURCE_MASK: added}, name_boolean(SOURCE_MASK): {SOURCE_MASK: ~unseen}}
    yield from ((name, changes) for name, changes in masks.items() if all(key in names for key in changes))
    positions = torch.cat([torch.arange(length - 5), torch.arange(5)]).to(x.device)
    packed = _pack(example, positions)
    if packed:
        yield PACKED, packed
    computed = [name for name in example.kwargs if name in COMPUTED_IF_MISSING]
    yield from ((f"no {name}", {name: None}) for name in computed)
    if len(computed) > 1:
        yield f"no {' and no '.join(computed)}", dict.fromkeys(computed)


def _pack(example: Example, positions: Tensor) -> dict[str, Any]:
    """Return the positions of an example, or their angles, for two documents in a row."""
    rows = len(example.args[0])
    packed: dict[str, Any] = {}
    for name, value in example.kwargs.items():
        if name == "position_ids" and value is not None:
            packed[name] = positions.expand(rows, -1)
        elif name in NAMES and isinstance(value, tuple):
            packed[name] = tuple(part[..., positions, :] for part in value)
        elif name in TABLES and value is not None:
            packed[name] = value[positions]
        elif name in NAMES and value is not None:
            packed[name] = value[..., positions, :]
    return packed
