"""Follows calls of the script's functions, and the functions and methods that nothing in the script calls."""

from __future__ import annotations

import ast
import re
from abc import abstractmethod
from collections.abc import Sequence

from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.context import Context
from narrowgauge.lint.interpreter.evaluate import Evaluator
from narrowgauge.lint.interpreter.observations import Observations
from narrowgauge.lint.interpreter.state import State, merge
from narrowgauge.lint.interpreter.syntax import is_static
from narrowgauge.lint.interpreter.values import OPAQUE, Class, Function, Instance, Module, Ref, Value, heap, is_module

_WORD = re.compile(r"[A-Za-z_]\w*")
DEEPEST = 6
"""Depth to which calls within calls are followed."""
ENOUGH = 4_000
"""Statements after which calls are no longer followed and paths are merged."""


class Frames(Context):
    """The part of the interpreter that enters functions."""

    def __init__(self, tree: ast.Module, observations: Observations) -> None:
        super().__init__(tree, observations)
        self.evaluator = Evaluator(self)
        self.defined: dict[str, list[Function | Class]] = {}
        """Functions and classes that are defined in each frame."""
        self.reached: set[ast.AST] = set()
        """Functions, methods and classes that were followed."""
        self.statements = 0

    @property
    def is_over_budget(self) -> bool:
        """Whether so many statements were followed that the rest gets less attention."""
        return self.statements > ENOUGH

    @abstractmethod
    def block(self, body: Sequence[ast.stmt], states: list[State]) -> list[State]:
        """Follow statements one after the other and return the states at the end of every path."""

    def value(self, node: ast.expr, state: State) -> Value | None:
        """Return the value of an expression."""
        return self.evaluator.value(node, state)

    def call(self, function: Function, call: Call, arguments: dict[str, Value | None]) -> Value | None:
        """Follow a call of one of the script's functions and return its value; the call's state becomes that after it.

        If the call is a whole statement, or all that is assigned, the paths through it stay separate (``spilled``).
        """
        node, state = function.node, call.state
        frame = f"{node.name}:{node.lineno}"
        apart = self.splitting is call.node
        if frame in self.frames or len(self.frames) > DEEPEST or self.is_over_budget:
            return None
        self.reached.add(node)
        inner = state.fork()
        for name, value in arguments.items():
            inner.bind(f"{frame}|{name}", OPAQUE if value is None else value)
            inner.bind(heap(f"{frame}|{name}", "!engine"), None)  # left over from an earlier call
        self.callers.insert(0, (call.node.lineno, call.node.col_offset))
        ends = [end for end in self._body(function, frame, inner) if end.flow != "raise"]
        self.callers.pop(0)
        if not ends:
            state.flow = "raise"
            return None
        same = {arg.id for arg in call.node.args if isinstance(arg, ast.Name)}
        if isinstance(call.receiver_node, ast.Name):
            same.add(call.receiver_node.id)
        results = {id(end): end.result for end in ends}
        for end in ends:
            own = {key.partition("|")[2] for key in end.env if key.startswith(f"{frame}|")} - same
            end.flow, end.result, end.autocast, end.contexts = "", None, state.autocast, state.contexts
            end.env = {key: value for key, value in end.env.items() if not key.startswith(f"{frame}|")}
            end.assumed = {test: way for test, way in end.assumed.items() if own.isdisjoint(_WORD.findall(test))}
        if apart:
            self.spilled = [(end, results[id(end)]) for end in ends[1:]]
            after, result = ends[0], results[id(ends[0])]
        else:
            values = list(results.values())
            result = values[0] if all(value == values[0] for value in values) else None
            after = merge(ends, 1)[0]
        state.env, state.grads, state.stages, state.assumed = after.env, after.grads, after.stages, after.assumed
        state.engines = after.engines
        return result

    def evaluate(self, node: ast.expr, state: State) -> list[tuple[State, Value | None]]:
        """Return the value of a whole expression, on each path through a function that it calls."""
        before = self.splitting, self.spilled
        self.splitting, self.spilled = node, []
        value = self.value(node, state)
        found = [(state, value), *self.spilled]
        self.splitting, self.spilled = before
        return found

    def _body(self, function: Function, frame: str, state: State) -> list[State]:
        self.frames.append(frame)
        self.scopes.append(function.node)
        self.parents[frame] = function.frame
        before = state.autocast
        if function.autocast is not None:
            state.autocast = (*before, function.autocast)
        quiet = any(self._disables_grad(decorator, state) for decorator in function.node.decorator_list)
        self.without_grad += quiet
        ends = self.block(function.node.body, [state])
        self.without_grad -= quiet
        for end in ends:
            end.autocast = before
        self.finish(frame, ends)
        self.frames.pop()
        self.scopes.pop()
        return ends

    def _disables_grad(self, node: ast.expr, state: State) -> bool:
        """Return whether a context manager or decorator disables gradients."""
        value = self.evaluator.value(node.func if isinstance(node, ast.Call) else node, state)
        return isinstance(value, Ref) and value.name in ("torch.no_grad", "torch.inference_mode")

    def finish(self, frame: str, states: list[State]) -> None:
        """Follow the functions that were defined in a frame and never called, from the end of the frame."""
        ends = [state.fork() for state in states if state.flow != "raise"] or [State()]
        for state in ends:
            state.flow, state.result = "", None
        base = merge(ends, 1)[0]
        base.grads, base.stages, base.assumed, base.autocast = State().grads, {}, {}, ()
        base.contexts, base.engines = (), {}  # the unknown caller may have opened an engine's forward
        loops, guards, self.loops, self.guards = self.loops, self.guards, [0], []
        for value in self.defined.pop(frame, []):
            if value.node in self.reached:
                continue
            self.reached.add(value.node)
            if isinstance(value, Class):
                self._methods(value, base)
            elif f"{value.node.name}:{value.node.lineno}" not in self.frames:
                self._body(value, f"{value.node.name}:{value.node.lineno}", base.fork())
        self.loops, self.guards = loops, guards

    def _methods(self, value: Class, base: State) -> None:
        """Follow all methods of a class, on an object as ``__init__`` leaves it."""
        site = (value.node.lineno, value.node.col_offset)
        own = Module(site, value.node.name, value.node) if is_module(value) else Instance(site, value.node)
        methods = [child for child in value.node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]
        methods.sort(key=lambda method: method.name != "__init__")
        is_lightning = any(name.endswith("LightningModule") for name in value.bases)
        state = base.fork()
        for method in methods:
            if method in self.reached and method.name != "__init__":
                continue
            frame = f"{method.name}:{method.lineno}"
            if frame in self.frames:
                continue
            self.reached.add(method)
            function = self.evaluator.method(own, method)
            inner = state.fork()
            if method.name in ("forward", "training_step"):
                under = self.trainer_autocast if is_lightning else self.observations.called_under.get(value.node.name)
                inner.autocast = (under,) if under is not None else ()
            if method.args.args and not is_static(method):
                inner.bind(f"{frame}|{method.args.args[0].arg}", own)
            ends = self._body(function, frame, inner)
            if method.name == "__init__" and ends:
                kept = merge([end for end in ends if end.flow != "raise"] or [inner], 1)[0]
                state.env = {key: value for key, value in kept.env.items() if not key.startswith(f"{frame}|")}
