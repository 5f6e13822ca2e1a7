"""Lints scripts: reads them, never runs them.

A line that ends in ``# narrowgauge: ignore`` is left alone, one with ``# narrowgauge: ignore[rule, ...]`` by those
rules.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

from narrowgauge import files
from narrowgauge.errors import UsageError
from narrowgauge.findings import Finding, Span
from narrowgauge.lint.afterwards import conclude, imported
from narrowgauge.lint.flow import Follower
from narrowgauge.lint.notebook import Notebook
from narrowgauge.lint.rule import in_order
from narrowgauge.lint.rules import RULES

_IGNORE = re.compile(r"#\s*narrowgauge:\s*ignore(?:\[([\w\s,-]*)\])?")
_RELEVANT = {"torch", "torchvision", "lightning", "pytorch_lightning", "transformers", "apex", "narrowgauge"}
"""Libraries without which no rule applies."""
DEEP = 10_000
"""Nesting of Python calls: an expression of a thousand terms is a thousand deep."""
LARGEST = 16 << 20
"""Bytes of a script: more was not written by a person."""
_SKIPPED = {".git", ".venv", "venv", "node_modules", "__pycache__", ".tox", "build", "dist"}


def check(path: Path, formats: Iterable[str] = ()) -> list[Finding]:
    """The findings of one file. ``formats``: what it will be trained in, beside what it says itself."""
    text = files.read(path, LARGEST)
    try:
        return check_text(text.decode(_encoding(text)), str(path), formats)
    except (UnicodeDecodeError, LookupError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def check_folder(folder: Path, formats: Iterable[str] = ()) -> list[Finding]:
    """The findings of every Python file in a folder; one that is not Python is a finding itself."""
    found: list[Finding] = []
    for path in sorted(folder.rglob("*.py")):
        if _SKIPPED.isdisjoint(path.relative_to(folder).parts[:-1]) and path.is_file():
            try:
                found += check(path, formats)
            except UsageError as error:
                rule = RULES["syntax"]
                line = getattr(error.__cause__, "lineno", None) or 1
                span = Span(str(path), line)
                found.append(
                    Finding(
                        rule=rule.name,
                        severity=rule.severity,
                        where=str(span),
                        detail=str(error),
                        why=rule.why,
                        fix=rule.fix,
                        span=span,
                    )
                )
    return found


def check_text(text: str, path: str = "<script>", formats: Iterable[str] = ()) -> list[Finding]:
    """The findings of a script's text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script's own, such as an invalid escape
            tree = ast.parse(text, path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        place = f"{path}:{line}" if line else path
        reason = getattr(error, "msg", None) or str(error) or type(error).__name__
        raise UsageError(
            f"{place} is not Python that {sys.version_info.major}.{sys.version_info.minor} reads: {reason}"
        ) from error
    if not _RELEVANT & imported(tree):
        return []
    notebook = Notebook()
    notebook.formats |= set(formats) & {"fp16", "bf16", "fp8"}
    follower = Follower(tree, notebook)
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(max(limit, DEEP))
        follower.follow()
        conclude(follower)
    except RecursionError:
        return []  # nothing is sure
    finally:
        sys.setrecursionlimit(limit)
    lines = text.splitlines()
    found = []
    for name, verdict in notebook.judged():
        rule = RULES[name]
        span = _span(verdict.node, path, lines)
        if not _is_ignored(lines[span.line - 1] if span.line <= len(lines) else "", name):
            found.append(
                Finding(
                    rule=name,
                    severity=verdict.severity or rule.severity,
                    where=str(span),
                    detail=verdict.detail or rule.about,
                    why=rule.why,
                    fix=verdict.fix or rule.fix,
                    span=span,
                )
            )
    return in_order(found)


def line_of(path: Path, function: str) -> int:
    """Where a function of a file begins; 1 where it cannot be found."""
    try:
        tree = ast.parse(files.read(path, LARGEST))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 1
    return next((node.lineno for node in tree.body if getattr(node, "name", None) == function), 1)


def _encoding(text: bytes) -> str:
    import io
    import tokenize

    try:
        return tokenize.detect_encoding(io.BytesIO(text).readline)[0]
    except SyntaxError:
        return "utf-8"


def _span(node: ast.AST, path: str, lines: list[str]) -> Span:
    """Where a node is; Python counts columns in bytes, people in letters."""
    line = getattr(node, "lineno", 1)
    end = getattr(node, "end_lineno", None) or line
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        end = line

    def column(number: int, offset: int) -> int:
        text = lines[number - 1] if number <= len(lines) else ""
        return len(text.encode()[:offset].decode(errors="ignore")) + 1

    last = len(lines[end - 1]) + 1 if end <= len(lines) else 1
    if not isinstance(node, ast.ClassDef | ast.FunctionDef):
        last = column(end, getattr(node, "end_col_offset", 0) or 0)
    return Span(path, line, column(line, getattr(node, "col_offset", 0)), end, last)


def _is_ignored(line: str, rule: str) -> bool:
    match = _IGNORE.search(line)
    if match is None:
        return False
    return match[1] is None or rule in {name.strip() for name in match[1].split(",")}
