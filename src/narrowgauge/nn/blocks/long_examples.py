"""How long an example must be to show what a block does with long sequences: attention in a window, or in chunks.

On a few tokens a window of a hundred tokens looks like attention to all. The size of a window stands somewhere: in an
attribute of a module or of its configuration, in its code, or in the shape of a mask. So the fast forms of attention
are compared with the block's own on a sequence that is longer than all such numbers, up to a limit.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.nn.module_changes import original_class

LONGEST = {"cuda": 4096, "cpu": 1024}
"""The largest window that is looked for, by type of device."""
MOST_WORK = {"cuda": 4e12, "cpu": 1.5e10}
"""Parameters times tokens of an example."""
DEEPEST = 2
"""Levels of objects whose attributes are read, such as a configuration and what it contains."""


def list_lengths(block: nn.Module, shortest: int, device: torch.device) -> list[int]:
    """Return lengths of examples that show windows, the longest first; a block may not take all of them.

    Args:
        block: The block.
        shortest: The length of an example that it was seen with: smaller windows have shown there.
        device: Where it will run.
    """
    kind = "cpu" if device.type == "cpu" else "cuda"
    size = sum(parameter.numel() for parameter in block.parameters())
    numbers, sizes = set(_list_numbers(block)), set(_list_sizes(block))
    lengths = {number + number // 4 + 17 for number in numbers if shortest <= number <= LONGEST[kind]}
    lengths |= {number for number in sizes if shortest < number <= LONGEST[kind]}  # of a mask, which must be as long
    # Kernels are compiled anew for multiples of 16, which short examples are not.
    lengths = {length - (length % 16 == 0) for length in lengths}
    return sorted((length for length in lengths if length * max(size, 1) <= MOST_WORK[kind]), reverse=True)


def _list_numbers(block: nn.Module) -> Iterator[int]:
    for module in block.modules():
        yield from _read_numbers(vars(module), 0)
        for base in original_class(module).__mro__:
            if not base.__module__.startswith(("torch.", "narrowgauge.")) and base is not object:
                for value in vars(base).values():
                    function = inspect.unwrap(value) if isinstance(value, types.FunctionType) else None
                    if isinstance(function, types.FunctionType):
                        yield from _read_constants(function.__code__)
                    elif type(value) is int:
                        yield value


def _read_numbers(values: Any, depth: int) -> Iterator[int]:
    """Yield the whole numbers in attributes, lists, dictionaries and objects."""
    entries = values.items() if isinstance(values, dict) else enumerate(values)
    for name, value in entries:
        if isinstance(name, str) and name.startswith(("_parameters", "_modules", "_buffers", "_forward", "_backward")):
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            yield int(value)
        elif isinstance(value, nn.Module | Tensor | str | type) or callable(value) or depth >= DEEPEST:
            continue
        elif isinstance(value, dict | list | tuple):
            yield from _read_numbers(value, depth + 1)
        elif isinstance(getattr(value, "__dict__", None), dict):
            yield from _read_numbers(vars(value), depth + 1)


def _read_constants(code: types.CodeType) -> Iterator[int]:
    for value in code.co_consts:
        if type(value) is int:
            yield value
        elif isinstance(value, types.CodeType):
            yield from _read_constants(value)


def _list_sizes(block: nn.Module) -> Iterator[int]:
    """Yield the sizes of buffers and of tensors that are attributes."""
    for module in block.modules():
        for value in (*module._buffers.values(), *vars(module).values()):
            if isinstance(value, Tensor):
                yield from value.shape
