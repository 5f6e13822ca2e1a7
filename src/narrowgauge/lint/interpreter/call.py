"""A call in a script, with what is known of its parts."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from narrowgauge.lint.interpreter.state import State
from narrowgauge.lint.interpreter.values import Value

Handled = tuple[bool, Value | None]
"""Whether a handler knows a call, and the value that the call returns."""
NOT_HANDLED: Handled = (False, None)


@dataclass
class Call:
    """A call, with what is known of its parts."""

    node: ast.Call
    state: State
    name: str = ""
    """Full name of the callee, if it was imported."""
    method: str = ""
    """Name of the attribute that is called; empty for ``f(...)``."""
    receiver: Value | None = None
    """The object whose method is called."""
    target: Value | None = None
    """The callee."""
    args: list[Value | None] = field(default_factory=list)
    keywords: dict[str, Value | None] = field(default_factory=dict)

    def arg(self, position: int, keyword: str = "") -> Value | None:
        """Return the value of an argument, given by position or by keyword."""
        if keyword in self.keywords:
            return self.keywords[keyword]
        return self.args[position] if 0 <= position < len(self.args) else None

    def written(self, position: int, keyword: str = "") -> ast.expr | None:
        """Return the expression of an argument; None if the call does not have it."""
        for given in self.node.keywords:
            if given.arg == keyword:
                return given.value
        if 0 <= position < len(self.node.args) and not any(isinstance(arg, ast.Starred) for arg in self.node.args):
            return self.node.args[position]
        return None

    @property
    def receiver_node(self) -> ast.expr | None:
        """The expression before the dot."""
        return self.node.func.value if isinstance(self.node.func, ast.Attribute) else None

    @property
    def values(self) -> list[Value | None]:
        """The values of all arguments."""
        return [*self.args, *self.keywords.values()]
