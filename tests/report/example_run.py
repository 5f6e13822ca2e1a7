"""Writes synthetic runs with the record's own writer: long runs with spikes, skips, NaN and hostile names."""

from __future__ import annotations

import functools
import math
import random
from pathlib import Path
from typing import Any

from narrowgauge.gauges.watch.readings import Reading
from narrowgauge.runs import record

EVIL = "<script>alert(1)</script>"
"""A module name that must not be executed."""


def modules(count: int) -> tuple[str, ...]:
    parts = ("norm1", "qkv", "out", "norm2", "up", "down")
    return (*(f"blocks.{i // len(parts)}.{parts[i % len(parts)]}" for i in range(count - 1)), EVIL)


@functools.cache
def readings(names: tuple[str, ...], scale: float) -> list[dict[str, Any]]:
    """One sample: activations around 1, and gradients that become smaller with depth."""
    found = []
    for depth, name in enumerate(names):
        draw = random.Random(depth)
        small = -26 - 2 * (depth % 12) + round(math.log2(scale))
        for kind, centre, own in (("activation", -1, 1.0), ("gradient", small, scale)):
            counts = {centre + i: max(1, round(10_000 * math.exp(-((i / 4) ** 2)) * draw.uniform(0.9, 1.1)))
                      for i in range(-12, 9)}  # fmt: skip
            reading = Reading(kind=kind, module=name, dtype="fp16", count=sum(counts.values()) + 50, zeros=50,
                              amax=2.0 ** (centre + 8.6), mean_square=1.0, exponents=counts, scale=own)  # fmt: skip
            found.append(reading.as_event())
        weight = Reading(kind="update", module=f"{name}.weight", dtype="fp32", count=1000, amax=0.01,
                         exponents={-12: 500, -11: 500}, lost=0.3, ratio=0.001)  # fmt: skip
        found.append(weight.as_event())
    return found


def configure(folder: Path, steps: int, **settings: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    known = {"recipe": "fp16", "device": "cpu", "steps": steps, "learning_rate": 1e-3, "seed": 0, "watch_every": 100}
    facts = {"parameters": 124_000_000, "vocab": 256, "data": "made up"}
    record.write_configuration(folder, {"task": "gpt:12x768", "options": {"seed": known["seed"]}, "began": "2026-11-15",
                                        "settings": known | settings, "facts": facts, "versions": {}})  # fmt: skip


def write_run(
    folder: Path, steps: int, *, tensors: int = 0, every: int = 100, seed: int = 0, end: bool = True, **settings: Any
) -> Path:
    """A run of ``steps`` updates: the loss falls, jumps once and is NaN once; the scale grows and backs off."""
    configure(folder, steps, seed=seed, **settings)
    draw, names = random.Random(seed), modules(tensors) if tensors else ()
    scale, skipped = 65536.0, 0
    with record.Record(folder) as book:
        for step in range(1, steps + 1):
            skip = step % 997 == 0
            skipped += skip
            scale = scale / 2 if skip else scale * 2 if step % 800 == 0 and scale < 2**20 else scale
            loss = 3 + 7 * math.exp(-step / (steps / 6)) + draw.gauss(0, 0.15)
            loss = 40.0 if step == steps // 2 else math.nan if step == steps * 3 // 4 else loss
            norm = math.inf if skip else draw.lognormvariate(0, 0.3)
            book.append("step", step, loss=loss, lr=1e-3, grad_norm=norm, loss_scale=scale, applied=not skip,
                        tokens_per_s=50_000 + draw.gauss(0, 900), time=step * 0.1)  # fmt: skip
            if names and step % every == 1:
                book.append("look", step, applied=True, readings=readings(names, scale))
            if step % max(1, steps // 20) == 0:
                book.append("eval", step, loss=3 + 7 * math.exp(-step / (steps / 6)), accuracy=step / steps)
        if end:
            findings = {"rule": "underflow", "severity": "serious", "where": EVIL, "fix": "raise the loss scale",
                        "detail": f"gradients of {EVIL} vanish", "consequence": "its weights stop"}  # fmt: skip
            book.append("finding", steps, **findings)
            book.append("sample", steps, text=f"def f():\n    return '{EVIL}'")
            book.append("end", steps, run=str(folder), recipe="fp16", steps=steps, parameters=124_000_000, seconds=1e4,
                        tokens_per_s=5e4, unit="token", loss_first=10.0, loss_last=3.0, skipped=skipped,
                        interrupted=False, findings=[findings])  # fmt: skip
    return folder
