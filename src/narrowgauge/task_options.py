"""The parameters of a task's function as command-line options: their names, types and values.

    def mine(width: int = 64, bias: bool = True, act: Literal["relu", "gelu"] = "relu", sizes: list[int] = ()): ...

    --width 128   --no-bias   --act gelu   --sizes 64,32

The type comes from the annotation, or else from the default, or else it is text. Values are kept in JSON's types,
because the run's record stores them. They become a Path, a tuple or a member of an Enum when the function is called.
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

_SIMPLE_TYPES = (bool, int, float, str, Path)
_DESCRIPTIONS = {int: "a whole number", float: "a number", str: "text", Path: "a path", bool: "true or false"}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a task's function."""

    name: str
    types: tuple[type, ...]
    """Possible types of a value, tried in this order. Empty: the parameter cannot be a command-line option."""
    choices: Mapping[str, Any] = field(default_factory=dict)
    """All values of a Literal or an Enum, by their text."""
    enum_class: type[enum.Enum] | None = None
    """The Enum whose members the values are."""
    container: Callable[[Iterable[Any]], Any] | None = None
    """Creates a list or tuple, if the option takes several values, separated by commas."""
    default: Any = None
    required: bool = False

    @property
    def option(self) -> str:
        """The option's name, as in ``--log-scale``."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_switch(self) -> bool:
        """Whether the option is a flag without a value."""
        return self.types == (bool,) and self.container is None

    @property
    def expects(self) -> str:
        """A description of the values that the option takes."""
        words = " or ".join(_DESCRIPTIONS[kind] for kind in self.types)
        if self.choices:
            words = f"one of {', '.join(self.choices)}"
        return f"{words}, or several, separated by commas" if self.container else words

    def parse(self, text: str) -> Any:
        """Return the value of a text, in JSON's types, or raise UsageError."""
        parts = [text] if self.container is None else [part.strip() for part in text.split(",") if part.strip()]
        try:
            values = [self._parse_one(part) for part in parts]
        except ValueError:
            raise UsageError(f"{self.option} {text!r}: expected {self.expects}") from None
        return values if self.container else values[0]

    def convert(self, value: Any) -> Any:
        """Return a value in the type that the function takes."""
        if self.container is not None and isinstance(value, list | tuple):
            return self.container(self._convert_one(one) for one in value)
        return self._convert_one(value)

    def _parse_one(self, text: str) -> Any:
        if self.choices:
            if text not in self.choices:
                raise ValueError
            return self.choices[text]
        for kind in self.types:
            with contextlib.suppress(ValueError):
                return _TRUTH[text.lower()] if kind is bool else text if kind in (str, Path) else kind(text)
        raise ValueError

    def _convert_one(self, value: Any) -> Any:
        if self.enum_class is not None and isinstance(value, str):
            return self.enum_class[value]
        return Path(value) if self.types == (Path,) and isinstance(value, str) else value


class _Truth(dict[str, bool]):
    """A dictionary that raises ValueError for unknown keys."""

    def __missing__(self, key: str) -> bool:
        raise ValueError(key)


_TRUTH = _Truth({"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False})


def read_parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters of a function that can be passed by name.

    Args:
        function: A task's function.
    """
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # an annotation names something that is not imported: use the defaults
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
    container: Callable[[Iterable[Any]], Any] | None = None
    for one in _union_types(hint):
        origin = typing.get_origin(one) or one
        if origin in (list, tuple, Sequence, collections.abc.Iterable):
            container = list if origin is list else tuple
            inner = [part for part in typing.get_args(one) if part is not Ellipsis]
            items = {type(item) for item in known} if isinstance(known, list | tuple) else set()
            hint = inner[0] if inner else items.pop() if len(items) == 1 else str
            break
    rest: dict[str, Any] = {"container": container, "default": known, "required": required}
    choices = [
        choice for one in _union_types(hint) if typing.get_origin(one) is Literal for choice in typing.get_args(one)
    ]
    if choices:
        return Parameter(name, (str,), {str(choice): choice for choice in choices}, **rest)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        choices_by_text = {str(one.value): one.name for one in hint} | {one: one for one in hint.__members__}
        return Parameter(name, (str,), choices_by_text, hint, **rest)
    kinds = [kind for kind in _SIMPLE_TYPES if kind in _union_types(hint)]
    return Parameter(name, tuple(kinds), **rest)


def _union_types(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, without None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(one for one in typing.get_args(hint) if one is not type(None))
    if typing.get_origin(hint) is typing.Annotated:
        return _union_types(typing.get_args(hint)[0])
    return (hint,)
