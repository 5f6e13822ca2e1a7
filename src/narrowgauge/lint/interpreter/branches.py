"""Conditions whose result is known: from values, or because the same path took them before."""

from __future__ import annotations

import ast
import functools

from narrowgauge.lint.interpreter.context import Context
from narrowgauge.lint.interpreter.state import State
from narrowgauge.lint.interpreter.values import Autocast, Const, Engine, Instance, Module, Optimizer, Scaler


def decide(context: Context, test: ast.expr, state: State) -> bool | None:
    """Return the result of a condition if it is known, else None."""
    test, flipped = _plain(test)
    known: bool | None = state.assumed.get(_text(test))
    if known is None and isinstance(test, ast.BoolOp):
        parts = [decide(context, part, state) for part in test.values]
        decisive = isinstance(test.op, ast.Or)
        if decisive in parts:
            known = decisive
        elif all(part is not None for part in parts):
            known = not decisive
    elif known is None and _text(test) == "__name__ == '__main__'":
        known = True
    elif known is None and isinstance(test, ast.Name | ast.Attribute):
        value = context.value(test, state)
        if value == Const(None):
            known = False
        elif isinstance(value, Scaler | Optimizer | Module | Instance | Autocast | Engine):
            known = None if isinstance(value, Scaler) and not (value.sure and isinstance(value.site, tuple)) else True
            known = None if isinstance(value, Module | Optimizer) and isinstance(value.site, str) else known
    return known if known is None else known != flipped


def assume(context: Context, test: ast.expr, state: State, way: bool) -> None:
    """Record that this path took a condition as true or false. If there is no scaler, nothing was scaled."""
    test, flipped = _plain(test)
    way = way != flipped
    state.assumed[_text(test)] = way
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == way:
        for part in test.values:
            assume(context, part, state, way)
    if not way and isinstance(test, ast.Name | ast.Attribute) and isinstance(context.value(test, state), Scaler):
        unscaled = frozenset(phase for phase in state.grads if phase[0] not in ("scaled", "unscaled"))
        state.grads = unscaled or frozenset({("plain", None)})


@functools.lru_cache(maxsize=4096)
def _text(node: ast.expr) -> str:
    return ast.unparse(node)


def _plain(test: ast.expr) -> tuple[ast.expr, bool]:
    """Return a condition without ``not`` and ``is None``, and whether that negated it."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner, flipped = _plain(test.operand)
        return inner, not flipped
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.left, ast.Name | ast.Attribute):
        right = test.comparators[0]
        if isinstance(right, ast.Constant) and right.value is None and isinstance(test.ops[0], ast.Is | ast.IsNot):
            return test.left, isinstance(test.ops[0], ast.Is)
    return test, False
