"""Frames: which function of a script is being followed, what its names stand for, and what it was called with."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from narrowgauge.lint.evaluate import Call, Evaluator
from narrowgauge.lint.notebook import Event, Notebook
from narrowgauge.lint.state import State, merge
from narrowgauge.lint.values import (
    OPAQUE,
    Autocast,
    Class,
    Function,
    Instance,
    Module,
    Ref,
    Site,
    Value,
    heap,
    is_module,
    is_static,
)

_WORD = re.compile(r"[A-Za-z_]\w*")
DEEPEST = 6
"""Calls within calls that are followed."""
ENOUGH = 4_000
"""Statements after which calls are no longer followed and ways are no longer told apart."""


class Frames:
    """The part of a follower that enters functions."""

    def __init__(self, tree: ast.Module, notebook: Notebook) -> None:
        self.tree, self.notebook = tree, notebook
        self.evaluator = Evaluator(self)
        self.frames: list[str] = [""]
        self.scopes: list[ast.AST] = [tree]
        """The script, and the functions of the frames."""
        self.parents: dict[str, str] = {}
        self.defined: dict[str, list[Function | Class]] = {}
        self.classes: dict[ast.ClassDef, Class] = {}
        self.decorated: dict[ast.AST, Autocast] = {}
        """Methods that are decorated with autocast."""
        self.reached: set[ast.AST] = set()
        self.loops: list[int] = [0]
        self.guards: list[tuple[int, ast.expr]] = []
        self.compatible = 0
        """Above 0 inside the fallback for an older or newer torch."""
        self.handling = 0
        """Above 0 inside a handler of exceptions."""
        self.without_grad = 0
        """Above 0 where no gradients are computed."""
        self.statements = 0
        self.splitting: ast.expr | None = None
        self.callers: list[tuple[int, int]] = []
        """Where the calls were made that led here, the innermost first."""
        self.spilled: list[tuple[State, Value | None]] = []
        """Further ways out of the call that is ``splitting``, with what they return."""

    @property
    def tired(self) -> bool:
        return self.statements > ENOUGH

    def event(self, kind: str, node: ast.AST, **about: object) -> None:
        """Note that something happens here."""
        loop = self.loops[-1]
        guards = tuple(test for where, test in self.guards if where == loop)
        self.notebook.note(Event(kind, node, loop, guards, **about))  # type: ignore[arg-type]

    def site(self, node: ast.expr) -> Site:
        """Where something is made: the place, and the calls that led there."""
        return (node.lineno, node.col_offset, *(number for place in self.callers for number in place))

    def lookup(self, name: str, state: State) -> Value | None:
        """What a name stands for here: in this frame, in those around it, in the module."""
        frame = self.frames[-1]
        while True:
            value = state.env.get(f"{frame}|{name}")
            if value is not None or not frame:
                return None if value == OPAQUE else value
            frame = self.parents.get(frame, "")

    def block(self, body: Sequence[ast.stmt], states: list[State]) -> list[State]:
        """Follow statements one after the other."""
        raise NotImplementedError

    def assign(self, target: ast.expr, value: Value | None, state: State) -> None:
        """Give a name, an attribute or several of them a value."""
        raise NotImplementedError

    def call(self, function: Function, call: Call, arguments: dict[str, Value | None]) -> Value | None:
        """Follow a call of one of the script's functions; the call's state is then the one after it.

        Where the call is a whole statement, or all that is assigned, the ways through it stay apart (``spilled``).
        """
        node, state = function.node, call.state
        frame = f"{node.name}:{node.lineno}"
        apart = self.splitting is call.node
        if frame in self.frames or len(self.frames) > DEEPEST or self.tired:
            return None
        self.reached.add(node)
        inner = state.fork()
        for name, value in arguments.items():
            inner.bind(f"{frame}|{name}", OPAQUE if value is None else value)
            inner.bind(heap(f"{frame}|{name}", "!engine"), None)  # of the call before
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
        """A whole expression: its value, on each of the ways through a function that it calls."""
        before = self.splitting, self.spilled
        self.splitting, self.spilled = node, []
        value = self.evaluator.value(node, state)
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
        quiet = any(self._switches_off(decorator, state) for decorator in function.node.decorator_list)
        self.without_grad += quiet
        ends = self.block(function.node.body, [state])
        self.without_grad -= quiet
        for end in ends:
            end.autocast = before
        self.finish(frame, ends)
        self.frames.pop()
        self.scopes.pop()
        return ends

    def _switches_off(self, node: ast.expr, state: State) -> bool:
        """Whether a context or decorator is one under which nothing is learnt."""
        value = self.evaluator.value(node.func if isinstance(node, ast.Call) else node, state)
        return isinstance(value, Ref) and value.name in ("torch.no_grad", "torch.inference_mode")

    def finish(self, frame: str, states: list[State]) -> None:
        """Follow what was defined in a frame and never called, from where the frame ends."""
        ends = [state.fork() for state in states if state.flow != "raise"] or [State()]
        for state in ends:
            state.flow, state.result = "", None
        base = merge(ends, 1)[0]
        base.grads, base.stages, base.assumed, base.autocast = State().grads, {}, {}, ()
        base.contexts, base.engines = (), {}  # who calls it may have opened an engine's forward
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
        """All methods of a class, on an object fresh from ``__init__``."""
        site = (value.node.lineno, value.node.col_offset)
        own = Module(site, value.node.name, value.node) if is_module(value) else Instance(site, value.node)
        methods = [child for child in value.node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]
        methods.sort(key=lambda method: method.name != "__init__")
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
            if method.args.args and not is_static(method):
                inner.bind(f"{frame}|{method.args.args[0].arg}", own)
            ends = self._body(function, frame, inner)
            if method.name == "__init__" and ends:
                kept = merge([end for end in ends if end.flow != "raise"] or [inner], 1)[0]
                state.env = {key: value for key, value in kept.env.items() if not key.startswith(f"{frame}|")}
