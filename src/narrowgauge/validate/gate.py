"""A gate for numerics: does a candidate still train as well, and compute as exactly, as when the base was saved?

Two things are held against a saved validation, both from fresh runs of the same seeds:

    losses   the candidate's final losses, seed by seed, relative to the reference's of the same day: `worse` by the
             verdict's own test fails; what is not decided passes, and is said
    layers   the SQNR of all weight gradients in one step: a fall of more than a decibel fails. It has next to no noise,
             and a rounding in the wrong place costs it many
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowgauge import files
from narrowgauge.errors import UsageError
from narrowgauge.validate.statistics.verdict import WORSE, judge

DECIBELS = 1.0
"""How far the SQNR of a step may fall."""
NEEDED = ("task", "reference", "steps", "losses", "candidates", "margin", "options")


def save(path: Path, described: Mapping[str, Any]) -> None:
    files.save_text(path, json.dumps(described, indent=1, allow_nan=False) + "\n", "--save")


def read(path: Path) -> dict[str, Any]:
    """A saved validation."""
    try:
        base = files.parse_json(files.read(path))
    except UsageError as error:
        raise UsageError(f"--against: {error}") from None
    except ValueError:
        raise UsageError(f"--against {path}: it is not JSON; save one with validate --save") from None
    if not isinstance(base, dict) or any(name not in base for name in NEEDED):
        raise UsageError(f"--against {path}: it is not a saved validation; make one with validate --save")
    return base


def hold(base: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Every candidate of the base against what it does now."""
    rows = [_row(name, old, base, now) for name, old in base["candidates"].items() if name in now["candidates"]]
    failures = [f"{row['name']}: {reason}" for row in rows for reason in row["failures"]]
    return {"ok": not failures, "failures": failures, "rows": rows}


def _row(name: str, old: Mapping[str, Any], base: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    new = now["candidates"][name]
    before, after = (_relative(one["losses"], side["losses"]) for one, side in ((old, base), (new, now)))
    count = min(len(before), len(after))
    verdict = judge(before[:count], after[:count], base["margin"])
    failures = [verdict.reason] if verdict.verdict == WORSE else []
    decibels = [_total(one) for one in (old, new)]
    fall = decibels[0] - decibels[1] if None not in decibels else None  # type: ignore[operator]
    if fall is not None and fall > DECIBELS:
        failures.append(f"its weight gradients have {decibels[1]:.1f} dB, where they had {decibels[0]:.1f}")
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


def _relative(losses: list[float | None], reference: list[float | None]) -> list[float]:
    """Losses in units of the reference's mean, so that two days, or two machines, have one measure."""
    known = [loss for loss in reference[: len(losses)] if loss is not None]
    level = sum(known) / len(known) if known else math.nan
    own = [reference[index] for index in range(len(losses))]
    return [
        math.nan if loss is None or of is None or not level else 1 + (loss - of) / abs(level)
        for loss, of in zip(losses, own, strict=True)
    ]


def _total(candidate: Mapping[str, Any]) -> float | None:
    layers = candidate.get("layers")
    return float(layers["total"]) if layers else None
