"""A regression gate for numerics: compares a candidate with a saved validation of the same candidate.

Two measurements from new runs with the same seeds are compared with the saved ones:

    losses   the candidate's final losses, seed by seed, relative to the reference's losses of the same session. The
             gate fails if the verdict is `worse`. An undecided verdict passes, and is reported
    layers   the SQNR of all weight gradients in one step. The gate fails if it drops by more than 1 dB. This has almost
             no noise, and one misplaced rounding costs many dB
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowgauge import files
from narrowgauge.errors import UsageError
from narrowgauge.validate.statistics.verdict import WORSE, judge

MAX_DROP_DB = 1.0
"""How far the SQNR of a step may drop."""
REQUIRED = ("task", "reference", "steps", "losses", "candidates", "margin", "options")


def save_validation(path: Path, described: Mapping[str, Any]) -> None:
    """Writes a validation as JSON, for ``--against``."""
    files.save_text(path, json.dumps(described, indent=1, allow_nan=False) + "\n", "--save")


def read_validation(path: Path) -> dict[str, Any]:
    """Reads a saved validation.

    Raises:
        UsageError: If the file cannot be read or is not a saved validation.
    """
    try:
        saved = files.parse_json(files.read(path))
    except UsageError as error:
        raise UsageError(f"--against: {error}") from None
    except ValueError:
        raise UsageError(f"--against {path}: not JSON; create the file with validate --save") from None
    if not isinstance(saved, dict) or any(name not in saved for name in REQUIRED):
        raise UsageError(f"--against {path}: not a saved validation; create one with validate --save")
    return saved


def refuse_unknown_candidates(candidates: Sequence[str], saved: Mapping[str, Any], path: str) -> None:
    """Raises UsageError for a candidate that the saved validation does not have: nothing would be compared with it."""
    for name in candidates:
        if name not in saved["candidates"]:
            known = ", ".join(saved["candidates"])
            raise UsageError(
                f"--candidates {name}: {path} has {known}; omit --candidates, or save a validation that has {name} too"
            )


def compare_with_saved(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Compares every candidate of a saved validation with its new results.

    Returns:
        The ``gate`` field of the JSON output: ``ok``, ``failures``, and one row per candidate.
    """
    rows = [
        _compare_candidate(name, old, saved, now)
        for name, old in saved["candidates"].items()
        if name in now["candidates"]
    ]
    failures = [f"{row['name']}: {reason}" for row in rows for reason in row["failures"]]
    return {"ok": not failures, "failures": failures, "rows": rows}


def _compare_candidate(
    name: str, old: Mapping[str, Any], saved: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, Any]:
    new = now["candidates"][name]
    before, after = (_relative_losses(one["losses"], side["losses"]) for one, side in ((old, saved), (new, now)))
    count = min(len(before), len(after))
    verdict = judge(before[:count], after[:count], saved["margin"])
    failures = [verdict.reason] if verdict.verdict == WORSE else []
    decibels = [_total_decibels(one) for one in (old, new)]
    drop = decibels[0] - decibels[1] if None not in decibels else None  # type: ignore[operator]
    if drop is not None and drop > MAX_DROP_DB:
        failures.append(f"the SQNR of its weight gradients dropped from {decibels[0]:.1f} to {decibels[1]:.1f} dB")
    return {
        "name": name,
        "verdict": verdict.verdict,
        "gap": verdict.gap,
        "interval": verdict.interval,
        "pairs": count,
        "decibels_before": decibels[0],
        "decibels_now": decibels[1],
        "failures": failures,
    }


def _relative_losses(losses: list[float | None], reference: list[float | None]) -> list[float]:
    """Losses relative to the reference's mean, so that results of two days or two machines are comparable."""
    known = [loss for loss in reference[: len(losses)] if loss is not None]
    level = sum(known) / len(known) if known else math.nan
    own = [reference[index] for index in range(len(losses))]
    return [
        math.nan if loss is None or of is None or not level else 1 + (loss - of) / abs(level)
        for loss, of in zip(losses, own, strict=True)
    ]


def _total_decibels(candidate: Mapping[str, Any]) -> float | None:
    layers = candidate.get("layers")
    return float(layers["total"]) if layers else None
