"""Finds linear layers with a low-rank adapter, and makes layer and adapter one projection of an observed run.

    y = base(x) + scale * b(a(dropout(x)))

A module is such a layer if exactly three linear layers run inside it, and their tensors satisfy this equation for a
number that the module holds as an attribute, or for 1. The number is read from there, because a measured one is not
exact. What else decides how the module computes (which adapter is active, whether it is merged) is in its attributes
too: they are compared at every call of a fused block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from narrowgauge.nn.blocks.equations import are_close
from narrowgauge.nn.blocks.observe import Call, DropoutCall, Observation
from narrowgauge.nn.blocks.settings import read_plain
from narrowgauge.nn.blocks.spec import AdapterSpec
from narrowgauge.nn.products.linear import has_transposed_weight

EXACT_SCALE = 1e-4
"""Relative difference between the measured scale and the attribute that it is."""


def merge_adapters(seen: Observation) -> tuple[Observation, tuple[AdapterSpec, ...]]:
    """Return the run with one call for each layer that has an adapter, and the adapters in the order of their calls."""
    once = seen.once()
    merged: dict[int, Call] = {}
    left_out: set[int] = set()
    found = []
    for whole in once:
        inside = [call for call in once if call.is_projection and call.path.startswith(f"{whole.path}.")]
        if len(inside) != 3 or any(id(call) in left_out for call in inside):
            continue  # also if a module inside this one was described already
        places = [(call, call.place[0]) for call in seen.dropouts if call.place is not None]
        drops = [call for call, path in places if path == whole.path or path.startswith(f"{whole.path}.")]
        adapter = _match(whole, inside, drops)
        if adapter is not None:
            found.append(adapter)
            base = next(call for call in inside if call.path == adapter.base)
            merged[id(whole)] = Call(base.path, base.module, whole.input, whole.output, True)
            left_out |= {id(call) for call in (*inside, *drops)}
    calls = [merged.get(id(call), call) for call in seen.calls if id(call) not in left_out]
    dropouts = [call for call in seen.dropouts if id(call) not in left_out]
    return replace(seen, calls=calls, dropouts=dropouts), tuple(found)


def _match(whole: Call, inside: list[Call], drops: list[DropoutCall]) -> AdapterSpec | None:
    """Return the description of a module whose run satisfies the equation."""
    if len(drops) > 1 or any(not are_close(call.input, whole.input) for call in drops):
        return None
    for base, a, b in itertools.permutations(inside):
        if not all(map(_is_low_rank, (a, b))) or not are_close(b.input, a.output):
            continue
        if not are_close(base.input, whole.input) or not are_close(a.input, whole.input):
            continue
        scale = _find_scale(whole, base.output, b.output)
        if scale is not None:
            dropout = drops[0].place if drops else None
            return AdapterSpec(whole.path, base.path, a.path, b.path, scale, dropout)
    return None


def _is_low_rank(call: Call) -> bool:
    return call.module._parameters.get("bias") is None and not has_transposed_weight(call.module)


def _find_scale(whole: Call, base: Tensor, added: Tensor) -> float | None:
    """Return the number that multiplies what an adapter adds, if it is one of the module's attributes, or 1."""
    if not base.shape == added.shape == whole.output.shape:
        return None
    difference = (whole.output - base).double()
    measured = float((difference * added).sum() / added.double().square().sum().clamp(min=1e-30))
    held = [number for value in read_plain(whole.module).values() for number in _list_numbers(value)]
    scale = min((1.0, *held), key=lambda number: abs(number - measured))
    if abs(scale - measured) > EXACT_SCALE * abs(measured) or not are_close(base + scale * added, whole.output):
        return None
    return scale


def _list_numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        for entry in value:
            yield from _list_numbers(entry)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)
