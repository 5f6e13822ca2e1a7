"""The rule about loops over experts that wait for the GPU once for each expert."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from narrowgauge.findings import NOTE
from narrowgauge.lint import expert_names
from narrowgauge.lint.detector import Detector
from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.context import Context
from narrowgauge.lint.interpreter.syntax import nodes_of, words_of
from narrowgauge.lint.rule import PYTORCH, Rule
from narrowgauge.lint.verdicts import Verdicts

EXPERT_LOOP = Rule(
    name="expert-loop",
    severity=NOTE,
    about="a loop over experts waits for the GPU at each expert",
    why="how many tokens an expert gets is known on the GPU only: the CPU waits for it, and the GPU is then idle until "
    "the next launch",
    fix="store the experts as two stacked parameters, [E, 2F, D] and [E, D, F]: fp8 recipes run them as one function, "
    "without waiting (docs/experts.md); in BF16, F.grouped_mm multiplies by all of them",
    url=f"{PYTORCH}/generated/torch.nn.functional.grouped_mm.html",
)
_WAITS = ("nonzero", "argwhere", "masked_select", "item", "tolist")
_TESTED = ("any", "all", "sum")
"""Methods whose result is read on the CPU if it is the condition of an ``if``."""


class ExpertLoop(Detector):
    """Checks loops that call an expert of a list with the tokens that chose it.

    A loop that gives every token to every expert does not wait. Loops over stacked parameters, as in transformers, are
    not reported: engines run them as one function.
    """

    def __init__(self, context: Context, verdicts: Verdicts) -> None:
        super().__init__(context, verdicts)
        self._calls: set[ast.AST] = set()
        """Calls in loops, of what may be an expert."""

    def on_call(self, call: Call) -> None:
        if (
            not self.context.loops[-1]
            or self.context.without_grad
            or not isinstance(call.node.func, ast.Name | ast.Subscript)
        ):
            return
        if expert_names.has_experts(self.context.tree) and not expert_names.only_runs(self.context):
            self._calls.add(call.node)

    def on_end(self) -> None:
        if not self._calls:
            return
        for loop in nodes_of(self.context.tree):
            if not isinstance(loop, ast.For):
                continue
            body = list(_innermost(loop))
            experts = _expert_names(loop, body)
            if not any(node in self._calls and _is_expert(node, experts) for node in body):
                continue
            waits = next(_waits(body), None)
            if waits is not None:
                node, what = waits
                detail = f"{what} waits for the GPU, at each expert of the loop"
                self.judge(EXPERT_LOOP, node, True, detail)


def _innermost(loop: ast.For) -> Iterator[ast.AST]:
    """Yield the nodes in the body of a loop, in order, without those of loops and functions inside."""
    waiting: list[ast.AST] = list(reversed(loop.body))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.For | ast.While | ast.FunctionDef | ast.Lambda):
            waiting += reversed(list(ast.iter_child_nodes(node)))


def _speaks_of_experts(node: ast.AST) -> bool:
    return any("expert" in word.lower() for word in words_of(node))


def _expert_names(loop: ast.For, body: list[ast.AST]) -> set[str]:
    """Return what a loop calls its expert: ``for i, expert in enumerate(self.experts)``, ``e = self.experts[i]``."""
    names: set[str] = set()
    if _speaks_of_experts(loop.iter) and not _is_range(loop.iter):
        names |= {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    for node in body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Subscript)
            and _speaks_of_experts(node.value.value)
        ):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _is_range(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("range", "trange")


def _is_expert(node: ast.AST, names: set[str]) -> bool:
    """Return whether a call is one of an expert: ``expert(x)``, ``self.experts[i](x)``."""
    called = node.func if isinstance(node, ast.Call) else None
    if isinstance(called, ast.Subscript):
        return _speaks_of_experts(called) or any("expert" in text for text in _texts(called.slice))
    return isinstance(called, ast.Name) and called.id in names


def _texts(node: ast.expr) -> Iterator[str]:
    """Yield the literal texts in an expression: ``self[f"expert_{index}"]``."""
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value


def _waits(body: list[ast.AST]) -> Iterator[tuple[ast.AST, str]]:
    """Yield what waits for the GPU in a loop's body, and how the script writes it."""
    masks = {
        target.id
        for node in body
        if isinstance(node, ast.Assign) and _is_mask(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in body:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if name in _WAITS or (name == "where" and len(node.args) == 1 and not node.keywords):
                yield node, f"{name}()"
        elif isinstance(node, ast.If):
            for inner in ast.walk(node.test):
                if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in _TESTED:
                    yield inner, f"the condition on {inner.func.attr}()"
        elif isinstance(node, ast.Subscript) and _has_mask(node.slice, masks):
            yield node, "an index that is a mask"


def _is_mask(node: ast.expr) -> bool:
    """Return whether an expression is ``index == i``, or ``(index == i).any(-1)``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "any":
        return _is_mask(node.func.value)
    return isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq)


def _has_mask(node: ast.expr, masks: set[str]) -> bool:
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(_is_mask(part) or (isinstance(part, ast.Name) and part.id in masks) for part in parts)
