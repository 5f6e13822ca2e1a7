"""The result of a run: its summary, and the findings that follow from the summary."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.findings import SERIOUS, WARNING, Finding
from narrowgauge.gauges.rules.nonfinite_advice import advise_on_nonfinite
from narrowgauge.recipe import parse as parse_recipe

_MANY_SKIPS = 0.1


@dataclass(kw_only=True)
class Result:
    """The summary of a run."""

    run: str
    recipe: str
    step: int
    """Updates done, skipped ones included."""
    steps: int
    """Updates planned."""
    parameters: int
    seconds: float = 0.0
    """Total training time, over all processes of the run."""
    tokens_per_s: float | None = None
    """Items per second in steady steps: without the first step, evaluations and checkpoints."""
    unit: str = "item"
    """What an item is: a token, an image."""
    loss_first: float | None = None
    loss_last: float | None = None
    loss_eval: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    skipped: int = 0
    interrupted: bool = False
    checkpoint: str | None = None
    sample: str | None = None
    captures: list[str] = field(default_factory=list)
    """Files of the steps that were captured for ``narrowgauge replay``."""
    findings: list[Finding] = field(default_factory=list)
    predictions: list[dict[str, Any]] = field(default_factory=list)
    """Whether the model would train in FP16 and FP8, predicted from a run in FP32 or BF16."""
    memory_plan: dict[str, Any] | None = None
    """What each block keeps for backward, if the run has a memory budget (``--fit``)."""
    gradient_formats: dict[str, str] | None = None
    """The FP8 format of each gradient, if the recipe chooses them (``gradients_format=auto``)."""
    conversion: str | None = None
    """What was multiplied in which format, in one line."""
    format_share: float | None = None
    """The share of multiplied parameters in the recipe's format. Records of earlier versions do not have it."""
    watched: bool = True
    """Whether tensors were read while it ran (``--watch``)."""

    @property
    def serious(self) -> bool:
        """Whether a finding is serious."""
        return any(finding.severity == SERIOUS for finding in self.findings)

    def describe(self) -> dict[str, Any]:
        """Return the fields as plain values, for the record and for JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "findings": [finding.describe() for finding in self.findings]}

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> Result:
        """Make the result from the ``end`` event of a run."""
        names = {f.name for f in dataclasses.fields(cls)}
        values = {name: value for name, value in event.items() if name in names}
        for name in ("loss_first", "loss_last", "loss_eval"):
            values[name] = None if values.get(name) is None else float(values[name])
        values["metrics"] = {name: float(value) for name, value in values.get("metrics", {}).items()}
        values["findings"] = [Finding.from_record(finding) for finding in values.get("findings", ())]
        values["predictions"] = event.get("predictions", event.get("foretold", []))  # "foretold" in older records
        return cls(**values)


def check_result(result: Result) -> list[Finding]:
    """Return the findings from a run's summary that were not found while it ran."""
    found = []
    known = {finding.rule for finding in result.findings}
    last, first = result.loss_last, result.loss_first
    advice = advise_on_nonfinite(parse_recipe(result.recipe))
    for name, loss in (("training", last), ("evaluation", result.loss_eval)):
        if loss is not None and not math.isfinite(loss) and "loss-not-finite" not in known:
            found.append(
                Finding(
                    rule="loss-not-finite",
                    severity=SERIOUS,
                    where=f"{name} loss, step {result.step}",
                    detail=f"the last {name} loss is {loss}",
                    fix=advice,
                )
            )
    falls = first is None or last is None or last < first or result.step < 20 or result.interrupted
    if not falls and not found:
        found.append(
            Finding(
                rule="loss-did-not-fall",
                severity=WARNING,
                where="training loss",
                detail=f"the loss went from {first:.4g} to {last:.4g} in {result.step} steps",
                fix="check the data, and try another learning rate",
            )
        )
    all_skipped = 0 < result.step == result.skipped
    many = result.skipped > max(5, _MANY_SKIPS * result.step) and "skipping-too-often" not in known
    if all_skipped or many:
        found.append(
            Finding(
                rule="many-skipped-updates",
                severity=SERIOUS if all_skipped else WARNING,
                where="optimizer step",
                detail=f"{result.skipped} of {result.step} updates were skipped because gradients were not finite",
                why="the weights are still those of the start" if all_skipped else "",
                fix=advice,
            )
        )
    return found


def make_stall_finding(result: Result, error: Exception) -> Finding:
    """Describe training that stopped after too many consecutive skipped steps."""
    advice = advise_on_nonfinite(parse_recipe(result.recipe))
    return Finding(
        rule="training-stalled",
        severity=SERIOUS,
        where=f"step {result.step + 1}",
        detail=str(error),
        fix=f"check the parameters named here; {advice}",
        step=result.step + 1,
    )


def make_data_finding(step: int, error: Exception) -> Finding:
    """Describe data that cannot be trained on."""
    fix = "fix the data, then continue with --resume"
    return Finding(rule="bad-data", severity=SERIOUS, where=f"step {step + 1}", detail=str(error), fix=fix)


def make_sample_finding(step: int, error: Exception) -> Finding:
    """Describe an error in the task's sample function."""
    return Finding(
        rule="sample-failed",
        severity=WARNING,
        where=f"sample after step {step}",
        detail=f"{type(error).__name__}: {error}",
        fix="fix the task's sample function; the trained model is saved",
    )
