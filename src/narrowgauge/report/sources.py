"""What is to be reported: each path is a run folder, or JSON that another verb gave, known by its fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowgauge import files
from narrowgauge.errors import UsageError
from narrowgauge.report.story import Story
from narrowgauge.report.thin import short
from narrowgauge.runs import record

COMPONENTS = ("weights", "master", "gradients", "moments", "activations", "workspace")
FORECAST = ("step_ms", "measured_ms", "tokens_per_s", "mfu", "bound", "hours", "cost")
"""Of a recipe on a GPU."""


@dataclass
class Sources:
    """Everything that goes into one page."""

    stories: list[Story] = field(default_factory=list)
    saved: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By kind: validation, bench, memory, roofline, findings."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return self.saved.get(kind, [])


def open_all(paths: Sequence[Path]) -> Sources:
    """Read every path once; runs can be read on."""
    if not paths:
        raise UsageError("report: give at least one run folder, or JSON of validate, bench, memory or roofline")
    sources = Sources()
    for path in dict.fromkeys(paths):
        if files.is_folder(path):
            if not record.holds_run(path):
                raise UsageError(f"{path} holds no run: there is no {record.CONFIGURATION} in it; give a run folder")
            story = Story(path)
            story.update()
            sources.stories.append(story)
        else:
            kind, data = read_saved(path)
            sources.saved.setdefault(kind, []).append({"name": path.stem, **data})
    return sources


def read_saved(path: Path) -> tuple[str, dict[str, Any]]:
    """What kind of result a JSON file holds, and the part of it that the page shows."""
    if not files.exists(path):
        raise UsageError(f"{path} is not there: give a run folder, or JSON that validate or bench saved")
    try:
        data = files.parse_json(files.read(path))
    except UsageError as error:
        raise UsageError(f"{error}; give a run folder, or JSON that validate or bench saved") from None
    except ValueError:
        raise UsageError(f"{path} is neither a run folder nor JSON: give what a verb printed with --json") from None
    if isinstance(data, list):  # as bench/ keeps rows that were measured on their own
        data = {"rows": data}
    for kind, (is_one, take) in _KINDS.items():
        if isinstance(data, dict) and is_one(data):
            try:
                return kind, take(data)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise UsageError(
                    f"{path} looks like {kind} JSON but cannot be read ({_why(error)}); save it again"
                ) from None
    raise UsageError(
        f"{path} is JSON, but of no kind that report knows: expected what validate, bench, memory, roofline, lint or "
        "break print with --json"
    )


def _why(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def _validation(data: dict[str, Any]) -> dict[str, Any]:
    candidates = {}
    for name, one in data["candidates"].items():
        numbers = ("gap", "margin", "detectable", "curve_gap_mean", "curve_gap_largest", "curve_gap_step",
                   "grad_norm_ratio", "seeds", "seeds_needed", "skipped", "diverged")  # fmt: skip
        candidates[str(name)] = {
            "verdict": str(one["verdict"]),
            "reason": str(one.get("reason") or ""),
            "interval": numbers_of(one.get("interval")),
            "losses": numbers_of(one.get("losses")),
            **{key: number_of(one.get(key)) for key in numbers},
            "layers": _layers(one.get("layers")),
        }
    return {
        "task": _text(data.get("task")),
        "device": _text(data.get("device")),
        "reference": _text(data.get("reference")),
        "steps": number_of(data.get("steps")),
        "margin": number_of(data.get("margin")),
        "losses": numbers_of(data.get("losses")),
        "noise_band": number_of(data.get("noise_band")),
        "candidates": candidates,
    }


def _layers(data: Any) -> dict[str, Any] | None:
    """The modules of one step: the lowest of each one's own figures, and of those end to end."""
    if not isinstance(data, Mapping):
        return None
    rows = []
    for row in data.get("rows") or ():
        pairs = [row.get(name) or {} for name in ("output", "grad_input", "grad_weight")]
        own, whole = (
            [number for pair in pairs if (number := number_of(pair.get(key))) is not None]
            for key in ("own", "end_to_end")
        )
        decibels = {"own": min(own, default=None), "end_to_end": min(whole, default=None)}
        rows.append({"module": str(row["module"]), "class": _text(row.get("class")), **decibels})
    worst = [
        {"module": _text(one.get("module")), "quantity": _text(one.get("quantity")), "advice": _text(one.get("advice")),
         "decibels": number_of(one.get("decibels"))}
        for one in data.get("worst") or ()
    ]  # fmt: skip
    return {"rows": rows, "worst": worst, "total": number_of(data.get("total"))}


def _bench(data: dict[str, Any]) -> dict[str, Any]:
    numbers = ("tokens_per_s", "step_ms", "step_ms_low", "step_ms_high", "peak_bytes", "mfu", "ratio")
    rows = [
        {"name": str(row["name"]), **{key: number_of(row.get(key)) for key in numbers}}
        for row in data["rows"]
    ]  # fmt: skip
    gate = data.get("gate") if isinstance(data.get("gate"), Mapping) else None
    return {
        "task": _text(data.get("task")),
        "device": _text(data.get("device")),
        "unit": _text(data.get("unit")) or "token",
        "note": _text(data.get("note")),
        "rows": rows,
        "failures": [str(line) for line in gate.get("failures") or ()] if gate else [],
    }


def _memory(data: dict[str, Any]) -> dict[str, Any]:
    recipes = {}
    for name, parts in data["recipes"].items():
        known = {key: number for key in COMPONENTS if (number := number_of(parts.get(key))) is not None}
        recipes[str(name)] = {
            "parts": known,
            "total": number_of(parts.get("total")) or sum(known.values()),
            "measured": number_of(parts.get("measured")),
            "between": number_of(parts.get("between_steps")),
            **_peak(parts.get("when")),
            "timeline": timeline_of(parts.get("timeline")),
        }
    return {
        "task": _text(data.get("task")),
        "gpu": _text(data.get("gpu") or data.get("device")),
        "recipes": recipes,
        "timeline": timeline_of(data.get("timeline")),
    }


def _peak(when: Any) -> dict[str, Any]:
    """When in a step the peak comes, as ``memory`` says it."""
    known = when if isinstance(when, Mapping) else {}
    phase, module = _text(known.get("phase")), _text(known.get("module"))
    return {"peak_at": number_of(known.get("share")), "peak_in": ", ".join(filter(None, (phase, module)))}


def timeline_of(value: Any) -> list[dict[str, Any]]:
    """Memory over a step: ``[[label, bytes]...]``, or for each moment its components."""
    moments = []
    for moment in value or () if isinstance(value, list) else ():
        if isinstance(moment, Mapping):
            parts = {key: number for key in COMPONENTS if (number := number_of(moment.get(key))) is not None}
            label = _text(moment.get("label") or moment.get("at") or moment.get("phase"))
            if not parts and (total := number_of(moment.get("bytes") or moment.get("total"))) is not None:
                parts = {"total": total}
        elif isinstance(moment, Sequence) and len(moment) == 2 and isinstance(moment[1], Mapping):
            parts = {key: number for key in COMPONENTS if (number := number_of(moment[1].get(key))) is not None}
            label = _text(moment[0])
        elif isinstance(moment, Sequence) and len(moment) == 2 and (total := number_of(moment[1])) is not None:
            parts, label = {"total": total}, _text(moment[0])
        else:
            continue
        if parts:
            moments.append({"label": label, "parts": parts})
    return moments


def _roofline(data: dict[str, Any]) -> dict[str, Any]:
    """Layers of the whole, each with the recipe it was predicted for where that is said, or those of each recipe."""
    recipes = data.get("recipes") or {}
    layers = [one for layer in data["layers"] for one in _layers_of(layer, _text(data.get("recipe")))]
    for name, row in recipes.items():
        for layer in row.get("layers") or ():
            layers += _layers_of(layer, str(name))
    gpu = data.get("gpu")
    name = _text(gpu.get("name") if isinstance(gpu, Mapping) else gpu)
    others = {str(other): _forecasts(one.get("recipes") or {}) for other, one in (data.get("gpus") or {}).items()}
    return {
        "task": _text(data.get("task")),
        "gpu": name,
        "layers": layers,
        "recipes": others | {name: _forecasts(recipes)},
    }


def _forecasts(recipes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What is predicted of each recipe's step, as far as it is a plain number or word."""
    return {
        str(name): {
            key: row[key] if isinstance(row[key], str) else number_of(row[key])
            for key in FORECAST
            if isinstance(row.get(key), str | int | float)
        }
        for name, row in recipes.items()
    }


def _layers_of(layer: Mapping[str, Any], recipe: str) -> list[dict[str, Any]]:
    """A layer, once for each recipe that its time is known for."""
    numbers = {key: number_of(layer.get(key)) for key in ("flops", "bytes", "intensity", "saved_ms", "measured_ms")}
    if numbers["intensity"] is None and numbers["flops"] and numbers["bytes"]:
        numbers["intensity"] = short(numbers["flops"] / numbers["bytes"])
    name = _text(layer.get("name") or layer.get("module") or layer.get("path"))
    texts = {key: _text(layer.get(key)) for key in ("kind", "phase", "format")}
    ms, bound = layer.get("ms"), layer.get("bound")
    times = ms if isinstance(ms, Mapping) else {_text(layer.get("recipe")) or recipe: ms}
    return [
        {
            "name": name,
            "recipe": str(one),
            "ms": number_of(time),
            "bound": _text(bound.get(one) if isinstance(bound, Mapping) else bound),
            **numbers,
            **texts,
        }
        for one, time in times.items()
    ]


def _found(data: dict[str, Any]) -> dict[str, Any]:
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
    "validation": (lambda d: isinstance(d.get("candidates"), dict), _validation),
    "bench": (lambda d: _all_have(d.get("rows"), ("name", "step_ms")), _bench),
    "roofline": (lambda d: isinstance(d.get("layers"), list) and "gpu" in d, _roofline),
    "memory": (lambda d: _is_memory(d.get("recipes")), _memory),
    "findings": (lambda d: _all_have(d.get("findings"), ("rule", "severity"), empty=True), _found),
}
"""In this order: a roofline has recipes, too."""


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


def number_of(value: Any) -> float | int | None:
    """A number, short; None for anything else, and for what is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) and abs(value) < 1 << 53 else short(float(value))


def numbers_of(values: Any) -> list[float | int | None] | None:
    return [number_of(value) for value in values] if isinstance(values, list) else None


def _text(value: Any) -> str:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)
