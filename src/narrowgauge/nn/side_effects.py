"""Takes back what an extra run of a user's module leaves behind in Python objects, and lets it see what the first saw.

A module runs more often than its user asks for: on an example before its blocks are fused, and again in backward where
activations are recomputed. Its forward may store or collect tensors: the auxiliary losses of mixtures of experts are
often attributes of a router, or appended to a list of its Python file, or of an object there. The next step would then
add up losses of a run that nobody asked for, and fail in their graph, which is gone.

What is looked at: attributes of the module's parts and of their classes, globals of the files in which their methods
are written, and attributes of objects among these. Lists, dictionaries and sets get their entries back, objects their
attributes. Buffers, such as the running statistics of batch norm, are written in place: the extra run gets copies of
them. Parameters and parts of a module are left alone, as are parts of torch, Python and narrowgauge.

A forward that is run again in backward must also compute the same. A module may read what it has stored: a recurrent
state, or the number of its calls. It may draw random numbers of Python or NumPy. So its attributes and these random
numbers are remembered before its first run (``StateBefore``).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
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
    contents = list(map(_Content, [*_list_values(_places[module]), *_list_own_values(module)]))
    give_back_buffers = _replace_buffers(module)
    try:
        yield
    finally:
        for content in contents:
            content.restore()
        for give_back in give_back_buffers:
            give_back()


class StateBefore:
    """The attributes of a module's parts before a forward, for another run of the same forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._contents = list(map(_Content, _list_own_values(module)))
        self._buffers = [(part._buffers, dict(part._buffers)) for part in module.modules()]
        self._drawn: HostRandom | None = read_host_random()

    def forget_unchanged(self) -> None:
        """Keep only what the forward has changed. Call it when the forward is done."""
        self._contents = [content for content in self._contents if not content.is_same()]
        self._buffers = [
            (now, {name: before.get(name, _MISSING) for name in changed})
            for now, before in self._buffers
            if (changed := [name for name in now if before.get(name, _MISSING) is not now[name]])
        ]
        self._drawn = None if self._drawn == read_host_random() else self._drawn

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Context manager for the other run: attributes are as before the first one, and afterwards as they were."""
        now = read_host_random()
        with undo_side_effects(self._module):
            for content in self._contents:
                content.restore()
            for buffers, before in self._buffers:  # only those that were registered or replaced
                for name, buffer in before.items():
                    if buffer is _MISSING:
                        buffers.pop(name, None)
                    else:
                        buffers[name] = buffer
            if self._drawn is None:
                yield
                return
            _set_host_random(self._drawn)
            try:
                yield
            finally:
                _set_host_random(now)


_MISSING: Any = object()
HostRandom = tuple[Any, str, bytes, tuple[Any, ...]]


def read_host_random() -> HostRandom:
    """Return the states of Python's and NumPy's random numbers, which torch's own checkpoints do not restore."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), str(name), keys.tobytes(), tuple(rest)  # type: ignore[union-attr]


def _set_host_random(state: HostRandom) -> None:
    own, name, keys, rest = state
    random.setstate(own)
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))


def _list_own_values(module: nn.Module) -> Iterator[Any]:
    """Yield the parts of a module, and the containers that are their attributes."""
    for part in module.modules():
        yield part
        yield from (value for name, value in vars(part).items() if name not in OWN and _is_container(value))


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
        if not name.startswith("__") and (_is_container(value) or is_plain_object(value))
    ]


def _list_values(places: list[tuple[Mapping[str, Any], str]]) -> list[Any]:
    """Return the objects at these places, and the containers in their attributes, each once."""
    found: dict[int, Any] = {}
    for space, name in places:
        value = space.get(name)
        if _is_container(value):
            found[id(value)] = value
        elif is_plain_object(value):
            found[id(value)] = value
            found |= {id(inner): inner for inner in vars(value).values() if _is_container(inner)}
    return list(found.values())


def _is_container(value: Any) -> bool:
    return type(value) in (list, dict, set) and len(value) <= LARGEST


def is_plain_object(value: Any) -> bool:
    """Whether a value is an object with attributes whose class belongs to the user's code or to a model library."""
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


class _Content:
    """The entries of a container, or the attributes of an object."""

    def __init__(self, value: Any) -> None:
        kind = type(value)
        # the attributes of any class but Python's containers, also of one that is derived from dict
        self._space: Any = value if kind in (list, set, dict) else vars(value)
        self._entries = self._space.copy()

    def is_same(self) -> bool:
        """Whether the entries are the same objects as before."""
        now, before = self._space, self._entries
        if isinstance(now, set):
            return bool(now == before)
        if isinstance(now, list):
            return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
        return now.keys() == before.keys() and all(now[name] is entry for name, entry in before.items())

    def restore(self) -> None:
        """Give the container its entries back."""
        if self.is_same():
            return
        if isinstance(self._space, list):
            self._space[:] = self._entries
        else:
            _refill(self._space, self._entries)


def _refill(space: Any, content: Any) -> None:
    space.clear()
    space.update(content)
