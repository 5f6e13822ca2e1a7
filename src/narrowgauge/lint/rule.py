"""A rule of the linter: what it finds, how serious that is, why, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.findings import ORDER, Finding, Span

PYTORCH = "https://docs.pytorch.org/docs/stable"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A pitfall that the linter knows."""

    name: str
    severity: str
    """``serious``, ``warning`` or ``note``; a finding may have another one."""
    about: str
    """What the rule finds."""
    why: str
    """What happens if it is not fixed."""
    fix: str
    """How to fix it."""
    url: str = f"{PYTORCH}/notes/amp_examples.html"
    """PyTorch's page on the subject, for code hosts."""
    advice: bool = False
    """Whether it is about speed or style: the code is correct, so CI does not fail by default."""

    def finding(
        self, where: str, detail: str = "", fix: str = "", severity: str = "", span: Span | None = None
    ) -> Finding:
        """Return a finding of this rule.

        Args:
            where: file:line, or the path of a module.
            detail: the evidence; by default what the rule is about.
            fix: a more precise fix than the rule's.
            severity: another severity than the rule's.
            span: the range in a file.
        """
        return Finding(
            rule=self.name,
            severity=severity or self.severity,
            where=where,
            detail=detail or self.about,
            why=self.why,
            fix=fix or self.fix,
            span=span,
        )


def in_order(findings: list[Finding]) -> list[Finding]:
    """Return the findings by file and line, modules last, without duplicates."""
    unique = list(dict.fromkeys(findings))

    def key(finding: Finding) -> tuple[bool, str, int, int, int]:
        span, severity = finding.span, ORDER[finding.severity]
        return (span is None, span.path, span.cell or 0, span.line, severity) if span else (True, "", 0, 0, severity)

    return sorted(unique, key=key)
