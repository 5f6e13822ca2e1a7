"""Lints scripts and notebooks without running them."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from narrowgauge import files
from narrowgauge.errors import UsageError
from narrowgauge.findings import Finding, Span
from narrowgauge.lint import discovery, source
from narrowgauge.lint.importers import Importers
from narrowgauge.lint.interpreter.flow import Interpreter
from narrowgauge.lint.interpreter.observations import Observations
from narrowgauge.lint.interpreter.syntax import imported_libraries
from narrowgauge.lint.interpreter.values import Autocast
from narrowgauge.lint.rule import in_order
from narrowgauge.lint.rules import DETECTORS
from narrowgauge.lint.source import Source
from narrowgauge.lint.suppression import Suppressions
from narrowgauge.lint.verdicts import Verdicts

_RELEVANT = {"torch", "torchvision", "lightning", "pytorch_lightning", "transformers", "apex", "narrowgauge"}
"""A script that imports none of these is not checked: no rule applies."""
DEEP = 10_000
"""Recursion limit: an expression of a thousand terms is a thousand levels deep."""


def check(path: Path, formats: Iterable[str] = (), importers: Importers | None = None) -> list[Finding]:
    """Return the findings in one file.

    Args:
        path: the script or notebook.
        formats: formats that it will be trained in, in addition to those it names itself.
        importers: what other files do with its classes.

    Raises:
        UsageError: the file cannot be read, or is not valid Python.
    """
    return check_source(source.read(path), formats, importers.called_under(path) if importers else {})


def check_folder(folder: Path, formats: Iterable[str] = (), exclude: Sequence[str] = ()) -> list[Finding]:
    """Return the findings in every script and notebook of a folder; a file that cannot be parsed is a finding."""
    formats = tuple(formats)
    found: list[Finding] = []
    paths = discovery.find_scripts(folder, exclude)
    importers = Importers(paths)
    for path in paths:
        try:
            found += check(path, formats, importers)
        except UsageError as error:
            found.append(unreadable(path, error))
    return found


def unreadable(path: Path, error: UsageError) -> Finding:
    """Return the finding for a file that cannot be read or parsed."""
    span = Span(str(path), getattr(error.__cause__, "lineno", None) or 1)
    return source.fault(span, str(error), error.__cause__)


def check_text(text: str, path: str = "<script>", formats: Iterable[str] = ()) -> list[Finding]:
    """Return the findings in the text of a script.

    Args:
        text: the source code.
        path: file name for the findings.
        formats: formats that it will be trained in, in addition to those it names itself.

    Raises:
        UsageError: the text is not valid Python.
    """
    return check_source(Source(path, text), formats)


def check_source(
    given: Source, formats: Iterable[str] = (), called_under: Mapping[str, Autocast] | None = None
) -> list[Finding]:
    """Return the findings in a script or notebook that was read.

    Args:
        given: what was read.
        formats: formats that it will be trained in, in addition to those it names itself.
        called_under: classes that other files call under autocast.

    Raises:
        UsageError: it is not valid Python.
    """
    tree = given.parse()
    is_relevant = bool(_RELEVANT & imported_libraries(tree))
    found = list(given.broken) if is_relevant or _RELEVANT & set(re.findall(r"\w+", given.unparsed)) else []
    suppressions = Suppressions(given, tree)
    found += suppressions.unknown()
    if is_relevant:
        for verdict in _follow(tree, formats, called_under or {}).bad():
            if not suppressions.hides(verdict.rule.name, verdict.node):
                span = given.span(verdict.node)
                found.append(verdict.rule.finding(str(span), verdict.detail, verdict.fix, verdict.severity, span))
    return in_order(found)


def _follow(tree: ast.Module, formats: Iterable[str], called_under: Mapping[str, Autocast]) -> Verdicts:
    """Return the verdicts of all detectors on a script."""
    verdicts = Verdicts()
    known = {*formats, *(cast.dtype for cast in called_under.values() if cast.dtype)} & {"fp16", "bf16", "fp8"}
    interpreter = Interpreter(tree, Observations(formats=known, called_under=called_under))
    interpreter.observers += [detector(interpreter, verdicts) for detector in DETECTORS]
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(max(limit, DEEP))
        interpreter.follow()
    except RecursionError:
        return Verdicts()  # nothing is certain
    finally:
        sys.setrecursionlimit(limit)
    return verdicts


def line_of(path: Path, function: str) -> int:
    """Return the line of a function in a file; 1 if it is not found."""
    try:
        tree = ast.parse(files.read(path, source.LARGEST))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 1
    return next((node.lineno for node in tree.body if getattr(node, "name", None) == function), 1)
