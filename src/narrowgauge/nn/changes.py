"""Changes how a module computes by changing its class, as FSDP2 does, and takes the changes back.

A change is an object with the state it needs (a plan, scales); the list of a module's changes is an attribute of the
module. Behaviour and state so belong to the module itself: ``copy.deepcopy``, ``torch.save``, pickle and torch's
``AveragedModel`` give a module that computes with its own parameters. Parameters, names, hooks and the state dictionary
stay as they were, and ``isinstance`` still holds, because the new class derives from the old one.

    model.layer(x)  ->  Changed.forward  ->  changes, the last one first  ->  the class's own forward

A second engine over the same model starts from the model as the user made it (``remove_changes``).
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

from narrowgauge.optim.masters import carry_masters

METHODS = ("forward", "trunk", "finish")
"""What can be changed; the last two are those of the built-in models."""
CHANGES, OWN = "narrowgauge_changes", "narrowgauge_own_methods"
"""Attributes of a changed module: its changes, and the methods that the user had set on the module itself."""

_differentiable_twice = False


class Change:
    """A change of one method of a module. Its attributes are copied and pickled with the module."""

    method = "forward"
    differentiable_twice = True
    """Whether gradients of gradients flow through it; if not, ``plain_products`` leaves it out."""

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Stands for the method; ``inner`` is the method as it was before this change."""
        raise NotImplementedError


AnyChange = TypeVar("AnyChange", bound=Change)


class Changed:
    """Mixed into the class of every module that has changes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own: Any = getattr(super(), "__deepcopy__", None)
        made = own(memo) if own is not None else copy._reconstruct(self, memo, *self.__reduce_ex__(4))  # type: ignore[attr-defined]
        carry_masters(self, made)  # type: ignore[arg-type]
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles name the original class: the one made here has no place in any file."""
        reduced: Any = super().__reduce_ex__(protocol)
        if reduced[0].__name__ == "__newobj__" and reduced[1][0] is _changed_class(original_class(self)):
            return _new, (original_class(self), *reduced[1][1:]), *reduced[2:]
        return reduced


def apply_change(module: nn.Module, change: Change) -> None:
    """Let a change stand around the module's method, and around the changes it has already."""
    if not isinstance(module, Changed):
        cls = _changed_class(type(module))
        names = [name for name in METHODS if name in module.__dict__]
        module.__dict__[OWN] = {name: module.__dict__.pop(name) for name in names}
        module.__dict__[CHANGES] = []
        module.__class__ = cls
    module.__dict__.setdefault(CHANGES, []).append(change)


def remove_changes(model: nn.Module) -> None:
    """Give every module its own class and methods back."""
    for module in model.modules():
        if isinstance(module, Changed):
            module.__dict__.pop(CHANGES, None)
            module.__dict__.update(module.__dict__.pop(OWN, {}))
            original = original_class(module)
            if type(module) is _changed_class(original):  # another class may have been derived from ours: FSDP's
                module.__class__ = original


def find_change(module: nn.Module, kind: type[AnyChange]) -> AnyChange | None:
    """The module's change of a kind."""
    return next((change for change in module.__dict__.get(CHANGES, ()) if isinstance(change, kind)), None)


def is_replaced(module: Any, *methods: str) -> bool:
    """Whether somebody has set one of these methods on the module itself: what stands for its class would drop it."""
    return any(name in module.__dict__ or name in module.__dict__.get(OWN, {}) for name in methods)


def original_class(module: Any) -> type[Any]:
    """The class that a module had before it was changed; that of any other module as it is."""
    return getattr(type(module), "narrowgauge_original", type(module))


@contextlib.contextmanager
def plain_products() -> Iterator[None]:
    """While open, changes that are differentiable only once are left out: layers compute as they were written."""
    global _differentiable_twice
    before, _differentiable_twice = _differentiable_twice, True
    try:
        yield
    finally:
        _differentiable_twice = before


_classes: dict[type[Any], type[Any]] = {}


def _changed_class(original: type[Any]) -> type[Any]:
    if original not in _classes:
        _classes[original] = _derive(original)
    return _classes[original]


def _derive(original: type[Any]) -> type[Any]:
    methods = {name: _dispatcher(original, name) for name in METHODS if hasattr(original, name)}
    named = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(original.__name__, (Changed, original), {**methods, **named, "narrowgauge_original": original})


def _dispatcher(original: type[Any], name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(original, name))  # libraries read the signature of forward
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return _call(self, name, len(self.__dict__.get(CHANGES, ())), *args, **kwargs)

    return method


def _call(module: Any, method: str, level: int, /, *args: Any, **kwargs: Any) -> Any:
    """The method with the first ``level`` changes of the module."""
    changes: list[Change] = module.__dict__.get(CHANGES, [])
    while level > 0:
        level -= 1
        change = changes[level]
        if change.method == method and (change.differentiable_twice or not _differentiable_twice):
            return change.run(module, functools.partial(_call, module, method, level), *args, **kwargs)
    own = module.__dict__.get(OWN, {}).get(method)
    if own is not None:
        return own(*args, **kwargs)
    return getattr(original_class(module), method)(module, *args, **kwargs)


def _new(original: type[Any], *args: Any) -> Any:
    """A module without state yet, for copy and pickle."""
    cls = _changed_class(original)
    return cls.__new__(cls, *args)
