"""Small examples of the JSON output of other verbs, for tests of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def pair(own: float | None, whole: float | None) -> dict[str, float | None]:
    return {"own": own, "end_to_end": whole}


def validation(verdict: str = "worse") -> dict[str, Any]:
    rows = [{"module": name, "class": "Linear", "output": pair(decibels, decibels - 3), "grad_input": pair(None, None),
             "grad_weight": pair(decibels + 9, decibels - 5), "calls": 1, "not_finite": 0, "note": ""}
            for name, decibels in (("blocks.0.qkv", 26.4), ("blocks.0.up", 200.0))]  # fmt: skip
    worst = [{"module": "blocks.0.qkv", "quantity": "output", "decibels": 26.4, "reason": "rounding", "gain": 3.0,
              "advice": "keep=blocks.0.qkv would help"}]  # fmt: skip
    layers = {"rows": rows, "worst": worst, "total": 27.0}
    bad = {"verdict": verdict, "gap": 0.02, "interval": [0.011, 0.029], "margin": 0.005, "seeds": 3, "diverged": 0,
           "detectable": 0.004, "losses": [3.1, 3.2, "nan"], "reason": "the gap is beyond the margin",
           "layers": layers}  # fmt: skip
    good = bad | {"verdict": "equivalent", "gap": 0.0, "interval": [-0.001, 0.001], "layers": None, "speed": speed()}
    return {"task": "gpt:12x768", "device": "H200", "reference": "fp32", "steps": 400, "margin": 0.005,
            "losses": [3.0, 3.1, 3.05], "noise_band": 0.016, "candidates": {"fp8": bad, "bf16": good}}  # fmt: skip


def speed() -> dict[str, Any]:
    return {"step_ratio": 1.5, "reason": "", "steps_needed": 1.05, "ratio": 1.43, "interval": [1.38, 1.47],
            "slope": 0.2, "plain_ratio": 1.6}  # fmt: skip


def bench() -> dict[str, Any]:
    rows = [{"name": name, "recipe": name, "tokens_per_s": speed, "step_ms": 1e6 / speed, "step_ms_low": 0.98e6 / speed,
             "step_ms_high": 1.03e6 / speed, "peak_bytes": 30 << 30, "mfu": 0.45, "ratio": speed / 5e5}
            for name, speed in (("bf16", 5e5), ("fp8", 7.7e5))]  # fmt: skip
    to_loss = {"reference": "bf16", "steps": 400, "candidates": {"fp8": {"verdict": "equivalent", "speed": speed()}}}
    return {"task": "llama-7b", "device": "NVIDIA H200", "unit": "token", "rows": rows, "to_loss": to_loss}


def memory() -> dict[str, Any]:
    parts = {"weights": 14 << 30, "master": 0, "gradients": 28 << 30, "moments": 56 << 30, "activations": 9 << 30,
             "workspace": 1 << 30, "total": 108 << 30}  # fmt: skip
    lean = {"weights": 14 << 30, "gradients": 14 << 30, "activations": 4 << 30, "total": 32 << 30}
    timeline = [
        ["begin", 1 << 30],
        ["loss", {"weights": 14 << 30, "activations": 9 << 30}],
        {"label": "end", "bytes": 5},
    ]
    return {"task": "llama-7b", "recipes": {"bf16": parts, "fp8": lean | {"timeline": timeline}}}


def roofline() -> dict[str, Any]:
    layers = [{"name": f"blocks.0.{name}", "flops": flops, "bytes": size, "intensity": flops / size, "bound": "compute",
               "ms": {"bf16": flops / 5e11, "fp8": flops / 9e11}}
              for name, flops, size in (("qkv", 4e11, 1e9), ("up", 6e11, 2e9), ("norm1", 1e8, 1e8))]  # fmt: skip
    recipes = {"bf16": {"step_ms": 111.0, "tokens_per_s": 590_000, "bound": "compute"}}
    return {"task": "gpt:12x768", "gpu": "H200", "ridge": 206, "layers": layers, "recipes": recipes}


def lint() -> dict[str, Any]:
    return {"findings": [{"rule": "odd-width", "where": "head", "detail": "50257 is not a multiple of 8",
                          "fix": "pad it", "severity": "warning"}]}  # fmt: skip


def save(folder: Path, **data: Any) -> list[Path]:
    paths = []
    for name, one in data.items():
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps(one))
    return paths


def save_all(folder: Path) -> list[Path]:
    return save(folder, validation=validation(), bench=bench(), memory=memory(), roofline=roofline(), lint=lint())
