"""Where the interpreter is in a script: the function, loop and branches around the current line.

Handlers of calls and observers get this object. The subclasses ``frames.Frames`` and ``flow.Interpreter`` implement the
abstract methods.
"""

from __future__ import annotations

import ast
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.inferred_types import InferredTypes
from narrowgauge.lint.interpreter.observations import Event, Observations
from narrowgauge.lint.interpreter.observer import Observer
from narrowgauge.lint.interpreter.state import State
from narrowgauge.lint.interpreter.syntax import dotted, imported_libraries, nodes_of, words_of
from narrowgauge.lint.interpreter.values import OPAQUE, Autocast, Class, Function, Site, Value

P = ParamSpec("P")
MIXED: dict[object, str] = {16: "fp16", "16": "fp16", "16-mixed": "fp16", "bf16": "bf16", "bf16-mixed": "bf16"}
"""Lightning's names of mixed precision, and the formats."""
_NONFINITE = ("finite", "inf", "nan")


class Context(ABC):
    """The current position, and what has been recorded so far."""

    def __init__(self, tree: ast.Module, observations: Observations) -> None:
        self.tree, self.observations = tree, observations
        self.observers: list[Observer] = []
        """Complete before the first step is reported."""
        self._overriding: dict[str, list[Observer]] = {}
        """The observers that override a method of ``Observer``, by its name."""
        self.inferred = InferredTypes(tree)
        self.frames: list[str] = [""]
        """Functions that were entered, the innermost last; empty for the module."""
        self.scopes: list[ast.AST] = [tree]
        """The syntax trees of the frames."""
        self.parents: dict[str, str] = {}
        """The frame that each frame's function was defined in."""
        self.classes: dict[ast.ClassDef, Class] = {}
        self.decorated: dict[ast.AST, Autocast] = {}
        """Methods that are decorated with autocast."""
        self.loops: list[int] = [0]
        self.guards: list[tuple[int, ast.expr]] = []
        """Conditions of the ``if`` statements around the line, each with its loop."""
        self.compatible = 0
        """Above 0 inside a fallback for an older or newer torch."""
        self.handling = 0
        """Above 0 inside an exception handler."""
        self.without_grad = 0
        """Above 0 where no gradients are computed."""
        self.callers: list[tuple[int, int]] = []
        """Positions of the calls that led here, the innermost first."""
        self.splitting: ast.expr | None = None
        """An expression whose paths stay separate: all of a statement, or all that is assigned."""
        self.spilled: list[tuple[State, Value | None]] = []
        """Further paths out of the call that is ``splitting``, with the values that they return."""

    @abstractmethod
    def value(self, node: ast.expr, state: State) -> Value | None:
        """Return the value of an expression."""

    @abstractmethod
    def call(self, function: Function, call: Call, arguments: dict[str, Value | None]) -> Value | None:
        """Follow a call of one of the script's functions and return its value."""

    @abstractmethod
    def assign(self, target: ast.expr, value: Value | None, state: State) -> None:
        """Assign a value to a name, an attribute or a tuple of them."""

    def notify(self, method: Callable[Concatenate[Observer, P], None], *arguments: P.args, **more: P.kwargs) -> None:
        """Report a step to every observer, by one of the methods of ``Observer``.

        Observers that do not override it are skipped: a script has many more names and calls than training steps.
        """
        name = method.__name__
        if name not in self._overriding:
            self._overriding[name] = [one for one in self.observers if getattr(type(one), name) is not method]
        for observer in self._overriding[name]:
            getattr(observer, name)(*arguments, **more)

    def event(self, kind: str, node: ast.AST, **about: object) -> None:
        """Record that something happens here."""
        loop = self.loops[-1]
        guards = tuple(test for where, test in self.guards if where == loop)
        self.observations.record(Event(kind, node, loop, guards, **about))  # type: ignore[arg-type]

    def site(self, node: ast.expr) -> Site:
        """Return the identity of an object that is created here: the position, and the calls that led there."""
        return (node.lineno, node.col_offset, *(number for place in self.callers for number in place))

    def lookup(self, name: str, state: State) -> Value | None:
        """Return the value of a name: in this frame, in those around it, in the module."""
        frame = self.frames[-1]
        while True:
            value = state.env.get(f"{frame}|{name}")
            if value is not None or not frame:
                return None if value == OPAQUE else value
            frame = self.parents.get(frame, "")

    @property
    def is_in_test(self) -> bool:
        """Whether the line is in a function of pytest, where nobody uses the weights that are trained."""
        return any(getattr(scope, "name", "").startswith("test_") for scope in self.scopes)

    @property
    def checks_nonfinite(self) -> bool:
        """Whether a condition around the line looks for inf or NaN."""
        tests = " ".join(ast.unparse(test) for _, test in self.guards)
        return any(word in tests for word in _NONFINITE)

    @functools.cached_property
    def words(self) -> set[str]:
        """Every name and attribute in the script."""
        return set(words_of(self.tree))

    @functools.cached_property
    def read_at_once(self) -> set[ast.AST]:
        """Calls whose result becomes a number in the same expression: ``loss_fn(x, y).item()``, ``float(...)``."""
        found: set[ast.AST] = set()
        for node in nodes_of(self.tree):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("item", "tolist", "detach"):
                found.add(node.func.value)
            elif isinstance(node.func, ast.Name) and node.func.id == "float":
                found.update(node.args)
        return found

    @functools.cached_property
    def trainer_autocast(self) -> Autocast | None:
        """The autocast of Lightning's Trainer around training_step, if the script creates one with mixed precision."""
        for node in nodes_of(self.tree):
            if isinstance(node, ast.Call) and (dotted(node.func) or "").split(".")[-1] == "Trainer":
                for given in node.keywords:
                    value = given.value.value if isinstance(given.value, ast.Constant) else None
                    if given.arg == "precision" and value in MIXED:
                        return Autocast(MIXED[value], "cuda")
        return None

    @functools.cached_property
    def libraries(self) -> set[str]:
        """The packages that the script imports."""
        return imported_libraries(self.tree)
