"""Time engine steps of two source trees of narrowgauge that take turns on one GPU: did a change cost speed?

usage: python bench/compare_trees.py BEFORE_SRC AFTER_SRC [RECIPE...]     (default fp8 bf16)
(JSON to $OUT/before-after.json if OUT is set)

Each tree runs in its own process with its own model, gpt2-124m, and steps when asked to.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

TURNS, STEPS = 8, 15
WORKER = """
import json, sys, time, torch
from narrowgauge import Engine, tasks
task = tasks.find("gpt2-124m")
torch.manual_seed(0)
model = task.model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), 6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
engine = Engine(model, optimizer, sys.argv[1], clip_norm=1.0)
batches = [tuple(tensor.cuda() for tensor in task.batch(number, "train")) for number in range(4)]
def step(number):
    with engine.forward():
        loss = task.loss(engine.model, batches[number % 4])
    engine.backward(loss)
    engine.step()
    return loss
for number in range(8):
    step(number)
torch.cuda.synchronize()
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    step(0)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for number in range(int(line)):
        loss = step(number)
    launched = time.perf_counter() - begin
    torch.cuda.synchronize()
    total = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated()
    row = {"ms": total / int(line) * 1e3, "host_ms": launched / int(line) * 1e3, "peak_bytes": peak}
    print(json.dumps({**row, "loss": float(loss.detach())}), flush=True)
"""


def start(tree: str, recipe: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": tree}
    command = [sys.executable, "-u", "-c", WORKER, recipe]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and json.loads(process.stdout.readline()) == "ready"
    return process


def measure(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{STEPS}\n")
    process.stdin.flush()
    row: dict[str, Any] = json.loads(process.stdout.readline())
    return row


trees = dict(zip(("before", "after"), sys.argv[1:3], strict=True))
result: dict[str, Any] = {}
for recipe in sys.argv[3:] or ["fp8", "bf16"]:
    workers = {name: start(tree, recipe) for name, tree in trees.items()}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for turn in range(TURNS):
        for name in list(trees) if turn % 2 else reversed(list(trees)):
            rows[name].append(measure(workers[name]))
    for name, worker in workers.items():
        worker.communicate()
        times = [row["ms"] for row in rows[name]]
        print(f"{recipe} {name:6s} {statistics.median(times):8.2f} ms ({min(times):.2f}-{max(times):.2f})", flush=True)
    before, after = (statistics.median(row["ms"] for row in rows[name]) for name in trees)
    print(f"{recipe} after / before {after / before:.4f}", flush=True)
    result[recipe] = {"ratio": after / before, **rows}
if "OUT" in os.environ:
    (Path(os.environ["OUT"]) / "before-after.json").write_text(json.dumps(result, indent=1))
