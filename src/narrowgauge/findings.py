"""A finding of a gauge or of the linter: which rule, where, the evidence, why it matters and how to fix it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SERIOUS, WARNING, NOTE = "serious", "warning", "note"
ORDER = {SERIOUS: 0, WARNING: 1, NOTE: 2}
"""Severities, the worst first."""


@dataclass(frozen=True)
class Span:
    """A range in a file. Lines and columns count from 1, as in editors and SARIF."""

    path: str
    line: int
    """In a notebook, the line in the cell."""
    column: int = 1
    end_line: int | None = None
    end_column: int | None = None
    cell: int | None = None
    """For a notebook: the number of the cell."""
    file_line: int | None = None
    """For a notebook: the line in the file."""
    code: str = ""
    """The text of the first line, which identifies it after lines above were added or removed."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.cell is None else f"{self.path}:cell {self.cell}:{self.line}"


@dataclass(frozen=True)
class Consequence:
    """Another finding that follows from the same cause."""

    rule: str
    where: str
    detail: str
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem that a rule found in a run, a model or a script."""

    rule: str
    """Name of the rule."""
    severity: str
    """serious: training breaks or its result cannot be trusted. warning: speed or precision is lost. note: for
    information; never a failure."""
    where: str
    """file:line of a script, or the path of a module, parameter or optimizer state."""
    detail: str
    """The evidence."""
    fix: str
    """How to fix it."""
    why: str = ""
    """What happens if it is not fixed."""
    span: Span | None = None
    """The range in a file, for findings in files."""
    step: int | None = None
    """The step of a run in which it was found, counted from 1."""
    consequences: tuple[Consequence, ...] = ()
    """Other findings of the run that follow from this one."""

    def describe(self) -> dict[str, Any]:
        """Return the fields for JSON; a span becomes ``path``, ``line`` and, in a notebook, ``cell``."""
        place = {"path": self.span.path, "line": self.span.line} if self.span else {}
        cell = {"cell": self.span.cell} if self.span and self.span.cell is not None else {}
        return {
            "rule": self.rule,
            "severity": self.severity,
            "where": self.where,
            "detail": self.detail,
            "why": self.why,
            "fix": self.fix,
            **place,
            **cell,
            **({"step": self.step} if self.step is not None else {}),
            **({"consequences": [dict(vars(one)) for one in self.consequences]} if self.consequences else {}),
        }

    @classmethod
    def from_record(cls, fields: Mapping[str, Any]) -> Finding:
        """Rebuild a finding from what ``describe`` returned, for example from a run's record or a checkpoint.

        Records of earlier versions have ``consequence`` instead of ``why``.

        Raises:
            TypeError: A field is missing or unknown.
        """
        known = {name: value for name, value in fields.items() if name not in ("consequence", "path", "line", "cell")}
        consequences = tuple(Consequence(**one) for one in known.pop("consequences", ()))
        return cls(**{"why": fields.get("consequence", ""), "consequences": consequences, **known})
