"""Compares FP8 and narrowgauge's fused BF16 with compiled BF16 and torchao, taking turns in one process.

usage: python bench/fp8_steps.py TASK [ROUNDS] [STEPS] [torchao | tensorwise | rowwise] [ours | fp8-only] [profile]
                                [graphs] [no-graphs] [batch=ITEMS] [fp8[FIELD=VALUE]...]
(JSON to $OUT/fp8-TASK.json where OUT is set, and each line about a round to $OUT/fp8-TASK.log when it is printed)

ours: without plain compiled BF16, whose compilation takes a minute on deep models. fp8-only: without narrowgauge's
BF16, to save memory: the weights and moments of all contestants are on the GPU at once. Recipes with changed fields,
such as fp8[activations=8bit], take part too. graphs, no-graphs: also each FP8 recipe with its steps always, or never,
as CUDA graphs; otherwise it is found out whether the GPU waits. batch: another batch than the task's, for small steps.
"""

import collections
import dataclasses
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from narrowgauge import Engine, bench, hardware, tasks
from narrowgauge.bench.baselines import Baseline, make_baselines
from narrowgauge.recipe import parse

spec = sys.argv[1] if len(sys.argv) > 1 else "gpt2-124m"
rounds, steps = (*(int(argument) for argument in sys.argv[2:] if argument.isdigit()), 6, 8)[:2]
batch = next((int(argument.partition("=")[2]) for argument in sys.argv if argument.startswith("batch=")), None)
device, task, fp8 = hardware.detect(), tasks.find(spec, batch=batch), parse("fp8")
settings = bench.Settings(compile=True, rounds=rounds, steps=steps)


def fused(
    recipe: str, task: Any, model: Any, optimizer: Any, clip_norm: float, compile: bool, graphs: bool | None = None
) -> Any:
    engine = Engine(model, optimizer, recipe, clip_norm=clip_norm, fused=True, cuda_graphs=graphs)
    return bench.make_engine_step(task, engine)


baselines = {} if "fp8-only" in sys.argv else {"fused bf16": Baseline("bf16", functools.partial(fused, "bf16"))}
if "ours" not in sys.argv:
    baselines |= make_baselines("torch", fp8)
baselines |= {text: Baseline("fp8", functools.partial(fused, text)) for text in sys.argv if text.startswith("fp8[")}
recipes = ["fp8", *(name for name in baselines if name.startswith("fp8["))]
for option in [word for word in ("graphs", "no-graphs") if word in sys.argv]:
    always = option == "graphs"
    baselines |= {f"{one} {option}": Baseline("fp8", functools.partial(fused, one, graphs=always)) for one in recipes}
wants_torchao = bool({"torchao", "tensorwise", "rowwise"} & set(sys.argv))
for name, baseline in make_baselines("torchao", fp8).items() if wants_torchao else ():
    if "torchao" in sys.argv or name.rpartition("-")[2] in sys.argv:
        baselines[name] = baseline
batches = bench.make_batches(task, device)
torch._functorch.config.enable_autograd_cache = False
name = spec.replace(":", "-") + ("" if batch is None else f"-batch-{batch}")
target = Path(os.environ["OUT"]) / f"fp8-{name}" if "OUT" in os.environ else None


def say(line: str) -> None:
    print(line, flush=True)
    if target is not None:
        with target.with_suffix(target.suffix + ".log").open("a") as log:
            log.write(f"{line}\n")


field = bench.measure_recipe(task, fp8, baselines, batches, device, settings, say)
rows = bench.make_rows(task, field, device)
plain = "torch-bf16" if "ours" not in sys.argv else "fp8" if "fp8-only" in sys.argv else "fused bf16"
base = next(row for row in rows if row.name == plain)
for row in rows:
    spread, peak = f"{row.step_ms_low:.2f}-{row.step_ms_high:.2f}", (row.peak_bytes or 0) / 2**30
    print(
        f"{row.name:22s} {row.step_ms:8.2f} ms ({spread})  {row.tokens_per_s:9,.0f} /s  "
        f"{peak:6.1f} GiB  {row.tokens_per_s / base.tokens_per_s:.3f} x {plain}  loss {row.loss:.3f}",
        flush=True,
    )
if target is not None:
    written = json.dumps([dataclasses.asdict(row) for row in rows], indent=1)
    target.with_suffix(target.suffix + ".json").write_text(written)
if "profile" in sys.argv:
    fused_bf16 = [(name, baseline) for name, baseline in baselines.items() if name == "fused bf16"]
    for name, baseline in ((str(fp8), None), *fused_bf16):
        entry = bench.build_entry(name, task, fp8, baseline, batches, device, settings)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for index in range(3):
                entry.step(batches[index])
            torch.cuda.synchronize()
        kernels = collections.Counter({event.key: event.device_time_total / 3e3 for event in profile.key_averages()})
        print(f"{name}: all kernels {sum(kernels.values()):.2f} ms", flush=True)
        for kernel, milliseconds in kernels.most_common(34):
            print(f"{milliseconds:9.3f} ms  {kernel[:120]}", flush=True)
        entry.step = bench.raise_released
        bench.free_memory(device)
