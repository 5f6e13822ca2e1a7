"""Trains a large model under a recipe on real text; reports peak memory, speed and loss.

usage: python bench/lean.py TASK RECIPE STEPS [BATCH [FIT]]      (e.g. llama-7b fp8-lean 50 8 110GB)
(JSON to $OUT/lean-TASK-RECIPE-TOKENS.json where OUT is set)

Weights are initialized on the GPU. Gradients are clipped to a norm of 1, except where they are released. The peak is
``max_memory_allocated`` over the steps, in GB (10^9); it includes the first step, which allocates states and caches.
With FIT, a memory budget, the forecast's plan, peak and time stand next to those of the engine, which plans on its own
from its first steps; peak and time are then those of the steps with the final plan.
"""

import json
import os
import re
import statistics
import sys
import time
from pathlib import Path

import torch

from narrowgauge import Engine, hardware, tasks
from narrowgauge.forecast.memory.estimate import predict_memory
from narrowgauge.forecast.time.reachable_rates import ReachableRates
from narrowgauge.forecast.time.roofline import predict_time
from narrowgauge.forecast.trace.trace_step import trace_steps
from narrowgauge.recipe import parse
from narrowgauge.runs.batches import make_batch, to_device
from narrowgauge.runs.optimizers import make_adamw
from narrowgauge.runs.schedule import Schedule

spec, recipe, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
sizes = {"batch": int(sys.argv[4])} if len(sys.argv) > 4 else {}
fit = sys.argv[5] if len(sys.argv) > 5 else None
task = tasks.find(spec, **sizes)
predicted = {}
if fit is not None:
    gpu = hardware.detect("cuda").gpu
    traced = trace_steps(task, parse(recipe), gpu, memory_budget=fit)
    predicted = {"plan": traced.plan.describe(), "peak_bytes": predict_memory(traced).total}
    predicted["step_ms"] = predict_time(traced, ReachableRates(gpu)).step_ms
    print(f"predicted: {traced.plan}, {predicted['step_ms']:.1f} ms per step", flush=True)
torch.manual_seed(0)
begin = time.perf_counter()
with torch.device("cuda"):
    model = task.model()
optimizer = make_adamw(model, task.learning_rate, task.weight_decay)
schedule = Schedule(optimizer, steps, max(1, steps // 10))
clip_norm = None if "released" in recipe else 1.0
engine = Engine(model, optimizer, recipe, clip_norm=clip_norm, compile=True, memory_budget=fit)
weights, made = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
count, tokens = sum(p.numel() for p in model.parameters()), task.items_per_batch
print(f"{spec} {engine.recipe}, {count / 1e9:.2f}B parameters, {tokens} tokens per step", flush=True)
print(f"built in {time.perf_counter() - begin:.1f} s with a peak of {made / 1e9:.2f} GB", flush=True)
torch.cuda.reset_peak_memory_stats()
losses, times, norms = [], [], []
for step in range(steps):
    schedule.set(step)
    batch = to_device(make_batch(task, step, "train", f"step {step}"), engine.device)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with engine.forward():
        loss = task.loss(model, batch)
    engine.backward(loss)
    report = engine.step()
    torch.cuda.synchronize()
    times.append(time.perf_counter() - start)
    if not engine.memory_settled:
        torch.cuda.reset_peak_memory_stats()
    losses.append(loss.item())
    norms.append(report.grad_norm)
    if step < 3 or (step + 1) % 10 == 0:
        held = torch.cuda.max_memory_allocated() / 1e9
        print(f"step {step + 1}: {losses[-1]:.4f}, norm {norms[-1]:.3f}, {times[-1]:.3f} s, {held:.2f} GB", flush=True)
seconds, peak = statistics.median(times[len(times) // 2 :]), torch.cuda.max_memory_allocated()
print(f"{spec} {recipe}: peak {peak / 1e9:.2f} GB ({peak / count:.2f} bytes/parameter; weights {weights / 1e9:.2f} GB)")
print(f"{seconds:.3f} s per step, {tokens / seconds:,.0f} tokens/s, skipped {engine.skipped}")
print(f"loss {losses[0]:.3f} to {statistics.mean(losses[-5:]):.3f}", flush=True)
if fit is not None:
    off = predicted["peak_bytes"] / peak - 1, predicted["step_ms"] / seconds / 1e3 - 1
    print(f"measured: {engine.memory_plan}; predictions are off by {off[0]:+.1%} in peak and {off[1]:+.1%} in time")
if "OUT" in os.environ:
    record = {"task": spec, "recipe": recipe, "steps": steps, "tokens": tokens, "parameters": count}
    if fit is not None:
        record |= {"fit": fit, "plan": engine.memory_plan.describe(), "predicted": predicted}
    record |= {"peak_bytes": peak, "weights_bytes": weights, "seconds": seconds, "losses": losses, "norms": norms}
    name = re.sub(r"[^a-z0-9.]+", "-", f"lean-{spec}-{recipe}-{tokens}{f'-{fit}' if fit else ''}".lower())
    (Path(os.environ["OUT"]) / f"{name}.json").write_text(json.dumps(record, indent=1))
