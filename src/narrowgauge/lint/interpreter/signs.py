"""The sign of an expression: exp() of what cannot be positive, such as a Gaussian kernel, does not overflow.

    -(x ** 2) / (2 * sigma ** 2)     not positive: a square is not negative, and a minus turns it around
    -torch.cdist(a, b) / width       not positive: widths, variances and temperatures are taken as positive
    log_probs                        not positive, by its name

A name has the sign that everything assigned to it in the same function has.
"""

from __future__ import annotations

import ast
import functools

from narrowgauge.lint.interpreter.syntax import dotted, nodes_of

_NOT_NEGATIVE = frozenset({
    "abs", "square", "norm", "cdist", "pdist", "exp", "sqrt", "relu", "softplus", "sigmoid", "softmax", "var", "std",
    "pairwise_distance", "mse_loss", "l1_loss", "vector_norm", "arange",
})  # fmt: skip
_KEEPS = frozenset({
    "sum", "mean", "unsqueeze", "squeeze", "view", "reshape", "float", "to", "expand", "detach", "clone", "transpose",
    "permute", "contiguous", "flatten", "half", "double", "cuda", "type", "repeat",
})  # fmt: skip
_DISTANCES = ("dist", "distance", "distances", "dists", "sqdist", "dist2", "dist_sq", "squared_distance")
_DEEPEST = 12


class Signs:
    """Signs of the expressions of one script: 1 if not negative, -1 if not positive, 0 if unknown."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree

    def of(self, node: ast.expr, depth: int = 0) -> int:
        """Return the sign of an expression."""
        if depth > _DEEPEST:
            return 0
        if isinstance(node, ast.Constant):
            value = node.value
            return 0 if not isinstance(value, int | float) else -1 if value < 0 else 1
        if isinstance(node, ast.UnaryOp):
            return -self.of(node.operand, depth + 1) if isinstance(node.op, ast.USub) else 0
        if isinstance(node, ast.BinOp):
            return self._binary(node, depth)
        if isinstance(node, ast.Subscript):
            return self.of(node.value, depth + 1)
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        if isinstance(node, ast.Name):
            if node.id in _DISTANCES:
                return 1
            if "log_prob" in node.id or "logprob" in node.id:
                return -1
            signs = {self.of(value, depth + 3) for value in self._values_of(node)}
            return signs.pop() if len(signs) == 1 else 0
        return 0

    def _binary(self, node: ast.BinOp, depth: int) -> int:
        left, right = self.of(node.left, depth + 1), self.of(node.right, depth + 1)
        if isinstance(node.op, ast.Pow):
            return 1 if left > 0 or _is_even(node.right) else 0
        if isinstance(node.op, ast.Div):
            return left * (right or 1)
        if isinstance(node.op, ast.Mult):
            if left * right:
                return left * right
            same = ast.dump(node.left) == ast.dump(node.right)
            known, other = (left, node.right) if left else (right, node.left)
            return 1 if same else known if known and _is_width(other) else 0
        if isinstance(node.op, ast.Add):
            return left if left == right else 0
        return left if isinstance(node.op, ast.Sub) and left == -right else 0

    def _call(self, node: ast.Call, depth: int) -> int:
        name = (dotted(node.func) or "").split(".")[-1] or getattr(node.func, "attr", "")
        if name in _NOT_NEGATIVE:
            return 1
        is_function = isinstance(node.func, ast.Attribute) and dotted(node.func.value) in ("torch", "F", "math", "np")
        owner = [node.func.value] if isinstance(node.func, ast.Attribute) and not is_function else []
        operands = [*owner, *node.args]
        if name in ("pow", "float_power") and len(operands) > 1:
            return 1 if self.of(operands[0], depth + 1) > 0 or _is_even(operands[1]) else 0
        if name in ("neg", "negative") and operands:
            return -self.of(operands[0], depth + 1)
        if name in ("mul", "div") and len(operands) > 1:
            right = self.of(operands[1], depth + 1)
            return self.of(operands[0], depth + 1) * (right or int(name == "div"))
        return self.of(operands[0], depth + 1) if name in _KEEPS and operands else 0

    def _values_of(self, name: ast.Name) -> list[ast.expr]:
        """Return what the function around a name assigns to it; if it assigns nothing, what the module does."""
        inner = self._function_at.get(name.lineno, (0, 0))
        values = self._assigned.get((*inner, name.id))
        return values if values is not None else self._assigned.get((0, 0, name.id), [])

    @functools.cached_property
    def _function_at(self) -> dict[int, tuple[int, int]]:
        """The first and last line of the innermost function around each line that is in one."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        functions = [node for node in nodes_of(self._tree) if isinstance(node, kinds)]
        found: dict[int, tuple[int, int]] = {}
        for first, last in sorted((node.lineno, node.end_lineno or node.lineno) for node in functions):
            found.update(dict.fromkeys(range(first, last + 1), (first, last)))
        return found

    @functools.cached_property
    def _assigned(self) -> dict[tuple[int, int, str], list[ast.expr]]:
        """What is assigned to each name, by the lines of the function; (0, 0) for the module."""
        found: dict[tuple[int, int, str], list[ast.expr]] = {}
        for node in nodes_of(self._tree):
            if isinstance(node, ast.Assign):
                around = self._function_at.get(node.lineno, (0, 0))
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        found.setdefault((*around, target.id), []).append(node.value)
        return found


def _is_even(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value % 2 == 0


def _is_width(node: ast.expr) -> bool:
    """Return whether a factor is positive by its meaning."""
    name = (dotted(node) or "").split(".")[-1].lower()
    return any(word in name for word in ("gamma", "beta", "sigma", "scale", "var", "temp", "width", "precision"))
