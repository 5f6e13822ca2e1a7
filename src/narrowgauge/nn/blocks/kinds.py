"""Which blocks of a model are of one kind, so that they are described once.

key       classes, code, shapes of parameters, and the settings of all modules: numbers, names, enumerations, the
          content of buffers and other tensors, and the attributes of objects such as a configuration. What cannot
          be compared is only equal to itself
number    layers have numbers, which most blocks only need for a cache. They are not part of the key: a copy of the
          block runs with each of them, and those that change its output are of another kind
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import itertools
import re
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils.weak import WeakIdKeyDictionary

from narrowgauge.nn.blocks.equations import are_close
from narrowgauge.nn.blocks.example import Example
from narrowgauge.nn.blocks.observe import get_rows
from narrowgauge.nn.module_changes import CHANGES, OWN, original_class

NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index")
"""Attributes that number the layers."""
NUMBER_IN_PATH = re.compile(r"\.\d+\.")
"""The number of a layer in a path, which PEFT's modules hold as an attribute."""
PRIVATE = (int, float, str, list, tuple, enum.Enum, np.generic, Tensor)
"""Types of private attributes that are settings, such as the names of active adapters."""
PLAIN = (int, float, str, bytes, type(None), torch.dtype, torch.device, type)
SAMPLED = 1 << 16
"""Values of a tensor that are compared: of a larger one, some."""
DEEPEST = 6
"""Levels of objects in objects."""


def make_key(block: nn.Module) -> Any:
    """Return what decides how a block computes, apart from the number of the layer."""
    reader = _Reader()
    return tuple(
        (
            path,
            original_class(module),
            original_class(module).forward.__code__,
            tuple(
                (name, reader.read(value))
                for name, value in sorted(vars(module).items())
                if name not in (*NUMBERS, "training", CHANGES, OWN)
                and (not name.startswith("_") or isinstance(value, PRIVATE))
            ),
            tuple((name, None if p is None else tuple(p.shape)) for name, p in module._parameters.items()),
            tuple((name, reader.read(buffer)) for name, buffer in module._buffers.items()),
        )
        for path, module in block.named_modules()
    )


class _Reader:
    """Turns settings into values that can be compared; what several modules hold is read once."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def read(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, str):
            return NUMBER_IN_PATH.sub("..", value)
        if isinstance(value, enum.Enum):
            return type(value), value.name
        if isinstance(value, PLAIN):
            return type(value), value
        if isinstance(value, np.generic):
            return type(value), value.item()
        if depth > DEEPEST:
            return _get_token(value)
        if id(value) not in self._known:
            self._known[id(value)] = "itself"  # for objects that contain themselves
            self._known[id(value)] = self._read_inside(value, depth + 1)
        return self._known[id(value)]

    def _read_inside(self, value: Any, depth: int) -> Any:
        if isinstance(value, Tensor):
            return _describe_tensor(value)
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            return value.shape, self.read(value.tolist(), depth)
        if isinstance(value, np.ndarray):
            return value.shape, str(value.dtype), hashlib.blake2b(np.ascontiguousarray(value).tobytes()).digest()
        if isinstance(value, list | tuple):
            return tuple(self.read(entry, depth) for entry in value)
        if isinstance(value, set | frozenset):
            return frozenset(self.read(entry, depth) for entry in value)
        if isinstance(value, dict):
            return tuple((str(name), self.read(entry, depth)) for name, entry in value.items())
        if isinstance(value, functools.partial):
            return tuple(self.read(part, depth) for part in (value.func, value.args, value.keywords))
        if isinstance(value, types.ModuleType | nn.Module):
            return _get_token(value)
        if callable(value) and hasattr(value, "__qualname__"):
            return value.__module__, value.__qualname__, getattr(value, "__code__", None), _list_enclosed(value)
        try:
            attributes = vars(value)
        except TypeError:
            return _get_token(value)
        return type(value), tuple((name, self.read(entry, depth)) for name, entry in attributes.items())


_tokens: Any = WeakIdKeyDictionary()
_numbers = itertools.count()


def _get_token(value: Any) -> tuple[str, int]:
    """Return what stands for an object that cannot be compared: never the same for another one, also a later one.

    Keys outlive models, and the address of an object that is gone may be that of a new one. An object without weak
    references is another one each time.
    """
    try:
        return _tokens.setdefault(value, ("object", next(_numbers)))  # type: ignore[no-any-return]
    except TypeError:
        return "object", next(_numbers)


def _describe_tensor(value: Tensor) -> Any:
    """Return shape, type and a hash of the values, or of some of them; without values, of a meta tensor, no hash."""
    place = tuple(value.shape), value.dtype
    if value.device.type == "meta" or is_fake(value) or type(value) not in (Tensor, nn.Buffer, nn.Parameter):
        return place
    try:
        flat = value.detach().reshape(-1)
        flat = flat[:: max(1, flat.numel() // SAMPLED) | 1]  # an odd step meets all columns of most matrices
        content = flat.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    except (RuntimeError, TypeError):  # a layout without strides, or a quantized type
        return *place, _get_token(value)
    return *place, hashlib.blake2b(content).digest()


def _list_enclosed(function: Any) -> tuple[Any, ...]:
    """Return the numbers and names that a function has from where it was defined."""
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not filled yet
            found.append(cell.cell_contents)
    return tuple(value for value in found if isinstance(value, int | float | str))


Members = list[tuple[str, nn.Module]]
"""Blocks by path."""
Numbers = tuple[tuple[str, str, Any], ...]
"""Places and values of a block's numbers: the path of a module, an attribute, and its value."""


def label_by_number(numbers: list[Numbers], copy: nn.Module, examples: list[Example]) -> list[bytes]:
    """Return a label of what a block computes with each of these numbers: the same label if they make no difference.

    Args:
        numbers: The numbers of blocks with the same key.
        copy: A copy of one of them, in evaluation. Its numbers change.
        examples: Calls to try.
    """
    if not any(numbers):
        return [b""] * len(numbers)
    outputs: list[tuple[Tensor | None, bytes]] = []
    labels = []
    for places in numbers:
        for place, name, number in places:
            setattr(copy.get_submodule(place), name, number)
        output = _run(copy, examples)
        label = next((known for other, known in outputs if _agree(output, other)), None)
        if label is None:
            label = _label(output)
            outputs.append((output, label))
        labels.append(label)
    return labels


def _agree(one: Tensor | None, other: Tensor | None) -> bool:
    return (one is None and other is None) or (one is not None and other is not None and are_close(one, other))


def list_numbers(block: nn.Module) -> Numbers:
    """Return the numbers that modules of a block hold, with their places."""
    return tuple(
        (path, name, vars(module)[name])
        for path, module in block.named_modules()
        for name in NUMBERS
        if name in vars(module)
    )


def _run(block: nn.Module, examples: list[Example]) -> Tensor | None:
    """Return the output of the first example that runs, as rows."""
    for example in examples:
        with contextlib.suppress(Exception), torch.no_grad():
            made = next(_list_tensors(block(*example.args, **example.kwargs)))
            return get_rows(made).clone()
    return None


def _list_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _list_tensors(entry)


def _label(output: Tensor | None) -> bytes:
    """Return a label that differs for outputs that differ; for two that are close it is usually the same."""
    if output is None:
        return b"does not run"
    rounded = (output.float() / output.float().abs().max().clamp(min=1e-12) * 100).round().to(torch.int8)
    return hashlib.blake2b(rounded.cpu().numpy().tobytes()).digest()
