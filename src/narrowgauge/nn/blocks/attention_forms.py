"""Lists the forms of attention that a block may have and that we compute faster; each is verified before it is used."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from narrowgauge.nn.blocks.angles import NAMES, TABLES, read_angles
from narrowgauge.nn.blocks.equations import recognize_norm
from narrowgauge.nn.blocks.example import SOURCES, Example
from narrowgauge.nn.blocks.observe import Observation, list_probabilities
from narrowgauge.nn.blocks.projections import find_projection
from narrowgauge.nn.blocks.spec import AttentionSpec, BlockSpec, NormSpec, Place

POSITIONS = ("position_ids", *NAMES)
"""Arguments that an example may have for the fast forms of attention."""
CLOSE = 1e-6
"""Relative difference between numbers that are the same."""
LARGEST_HEAD = 256
"""Larger heads have no fused attention."""


def list_attention_forms(
    block: nn.Module, spec: BlockSpec, seen: Observation, example: Example
) -> Iterator[AttentionSpec]:
    """Yield forms in the order in which to try them."""
    if any(name not in (*POSITIONS, *SOURCES) for name in spec.given):
        return
    outputs = [find_projection(block, path).shape[0] for path in spec.inputs]
    norms = [norm for call in seen.calls if (norm := recognize_norm(call)) is not None]
    inner = [norm for norm in norms if norm not in spec.norms and norm.weight]
    given = read_angles(example.kwargs)
    angles = None if given is None else given[0].shape[-1]
    is_table = any(example.kwargs.get(name) is not None for name in TABLES)
    for heads, kv_heads, size in _list_layouts(block, outputs):
        pairs: list[tuple[NormSpec | None, NormSpec | None]] = [(None, None)]
        for widths in ((size, size), (heads * size, kv_heads * size)):  # of each head, or of all heads together
            sized = {norm.path: norm for norm in inner if norm.get_width(block) in widths}
            if len(sized) == 2:
                orders = itertools.permutations(sized.values())
                pairs = [(a, b) for a, b in orders if (a.get_width(block), b.get_width(block)) == widths]
        for q_norm, k_norm in pairs:
            if q_norm is not None and (k_norm is None or q_norm.eps != k_norm.eps or q_norm.kind != "rms"):
                continue
            options = itertools.product(_list_scales(block, size), (None, *_list_dropouts(block, spec)), (True, False))
            for scale, dropout, causal in options:
                common = AttentionSpec("plain", heads, kv_heads, causal, scale=scale, dropout=dropout)
                if angles is not None and angles <= size:
                    rotary = replace(common, kind="rotary", q_norm=q_norm, k_norm=k_norm)
                    for use, are_pairs in _list_rotations(angles, size, is_table):
                        yield replace(rotary, angles=use, pairs=are_pairs)
                if q_norm is None:
                    yield common


def _list_layouts(block: nn.Module, outputs: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield query heads, key heads and head sizes that fit the projections, from the numbers that the block holds."""
    numbers: list[int] = []
    for module in block.modules():
        config = getattr(module, "config", None)
        for holder in (vars(module), {} if config is None else vars(config)):
            numbers += [v for v in holder.values() if type(v) is int and 0 < v <= max(outputs) and v not in numbers]
    total = sum(outputs)
    seen = set()
    for size in numbers:
        if size > LARGEST_HEAD or size % 8 or total % size:
            continue
        if len(outputs) == 3:
            layouts = [(outputs[0] // size, outputs[1] // size)] if not any(o % size for o in outputs) else []
        elif len(outputs) == 1:
            count = total // size
            layouts = [(count - 2 * kv, kv) for kv in numbers if count > 2 * kv and (count - 2 * kv) % kv == 0]
        else:
            layouts = []
        for heads, kv_heads in layouts:
            if (heads, kv_heads, size) not in seen and heads % max(kv_heads, 1) == 0 and heads in numbers:
                seen.add((heads, kv_heads, size))
                yield heads, kv_heads, size
    for heads in numbers:  # a block may know its heads, and compute their size
        if len(outputs) in (1, 3) and total % (3 * heads) == 0 and (heads, heads, total // 3 // heads) not in seen:
            size = total // 3 // heads
            if 8 <= size <= LARGEST_HEAD and size % 8 == 0 and len(set(outputs)) == 1:
                seen.add((heads, heads, size))
                yield heads, heads, size


def _list_scales(block: nn.Module, size: int) -> list[float | None]:
    """Return what may multiply the scores: unusual numbers that modules call a scale, and the usual one, None."""
    named = (item for module in block.modules() for item in vars(module).items())
    held = {value for name, value in named if "scal" in name and type(value) is float and 0.0 < value <= 1.0}
    return [*sorted(value for value in held if abs(value * size**0.5 - 1.0) > CLOSE), None]


def _list_dropouts(block: nn.Module, spec: BlockSpec) -> Iterator[Place]:
    """Yield the places of probabilities that may be attention's dropout."""
    known = [spec.branch1.dropout, spec.branch2.dropout, None if spec.cross is None else spec.cross.dropout]
    known += [adapter.dropout for adapter in spec.adapters]
    for path, name in list_probabilities(block):
        place = path, name
        if place not in known and vars(block.get_submodule(path))[name] > 0:
            yield place


def _list_rotations(angles: int, size: int, is_table: bool) -> list[tuple[str, bool]]:
    """Return which angles may be given, and whether neighbours are rotated together: likely ones first.

    Args:
        angles: How many cosines a token has.
        size: The size of a head.
        is_table: Whether the angles are one tensor: code that passes them like that rotates neighbours.
    """
    halved = 2 * angles <= size
    halves = [("half", False)] if halved else []
    neighbours = [("half", True)] if halved else []
    if angles % 2 == 0 and not is_table:
        halves, neighbours = [*halves, ("all", False)], [*neighbours, ("all", True), ("first half", True)]
    return [*neighbours, *halves] if is_table else [*halves, *neighbours]
