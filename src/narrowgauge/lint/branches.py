"""Which way a test goes, where that is known: from values, or because it was taken before on the same way."""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING

from narrowgauge.lint.state import State
from narrowgauge.lint.values import Autocast, Const, Engine, Instance, Module, Optimizer, Scaler

if TYPE_CHECKING:
    from narrowgauge.lint.evaluate import Evaluator


def decide(evaluator: Evaluator, test: ast.expr, state: State) -> bool | None:
    """True or False where a test can only go one way, else None."""
    test, flipped = _plain(test)
    known: bool | None = state.assumed.get(_text(test))
    if known is None and isinstance(test, ast.BoolOp):
        parts = [decide(evaluator, part, state) for part in test.values]
        decisive = isinstance(test.op, ast.Or)
        if decisive in parts:
            known = decisive
        elif all(part is not None for part in parts):
            known = not decisive
    elif known is None and _text(test) == "__name__ == '__main__'":
        known = True
    elif known is None and isinstance(test, ast.Name | ast.Attribute):
        value = evaluator.value(test, state)
        if value == Const(None):
            known = False
        elif isinstance(value, Scaler | Optimizer | Module | Instance | Autocast | Engine):
            known = None if isinstance(value, Scaler) and not (value.sure and isinstance(value.site, tuple)) else True
            known = None if isinstance(value, Module | Optimizer) and isinstance(value.site, str) else known
    return known if known is None else known != flipped


def assume(evaluator: Evaluator, test: ast.expr, state: State, way: bool) -> None:
    """From here on the test went this way. Where there is no scaler, nothing was scaled."""
    test, flipped = _plain(test)
    way = way != flipped
    state.assumed[_text(test)] = way
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == way:
        for part in test.values:
            assume(evaluator, part, state, way)
    if not way and isinstance(test, ast.Name | ast.Attribute) and isinstance(evaluator.value(test, state), Scaler):
        unscaled = frozenset(phase for phase in state.grads if phase[0] not in ("scaled", "unscaled"))
        state.grads = unscaled or state.grads


@functools.lru_cache(maxsize=4096)
def _text(node: ast.expr) -> str:
    return ast.unparse(node)


def _plain(test: ast.expr) -> tuple[ast.expr, bool]:
    """A test without ``not`` and ``is None``, and whether that turned it round."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner, flipped = _plain(test.operand)
        return inner, not flipped
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.left, ast.Name | ast.Attribute):
        right = test.comparators[0]
        if isinstance(right, ast.Constant) and right.value is None and isinstance(test.ops[0], ast.Is | ast.IsNot):
            return test.left, isinstance(test.ops[0], ast.Is)
    return test, False
