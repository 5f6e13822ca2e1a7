"""Questions about syntax trees: dotted names, names that occur, libraries that are imported, conditions."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator


@functools.lru_cache(maxsize=2)
def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return all nodes of a script. Many rules ask for them, so the last scripts' are kept."""
    return tuple(ast.walk(tree))


def dotted(node: ast.expr) -> str | None:
    """Return ``a.b.c`` as text; None for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def words_of(node: ast.AST) -> Iterator[str]:
    """Yield every name, attribute and imported name inside a node."""
    for child in nodes_of(node) if isinstance(node, ast.Module) else ast.walk(node):
        if isinstance(child, ast.Name):
            yield child.id
        elif isinstance(child, ast.Attribute):
            yield child.attr
        elif isinstance(child, ast.alias):
            yield child.name


def imported_libraries(tree: ast.Module) -> set[str]:
    """Return the top-level packages that a script imports."""
    found: set[str] = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def has_modulo(tests: Iterable[ast.expr]) -> bool:
    """Return whether a condition holds at every n-th step only."""
    return any(isinstance(node, ast.Mod) for test in tests for node in ast.walk(test))


def is_static(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a method is decorated with ``staticmethod``."""
    return any(isinstance(node, ast.Name) and node.id == "staticmethod" for node in method.decorator_list)
