"""Lints scripts without running them.

A comment ``# narrowgauge: ignore`` suppresses all findings on its line, ``# narrowgauge: ignore[rule, ...]`` those of
the named rules.
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
from narrowgauge.lint.interpreter.flow import Interpreter
from narrowgauge.lint.interpreter.observations import Observations
from narrowgauge.lint.interpreter.syntax import imported_libraries
from narrowgauge.lint.rule import in_order
from narrowgauge.lint.rules import DETECTORS
from narrowgauge.lint.rules.syntax import SYNTAX
from narrowgauge.lint.verdicts import Verdicts

_IGNORE = re.compile(r"#\s*narrowgauge:\s*ignore(?:\[([\w\s,-]*)\])?")
_RELEVANT = {"torch", "torchvision", "lightning", "pytorch_lightning", "transformers", "apex", "narrowgauge"}
"""A script that imports none of these is not checked: no rule applies."""
DEEP = 10_000
"""Recursion limit: an expression of a thousand terms is a thousand levels deep."""
LARGEST = 16 << 20
"""Maximum size of a script in bytes; larger ones are generated."""
_SKIPPED = {".git", ".venv", "venv", "node_modules", "__pycache__", ".tox", "build", "dist"}


def check(path: Path, formats: Iterable[str] = ()) -> list[Finding]:
    """Return the findings in one file.

    Args:
        path: the script.
        formats: formats that it will be trained in, in addition to those it names itself.

    Raises:
        UsageError: the file cannot be read, or is not valid Python.
    """
    text = files.read(path, LARGEST)
    try:
        return check_text(text.decode(_encoding(text)), str(path), formats)
    except (UnicodeDecodeError, LookupError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def check_folder(folder: Path, formats: Iterable[str] = ()) -> list[Finding]:
    """Return the findings in every Python file of a folder; a file that cannot be parsed is a finding."""
    found: list[Finding] = []
    for path in sorted(folder.rglob("*.py")):
        if _SKIPPED.isdisjoint(path.relative_to(folder).parts[:-1]) and path.is_file():
            try:
                found += check(path, formats)
            except UsageError as error:
                span = Span(str(path), getattr(error.__cause__, "lineno", None) or 1)
                found.append(SYNTAX.finding(str(span), str(error), span=span))
    return found


def check_text(text: str, path: str = "<script>", formats: Iterable[str] = ()) -> list[Finding]:
    """Return the findings in the text of a script.

    Args:
        text: the source code.
        path: file name for the findings.
        formats: formats that it will be trained in, in addition to those it names itself.

    Raises:
        UsageError: the text is not valid Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script's own, such as an invalid escape
            tree = ast.parse(text, path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        place = f"{path}:{line}" if line else path
        reason = getattr(error, "msg", None) or str(error) or type(error).__name__
        raise UsageError(
            f"{place} is not valid Python {sys.version_info.major}.{sys.version_info.minor}: {reason}"
        ) from error
    if not _RELEVANT & imported_libraries(tree):
        return []
    verdicts = Verdicts()
    interpreter = Interpreter(tree, Observations(formats=set(formats) & {"fp16", "bf16", "fp8"}))
    interpreter.observers += [detector(interpreter, verdicts) for detector in DETECTORS]
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(max(limit, DEEP))
        interpreter.follow()
    except RecursionError:
        return []  # nothing is certain
    finally:
        sys.setrecursionlimit(limit)
    lines = text.splitlines()
    found = []
    for verdict in verdicts.bad():
        span = _span(verdict.node, path, lines)
        if not _is_ignored(lines[span.line - 1] if span.line <= len(lines) else "", verdict.rule.name):
            found.append(verdict.rule.finding(str(span), verdict.detail, verdict.fix, verdict.severity, span))
    return in_order(found)


def line_of(path: Path, function: str) -> int:
    """Return the line of a function in a file; 1 if it is not found."""
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
    """Return the range of a node, with columns in characters (Python counts bytes)."""
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
