"""Profiles one training step of the engine or of a plain torch loop: its kernels, and the gaps between them.

usage: python bench/where_a_step_goes.py engine|torch [TASK] [RECIPE]
"""

import collections
import sys

import torch

from narrowgauge import bench, hardware, tasks
from narrowgauge.recipe import parse

who, spec, recipe = (*sys.argv[1:], "gpt2-124m", "bf16")[:3] if len(sys.argv) == 2 else (*sys.argv[1:], "bf16")[:3]
device, task = hardware.detect(), tasks.find(spec)
batches = bench.make_batches(task, device)
peer = None if who == "engine" else who
entry = bench.build_entry(who, task, parse(recipe), peer, batches, device, bench.Settings(compile=True))
times = [bench.time_round(entry, batches, index, device, 5) for index in range(4)]
losses = [f"{entry.step(batches[index % 4]).item():.3f}" for index in range(8)]
print(who, recipe, "ms", " ".join(f"{t:.2f}" for t in times), "loss", *losses, flush=True)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
    for index in range(3):
        entry.step(batches[index])
    torch.cuda.synchronize()
kernels = collections.Counter({event.key: event.device_time_total / 3e3 for event in profile.key_averages()})
on_device = [event for event in profile.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
spans = sorted((event.time_range.start, event.time_range.end) for event in on_device)
waited, busy_until = 0.0, spans[0][0]
for begin, end in spans:
    waited += max(0.0, begin - busy_until)
    busy_until = max(busy_until, end)
print(f"{len(spans) // 3} kernels, {sum(kernels.values()):.2f} ms; {waited / 3e3:.2f} ms of waits between them")
for name, milliseconds in kernels.most_common(28):
    print(f"{milliseconds:9.3f} ms  {name[:150]}", flush=True)
