"""Comments that suppress findings.

``# narrowgauge: ignore`` on any line of a statement suppresses all findings in the statement,
``# narrowgauge: ignore[rule, ...]`` those of the named rules. For a compound statement (``with``, ``if``, ``def``) only
its head counts.
"""

from __future__ import annotations

import ast
import bisect
import io
import re
import tokenize
from collections.abc import Iterator

from narrowgauge.findings import Finding
from narrowgauge.lint.interpreter.syntax import nodes_of
from narrowgauge.lint.rules import RULES
from narrowgauge.lint.rules.syntax import UNKNOWN_RULE
from narrowgauge.lint.source import Source

_IGNORE = re.compile(r"#\s*narrowgauge:\s*ignore(?:\[([^\]]*)\])?")


class Suppressions:
    """The comments of one script."""

    def __init__(self, source: Source, tree: ast.Module) -> None:
        self._source = source
        self._comments = dict(_comments(source.text))
        """By line: the rules that a comment names; None for all rules."""
        self._heads = sorted(_heads(tree)) if self._comments else []

    def hides(self, rule: str, node: ast.AST) -> bool:
        """Return whether a comment suppresses the findings of a rule at a place."""
        if not self._comments:
            return False
        first = getattr(node, "lineno", 1)
        lines = range(first, first + 1)
        at = bisect.bisect_right(self._heads, (first, float("inf"))) - 1
        if at >= 0 and self._heads[at][0] <= first <= self._heads[at][1]:
            lines = range(self._heads[at][0], int(self._heads[at][1]) + 1)
        names = [self._comments[line] for line in lines if line in self._comments]
        return any(given is None or rule in given for given in names)

    def unknown(self) -> Iterator[Finding]:
        """Yield a finding for every comment that names a rule that does not exist."""
        for line, names in self._comments.items():
            for name in names or ():
                if name not in RULES:
                    span = self._source.at(line)
                    detail = f"the comment suppresses {name!r}, which is no rule: it has no effect"
                    yield UNKNOWN_RULE.finding(str(span), detail, span=span)


def _comments(text: str) -> Iterator[tuple[int, tuple[str, ...] | None]]:
    if "narrowgauge:" not in text:
        return
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            match = _IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
            if match is not None:
                names = (
                    None if match[1] is None else tuple(name.strip() for name in match[1].split(",") if name.strip())
                )
                yield token.start[0], names
    except (tokenize.TokenError, SyntaxError):  # the parser accepted it; only the comments after this are lost
        return


def _heads(tree: ast.Module) -> Iterator[tuple[int, float]]:
    """Yield the first and last line of every statement; of a compound statement, those before its body."""
    for node in nodes_of(tree):
        if isinstance(node, ast.stmt):
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
            body = getattr(node, "body", None) or getattr(node, "cases", None)
            if not body:
                yield first, node.end_lineno or node.lineno
            else:
                inner = body[0].lineno if isinstance(body[0], ast.stmt) else body[0].pattern.lineno
                yield first, max(first, node.lineno, inner - 1)
