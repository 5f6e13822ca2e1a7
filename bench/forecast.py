"""Compares forecasts with a GPU: predicts peak memory and step time of many cases, then measures them.

usage: python bench/forecast.py [WORD...] [--predict] [--from PREDICTED.json] [--json FILE]
       (only the cases whose name contains every WORD: gpt2-124m; fp8; eager; timed, untimed)

Everything is predicted before anything is measured. ``--predict`` stops there and needs no GPU; ``--from`` measures
cases predicted earlier, perhaps on another machine, and saved with ``--json``. Memory should be within 5% of
``max_memory_allocated``, time within 15% for BF16 and FP8 of the built-in models. The file is rewritten after every
case.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hf_tasks
import torch

from narrowgauge import hardware, tasks
from narrowgauge.forecast.memory.estimate import predict_memory
from narrowgauge.forecast.time.measure import measure_run
from narrowgauge.forecast.time.reachable_rates import ReachableRates
from narrowgauge.forecast.time.roofline import predict_time
from narrowgauge.forecast.trace.trace_step import trace_steps
from narrowgauge.recipe import parse
from narrowgauge.task import Task

MEMORY_TOLERANCE, TIME_TOLERANCE = 0.05, 0.15


HUGGING_FACE = {"bert": hf_tasks.bert, "hf-gpt2": hf_tasks.gpt2, "hf-llama": hf_tasks.llama}


@dataclass(frozen=True)
class Case:
    spec: str
    recipe: str
    batch: int | None = None
    compile: bool = True
    accumulate: int = 1
    timed: bool = False
    """Whether its step time must be within the tolerance as well."""

    @property
    def name(self) -> str:
        size = f" batch {self.batch}" if self.batch else ""
        mode = " compiled" if self.compile else " eager"
        more = f" accumulate {self.accumulate}" if self.accumulate > 1 else ""
        return f"{self.spec} {self.recipe}{size}{mode}{more}"

    def has(self, words: list[str]) -> bool:
        return all(word in [*self.name.split(), self.spec, "timed" if self.timed else "untimed"] for word in words)

    def task(self) -> Task:
        options = {"batch": self.batch} if self.batch else {}
        own = HUGGING_FACE.get(self.spec)
        return own(**options) if own is not None else tasks.find(self.spec, **options)


CASES = [
    Case("gpt2-124m", "fp32", 32, compile=False),
    Case("gpt2-124m", "fp32"),
    Case("gpt2-124m", "fp16", compile=False),
    Case("gpt2-124m", "fp16"),
    Case("gpt2-124m", "bf16", timed=True),
    Case("gpt2-124m", "bf16[checkpoint=full]"),
    Case("gpt2-124m", "bf16", 16, accumulate=4),
    Case("gpt2-124m", "fp8", timed=True),
    Case("gpt2-124m", "fp8[checkpoint=selective]"),
    Case("gpt2-124m", "bf16-lean"),
    Case("gpt:8x4096", "bf16", timed=True),
    Case("gpt:8x4096", "fp8", timed=True),
    Case("gpt-1.3b", "bf16", timed=True),
    Case("gpt-1.3b", "fp8", timed=True),
    Case("gpt-1.3b", "fp8-lean", timed=True),
    Case("llama-1b", "bf16", 8, timed=True),
    Case("llama-1b", "fp8", 8, timed=True),
    Case("llama-7b", "bf16-lean", timed=True),
    Case("llama-7b", "fp8-lean", timed=True),
    Case("llama-7b", "bf16-lean[gradients=released]", 2, timed=True),
    Case("digits", "fp32", compile=False),
    Case("digits", "bf16", compile=False),
    Case("digits", "fp32", 65536, compile=False),
    Case("bert", "fp32", compile=False),
    Case("bert", "bf16", compile=False),
    Case("bert", "bf16"),
    Case("bert", "fp8", compile=False),
    Case("bert", "bf16[checkpoint=full]", compile=False),
    Case("bert", "fp32"),
    Case("bert", "fp16"),
    Case("hf-gpt2", "bf16", compile=False),
    Case("hf-gpt2", "bf16"),
    Case("hf-gpt2", "fp32"),
    Case("hf-llama", "bf16", compile=False),
    Case("hf-llama", "bf16"),
    Case("hf-llama", "fp8", compile=False),
]


def predict(case: Case, gpu: hardware.Gpu) -> dict[str, Any]:
    traced = trace_steps(case.task(), parse(case.recipe), gpu, compile=case.compile, accumulate=case.accumulate)
    memory, time = predict_memory(traced), predict_time(traced, ReachableRates(gpu))
    return {
        "case": case.name, "timed": case.timed, "exact": memory.exact, "memory": memory.total,
        "components": memory.components(), "when": str(memory.when), "step_ms": time.step_ms, "bound": time.bound,
        "by_kind": time.by_kind,
    }  # fmt: skip


def measure(case: Case, device: hardware.Device, row: dict[str, Any]) -> None:
    try:
        found = measure_run(
            case.task(), parse(case.recipe), device, compile=case.compile, accumulate=case.accumulate, steps=3
        )
    except RuntimeError as error:  # most likely out of memory: continue with the other cases
        row["failure"] = str(error).splitlines()[0][:160]
        return
    row["measured_memory"], row["measured_ms"] = found.peak_bytes, found.step_ms
    row["memory_error"] = row["memory"] / found.peak_bytes - 1
    row["time_error"] = row["step_ms"] / found.step_ms - 1
    row["ok"] = abs(row["memory_error"]) <= MEMORY_TOLERANCE and (
        not case.timed or abs(row["time_error"]) <= TIME_TOLERANCE
    )


def main(argv: list[str], say: Callable[[str], None]) -> int:
    parser = argparse.ArgumentParser(description="compare forecasts with measurements")
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    chosen = [case for case in CASES if case.has(options.words)]
    device = None if options.predict else hardware.detect()
    gpu = device.gpu if device is not None and device.gpu is not None else hardware.find_gpu("h200")
    predicted = json.loads(options.source.read_text())["rows"] if options.source else []
    known = {row["case"]: row for row in predicted}
    rows: list[dict[str, Any]] = []

    def keep() -> None:
        if options.json:
            options.json.write_text(json.dumps({"gpu": gpu.name, "rows": rows}, indent=1))

    for case in chosen:
        rows.append(known.get(case.name) or predict(case, gpu))
        row = rows[-1]
        about = "" if row["exact"] else "about "
        say(f"predicted {case.name}: {about}{row['memory'] / 1e9:.3f} GB in {row['when']}, {row['step_ms']:.1f} ms")
    keep()
    for case, row in zip(chosen, rows, strict=True):
        if device is None:
            break
        measure(case, device, row)
        keep()
        gc.collect()
        torch._dynamo.reset()
        if "failure" in row:
            say(f"{case.name}: {row['failure']}")
            continue
        say(
            f"{'ok ' if row['ok'] else 'OFF'} {case.name}: {row['memory'] / 1e9:.3f} GB, measured "
            f"{row['measured_memory'] / 1e9:.3f} ({row['memory_error']:+.2%}); {row['step_ms']:.1f} ms, measured "
            f"{row['measured_ms']:.1f} ({row['time_error']:+.1%}{'' if case.timed else ', not guaranteed'})"
        )
    off = [row["case"] for row in rows if row.get("ok") is False]
    say(f"{len(off)} of {len(rows)} off: {', '.join(off)}" if off else f"{len(rows)} cases")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], lambda line: print(line, flush=True)))
