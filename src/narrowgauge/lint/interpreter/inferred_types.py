"""Types of names that other code creates, inferred from use: an object with an ``unscale_`` method is a scaler."""

from __future__ import annotations

import ast

from narrowgauge.lint.interpreter.syntax import dotted, nodes_of
from narrowgauge.lint.interpreter.values import Module, Optimizer, Ref, Scaler, Value


class InferredTypes:
    """Types of names, from the methods that the whole script calls on them."""

    def __init__(self, tree: ast.Module) -> None:
        self.methods: dict[str, set[str]] = {}
        self._given: dict[str, set[str]] = {}
        """Names that are passed to a method as its first argument, by the method's owner and name."""
        scaled: set[str] = set()
        for node in nodes_of(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner, method = dotted(node.func.value), node.func.attr
            if owner is None:
                inner = node.func.value
                if method == "backward" and isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
                    whose = dotted(inner.func.value)
                    if inner.func.attr == "scale" and whose:
                        scaled.add(whose)
                continue
            self.methods.setdefault(owner, set()).add(method if not node.args else f"{method}(...)")
            for arg in node.args[:1]:
                given = dotted(arg)
                if given:
                    self._given.setdefault(f"{owner}.{method}", set()).add(given)
        self.scalers = scaled | {
            name
            for name, called in self.methods.items()
            if "unscale_(...)" in called or {"scale(...)", "step(...)", "update"} <= called
        }
        self.optimizers = {name for name, called in self.methods.items() if {"zero_grad", "step"} <= called}
        for scaler in self.scalers:
            for method in ("unscale_", "step"):
                self.optimizers |= self._given.get(f"{scaler}.{method}", set())
        models, optimizers = _given_to_engines(tree)
        self._models = models
        self.optimizers = (self.optimizers | optimizers) - self.scalers - models
        self.known = self.scalers | self.optimizers | models | {name for name in self.methods if self.is_module(name)}

    def guess(self, node: ast.expr, value: Value | None, frame: str) -> Value | None:
        """Return the probable type of a name whose value is unknown; else the value."""
        if value is not None and not (isinstance(value, Ref) and not value.name.startswith(("torch.", "builtins."))):
            return value
        name = node.id if isinstance(node, ast.Name) else dotted(node)
        if name is None or name not in self.known:
            return value
        if name in self.scalers:
            return Scaler(f"{frame}|{name}")
        if name in self.optimizers:
            return Optimizer(f"{frame}|{name}")
        if value is None and self.is_module(name):
            return Module(f"{frame}|{name}", "")
        return value

    def is_module(self, name: str) -> bool:
        """Return whether a name is probably a model."""
        called = self.methods.get(name, set())
        return (
            name in self._models or bool(called & {"parameters", "named_parameters"})
        ) and name not in self.optimizers


def _given_to_engines(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the names that are passed to narrowgauge's Engine as model and as optimizers."""
    models: set[str] = set()
    optimizers: set[str] = set()
    if not any(_imports_narrowgauge(node) for node in nodes_of(tree)):
        return models, optimizers
    for node in nodes_of(tree):
        if isinstance(node, ast.Call) and (dotted(node.func) or "").split(".")[-1] == "Engine":
            given = dict(zip(("model", "optimizer"), node.args, strict=False))
            given |= {one.arg: one.value for one in node.keywords if one.arg}
            for name, arg in given.items():
                parts = arg.elts if isinstance(arg, ast.List | ast.Tuple) else [arg]
                names = {text for part in parts if (text := dotted(part))}
                (models if name == "model" else optimizers if name == "optimizer" else set()).update(names)
    return models, optimizers


def _imports_narrowgauge(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == "narrowgauge" for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "narrowgauge"
