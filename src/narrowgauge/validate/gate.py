"""A regression gate for numerics: compares a candidate with a saved validation of the same candidate.

Two measurements from new runs with the same seeds, of the same task with the same settings, are compared with the saved
ones:

    losses   the candidate's final losses, seed by seed, relative to the reference's losses of the same session. The
             gate fails if the verdict is `worse`. An undecided verdict passes, and is reported
    layers   the SQNR of all weight gradients in one step. The gate fails if it drops by more than 1 dB. This has almost
             no noise, and one misplaced rounding costs many dB
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowgauge import files
from narrowgauge.errors import UsageError
from narrowgauge.runs.settings import OPTIMIZERS
from narrowgauge.validate.curves.paired_runs import list_input_files
from narrowgauge.validate.statistics.verdict import EQUIVALENT, WORSE, judge

MAX_DROP_DB = 1.0
"""How far the SQNR of a step may drop."""
REQUIRED = ("task", "reference", "steps", "losses", "candidates", "margin", "options")
DATA = ("data", "eval_data")
"""Options that name data."""


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


def refuse_other_training(
    given: Mapping[str, Any], options: Mapping[str, Any], saved: Mapping[str, Any], path: str
) -> None:
    """Raises UsageError if runs would differ from the saved ones in more than the code: their losses do not compare.

    A file of a task or of data may be in another folder, as on another machine. Its name counts, and the size of data.

    Args:
        given: The task, and settings by the name of their option: reference, steps, optimizer.
        options: The task's options, and the learning rate.
        saved: The saved validation.
        path: Its file.
    """
    known = {"optimizer": OPTIMIZERS[0], **saved}  # files of earlier versions have no optimizer
    pairs = [(name, value, known[name]) for name, value in given.items()]
    every = dict.fromkeys((*options, *saved["options"]))
    pairs += [(name, options.get(name), saved["options"].get(name)) for name in every]
    for name, now, before in pairs:
        if _drop_folder(now) != _drop_folder(before):
            option = name if name == "task" else f"--{name.replace('_', '-')}"
            has = "none" if before is None else before
            raise UsageError(
                f"{option} {now}: {path} has {has}, and losses of different trainings do not compare; "
                f"omit {option if name != 'task' else 'the task'}, or save a validation with this one"
            )
    sizes = saved.get("data_bytes") or {}  # they do not have this either
    for name, size in measure_data(options).items():
        before = sizes.get(name, size)
        if size != before:
            raise UsageError(
                f"--{name.replace('_', '-')} {options[name]}: it has {size:,} bytes, and had {before:,} in {path}; "
                "restore it, or save a validation with this one"
            )


def measure_data(options: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of the data that a task's options name, by option. A dataset on a hub is not measured."""
    found = {name: list_input_files({name: options[name]}) for name in DATA if name in options}
    return {name: sum(one.stat().st_size for one in paths) for name, paths in found.items() if paths}


def _drop_folder(value: Any) -> Any:
    """Return the name of a task's file, or of what is given by its absolute path; other values as JSON has them."""
    if isinstance(value, str) and (value.startswith("/") or ".py:" in value):
        return Path(value).name
    return json.loads(json.dumps(value, default=str))


def compare_with_saved(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Compares every candidate of a saved validation with its new results, with the margin of the new ones.

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
    verdict = judge(before[:count], after[:count], now["margin"])
    failures = [verdict.reason] if verdict.verdict == WORSE else []
    if before[:count] == after[:count]:  # unchanged, whatever the noise is
        verdict = replace(verdict, verdict=EQUIVALENT)
    elif not verdict.decidable and verdict.gap is not None and verdict.gap > now["margin"]:
        failures.append(f"the gap is {verdict.gap:+.3%} in each of {count} equal pairs")
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


def _relative_losses(losses: list[float | str | None], reference: list[float | str | None]) -> list[float]:
    """Losses relative to the reference's mean, so that results of two days or two machines are comparable.

    Losses of diverged runs are text, as JSON lacks NaN, or null in older files; they become NaN.
    """
    own, of = (
        [math.nan if loss is None else float(loss) for loss in side[: len(losses)]] for side in (losses, reference)
    )
    known = [loss for loss in of if math.isfinite(loss)]
    level = abs(sum(known)) / len(known) if known else math.nan
    return [1 + (loss - other) / level if level else math.nan for loss, other in zip(own, of, strict=True)]


def _total_decibels(candidate: Mapping[str, Any]) -> float | None:
    layers = candidate.get("layers")
    return float(layers["total"]) if layers else None
