"""The parameters of a task's function as options: which there are, what they take, and values of the right type.

    def mine(width: int = 64, bias: bool = True, act: Literal["relu", "gelu"] = "relu", sizes: list[int] = ()): ...

    --width 128   --no-bias   --act gelu   --sizes 64,32

The annotation says the type, else the default does, else it is text. A value is kept as JSON has it (a run's record
must hold it) and becomes a Path, a tuple or a member of an Enum when the function is called.
"""

from __future__ import annotations

import collections.abc
import contextlib
import enum
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from narrowgauge.errors import UsageError

_PLAIN = (bool, int, float, str, Path)
_WORDS = {int: "a whole number", float: "a number", str: "text", Path: "a path", bool: "true or false"}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a task's function."""

    name: str
    kinds: tuple[type, ...]
    """What a value may be, tried in this order; empty: nothing that can be typed on a command line."""
    named: Mapping[str, Any] = field(default_factory=dict)
    """The only values there are, by what is typed for them: of a Literal, or an Enum."""
    members: type[enum.Enum] | None = None
    many: Callable[[Iterable[Any]], Any] | None = None
    """Makes a list or tuple: several values are given, with commas between them."""
    default: Any = None
    required: bool = False

    @property
    def option(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_switch(self) -> bool:
        return self.kinds == (bool,) and self.many is None

    @property
    def expects(self) -> str:
        """What may be given, in words."""
        words = " or ".join(_WORDS[kind] for kind in self.kinds)
        if self.named:
            words = f"one of {', '.join(self.named)}"
        return f"{words}, or several with commas between them" if self.many else words

    def parse(self, text: str) -> Any:
        """The value of a text, as JSON has it; UsageError where it is none."""
        parts = [text] if self.many is None else [part.strip() for part in text.split(",") if part.strip()]
        try:
            values = [self._parse_one(part) for part in parts]
        except ValueError:
            raise UsageError(f"{self.option} {text!r}: expected {self.expects}") from None
        return values if self.many else values[0]

    def convert(self, value: Any) -> Any:
        """A value as the function takes it."""
        if self.many is not None and isinstance(value, list | tuple):
            return self.many(self._convert_one(one) for one in value)
        return self._convert_one(value)

    def _parse_one(self, text: str) -> Any:
        if self.named:
            if text not in self.named:
                raise ValueError
            return self.named[text]
        for kind in self.kinds:
            with contextlib.suppress(ValueError):
                return _TRUTH[text.lower()] if kind is bool else text if kind in (str, Path) else kind(text)
        raise ValueError

    def _convert_one(self, value: Any) -> Any:
        if self.members is not None and isinstance(value, str):
            return self.members[value]
        return Path(value) if self.kinds == (Path,) and isinstance(value, str) else value


class _Truth(dict[str, bool]):
    def __missing__(self, key: str) -> bool:
        raise ValueError(key)


_TRUTH = _Truth({"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False})


def parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    """The parameters of a function that can be given by name."""
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # an annotation that names what is not imported: the defaults still say something
        hints = {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: _describe(name, hints.get(name), parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in by_name
    }


def _describe(name: str, hint: Any, default: Any) -> Parameter:
    required = default is inspect.Parameter.empty
    known = None if required else default
    if hint is None or hint is Any:
        hint = type(known) if known is not None else str
    many: Callable[[Iterable[Any]], Any] | None = None
    for one in _alternatives(hint):
        origin = typing.get_origin(one) or one
        if origin in (list, tuple, Sequence, collections.abc.Iterable):
            many = list if origin is list else tuple
            inner = [part for part in typing.get_args(one) if part is not Ellipsis]
            items = {type(item) for item in known} if isinstance(known, list | tuple) else set()
            hint = inner[0] if inner else items.pop() if len(items) == 1 else str
            break
    rest: dict[str, Any] = {"many": many, "default": known, "required": required}
    choices = [
        choice for one in _alternatives(hint) if typing.get_origin(one) is Literal for choice in typing.get_args(one)
    ]
    if choices:
        return Parameter(name, (str,), {str(choice): choice for choice in choices}, **rest)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        named = {str(one.value): one.name for one in hint} | {one: one for one in hint.__members__}
        return Parameter(name, (str,), named, hint, **rest)
    kinds = [kind for kind in _PLAIN if kind in _alternatives(hint)]
    return Parameter(name, tuple(kinds), **rest)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a union, without None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(one for one in typing.get_args(hint) if one is not type(None))
    if typing.get_origin(hint) is typing.Annotated:
        return _alternatives(typing.get_args(hint)[0])
    return (hint,)
