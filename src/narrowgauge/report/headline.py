"""The top of the page: a headline, and all findings below it, the serious ones first.

Findings come from runs, from lint and break, from the verdicts of validations and from the gates of benchmarks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from narrowgauge.findings import SERIOUS, WARNING
from narrowgauge.report.inputs import Inputs
from narrowgauge.report.run_data import RunData

GOOD, NOTE = "good", "note"
_RANK = {SERIOUS: 0, WARNING: 1, NOTE: 2, GOOD: 3}
_MOST_FINDINGS = 200


def summarize(inputs: Inputs, names: list[str]) -> dict[str, Any]:
    """The headline and the findings of all inputs. ``names`` are the display names of the runs."""
    found = []
    for run, name in zip(inputs.runs, names, strict=True):
        found += _group_findings([{"source": name, **finding} for finding in run.findings])
        found += _make_notes(run, name)
    for saved in inputs.of("findings"):
        origin = {"source": saved["title"] or saved["name"], "step": None}
        found += _group_findings([{**origin, **one} for one in saved["findings"]])
    for saved in inputs.of("validation"):
        found += _make_verdict_findings(saved)
    for saved in inputs.of("bench"):
        fix = "run bench --profile to see where the time goes"
        found += [
            _make_finding("slower-or-larger", SERIOUS, saved["name"], "", line, fix) for line in saved["failures"]
        ]
    serious, warnings = (
        sum(1 + len(one["also"]) for one in found if one["severity"] == rank) for rank in (SERIOUS, WARNING)
    )
    found.sort(key=lambda one: (_RANK.get(one["severity"], 1), one["step"] or 0))
    return {
        "headline": _make_headline(serious, warnings, inputs, found, names),
        "state": "serious" if serious else "warning" if warnings else "healthy",
        "findings": found[:_MOST_FINDINGS],
        "more": max(0, len(found) - _MOST_FINDINGS),
    }


def _group_findings(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merges equal findings of a run into one, which lists its other locations under ``also``."""
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for one in found:
        known = groups.setdefault((one["source"], one["rule"], one["severity"]), {**one, "also": []})
        if known["where"] != one["where"] or known["detail"] != one["detail"]:
            known["also"].append({name: one[name] for name in ("step", "where", "detail")})
    return list(groups.values())


def _make_headline(
    serious: int, warnings: int, inputs: Inputs, found: list[dict[str, Any]], names: Sequence[str]
) -> str:
    """The numbers of findings, and what the first of them is about: a module, a line of code or a run."""
    if serious or warnings:
        counted = [(serious, "serious finding"), (warnings, "warning")]
        numbers = ", ".join(f"{count} {what}{'s' * (count > 1)}" for count, what in counted if count)
        return f"{numbers}: {_name_subject(found[0])}" + (", and others" if serious + warnings > 1 else "")
    if not inputs.runs:
        return "No findings"
    whose = names[0] if len(names) == 1 else f"all {len(names)} runs"
    unwatched = [name for run, name in zip(inputs.runs, names, strict=True) if run.steps and not run.tensors.columns]
    if unwatched:
        return f"No findings, but not all tensors were watched in {', '.join(unwatched[:3])}"
    return f"Healthy: no findings in {whose}"


def _name_subject(one: dict[str, Any]) -> str:
    where, rule = str(one["where"] or "").strip(), str(one["rule"]).replace("-", " ")
    place = f"{where} of {one['source']}" if where and where != one["source"] else str(one["source"])
    return f"{rule} in {place}"


def _make_notes(run: RunData, name: str) -> list[dict[str, Any]]:
    """Facts about a run that are not findings, but that a reader should know."""
    notes = []
    for mark in run.marks:
        if mark["kind"] == "capture":
            detail = f"step {mark['step']} was captured: narrowgauge replay runs it again op by op"
            fix = f"narrowgauge replay {mark['path']}"
            notes.append(_make_finding("captured", NOTE, name, mark["path"], detail, fix))
            notes[-1]["step"] = mark["step"]
    if run.emulated is not None:
        detail = f"linear layers rounded their operands to {run.emulated} and multiplied in BF16: an emulation, which "
        detail += f"shows how training goes in {run.emulated}, and nothing about the speed or memory of its hardware"
        notes.append(_make_finding("emulated", NOTE, name, "", detail, "narrowgauge validate gives a verdict"))
    if run.state == "unfinished":
        detail = f"the record has no end event: the run was killed after step {run.step:,}, or its machine stopped"
        notes.append(_make_finding("unfinished", NOTE, name, str(run.folder), detail, "narrowgauge train --resume"))
    if run.damaged:
        detail = f"{run.damaged:,} lines or readings of the record could not be parsed and are left out"
        notes.append(_make_finding("record-damaged", WARNING, name, str(run.folder), detail, "restore events.jsonl"))
    if not run.steps:
        notes.append(_make_finding("no-steps", NOTE, name, str(run.folder), "no steps recorded yet", ""))
    elif not run.tensors.columns:
        detail = "no tensors were read in this run: findings are based on losses and gradient norms only"
        notes.append(_make_finding("not-watched", NOTE, name, "", detail, "train with --watch N"))
    return notes


def _make_verdict_findings(saved: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for name, one in saved["candidates"].items():
        where = f"{name} compared with {saved['reference']}"
        detail = f"{where}: {one['verdict']}" + (f": {one['reason']}" if one["reason"] else "")
        detail = f"{name}: {one['answer']}" if one["answer"] else detail
        severity = {"worse": SERIOUS, "inconclusive": WARNING}.get(one["verdict"], GOOD)
        worst = (one["layers"] or {}).get("worst") or []
        advice = f"{worst[0]['module']}: {worst[0]['advice']}" if worst and severity != GOOD else ""
        found.append(_make_finding(f"verdict-{one['verdict']}", severity, saved["name"], name, detail, advice))
    return found


def _make_finding(rule: str, severity: str, source: str, where: str, detail: str, fix: str) -> dict[str, Any]:
    fields = {"rule": rule, "severity": severity, "where": where, "detail": detail, "fix": fix}
    return {"source": source, "step": None, "consequence": "", "also": [], **fields}
