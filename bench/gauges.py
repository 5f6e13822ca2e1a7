"""Overhead of gauges: step time of a task with and without them, interleaved in one process.

usage: python bench/gauges.py [TASK] [RECIPE] [ROUNDS]     (e.g. gpt2-124m fp8 6; JSON to $OUT/gauges.json)

Three engines: without gauges; with gauges that read only what is read in every update; and with a snapshot every
``EVERY`` updates, the default. A round has ``EVERY`` updates and therefore one snapshot.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from narrowgauge import Engine, bench, hardware, tasks
from narrowgauge.device_readback import Readback
from narrowgauge.gauges.examiner import Examiner
from narrowgauge.gauges.rules.step_rules import Step
from narrowgauge.gauges.watch.watch import EVERY

spec, recipe = (*sys.argv[1:3], "gpt2-124m", "fp8")[:2] if len(sys.argv) > 2 else ("gpt2-124m", "fp8")
rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 6
device, task = hardware.detect(), tasks.find(spec)
batches = bench.make_batches(task, device)


class Runner:
    """An engine with its gauges, and the times of its updates."""

    def __init__(self, every: int | None) -> None:
        torch.manual_seed(0)
        with torch.device(device.torch_device):
            model = task.model()
        fused = device.kind == "cuda"
        self.engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused), recipe, clip_norm=1.0)
        self.examiner = Examiner(self.engine, every) if every else None
        self.readback, self.times, self.number = Readback(), [], 0

    def round(self, updates: int) -> None:
        _wait()
        start = time.perf_counter()
        for index in range(updates):
            with self.engine.forward():
                loss = task.loss(self.engine.model, batches[index % len(batches)])
            self.engine.backward(loss)
            report = self.engine.step()
            self.number += 1
            self.readback.push(self.number, {"loss": loss, **report.tensors})
            for number, values in self.readback.ready():
                if self.examiner is not None:
                    self.examiner.check_step(
                        Step(number, values["loss"], values["grad_norm"], values["loss_scale"], True)
                    )
            if self.examiner is not None:
                self.examiner.collect()
        _wait()
        self.times.append((time.perf_counter() - start) / updates)


def _wait() -> None:
    if device.kind == "cuda":
        torch.cuda.synchronize()


runners: dict[str, Runner] = {"alone": Runner(None), "every update": Runner(10**9), "default": Runner(EVERY)}
for runner in runners.values():
    runner.round(5)
    runner.times.clear()
for turn in range(rounds):
    for name, runner in runners.items():
        runner.round(EVERY)
        print(f"{turn} {name:14s} {runner.times[-1] * 1e3:8.3f} ms", flush=True)
    rows: dict[str, Any] = {name: statistics.median(runner.times) for name, runner in runners.items()}
    if "OUT" in os.environ:  # after every round, so that an interrupted run leaves its results
        record = {"task": spec, "recipe": recipe, "every": EVERY, "seconds": rows}
        record["rounds"] = {name: runner.times for name, runner in runners.items()}
        (Path(os.environ["OUT"]) / "gauges.json").write_text(json.dumps(record, indent=1))
for name, seconds in rows.items():
    print(f"{spec} {recipe} {name:14s} {seconds * 1e3:8.3f} ms  {seconds / rows['alone'] - 1:+.2%}")
