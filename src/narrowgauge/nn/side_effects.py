"""Takes back what an extra run of a user's module leaves behind in Python objects.

A module runs more often than its user asks for: on an example before its blocks are fused, and again in backward where
activations are recomputed. Its forward may store or collect tensors: the auxiliary losses of mixtures of experts are
often attributes of a router, or appended to a list of its Python file, or of an object there. The next step would then
add up losses of a run that nobody asked for, and fail in their graph, which is gone.

What is looked at: attributes of the module's parts and of their classes, globals of the files in which their methods
are written, and attributes of objects among these. Lists, dictionaries and sets get their entries back, objects their
attributes. Buffers, such as the running statistics of batch norm, are written in place: the extra run gets copies of
them. Parameters and parts of a module are left alone, as are parts of torch, Python and narrowgauge.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from narrowgauge.nn.module_changes import original_class

LARGEST = 10_000
"""Entries of the largest container that is copied; larger ones are tables, not collections of a step."""
LARGEST_BUFFER = 1 << 22
"""Values of the largest buffer that is copied; larger ones are tables or stored weights, not statistics."""
NOT_LOOKED_AT = {"torch", "narrowgauge", "numpy", "triton"}
OWN = frozenset(vars(nn.Module()))
"""Attributes of every module: parameters, parts, hooks."""

_places: WeakKeyDictionary[nn.Module, list[tuple[Mapping[str, Any], str]]] = WeakKeyDictionary()
"""Where a module's code can reach objects that it may change: a namespace and a name."""


@contextlib.contextmanager
def undo_side_effects(module: nn.Module) -> Iterator[None]:
    """Let a module's attributes, and what is around its code, be after the context as they were before."""
    if module not in _places:
        _places[module] = _find_places(module)
    values = _list_values(_places[module])
    for part in module.modules():
        values.append(part)
        values += [value for name, value in vars(part).items() if name not in OWN and _is_container(value)]
    restores = [_remember(value) for value in values] + _replace_buffers(module)
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _replace_buffers(module: nn.Module) -> list[Callable[[], None]]:
    """Give a module copies of its buffers; return functions that give it back its own."""
    copies: dict[Tensor, Tensor] = {}  # a buffer may have several owners
    restores: list[Callable[[], None]] = []
    for part in module.modules():
        buffers = part._buffers
        own = dict(buffers)
        for name, buffer in own.items():
            if buffer is not None and buffer.dtype is not torch.bool and buffer.numel() <= LARGEST_BUFFER:
                if buffer not in copies:
                    copies[buffer] = buffer.detach().clone()
                buffers[name] = copies[buffer]
        if own:
            restores.append(functools.partial(_refill, buffers, own))
    return restores


def _find_places(module: nn.Module) -> list[tuple[Mapping[str, Any], str]]:
    spaces: dict[int, Mapping[str, Any]] = {}
    for kind in {original_class(part) for part in module.modules()}:
        if _is_left_alone(kind):
            continue
        spaces[id(kind)] = vars(kind)
        for value in vars(kind).values():
            function = inspect.unwrap(value) if isinstance(value, types.FunctionType) else None
            if isinstance(function, types.FunctionType):
                spaces[id(function.__globals__)] = function.__globals__
    return [
        (space, name)
        for space in spaces.values()
        for name, value in list(space.items())
        if not name.startswith("__") and (_is_container(value) or _is_plain_object(value))
    ]


def _list_values(places: list[tuple[Mapping[str, Any], str]]) -> list[Any]:
    """Return the objects at these places, and the containers in their attributes, each once."""
    found: dict[int, Any] = {}
    for space, name in places:
        value = space.get(name)
        if _is_container(value):
            found[id(value)] = value
        elif _is_plain_object(value):
            found[id(value)] = value
            found |= {id(inner): inner for inner in vars(value).values() if _is_container(inner)}
    return list(found.values())


def _is_container(value: Any) -> bool:
    return type(value) in (list, dict, set) and len(value) <= LARGEST


def _is_plain_object(value: Any) -> bool:
    kind = type(value)  # not the value's own __class__ and __dict__: those of a proxy may raise any error
    other = issubclass(kind, type | types.ModuleType | types.FunctionType | nn.Module | Tensor)
    if other or any("__call__" in vars(base) for base in kind.__mro__) or _is_left_alone(kind):
        return False
    try:
        return type(vars(value)) is dict
    except Exception:
        return False


def _is_left_alone(kind: type) -> bool:
    package = (kind.__module__ or "").partition(".")[0]
    return package in NOT_LOOKED_AT or (package != "__main__" and package in sys.stdlib_module_names)


def _remember(value: Any) -> Callable[[], None]:
    """Return a function that gives a container its entries back, or an object its attributes."""
    if type(value) is list:
        entries = list(value)

        def restore() -> None:
            if len(value) != len(entries) or any(a is not b for a, b in zip(value, entries, strict=True)):
                value[:] = entries

        return restore
    if type(value) is set:
        members = set(value)
        return lambda: None if value == members else _refill(value, members)
    space = value if type(value) is dict else vars(value)  # the attributes of any other class, also of a dictionary's
    content = dict(space)
    return lambda: None if _is_same(space, content) else _refill(space, content)


def _is_same(space: dict[Any, Any], content: dict[Any, Any]) -> bool:
    return space.keys() == content.keys() and all(space[key] is one for key, one in content.items())


def _refill(space: Any, content: Any) -> None:
    space.clear()
    space.update(content)
