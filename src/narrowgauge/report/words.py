"""What the page says at its top: everything that was found, in words, the serious first; healthy if there is nothing.

Findings come from runs, from lint and break, from the verdicts of validations and from the gates of benchmarks.
"""

from __future__ import annotations

from typing import Any

from narrowgauge.findings import SERIOUS, WARNING
from narrowgauge.report.sources import Sources
from narrowgauge.report.story import Story

GOOD, NOTE = "good", "note"
_RANK = {SERIOUS: 0, WARNING: 1, NOTE: 2, GOOD: 3}
_MOST = 200


def tell(sources: Sources, names: list[str]) -> dict[str, Any]:
    """The headline, and the findings under it. ``names``: of the runs, as the page calls them."""
    found = []
    for story, name in zip(sources.stories, names, strict=True):
        found += _gathered([{"source": name, **finding} for finding in story.findings])
        found += _notes(story, name)
    for saved in sources.of("findings"):
        whose = {"source": saved["title"] or saved["name"], "step": None}
        found += _gathered([{**whose, **one} for one in saved["findings"]])
    for saved in sources.of("validation"):
        found += _verdicts(saved)
    for saved in sources.of("bench"):
        found += [
            _finding("slower-or-larger", SERIOUS, saved["name"], "", line, "look where its time goes: bench --profile")
            for line in saved["failures"]
        ]  # fmt: skip
    serious, warnings = (
        sum(1 + len(one["also"]) for one in found if one["severity"] == rank) for rank in (SERIOUS, WARNING)
    )
    found.sort(key=lambda one: (_RANK.get(one["severity"], 1), one["step"] or 0))
    return {
        "headline": _headline(serious, warnings, sources),
        "state": "serious" if serious else "warning" if warnings else "healthy",
        "findings": found[:_MOST],
        "more": max(0, len(found) - _MOST),
    }


def _gathered(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same finding at several places of a run is told once, with the other places under it."""
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for one in found:
        known = groups.setdefault((one["source"], one["rule"], one["severity"]), {**one, "also": []})
        if known["where"] != one["where"] or known["detail"] != one["detail"]:
            known["also"].append({name: one[name] for name in ("step", "where", "detail")})
    return list(groups.values())


def _headline(serious: int, warnings: int, sources: Sources) -> str:
    if serious or warnings:
        counted = [(serious, "serious finding"), (warnings, "warning")]
        return ", ".join(f"{count} {what}{'s' * (count > 1)}" for count, what in counted if count)
    if not sources.stories:
        return "Nothing to report"
    return "Healthy: nothing to report"


def _notes(story: Story, name: str) -> list[dict[str, Any]]:
    """What the run does not call a finding, but its reader should know."""
    notes = []
    for mark in story.marks:
        if mark["kind"] == "capture":
            detail = f"step {mark['step']} was captured: it can be run again, op by op"
            notes.append(_finding("captured", NOTE, name, mark["path"], detail, f"narrowgauge replay {mark['path']}"))
            notes[-1]["step"] = mark["step"]
    if story.state == "unfinished":
        detail = f"the record has no end: the run was killed after step {story.step:,}, or its machine went away"
        notes.append(_finding("unfinished", NOTE, name, str(story.folder), detail, "narrowgauge train --resume"))
    if story.damaged:
        detail = f"{story.damaged:,} lines or readings of the record could not be understood and are left out here"
        notes.append(_finding("record-damaged", WARNING, name, str(story.folder), detail, "restore events.jsonl"))
    if not story.steps:
        notes.append(_finding("no-steps", NOTE, name, str(story.folder), "no step is recorded yet", ""))
    elif not story.tensors.columns:
        detail = "no tensor was read in this run: what is said of its health comes from losses and norms alone"
        notes.append(_finding("not-watched", NOTE, name, "", detail, "train with --watch N"))
    return notes


def _verdicts(saved: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for name, one in saved["candidates"].items():
        where = f"{name} against {saved['reference']}"
        detail = f"{where}: {one['verdict']}" + (f": {one['reason']}" if one["reason"] else "")
        severity = {"worse": SERIOUS, "inconclusive": WARNING}.get(one["verdict"], GOOD)
        worst = (one["layers"] or {}).get("worst") or []
        advice = f"{worst[0]['module']}: {worst[0]['advice']}" if worst and severity != GOOD else ""
        found.append(_finding(f"verdict-{one['verdict']}", severity, saved["name"], name, detail, advice))
    return found


def _finding(rule: str, severity: str, source: str, where: str, detail: str, fix: str) -> dict[str, Any]:
    known = {"rule": rule, "severity": severity, "where": where, "detail": detail, "fix": fix}
    return {"source": source, "step": None, "consequence": "", "also": [], **known}
