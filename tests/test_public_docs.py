"""Every public name is documented: classes, functions, methods, parameters and fields.

Docstrings are Google style. ``Args:`` must name exactly the parameters of the signature, so that a new parameter
without documentation fails here. A function of one parameter may describe it in its summary instead.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import narrowgauge as ng

INTEGRATIONS = {
    "narrowgauge.integrations.lightning": ["ng_precision"],
    "narrowgauge.integrations.accelerate": ["prepare", "adopt", "engine_of"],
    "narrowgauge.integrations.transformers": ["adapt", "gauges_of", "replay_loss"],
    "narrowgauge.integrations.gauges": ["Gauges"],
    "narrowgauge.integrations.hosted": ["Hosted"],
}
HEADING = re.compile(r"[A-Z][a-z]+:$")


def list_sections(docstring: str) -> dict[str, str]:
    """Return the sections of a Google-style docstring, by heading; the text before the first has the key ""."""
    sections, heading = {"": ""}, ""
    for line in inspect.cleandoc(docstring).splitlines():
        if HEADING.match(line):
            heading = line[:-1]
            sections[heading] = ""
        else:
            sections[heading] += line + "\n"
    return sections


def list_documented(section: str) -> set[str]:
    """Return the names that an ``Args:`` or ``Attributes:`` section documents."""
    return set(re.findall(r"^    \*{0,2}(\w+): \S", section, re.MULTILINE))


def list_parameters(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters
    return {name for name in parameters if name not in ("self", "cls") and not name.startswith("_")}


def list_fields(cls: type) -> Iterator[tuple[str, str | None]]:
    """Yield the fields of a dataclass with the string below each."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            yield statement.target.id, after.value.value if is_text else None  # type: ignore[union-attr]


def find_gaps(name: str, value: Any) -> Iterator[str]:
    """Yield what is missing from the documentation of a class or function."""
    docstring = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    if not docstring:
        yield f"{name} has no docstring"
        return
    sections = list_sections(docstring)
    first = sections[""].strip().splitlines()[0]
    if not first.endswith((".", ":")):
        yield f"{name}: the first line is not one sentence: {first}"
    if inspect.isclass(value) and dataclasses.is_dataclass(value):
        yield from (f"{name}.{field} has no docstring" for field, text in list_fields(value) if not text)
    elif not (inspect.isclass(value) and issubclass(value, Exception)):
        arguments = sections.get("Args") or list_sections(value.__init__.__doc__ or "").get("Args", "")
        parameters, documented = list_parameters(value), list_documented(arguments)
        if len(parameters) > 1 or documented or inspect.isclass(value):
            yield from (f"{name}: Args lacks {missing}" for missing in sorted(parameters - documented))
        yield from (f"{name}: Args names {unknown}, which is not a parameter" for unknown in documented - parameters)
    if inspect.isclass(value):
        fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
        for method, member in inspect.getmembers(value):
            if not method.startswith("_") and method not in fields and is_own(member):
                yield from find_member_gaps(f"{name}.{method}", member)


def find_member_gaps(name: str, member: Any) -> Iterator[str]:
    if isinstance(member, property):
        if not member.__doc__:
            yield f"{name} has no docstring"
    elif callable(member):
        yield from find_gaps(name, inspect.unwrap(member))


def is_own(member: Any) -> bool:
    """Whether narrowgauge defines a member, and not a base class of another library."""
    function = member.fget if isinstance(member, property) else member
    return str(getattr(function, "__module__", "")).startswith("narrowgauge")


def list_public() -> Iterator[tuple[str, Any]]:
    for name in ng.__all__:
        value = getattr(ng, name)
        if not isinstance(value, ModuleType):
            yield f"ng.{name}", value
            continue
        if callable(value):  # ng.forecast and ng.validate are packages that can be called
            yield f"ng.{name}", getattr(importlib.import_module(f"narrowgauge.{name}.run"), name)
            continue
        members = getattr(value, "__all__", None) or [n for n in dir(value) if not n.startswith("_")]
        for member in members:
            inner = getattr(value, member)
            if (inspect.isclass(inner) or inspect.isfunction(inner)) and inner.__module__.startswith(value.__name__):
                yield f"ng.{name}.{member}", inner
    for module, names in INTEGRATIONS.items():
        for name in names:
            yield f"{module}.{name}", getattr(importlib.import_module(module), name)


PUBLIC = dict(list_public())


@pytest.mark.parametrize("name", list(PUBLIC))
def test_public_names_are_documented(name: str) -> None:
    gaps = list(find_gaps(name, PUBLIC[name]))
    assert not gaps, "\n".join(gaps)


def test_the_attributes_of_an_engine_are_documented() -> None:
    """All attributes that __init__ sets, except those for internal use."""
    internal = {"named", "released", "release", "lean", "update_sync", "step_context", "loss_in_16_bits"}
    source = textwrap.dedent(inspect.getsource(ng.Engine.__init__))
    assigned = set(re.findall(r"self\.([a-z]\w*)(?:: [^=]+)? = ", source))
    documented = list_documented(list_sections(ng.Engine.__doc__ or "")["Attributes"])
    assert documented == assigned - internal


def test_help_shows_arguments_and_methods() -> None:
    import pydoc

    text = pydoc.plain(pydoc.render_doc(ng.Engine))
    for part in ("clip_norm: Clip the norm", "TrainingStalled", "forward(self, double_backward", "Example:"):
        assert part in text


def test_a_missing_parameter_is_found() -> None:
    def function(one: int, two: int) -> None:
        """Do something.

        Args:
            one: The first.
            three: Nothing.
        """

    assert list(find_gaps("function", function)) == [
        "function: Args lacks two",
        "function: Args names three, which is not a parameter",
    ]
