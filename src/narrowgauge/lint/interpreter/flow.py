"""Follows a script statement by statement, along every path through its branches, without running it.

Both sides of an ``if`` are followed. A path that took a condition as true takes it as true again until the names in it
change. Loop bodies are followed twice. Functions of the script are followed at each call; functions that are never
called are followed once, with unknown arguments.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence

import narrowgauge
from narrowgauge.lint.interpreter.branches import assume, decide
from narrowgauge.lint.interpreter.frames import Frames
from narrowgauge.lint.interpreter.observer import Observer
from narrowgauge.lint.interpreter.state import MOST, State, merge
from narrowgauge.lint.interpreter.syntax import dotted
from narrowgauge.lint.interpreter.values import (
    OPAQUE,
    Autocast,
    Class,
    Condition,
    Const,
    EngineContext,
    Function,
    Instance,
    Module,
    Optimizer,
    Params,
    Ref,
    Scaler,
    Seq,
    Site,
    Tensor,
    Value,
    heap,
)

_BRANCHING = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
"""Statements with blocks, after which equal paths are merged."""
_MISSING = ("ImportError", "ModuleNotFoundError", "AttributeError")


class Interpreter(Frames):
    """Follows one script."""

    def follow(self) -> None:
        """Follow the whole script, reporting to ``observers``."""
        self.finish("", self.block(self.tree.body, [State()]))
        self.notify(Observer.on_end)

    def block(self, body: Sequence[ast.stmt], states: list[State]) -> list[State]:
        """Follow statements one after the other and return the states at the end of every path."""
        done: list[State] = []
        for statement in body:
            done += [state for state in states if state.flow]
            live = [state for state in states if not state.flow]
            if not live:
                return done
            self.statements += len(live)
            states = self.statement(statement, live)
            if isinstance(statement, _BRANCHING):
                states = self._merged(states)
        return done + states

    def statement(self, node: ast.stmt, states: list[State]) -> list[State]:
        """Follow one statement on every path."""
        handler: Callable[[ast.stmt, list[State]], list[State]] | None = getattr(
            self, f"_{type(node).__name__.lower()}", None
        )
        if handler is not None:
            return handler(node, states)
        for state in states:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.value(child, state)
        return states

    # Statements

    def _if(self, node: ast.If, states: list[State]) -> list[State]:
        yes, no = [], []
        for state in states:
            self.value(node.test, state)
            way = decide(self, node.test, state)
            if way is not False:
                yes.append(state.fork())
                assume(self, node.test, yes[-1], True)
            if way is not True:
                no.append(state.fork())
                assume(self, node.test, no[-1], False)
        named = self.value(node.test, states[0]) if isinstance(node.test, ast.Name) else None
        self.guards.append((self.loops[-1], named.test if isinstance(named, Condition) else node.test))
        ends = (self.block(node.body, yes) if yes else []) + (self.block(node.orelse, no) if no else [])
        self.guards.pop()
        return ends

    def _for(self, node: ast.For | ast.AsyncFor, states: list[State]) -> list[State]:
        values = [self.value(node.iter, state) for state in states]
        return self._loop(node, states, node.target, _element(node.iter, values[0]))

    _asyncfor = _for

    def _while(self, node: ast.While, states: list[State]) -> list[State]:
        return self._loop(node, states, None)

    def _loop(
        self,
        node: ast.For | ast.AsyncFor | ast.While,
        states: list[State],
        target: ast.expr | None,
        element: Value | None = None,
    ) -> list[State]:
        self.loops.append(id(node))
        left: list[State] = []
        for _ in range(1 if self.is_over_budget else 2):
            for state in states:
                if isinstance(node, ast.While):
                    self.value(node.test, state)
                if target is not None:
                    self.assign(target, element, state)
            states = self.block(node.body, states)
            left += [state for state in states if state.flow in ("break", "return", "raise")]
            states = [state for state in states if state.flow in ("", "continue")]
            for state in states:
                state.flow = ""
            states = merge(states)
        self.loops.pop()
        states = self.block(node.orelse, states) if node.orelse else states
        for state in left:
            state.flow = "" if state.flow == "break" else state.flow
        return merge([*states, *left])

    def _with(self, node: ast.With | ast.AsyncWith, states: list[State]) -> list[State]:
        groups: dict[tuple[object, ...], list[State]] = {}
        before: dict[tuple[object, ...], tuple[tuple[Autocast, ...], tuple[Site, ...]]] = {}
        quiet = any(self._disables_grad(item.context_expr, states[0]) for item in node.items)
        for state in states:
            outer = (state.autocast, state.contexts)
            for item in node.items:
                value = self.value(item.context_expr, state)
                self._report_with(item.context_expr, value, state)
                self.evaluator.engines.enter(value, state)
                quiet = quiet or (isinstance(value, EngineContext) and value.evaluates)
                if isinstance(value, Autocast):
                    state.autocast = (*state.autocast, value)
                if item.optional_vars is not None:
                    self.assign(item.optional_vars, None, state)
            key = (outer, state.autocast, state.contexts)
            before[key] = outer
            groups.setdefault(key, []).append(state)
        self.without_grad += quiet
        ends: list[State] = []
        for inner, group in groups.items():
            for end in self.block(node.body, group):
                end.autocast, end.contexts = before[inner]
                ends.append(end)
        self.without_grad -= quiet
        return ends

    _asyncwith = _with

    def _report_with(self, node: ast.expr, value: Value | None, state: State) -> None:
        self.notify(Observer.on_with, node, value, state)

    def _try(self, node: ast.Try, states: list[State]) -> list[State]:
        entry = [state.fork() for state in states]
        ends = self.block(node.body, states)
        if node.orelse:
            ends = self.block(node.orelse, ends)
        for handler in node.handlers:
            kinds = ast.unparse(handler.type) if handler.type else ""
            is_fallback = any(kind in kinds for kind in _MISSING)
            self.compatible += is_fallback
            self.handling += 1
            caught = self.block(handler.body, [state.fork() for state in entry])
            self.handling -= 1
            self.compatible -= is_fallback
            if not is_fallback:
                ends += caught
        if node.finalbody:
            flows = [(state.flow, state.result) for state in ends]
            for state in ends:
                state.flow = ""
            # The last block is followed for each path separately, so that each leaves as it did before.
            finals: list[State] = []
            for state, (flow, result) in zip(ends, flows, strict=True):
                for end in self.block(node.finalbody, [state]):
                    end.flow, end.result = end.flow or flow, end.result or result
                    finals.append(end)
            return finals
        return ends

    _trystar = _try

    def _match(self, node: ast.Match, states: list[State]) -> list[State]:
        ends = [state.fork() for state in states]
        for case in node.cases:
            ends += self.block(case.body, [state.fork() for state in states])
        return ends

    def _return(self, node: ast.Return, states: list[State]) -> list[State]:
        for state in states:
            state.result = self.value(node.value, state) if node.value else Const(None)
            state.flow = state.flow or "return"
        return states

    def _break(self, node: ast.Break, states: list[State]) -> list[State]:
        return self._leave(states, "break")

    def _continue(self, node: ast.Continue, states: list[State]) -> list[State]:
        return self._leave(states, "continue")

    def _raise(self, node: ast.Raise, states: list[State]) -> list[State]:
        return self._leave(states, "raise")

    def _leave(self, states: list[State], flow: str) -> list[State]:
        for state in states:
            state.flow = flow
        return states

    def _import(self, node: ast.Import, states: list[State]) -> list[State]:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.split(".")[0]
            self._bind_all(alias.asname or name, Ref(name), states)
        return states

    def _importfrom(self, node: ast.ImportFrom, states: list[State]) -> list[State]:
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            public = narrowgauge.__all__ if (module, alias.name) == ("narrowgauge", "*") else [alias.name]
            for name in public:
                self._bind_all(alias.asname or name, Ref(f"{module}.{name}"), states)
        return states

    def _functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, states: list[State]) -> list[State]:
        casts = [self.evaluator.decorator(decorator, state) for state in states for decorator in node.decorator_list]
        found = next((cast for cast in casts if isinstance(cast, Autocast)), None)
        function = Function(node, self.frames[-1], None, found)
        self._define(function)
        self._bind_all(node.name, function, states)
        return states

    _asyncfunctiondef = _functiondef

    def _classdef(self, node: ast.ClassDef, states: list[State]) -> list[State]:
        bases: list[str] = []
        for base in node.bases:
            value = self.value(base, states[0])
            if isinstance(value, Ref):
                bases.append(value.name)
            elif isinstance(value, Class):
                bases += [value.node.name, *value.bases]
        made = Class(node, self.frames[-1], tuple(bases))
        self.classes[node] = made
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                for decorator in child.decorator_list:
                    value = self.evaluator.decorator(decorator, states[0])
                    if isinstance(value, Autocast):
                        self.decorated[child] = value
            elif isinstance(child, ast.Assign | ast.AnnAssign) and child.value is not None:
                self.value(child.value, states[0])
        self._define(made)
        self._bind_all(node.name, made, states)
        return states

    def _define(self, value: Function | Class) -> None:
        known = self.defined.setdefault(self.frames[-1], [])
        if all(one.node is not value.node for one in known):
            known.append(value)

    def _expr(self, node: ast.Expr, states: list[State]) -> list[State]:
        return self._merged([after for state in states for after, _ in self.evaluate(node.value, state)])

    def _assign(self, node: ast.Assign, states: list[State]) -> list[State]:
        ends: list[State] = []
        for state in states:
            for after, value in self.evaluate(node.value, state):
                for target in node.targets:
                    self._report_assignment(node, target)
                    self.assign(target, value, after)
                ends.append(after)
        return self._merged(ends)

    def _report_assignment(self, node: ast.Assign, target: ast.expr) -> None:
        self.notify(Observer.on_assignment, node, target)

    def _merged(self, states: list[State]) -> list[State]:
        return merge(states, 1 if self.is_over_budget else MOST)

    def _annassign(self, node: ast.AnnAssign, states: list[State]) -> list[State]:
        for state in states:
            if node.value is not None:
                self.assign(node.target, self.value(node.value, state), state)
        return states

    def _augassign(self, node: ast.AugAssign, states: list[State]) -> list[State]:
        for state in states:
            load = ast.copy_location(ast.BinOp(node.target, node.op, node.value), node)
            self.assign(node.target, self.value(load, state), state)
        return states

    def assign(self, target: ast.expr, value: Value | None, state: State) -> None:
        """Assign a value to a name, an attribute or a tuple of them."""
        if isinstance(target, ast.Tuple | ast.List):
            items = value.items if isinstance(value, Seq) and len(value.items) == len(target.elts) else None
            for index, element in enumerate(target.elts):
                same = value if isinstance(value, Tensor) else None
                self.assign(element, items[index] if items else same, state)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, None, state)
        elif isinstance(target, ast.Name):
            state.forget_tests_of(target.id)
            hidden = OPAQUE if value is None and self.frames[-1] else None
            state.bind(f"{self.frames[-1]}|{target.id}", value or hidden)
            self.evaluator.modules.name_bound(target, value, state)
            if not isinstance(value, Module | Optimizer):
                state.bind(heap(f"{self.frames[-1]}|{target.id}", "!engine"), None)  # another object of the same name
            self.notify(Observer.on_name_bound, target, value)
        elif isinstance(target, ast.Attribute):
            if target.attr == "grad":
                state.move("lost")
            state.forget_tests_of(target.attr)
            state.bind(self.attribute_key(target, state), value)
        elif isinstance(target, ast.Subscript):
            owner = self.value(target.value, state)
            self.value(target.slice, state)
            self.notify(Observer.on_item_assigned, target, owner, value)

    def attribute_key(self, node: ast.Attribute, state: State) -> str:
        """Return the key of an attribute: the object's if it is known, else one made of the text."""
        owner = self.value(node.value, state)
        if isinstance(owner, Module | Instance | Scaler | Optimizer):
            return heap(owner.site, node.attr)
        return f"{self.frames[-1]}|{dotted(node) or ast.unparse(node)}"

    def _bind_all(self, name: str, value: Value, states: Iterable[State]) -> None:
        for state in states:
            state.bind(f"{self.frames[-1]}|{name}", value)


def _element(node: ast.expr, value: Value | None) -> Value | None:
    """Return what a loop over parameters gives its names."""
    method = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
    if isinstance(value, Params):
        return Seq((None, value)) if method == "named_parameters" else value
    is_zip = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "zip"
    return value if is_zip else None
