"""A baseline: the findings that a project has when it starts to use the linter. Only new ones are reported.

A finding is recognised by its rule, its file and the text of its line, not by the line's number, so that changes above
it do not matter. If a file has three equal findings, the baseline counts three, and a fourth is new.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from narrowgauge import files
from narrowgauge.errors import UsageError
from narrowgauge.findings import Finding

VERSION = 1
Key = tuple[str, str, str]
"""Rule, path relative to the folder of the baseline (or module), and text of the line."""


def save(findings: Iterable[Finding], path: Path) -> int:
    """Write a baseline, and return the number of findings in it."""
    counts = Counter(_key(finding, path) for finding in findings)
    rows = [
        {"rule": rule, "path": place, "code": code, "count": count}
        for (rule, place, code), count in sorted(counts.items())
    ]
    files.save_text(path, json.dumps({"version": VERSION, "findings": rows}, indent=1) + "\n", "--write-baseline")
    return counts.total()


def remove_known(findings: Iterable[Finding], path: Path) -> list[Finding]:
    """Return the findings that a baseline does not contain.

    Raises:
        UsageError: The file cannot be read, or is not a baseline.
    """
    known = _read(path)
    new: list[Finding] = []
    for finding in findings:
        key = _key(finding, path)
        if known[key] > 0:
            known[key] -= 1
        else:
            new.append(finding)
    return new


def _read(path: Path) -> Counter[Key]:
    try:
        data = files.parse_json(files.read(path))
        if data["version"] != VERSION:
            raise UsageError(f"{path} is a baseline of version {data['version']}; write it anew with --write-baseline")
        rows = [((row["rule"], row["path"], row["code"]), int(row["count"])) for row in data["findings"]]
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not a baseline ({type(error).__name__}: {error}); write one with --write-baseline"
        ) from None
    return Counter(dict(rows))


def _key(finding: Finding, path: Path) -> Key:
    span = finding.span
    if span is None:
        return finding.rule, finding.where, finding.detail
    place = span.path if span.path == "<stdin>" else os.path.relpath(span.path, path.parent)
    is_module = finding.where != str(span)
    return finding.rule, Path(place).as_posix(), finding.where if is_module else span.code
