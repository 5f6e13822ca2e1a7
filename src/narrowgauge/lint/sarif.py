"""Findings as SARIF 2.1.0, which code hosts show next to the lines.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html: a run has a tool with its rules, and results that
point to a range in a file (physicalLocation) or, for a module of a model, to its path (logicalLocations).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

from narrowgauge.findings import NOTE, SERIOUS, WARNING, Finding, Span
from narrowgauge.lint.rule import Rule
from narrowgauge.lint.rules import RULES
from narrowgauge.version import __version__

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
ROOT = "%SRCROOT%"
"""The name that code hosts use for the root of the repository."""
LEVELS = {SERIOUS: "error", WARNING: "warning", NOTE: "note"}


def report(findings: list[Finding], root: Path) -> dict[str, Any]:
    """Return the whole log; paths of files in ``root`` are relative to it."""
    names = list(RULES)
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "narrowgauge",
                        "version": __version__,
                        "rules": [_rule(rule) for rule in RULES.values()],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "originalUriBaseIds": {ROOT: {"uri": f"{root.resolve().as_uri()}/"}},
                "results": [_result(finding, names.index(finding.rule), root) for finding in findings],
            }
        ],
    }


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.name,
        "shortDescription": {"text": _sentence(rule.about)},
        "fullDescription": {"text": _sentence(rule.why)},
        "help": {"text": _sentence(rule.fix)},
        "helpUri": rule.url,
        "defaultConfiguration": {"level": LEVELS[rule.severity]},
    }


def _result(finding: Finding, index: int, root: Path) -> dict[str, Any]:
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": LEVELS[finding.severity],
        "message": {"text": _message(finding)},
        "locations": [_location(finding, root)],
        "partialFingerprints": {"narrowgauge/v1": _fingerprint(finding)},
    }


def _message(finding: Finding) -> str:
    span = finding.span
    place = f"Cell {span.cell}, line {span.line}: " if span is not None and span.cell is not None else ""
    return f"{place}{_sentence(finding.detail)} {_sentence(finding.why)} Fix: {_sentence(finding.fix)}"


def _location(finding: Finding, root: Path) -> dict[str, Any]:
    """Return a line, a module, or both, for a module of a task that is in a file."""
    place = _place(finding.span, root) if finding.span else {}
    return place if finding.span and finding.where == str(finding.span) else {**place, **_module(finding.where)}


def _place(span: Span, root: Path) -> dict[str, Any]:
    if span.cell is not None:  # the columns of the cell are not those of the JSON file
        region = {"startLine": span.file_line or 1}
        return {"physicalLocation": {"artifactLocation": _artifact(Path(span.path), root), "region": region}}
    region = {"startLine": span.line, "startColumn": span.column}
    if span.end_line is not None and span.end_column is not None:
        region |= {"endLine": span.end_line, "endColumn": span.end_column}
    return {"physicalLocation": {"artifactLocation": _artifact(Path(span.path), root), "region": region}}


def _artifact(path: Path, root: Path) -> dict[str, str]:
    try:
        return {"uri": quote(path.resolve().relative_to(root.resolve()).as_posix()), "uriBaseId": ROOT}
    except ValueError:
        return {"uri": path.resolve().as_uri()}


def _module(path: str) -> dict[str, Any]:
    return {"logicalLocations": [{"fullyQualifiedName": path, "name": path.split(".")[-1], "kind": "module"}]}


def _fingerprint(finding: Finding) -> str:
    """Return a hash without the line number, so that it stays the same when lines above are added or removed."""
    where = finding.span.path if finding.span else finding.where
    return hashlib.sha256(f"{finding.rule}|{where}|{finding.detail}".encode()).hexdigest()[:32]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", ")")) else ".")
