"""What decides how a block computes, besides its parameters and parts: noticed when it changes after the description.

A fused form computes what was verified. Code of a user may change that later: ``attn.causal = False``, a window that
grows with the steps, a flag that skips the block, ``model.config.scale = 0.5``. What is held:

    numbers, names, ...     compared by value, also in lists and dictionaries
    configurations          objects in attributes: their attributes, and those of objects in them
    tensors, buffers        compared by identity, and by value where they were replaced
    functions, parts        compared by identity
    defaults of classes     an attribute of the instance that now hides one of its class is a change

What calls read anew (probabilities of dropout) is left out, and what runs as a module of its own.
"""

from __future__ import annotations

import argparse
import copy
import enum
import functools
import types
import weakref
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from narrowgauge.nn.blocks.spec import Place
from narrowgauge.nn.module_changes import CHANGES, OWN, original_class
from narrowgauge.nn.side_effects import is_plain_object

NOT_SETTINGS = frozenset({*vars(nn.Module()), CHANGES, OWN, "gradient_checkpointing", "_gradient_checkpointing_func"})
"""Attributes that every module has, that conversion adds, or with which blocks compute the same."""
NAMES_OF_MODELS = frozenset({
    "architectures", "dtype", "torch_dtype", "transformers_version", "name_or_path", "_name_or_path", "use_cache",
    "return_dict", "output_hidden_states",
})  # fmt: skip
"""Entries of transformers' configurations that say nothing about a block; saving and evaluating a model change them."""
LARGEST = 256
"""Entries of the largest collection that is compared by value, and attributes of the largest object."""
LARGEST_TENSOR = 1 << 24
"""Values of the largest tensor that is compared by value."""
DEEPEST = 3
"""Levels of objects in attributes of objects."""
ATOMS = (
    enum.Enum, np.generic, torch.dtype, torch.device, type, types.FunctionType, types.BuiltinFunctionType,
    types.MethodType, functools.partial, Tensor, nn.Module,
)  # fmt: skip
"""Values that are compared as they are. Anything else, such as a lock or a list of tensors, is left alone."""
CONFIGURATIONS = (types.SimpleNamespace, argparse.Namespace)
_MISSING = object()


class Held(NamedTuple):
    """The attributes of a module, or of an object that it holds."""

    path: str
    """The module."""
    chain: tuple[str, ...]
    """The attributes that lead from the module to the object; empty for the module itself."""
    values: dict[str, Any]
    """Copies of numbers, names, and collections of these; of ``ATOMS`` and configurations themselves."""
    names: frozenset[str]
    """All attributes, also those whose values are not compared."""


Settings = tuple[Held, ...]


def read_plain(module: nn.Module) -> dict[str, Any]:
    """Return a copy of a module's attributes that are numbers, names, or collections of them; not its mode."""
    plain = {name: value for name, value in vars(module).items() if name not in NOT_SETTINGS and _is_plain(value)}
    return copy.deepcopy(plain)


def read_settings(
    block: nn.Module,
    modules: Collection[str] = (),
    places: Collection[Place | None] = (),
    ignored: Collection[str] = (),
) -> Settings:
    """Return what the modules of a block hold.

    Args:
        block: The block.
        modules: Paths of modules that are left out, with all that is inside of them.
        places: Attributes that are left out.
        ignored: The same, as ``WatchedSettings.list_changes`` names them.
    """
    left_out = {(path, (), name) for place in places if place is not None for path, name in [place]}
    found = []
    seen: set[int] = set()
    for path, module in block.named_modules():
        if not any(path == outer or path.startswith(f"{outer}.") for outer in modules):
            found += [_read(path, chain, space) for chain, space in _list_spaces(module, seen) if space]
    return tuple(
        held._replace(
            values={
                name: value
                for name, value in held.values.items()
                if (held.path, held.chain, name) not in left_out and _join(held, name) not in ignored
            }
        )
        for held in found
    )


class WatchedSettings:
    """Settings of a block, and where it holds them now.

    A block holds what watches it, as one of its attributes. So its own attributes are looked up at each call (None in
    place of a space): a cycle would keep a model's memory until Python looks for cycles.
    """

    def __init__(self, block: nn.Module, settings: Settings) -> None:
        self.settings = settings
        self._block = weakref.ref(block)
        self._spaces: list[tuple[Held, dict[str, Any] | None, Any]] = []
        self._values: list[tuple[dict[str, Any] | None, str, Any]] = []
        self._counts: list[tuple[dict[str, Any] | None, int]] = []
        for held in settings:
            found, owner = _find_space(block, held)
            space = None if found is vars(block) else found
            self._spaces.append((held, space, owner))
            self._values += [(space, name, value) for name, value in held.values.items()]
            self._counts.append((space, len(held.names)))

    def _get_own(self) -> dict[str, Any]:
        block = self._block()
        return {} if block is None else vars(block)

    def are_same(self) -> bool:
        """Whether everything is as it was. Every call of a block asks this."""
        own = self._get_own()
        for number, (space, name, value) in enumerate(self._values):
            now = (own if space is None else space).get(name, _MISSING)
            if now is not value:
                if not _is_equal(now, value):
                    return False
                if isinstance(now, Tensor):  # moved to another device, or copied: its values are compared once
                    self._values[number] = space, name, now
        is_known = all(len(own if space is None else space) == count for space, count in self._counts)
        return is_known or not self._list_hiding()

    def list_changes(self) -> list[str]:
        """Return the names of what has changed, from the block: ``attn.causal``."""
        own = self._get_own()
        changed = [
            _join(held, name)
            for held, space, _ in self._spaces
            for name, value in held.values.items()
            if not _is_equal((own if space is None else space).get(name, _MISSING), value)
        ]
        return changed + self._list_hiding()

    def _list_hiding(self) -> list[str]:
        """Return new attributes that hide one of their class. If there is none, do not look at these again."""
        own, hiding = self._get_own(), []
        for held, space, owner in self._spaces:
            present = own if space is None else space
            if len(present) != len(held.names):
                added = present.keys() - held.names - NOT_SETTINGS
                hiding += [_join(held, name) for name in added if hasattr(owner, name)]
        if not hiding:
            self._counts = [(space, len(own if space is None else space)) for space, _ in self._counts]
        return hiding


class OwnSettings:
    """What a module held when it was described; a copy of the module looks for it in itself."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._watched: tuple[weakref.ref[nn.Module], WatchedSettings] | None = None

    @staticmethod
    def of(module: nn.Module) -> OwnSettings:
        """Read them, without configurations: modules with no inner modules of interest are described from what they
        hold themselves, and models change their configuration for other reasons."""
        own = [_read("", chain, space) for chain, space in _list_spaces(module, set(), levels=0) if space]
        return OwnSettings(
            tuple(
                held._replace(values={n: v for n, v in held.values.items() if not _is_configuration(v)}) for held in own
            )
        )

    def __reduce__(self) -> Any:
        return OwnSettings, (self._settings,)

    def are_those_of(self, module: nn.Module) -> bool:
        """Whether a module still holds the same."""
        if self._watched is None or self._watched[0]() is not module:
            self._watched = weakref.ref(module), WatchedSettings(module, self._settings)
        return self._watched[1].are_same()


def watch_settings(model: nn.Module) -> WatchedSettings:
    """Watch what all modules of a model hold, apart from tensors."""
    settings = read_settings(model)
    kept = [held.values.items() for held in settings]
    return WatchedSettings(
        model,
        tuple(
            held._replace(values={name: value for name, value in values if not isinstance(value, Tensor)})
            for held, values in zip(settings, kept, strict=True)
        ),
    )


def _list_spaces(
    module: nn.Module, seen: set[int], levels: int = DEEPEST
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the attributes of a module, its buffers, parts, and the attributes of objects that it holds, with their
    chains; those of objects only if they were not ``seen``, as blocks hold one configuration in many places."""
    yield (), vars(module)
    yield ("_buffers",), module._buffers
    yield ("_modules",), module._modules
    level: list[tuple[tuple[str, ...], dict[str, Any]]] = [((), vars(module))]
    for _ in range(levels):
        inner = []
        for chain, space in level:
            for name, value in space.items():
                if name not in NOT_SETTINGS and id(value) not in seen and _is_configuration(value):
                    seen.add(id(value))
                    inner.append(((*chain, name), vars(value)))
        yield from inner
        level = inner


def _is_configuration(value: Any) -> bool:
    return (type(value) in CONFIGURATIONS or is_plain_object(value)) and len(vars(value)) <= LARGEST


def _read(path: str, chain: tuple[str, ...], space: dict[str, Any]) -> Held:
    left_out = NOT_SETTINGS | NAMES_OF_MODELS if chain else NOT_SETTINGS
    kept = {name: value for name, value in space.items() if name not in left_out}
    values = {
        name: copy.deepcopy(value) if _is_plain(value) else value
        for name, value in kept.items()
        if _is_plain(value) or isinstance(value, ATOMS) or _is_configuration(value)
    }
    return Held(path, chain, values, frozenset(space))


def _find_space(block: nn.Module, held: Held) -> tuple[dict[str, Any], Any]:
    """Return the attributes that a block has at this place, and the class that they may hide attributes of."""
    module = block.get_submodule(held.path)
    space, owner = vars(module), original_class(module)
    for name in held.chain:
        value = space.get(name)
        space, owner = (value, dict) if isinstance(value, dict) else (getattr(value, "__dict__", {}), type(value))
    return space, owner


def _join(held: Held, name: str) -> str:
    return ".".join([part for part in (held.path, *held.chain) if part not in ("", "_buffers", "_modules")] + [name])


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    try:
        if isinstance(one, Tensor):
            return (
                one.dtype is other.dtype and one.numel() <= LARGEST_TENSOR and torch.equal(one.to(other.device), other)
            )
        return bool(one == other)
    except Exception:  # arrays compare element by element, tensors may have no values
        return False


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return len(value) <= LARGEST and all(map(_is_plain, value))
    if isinstance(value, dict):
        return len(value) <= LARGEST and all(_is_plain(name) and _is_plain(entry) for name, entry in value.items())
    return value is None or isinstance(value, bool | int | float | str)
