"""What the expressions of a script stand for; rules look on at every call and every operation."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from narrowgauge.lint.casts import Casts
from narrowgauge.lint.ducks import Ducks
from narrowgauge.lint.engine_calls import Engines
from narrowgauge.lint.making import Making
from narrowgauge.lint.names import HARMLESS
from narrowgauge.lint.protocol import Protocol
from narrowgauge.lint.state import State
from narrowgauge.lint.tensors import Tensors
from narrowgauge.lint.values import (
    OPAQUE,
    Class,
    Condition,
    Const,
    Engine,
    EngineMethod,
    Function,
    Instance,
    Module,
    Optimizer,
    Params,
    Ref,
    Scaler,
    Seq,
    StateDict,
    Tensor,
    Value,
    dotted,
    heap,
    is_module,
    is_static,
    join,
)

if TYPE_CHECKING:
    from narrowgauge.lint.frames import Frames

_BUILTINS = HARMLESS | {"float", "exec"}


@dataclass
class Call:
    """A call, with what is known of its parts."""

    node: ast.Call
    state: State
    name: str = ""
    """Full name of what is called, where it was imported."""
    method: str = ""
    receiver: Value | None = None
    target: Value | None = None
    args: list[Value | None] = field(default_factory=list)
    keywords: dict[str, Value | None] = field(default_factory=dict)

    def arg(self, position: int, keyword: str = "") -> Value | None:
        """What is known of an argument, given by place or by name."""
        if keyword in self.keywords:
            return self.keywords[keyword]
        return self.args[position] if 0 <= position < len(self.args) else None

    def written(self, position: int, keyword: str = "") -> ast.expr | None:
        """An argument as it is written; None where it is not given."""
        for given in self.node.keywords:
            if given.arg == keyword:
                return given.value
        if 0 <= position < len(self.node.args) and not any(isinstance(arg, ast.Starred) for arg in self.node.args):
            return self.node.args[position]
        return None

    @property
    def receiver_node(self) -> ast.expr | None:
        return self.node.func.value if isinstance(self.node.func, ast.Attribute) else None

    @property
    def values(self) -> list[Value | None]:
        return [*self.args, *self.keywords.values()]


class Evaluator:
    """Finds values; tells rules."""

    def __init__(self, follower: Frames) -> None:
        self.follower = follower
        self.notebook = follower.notebook
        self.ducks = Ducks(follower.tree)
        self.making, self.protocol = Making(self), Protocol(self)
        self.casts, self.tensors = Casts(self), Tensors(self)
        self.engines = Engines(self)
        self._rules = (self.engines, self.making, self.protocol, self.casts, self.tensors)

    def value(self, node: ast.expr, state: State) -> Value | None:
        """What an expression stands for."""
        handler = getattr(self, f"_{type(node).__name__.lower()}", None)
        if handler is not None:
            known: Value | None = handler(node, state)
            return known
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, state)
        return None

    def decorator(self, node: ast.expr, state: State) -> Value | None:
        value = self.value(node, state)
        if isinstance(value, Ref):
            self.making.check_deprecated(value.name, node)
        return value

    # Names

    def _constant(self, node: ast.Constant, state: State) -> Value | None:
        return Const(node.value)

    def _name(self, node: ast.Name, state: State) -> Value | None:
        value = self.follower.lookup(node.id, state)
        if value is None and node.id in _BUILTINS:
            return Ref(f"builtins.{node.id}")
        value = self.ducks.guess(node, value, self.follower.frames[-1])
        self.tensors.read(node, value)
        return value

    def _attribute(self, node: ast.Attribute, state: State) -> Value | None:
        return self._attribute_of(self.value(node.value, state), node, state)

    def _attribute_of(self, owner: Value | None, node: ast.Attribute, state: State) -> Value | None:
        if isinstance(owner, Ref):
            known = self.follower.lookup(dotted(node) or "", state)
            return self.ducks.guess(node, known or Ref(f"{owner.name}.{node.attr}"), self.follower.frames[-1])
        if isinstance(owner, Module | Instance):
            value = state.env.get(heap(owner.site, node.attr))
            if value is not None:
                return None if value == OPAQUE else value
            found = self._find_method(owner.definition, node.attr) if owner.definition else None
            if found is not None:
                return self.method(owner, found)
            return self.ducks.guess(node, None, self.follower.frames[-1])
        if isinstance(owner, Class):
            if node.attr == "apply":
                off = bool(state.autocast) and state.casting is None
                self.follower.event("apply", node, value=owner, text="off" if off else "")
            found = self._find_method(owner.node, node.attr)
            return Function(found, owner.frame) if found is not None else None
        if isinstance(owner, Engine):
            return self.engines.attribute(owner, node.attr)
        if isinstance(owner, Tensor):
            return self.tensors.attribute(owner, node.attr)
        if node.attr == "mT" and owner is None:
            return Tensor(role="transposed")
        known = self.follower.lookup(dotted(node) or "", state)
        return self.ducks.guess(node, known, self.follower.frames[-1])

    def method(self, owner: Value, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
        """A method of an object, with the autocast of its decorators."""
        definition = getattr(owner, "definition", None)
        frame = self.follower.classes[definition].frame if definition in self.follower.classes else ""
        return Function(node, frame, owner, self.follower.decorated.get(node))

    def _find_method(self, definition: ast.ClassDef, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        for child in definition.body:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and child.name == name:
                return child
        own = self.follower.classes.get(definition)
        for other in self.follower.classes.values() if own else ():
            if own and other.node.name in own.bases and other.node is not definition:
                found = self._find_method(other.node, name)
                if found is not None:
                    return found
        return None

    # Calls

    def _call(self, node: ast.Call, state: State) -> Value | None:
        call = Call(node, state)
        if isinstance(node.func, ast.Attribute):
            call.receiver = self.value(node.func.value, state)
            call.method = node.func.attr
            if not isinstance(call.receiver, Tensor):
                call.target = self._attribute_of(call.receiver, node.func, state)
        else:
            call.target = self.value(node.func, state)
        call.args = [self.value(arg, state) for arg in node.args]
        call.keywords = {given.arg or "**": self.value(given.value, state) for given in node.keywords}
        if isinstance(call.target, Ref):
            call.name = call.target.name
        for rule in self._rules:
            handled, value = rule.call(call)
            if handled:
                return value
        return self._elsewhere(call)

    def _elsewhere(self, call: Call) -> Value | None:
        """A call that no rule knows: of the script's own functions and classes, of a model, or of anything else."""
        target, state = call.target, call.state
        if isinstance(target, Function):
            return self.follower.call(target, call, self._arguments(target, call))
        if isinstance(target, Class):
            return self._make(target, call)
        made = Tensor(under=state.casting, output=True, makers=self.engines.makers(call))
        if isinstance(target, Module):
            return made
        if call.name.startswith("builtins."):
            if call.name == "builtins.exec":
                state.env = {key: value for key, value in state.env.items() if not isinstance(value, Const)}
            elif call.name == "builtins.sum" and made.makers:
                return made
            elif call.name in ("builtins.list", "builtins.filter", "builtins.tuple"):
                return next((value for value in call.args if isinstance(value, Params)), None)
            elif call.name == "builtins.float" and isinstance(call.arg(0), Tensor):
                self.tensors.item(call)
            return None
        if not call.name.startswith("torch."):
            self._escape(call)
        return made if made.makers or (state.casting is not None and not call.name.startswith("torch.")) else None

    def _escape(self, call: Call) -> None:
        """What is handed to something unknown may be changed there."""
        state = call.state
        given = [value for arg in call.values for value in (arg.items if isinstance(arg, Seq) else (arg,))]
        if call.target is None and isinstance(call.receiver, Instance | Module):  # a method of a base from elsewhere
            given += [value for key, value in state.env.items() if key.startswith(heap(call.receiver.site, ""))]
        for value in given:
            if isinstance(value, Scaler):
                self.notebook.escaped.add(value.site)
            if isinstance(value, Engine) and not call.name.startswith("narrowgauge."):
                self.engines.escape(value, call)
            if isinstance(value, EngineMethod):
                self.engines.escape(value.engine, call, value.name)
            if isinstance(value, Scaler | Optimizer):
                state.move("lost")
                state.stages = {}
            if isinstance(value, Module) and call.method not in ("append", "info", "debug", "watch", "add_graph"):
                state.env.pop(heap(value.site, "!cast"), None)

    def _arguments(self, function: Function, call: Call) -> dict[str, Value | None]:
        """The parameters of a function, and what the call gives them."""
        spec = function.node.args
        names = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
        defaults = dict(zip(reversed(names), reversed(spec.defaults), strict=False))
        defaults |= {arg.arg: value for arg, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if value}
        given: dict[str, Value | None] = dict.fromkeys([*names, *(arg.arg for arg in spec.kwonlyargs)])
        for name, default in defaults.items():
            given[name] = Const(default.value) if isinstance(default, ast.Constant) else None
        if function.owner is not None and names and not is_static(function.node):
            given[names[0]] = function.owner
            names = names[1:]
        if any(isinstance(arg, ast.Starred) for arg in call.node.args) or "**" in call.keywords:
            given |= dict.fromkeys(names)
        for name, arg, value in zip(names, call.node.args, call.args, strict=False):
            if isinstance(arg, ast.Starred):
                break
            given[name] = value
        given |= {name: value for name, value in call.keywords.items() if name in given}
        for extra in (spec.vararg, spec.kwarg):
            if extra is not None:
                given[extra.arg] = None
        return given

    def _make(self, target: Class, call: Call) -> Value | None:
        """An object of one of the script's classes: ``__init__`` is followed."""
        node = target.node
        site = self.follower.site(call.node)
        made = Module(site, node.name, node) if is_module(target) else Instance(site, node)
        found = self._find_method(node, "__init__")
        if found is not None:
            function = Function(found, target.frame, made)
            self.follower.call(function, call, self._arguments(function, call))
            if self.follower.splitting is call.node:  # each way through __init__ gives the object
                self.follower.spilled = [(end, made) for end, _ in self.follower.spilled]
        if isinstance(made, Module):
            self.casts.made(made, call)
        return made

    # Operations

    def _binop(self, node: ast.BinOp, state: State) -> Value | None:
        return self.tensors.binary(node, self.value(node.left, state), self.value(node.right, state), state)

    def _unaryop(self, node: ast.UnaryOp, state: State) -> Value | None:
        value = self.value(node.operand, state)
        if isinstance(node.op, ast.USub):
            if isinstance(value, Const) and isinstance(value.value, int | float):
                return Const(-value.value)
            return value if isinstance(value, Tensor) else None
        return Condition(node) if isinstance(node.op, ast.Not) else None

    def _ifexp(self, node: ast.IfExp, state: State) -> Value | None:
        self.value(node.test, state)
        return join(self._chosen(node.body, state), self._chosen(node.orelse, state))

    def _chosen(self, node: ast.expr, state: State) -> Value | None:
        value = self.value(node, state)
        self.engines.may_be_made(value, node, state)
        return value

    def _tuple(self, node: ast.Tuple | ast.List, state: State) -> Value | None:
        items = tuple(self.value(element, state) for element in node.elts)
        if items and all(isinstance(item, Params) for item in items):
            return Params(tuple(site for item in items if isinstance(item, Params) for site in item.models))
        return Seq(items)

    _list = _tuple

    def _dict(self, node: ast.Dict, state: State) -> Value | None:
        known: Value | None = None
        saved: list[Value | None] = []
        for key, value in zip(node.keys, node.values, strict=True):
            found = self.value(value, state)
            saved += [found] if isinstance(found, StateDict) else []
            if isinstance(key, ast.Constant) and key.value == "params" and isinstance(found, Params):
                known = found
        return known or (Seq(tuple(saved)) if saved else None)

    def _subscript(self, node: ast.Subscript, state: State) -> Value | None:
        owner, index = self.value(node.value, state), self.value(node.slice, state)
        if isinstance(owner, Seq) and isinstance(index, Const) and isinstance(index.value, int):
            return owner.items[index.value] if -len(owner.items) <= index.value < len(owner.items) else None
        return owner if isinstance(owner, Tensor) else None

    def _namedexpr(self, node: ast.NamedExpr, state: State) -> Value | None:
        value = self.value(node.value, state)
        self.follower.assign(node.target, value, state)
        return value

    def _compare(self, node: ast.Compare | ast.BoolOp, state: State) -> Value | None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._chosen(child, state)
        return Condition(node)

    _boolop = _compare

    def _lambda(self, node: ast.Lambda, state: State) -> Value | None:
        return None

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, state: State) -> Value | None:
        inner = state.fork()
        first = None
        for generator in node.generators:
            source = self.value(generator.iter, inner)
            first = first or source
            self.follower.assign(generator.target, None, inner)
            for test in generator.ifs:
                self.value(test, inner)
        self.value(node.elt, inner)
        own = {name.id for generator in node.generators for name in _names(generator.target)}
        unchanged = isinstance(node.elt, ast.Name) and node.elt.id in own
        if isinstance(first, Tensor) and first.makers:
            return first
        return first if isinstance(first, Params) and unchanged else None

    _listcomp = _setcomp = _generatorexp = _comprehension

    def _dictcomp(self, node: ast.DictComp, state: State) -> Value | None:
        return None


def _names(node: ast.expr) -> list[ast.Name]:
    return [name for name in ast.walk(node) if isinstance(name, ast.Name)]
