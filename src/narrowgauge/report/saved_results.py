"""Parses JSON that other verbs have saved, recognized by its fields, into the data of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowgauge import files
from narrowgauge.errors import UsageError
from narrowgauge.report.downsample import round_number

COMPONENTS = ("weights", "master", "gradients", "moments", "activations", "workspace")
FORECAST = ("step_ms", "measured_ms", "tokens_per_s", "mfu", "bound", "hours", "cost")
"""Predicted numbers of a recipe on a GPU."""


def read_result(path: Path) -> tuple[str, dict[str, Any]]:
    """Reads a JSON file.

    Returns:
        The kind of result (validation, bench, roofline, memory or findings), and the data that the page shows.

    Raises:
        UsageError: If the file does not exist, is not JSON, or is of an unknown kind.
    """
    if not files.exists(path):
        raise UsageError(f"{path} does not exist: give a run folder, or JSON saved by validate or bench")
    try:
        data = files.parse_json(files.read(path))
    except UsageError as error:
        raise UsageError(f"{error}; give a run folder, or JSON saved by validate or bench") from None
    except ValueError:
        raise UsageError(
            f"{path} is neither a run folder nor JSON: give a run folder or the output of a verb with --json"
        ) from None
    if isinstance(data, list):  # the form of some files in bench/results
        data = {"rows": data}
    for kind, (matches, parse) in _KINDS.items():
        if isinstance(data, dict) and matches(data):
            try:
                return kind, parse(data)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise UsageError(
                    f"{path} looks like {kind} JSON but cannot be read ({_describe_error(error)}); save it again"
                ) from None
    raise UsageError(
        f"{path} is JSON of an unknown kind: expected the --json output of validate, bench, memory, roofline, lint or "
        "break"
    )


def _describe_error(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def _parse_validation(data: dict[str, Any]) -> dict[str, Any]:
    candidates = {}
    for name, one in data["candidates"].items():
        numbers = ("gap", "margin", "detectable", "curve_gap_mean", "curve_gap_largest", "curve_gap_step",
                   "grad_norm_ratio", "seeds", "seeds_needed", "skipped", "diverged")  # fmt: skip
        candidates[str(name)] = {
            "verdict": str(one["verdict"]),
            "reason": str(one.get("reason") or ""),
            "emulated": _text(one.get("emulated")),
            "answer": str(one.get("answer") or ""),
            "interval": to_numbers(one.get("interval")),
            "losses": to_numbers(one.get("losses")),
            **{key: to_number(one.get(key)) for key in numbers},
            "layers": _parse_layers(one.get("layers")),
            **_parse_speed(one),
        }
    return {
        "task": _text(data.get("task")),
        "device": _text(data.get("device")),
        "reference": _text(data.get("reference")),
        "steps": to_number(data.get("steps")),
        "margin": to_number(data.get("margin")),
        "losses": to_numbers(data.get("losses")),
        "noise_band": to_number(data.get("noise_band")),
        "candidates": candidates,
    }


def _parse_speed(candidate: Any) -> dict[str, Any]:
    """How much faster a candidate reaches the reference's final loss, with the interval; None if not measured."""
    speed = candidate.get("speed") if isinstance(candidate, Mapping) else None
    if not isinstance(speed, Mapping):
        return {"equal_loss": None, "equal_loss_interval": None}
    interval = to_numbers(speed.get("interval")) or []
    whole = len(interval) == 2 and None not in interval
    return {"equal_loss": to_number(speed.get("ratio")), "equal_loss_interval": interval if whole else None}


def _parse_layers(data: Any) -> dict[str, Any] | None:
    """For each module the lowest own SQNR of its quantities, and the lowest end-to-end SQNR."""
    if not isinstance(data, Mapping):
        return None
    rows = []
    for row in data.get("rows") or ():
        pairs = [row.get(name) or {} for name in ("output", "grad_input", "grad_weight")]
        own, whole = (
            [number for pair in pairs if (number := to_number(pair.get(key))) is not None]
            for key in ("own", "end_to_end")
        )
        decibels = {"own": min(own, default=None), "end_to_end": min(whole, default=None)}
        rows.append({"module": str(row["module"]), "class": _text(row.get("class")), **decibels})
    worst = [
        {"module": _text(one.get("module")), "quantity": _text(one.get("quantity")), "advice": _text(one.get("advice")),
         "decibels": to_number(one.get("decibels"))}
        for one in data.get("worst") or ()
    ]  # fmt: skip
    return {"rows": rows, "worst": worst, "total": to_number(data.get("total"))}


def _parse_bench(data: dict[str, Any]) -> dict[str, Any]:
    numbers = ("tokens_per_s", "step_ms", "step_ms_low", "step_ms_high", "peak_bytes", "mfu", "ratio")
    trained = data["to_loss"] if isinstance(data.get("to_loss"), Mapping) else {}
    speeds = trained["candidates"] if isinstance(trained.get("candidates"), Mapping) else {}
    rows = [
        {"name": str(row["name"]), **{key: to_number(row.get(key)) for key in numbers},
         **_parse_speed(speeds.get(row["name"]))}
        for row in data["rows"]
    ]  # fmt: skip
    gate = data.get("gate") if isinstance(data.get("gate"), Mapping) else None
    return {
        "task": _text(data.get("task")),
        "device": _text(data.get("device")),
        "unit": _text(data.get("unit")) or "token",
        "note": _text(data.get("note")),
        "rows": rows,
        "reference": _text(trained.get("reference")),
        "failures": [str(line) for line in gate.get("failures") or ()] if gate else [],
    }


def _parse_memory(data: dict[str, Any]) -> dict[str, Any]:
    recipes = {}
    for name, parts in data["recipes"].items():
        known = {key: number for key in COMPONENTS if (number := to_number(parts.get(key))) is not None}
        recipes[str(name)] = {
            "parts": known,
            "total": to_number(parts.get("total")) or sum(known.values()),
            "measured": to_number(parts.get("measured")),
            "between": to_number(parts.get("between_steps")),
            **_parse_peak(parts.get("when")),
            "timeline": parse_timeline(parts.get("timeline")),
        }
    return {
        "task": _text(data.get("task")),
        "gpu": _text(data.get("gpu") or data.get("device")),
        "recipes": recipes,
        "timeline": parse_timeline(data.get("timeline")),
    }


def _parse_peak(when: Any) -> dict[str, Any]:
    """When in a step the peak occurs, according to ``memory``."""
    known = when if isinstance(when, Mapping) else {}
    phase, module = _text(known.get("phase")), _text(known.get("module"))
    return {"peak_at": to_number(known.get("share")), "peak_in": ", ".join(filter(None, (phase, module)))}


def parse_timeline(value: Any) -> list[dict[str, Any]]:
    """Memory over a step, given as ``[[label, bytes]...]`` or as the components at each moment."""
    moments = []
    for moment in value or () if isinstance(value, list) else ():
        if isinstance(moment, Mapping):
            parts = {key: number for key in COMPONENTS if (number := to_number(moment.get(key))) is not None}
            label = _text(moment.get("label") or moment.get("at") or moment.get("phase"))
            if not parts and (total := to_number(moment.get("bytes") or moment.get("total"))) is not None:
                parts = {"total": total}
        elif isinstance(moment, Sequence) and len(moment) == 2 and isinstance(moment[1], Mapping):
            parts = {key: number for key in COMPONENTS if (number := to_number(moment[1].get(key))) is not None}
            label = _text(moment[0])
        elif isinstance(moment, Sequence) and len(moment) == 2 and (total := to_number(moment[1])) is not None:
            parts, label = {"total": total}, _text(moment[0])
        else:
            continue
        if parts:
            moments.append({"label": label, "parts": parts})
    return moments


def _parse_roofline(data: dict[str, Any]) -> dict[str, Any]:
    """The layers at the top level with their recipe, if given, and those listed under each recipe."""
    recipes = data.get("recipes") or {}
    layers = [one for layer in data["layers"] for one in _split_by_recipe(layer, _text(data.get("recipe")))]
    for name, row in recipes.items():
        for layer in row.get("layers") or ():
            layers += _split_by_recipe(layer, str(name))
    gpu = data.get("gpu")
    name = _text(gpu.get("name") if isinstance(gpu, Mapping) else gpu)
    others = {str(other): _parse_forecasts(one.get("recipes") or {}) for other, one in (data.get("gpus") or {}).items()}
    return {
        "task": _text(data.get("task")),
        "gpu": name,
        "layers": layers,
        "recipes": others | {name: _parse_forecasts(recipes)},
    }


def _parse_forecasts(recipes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The predictions for each recipe's step that are numbers or strings."""
    return {
        str(name): {
            key: row[key] if isinstance(row[key], str) else to_number(row[key])
            for key in FORECAST
            if isinstance(row.get(key), str | int | float)
        }
        for name, row in recipes.items()
    }


def _split_by_recipe(layer: Mapping[str, Any], recipe: str) -> list[dict[str, Any]]:
    """One row for each recipe that the layer's time is given for."""
    numbers = {key: to_number(layer.get(key)) for key in ("flops", "bytes", "intensity", "saved_ms", "measured_ms")}
    if numbers["intensity"] is None and numbers["flops"] and numbers["bytes"]:
        numbers["intensity"] = round_number(numbers["flops"] / numbers["bytes"])
    name = _text(layer.get("name") or layer.get("module") or layer.get("path"))
    texts = {key: _text(layer.get(key)) for key in ("kind", "phase", "format")}
    ms, bound = layer.get("ms"), layer.get("bound")
    times = ms if isinstance(ms, Mapping) else {_text(layer.get("recipe")) or recipe: ms}
    return [
        {
            "name": name,
            "recipe": str(one),
            "ms": to_number(time),
            "bound": _text(bound.get(one) if isinstance(bound, Mapping) else bound),
            **numbers,
            **texts,
        }
        for one, time in times.items()
    ]


def _parse_findings(data: dict[str, Any]) -> dict[str, Any]:
    names = ("rule", "severity", "where", "detail", "fix")
    found = [
        {
            **{name: _text(one.get(name)) for name in names},
            "consequence": _text(one.get("why") or one.get("consequence")),
        }
        for one in data["findings"]
    ]
    return {"title": _text(data.get("fault") or data.get("task")), "findings": found}


_KINDS: dict[str, tuple[Callable[[dict[str, Any]], bool], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "validation": (lambda d: isinstance(d.get("candidates"), dict), _parse_validation),
    "bench": (lambda d: _all_have(d.get("rows"), ("name", "step_ms")), _parse_bench),
    "roofline": (lambda d: isinstance(d.get("layers"), list) and "gpu" in d, _parse_roofline),
    "memory": (lambda d: _is_memory(d.get("recipes")), _parse_memory),
    "findings": (lambda d: _all_have(d.get("findings"), ("rule", "severity"), empty=True), _parse_findings),
}
"""How to recognize and parse each kind. The order matters, because a roofline also has recipes."""


def _all_have(rows: Any, names: Iterable[str], empty: bool = False) -> bool:
    if not isinstance(rows, list) or not (rows or empty):
        return False
    return all(isinstance(row, dict) and all(name in row for name in names) for row in rows)


def _is_memory(recipes: Any) -> bool:
    return (
        isinstance(recipes, dict)
        and bool(recipes)
        and all(isinstance(parts, dict) and set(COMPONENTS) & set(parts) for parts in recipes.values())
    )


def to_number(value: Any) -> float | int | None:
    """A rounded number; None if the value is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) and abs(value) < 1 << 53 else round_number(float(value))


def to_numbers(values: Any) -> list[float | int | None] | None:
    return [to_number(value) for value in values] if isinstance(values, list) else None


def _text(value: Any) -> str:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)
