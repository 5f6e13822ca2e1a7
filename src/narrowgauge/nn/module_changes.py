"""Changes how a module computes by changing its class, as FSDP2 does; the changes can be removed.

A change is an object with the state it needs (a plan, scales). The list of a module's changes is an attribute of the
module. Behaviour and state therefore belong to the module itself: ``copy.deepcopy``, ``torch.save``, pickle and torch's
``AveragedModel`` give a module that computes with its own parameters. Parameters, names, hooks and the state dictionary
do not change, and ``isinstance`` still holds, because the new class derives from the old one.

    model.layer(x)  ->  ChangedModule.forward  ->  changes, last one first  ->  the class's own forward

A second engine over the same model starts from the user's model (``remove_changes``).
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
"""Methods that can be changed; the last two belong to the built-in models."""
CHANGES, OWN = "narrowgauge_changes", "narrowgauge_own_methods"
"""Attributes of a changed module: its changes, and the methods that were set on the instance before."""

_differentiable_twice = False


class Change:
    """A change to one method of a module. Its attributes are copied and pickled with the module."""

    method = "forward"
    differentiable_twice = True
    """Whether double backward works through it; if not, ``allow_double_backward`` skips it."""

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run instead of the method; ``inner`` is the method as it was before this change."""
        raise NotImplementedError


AnyChange = TypeVar("AnyChange", bound=Change)


class ChangedModule:
    """Mixin in the class of every module that has changes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own: Any = getattr(super(), "__deepcopy__", None)
        made = own(memo) if own is not None else copy._reconstruct(self, memo, *self.__reduce_ex__(4))  # type: ignore[attr-defined]
        carry_masters(self, made)  # type: ignore[arg-type]
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refer to the original class in copies and pickles, as the derived class cannot be imported."""
        reduced: Any = super().__reduce_ex__(protocol)
        if reduced[0].__name__ == "__newobj__" and reduced[1][0] is _changed_class(original_class(self)):
            return _new_module, (original_class(self), *reduced[1][1:]), *reduced[2:]
        return reduced


def apply_change(module: nn.Module, change: Change) -> None:
    """Wrap a change around the module's method and around its earlier changes."""
    if not isinstance(module, ChangedModule):
        cls = _changed_class(type(module))
        names = [name for name in METHODS if name in module.__dict__]
        module.__dict__[OWN] = {name: module.__dict__.pop(name) for name in names}
        module.__dict__[CHANGES] = []
        module.__class__ = cls
    module.__dict__.setdefault(CHANGES, []).append(change)


def remove_changes(model: nn.Module) -> None:
    """Restore the class and methods of every module."""
    for module in model.modules():
        if isinstance(module, ChangedModule):
            module.__dict__.pop(CHANGES, None)
            module.__dict__.update(module.__dict__.pop(OWN, {}))
            original = original_class(module)
            if type(module) is _changed_class(original):  # FSDP may have derived another class from ours
                module.__class__ = original


def count_changes(module: nn.Module) -> int:
    """Return the number of a module's changes: the level below which they are for ``call_below``."""
    return len(module.__dict__.get(CHANGES, ()))


def find_change(module: nn.Module, kind: type[AnyChange]) -> AnyChange | None:
    """Return the module's first change of a class, or None."""
    return next((change for change in module.__dict__.get(CHANGES, ()) if isinstance(change, kind)), None)


def has_own_method(module: Any, *methods: str) -> bool:
    """Whether one of these methods was set on the instance; replacing its class's method would ignore that."""
    return any(name in module.__dict__ or name in module.__dict__.get(OWN, {}) for name in methods)


def original_class(module: Any) -> type[Any]:
    """Return the class of a module before it was changed."""
    return getattr(type(module), "narrowgauge_original", type(module))


@contextlib.contextmanager
def allow_double_backward() -> Iterator[None]:
    """Context manager that skips changes that are differentiable only once, so layers compute as written."""
    global _differentiable_twice
    before, _differentiable_twice = _differentiable_twice, True
    try:
        yield
    finally:
        _differentiable_twice = before


_classes: dict[type[Any], type[Any]] = {}


def _changed_class(original: type[Any]) -> type[Any]:
    if original not in _classes:
        _classes[original] = _derive_class(original)
    return _classes[original]


def _derive_class(original: type[Any]) -> type[Any]:
    methods = {name: _make_dispatcher(original, name) for name in METHODS if hasattr(original, name)}
    named = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(original.__name__, (ChangedModule, original), {**methods, **named, "narrowgauge_original": original})


def _make_dispatcher(original: type[Any], name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(original, name))  # libraries read the signature of forward
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return call_below(self, name, len(self.__dict__.get(CHANGES, ())), *args, **kwargs)

    return method


def call_below(module: Any, method: str, level: int, /, *args: Any, **kwargs: Any) -> Any:
    """Call the method with the first ``level`` changes of the module."""
    changes: list[Change] = module.__dict__.get(CHANGES, [])
    while level > 0:
        level -= 1
        change = changes[level]
        if change.method == method and (change.differentiable_twice or not _differentiable_twice):
            return change.run(module, functools.partial(call_below, module, method, level), *args, **kwargs)
    own = module.__dict__.get(OWN, {}).get(method)
    if own is not None:
        return own(*args, **kwargs)
    return getattr(original_class(module), method)(module, *args, **kwargs)


def _new_module(original: type[Any], *args: Any) -> Any:
    """Create a module without state, for copy and pickle."""
    cls = _changed_class(original)
    return cls.__new__(cls, *args)
